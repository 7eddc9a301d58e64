"""`python -m benchmarks.objects` gives a command a store, and takes its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READ = """
import os, obstore
from obstore.store import S3Store
assert os.environ["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1:")
store = S3Store("forebay-demo", client_options={"allow_http": True})
print(bytes(obstore.get(store, "data/sub/a.txt").bytes()).decode())
raise SystemExit(7)
"""


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Returns the ended command, which was given a foreign endpoint."""
    command = [sys.executable, "-m", "benchmarks.objects", *args]
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "AWS_ENDPOINT_URL_S3": "http://elsewhere.invalid"}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120)


def test_a_command_finds_the_folder_in_the_bucket(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "a.txt").write_text("seven")
    ended = run(
        "--put", "data", "--latency-ms", "1", "--mb-per-s", "50", "--", sys.executable, "-c", READ, cwd=tmp_path
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "seven\nthe store saw 1 GET; 5 bytes down, 0 up\n"
    assert ended.stderr == ""


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    ended = run("--put", "data", "--", "true", cwd=tmp_path)
    assert ended.returncode == 2
    assert "and data is none" in ended.stderr
