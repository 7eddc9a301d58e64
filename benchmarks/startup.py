"""Measures what commands and small builds cost before they work: `python -m benchmarks.startup [--tiny]`.

- **Commands.** `forebay --help`, `key`, `inspect` and `cache ls` of a small sealed cache, each in a process of its own,
  beside a Python that starts and does nothing.
- **Builds.** `forebay preprocess` of two rows with two workers, from nothing to a sealed cache, for recipes that need
  more or less. Beside each stands a process that imports what its steps are made of, and nothing of forebay: `imports`.

Figures are CPU seconds, user and system, of a process with all that it started and waited for. All take turns within a
round; figures are medians, and `more` is the median of the differences within a round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.report import arguments, machine, median, show

BARE = "numpy pyarrow pydantic xxhash tqdm"
SOUND = f"{BARE} soundfile soxr"
BUILDS = {
    "waveform": ("demo_waveform", SOUND),
    "log_mel, whisper": ("demo_speech", f"{SOUND} torch tokenizers"),
    "text": ("demo_text", f"{BARE} tokenizers"),
    "qwen3_asr, its chat template": ("demo_qwen3_asr", f"{SOUND} torch tokenizers transformers.AutoTokenizer"),
    "patches, chat": (
        "demo_vision",
        f"{BARE} torch tokenizers PIL.Image transformers.AutoTokenizer transformers.Qwen2VLImageProcessorPil",
    ),
}
"""By name the config under `configs/`, and what its steps are made of."""


def cpu_s(*words: str) -> float:
    """Returns the CPU seconds of `python WORDS`, with its children. Raises SystemExit where it fails."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"python {' '.join(words)} ended with status {process.returncode}:\n{said}")
    return usage.ru_utime + usage.ru_stime


def _environment() -> dict[str, str]:
    """Returns that of an installed forebay, whose files are compiled once and not in every process."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**found, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(BENCH_DATA / "pycache")}


def imports(modules: str) -> str:
    """Returns the program that imports modules, and of one with a class behind it that class."""
    lines = []
    for name in modules.split():
        module, _, member = name.rpartition(".")
        lines.append(f"from {module} import {member}" if module else f"import {name}")
    return "; ".join(lines)


def rounds_of(contestants: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every contestant, in turns; a round before them compiles and loads files."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, work in contestants.items():
            seconds = work()
            if round_ or rounds == 1:
                found[name].append(seconds)
    return found


def build(name: str) -> float:
    """Returns the CPU seconds of a build of two rows under a new root."""
    with tempfile.TemporaryDirectory() as root:
        settings = ("--max-samples", "2", "--workers", "2", "--cache-root", root, "--no-progress")
        return cpu_s("-m", "forebay", "preprocess", f"configs/{name}.toml", *settings)


def commands(*, rounds: int) -> list[dict[str, Any]]:
    """Returns the CPU seconds of the commands that look at a cache of two clips."""
    with tempfile.TemporaryDirectory() as root:
        config = ("configs/demo_speech.toml", "--max-samples", "2", "--cache-root", root)
        cpu_s("-m", "forebay", "preprocess", *config, "--no-progress")
        (cache,) = Path(root).glob("*-*")
        asked: dict[str, tuple[str, ...]] = {
            "python alone": ("-c", "pass"),
            f"python, {BARE}": ("-c", imports(BARE)),
            "forebay --help": ("-m", "forebay", "--help"),
            "forebay key CONFIG": ("-m", "forebay", "key", *config),
            "forebay inspect CACHE": ("-m", "forebay", "inspect", str(cache)),
            "forebay inspect CONFIG": ("-m", "forebay", "inspect", *config),
            "forebay cache ls": ("-m", "forebay", "cache", "ls", "--cache-root", root),
            "forebay preprocess, sealed": ("-m", "forebay", "preprocess", *config, "--no-progress"),
        }
        made = {name: (lambda words=words: cpu_s(*words)) for name, words in asked.items()}
        found = rounds_of(made, rounds=rounds)
    return [{"command": name, "cpu_s": median(seconds)} for name, seconds in found.items()]


def builds(*, rounds: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the CPU seconds of builds of two rows, of what they import, and of the difference."""
    rows = []
    for name in names:
        config, modules = BUILDS[name]
        found = rounds_of(
            {"build": lambda c=config: build(c), "imports": lambda m=modules: cpu_s("-c", imports(m))}, rounds=rounds
        )
        more = [one - other for one, other in zip(found["build"], found["imports"], strict=True)]
        rows.append(
            {
                "two rows": name,
                "cpu_s": median(found["build"]),
                "imports_cpu_s": median(found["imports"]),
                "more_cpu_s": median(more),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 1 if options.tiny else options.rounds or 7
    document = {
        "machine": machine("numpy", "pyarrow", "torch", "transformers", "tokenizers"),
        "rounds": rounds,
        "commands": commands(rounds=rounds),
        "builds": builds(rounds=rounds, names=list(BUILDS)[:2] if options.tiny else list(BUILDS)),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
