"""`forebay inspect --serve` as a command: it says where it is, answers, and ends with Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.store_factory import make_cache


def test_it_prints_its_address_and_ends_cleanly(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    command = [sys.executable, "-m", "forebay", "inspect", str(folder), "--serve", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, process.communicate()
            text += line
        found = json.loads(text)
        assert found["samples"] == 6
        with urllib.request.urlopen(found["url"]) as reply:
            assert reply.status == 200
        process.send_signal(signal.SIGINT)
        try:
            rest, errors = process.communicate(timeout=30)
        finally:
            process.kill()  # the block waits for its end
    assert (process.returncode, rest, errors) == (0, "", "")
