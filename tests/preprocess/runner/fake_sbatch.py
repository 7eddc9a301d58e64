"""A fake of Slurm's `sbatch`, on PATH: it runs the job's script to its end, at once, and answers with a number.

It keeps what it was asked, and how each job ended, in the folder `FAKE_SLURM`. The tasks of an array run one after
another. A job whose dependency can never be met is cancelled, if it asks for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(os.environ.get("FAKE_SLURM", "."))
FIRST = 101


def numbers(array: str) -> Iterator[int]:
    for part in array.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def ended(job: str) -> str:
    return str(json.loads((FOLDER / f"{job}.json").read_text())["state"])


def is_met(dependency: str) -> bool:
    """Whether a dependency `how:job` is met; every job has ended when the next one is submitted."""
    how, _, job = dependency.partition(":")
    return how == "afterany" or ended(job) == "COMPLETED"


def run(script: str, output: str, environment: Mapping[str, str], names: Mapping[str, str]) -> bool:
    names = {**names, "%": "%"}
    path = Path(re.sub("%(.)", lambda found: names[found[1]], output))
    with path.open("wb") as log:
        # Through a file: bash reads on in its standard input while a command of the script may read there too.
        file = FOLDER / "script"
        file.write_bytes(os.fsencode(script))
        return subprocess.run(["bash", file], stdout=log, stderr=log, env={**os.environ, **environment}).returncode == 0


def main() -> int:
    options = dict(part.removeprefix("--").partition("=")[::2] for part in sys.argv[1:])
    if "partition" in options and options["partition"] == "nowhere":
        print("sbatch: error: invalid partition specified: nowhere", file=sys.stderr)
        return 1
    job = str(FIRST + len(list(FOLDER.glob("*.json"))))
    script = os.fsdecode(sys.stdin.buffer.read())
    met = all(is_met(part) for part in options.get("dependency", "").split(",") if part)
    environment = {"SLURM_JOB_ID": job, "SLURM_CPUS_PER_TASK": options["cpus-per-task"]}
    state = "CANCELLED"
    if met and "array" not in options:
        state = "COMPLETED" if run(script, options["output"], environment, {"j": job}) else "FAILED"
    elif met:
        environment["SLURM_ARRAY_JOB_ID"] = job
        ends = [
            run(
                script, options["output"], {**environment, "SLURM_ARRAY_TASK_ID": str(task)}, {"A": job, "a": str(task)}
            )
            for task in numbers(options["array"])
        ]
        state = "COMPLETED" if all(ends) else "FAILED"
    (FOLDER / f"{job}.json").write_text(json.dumps({"options": options, "state": state, "script": script}))
    print(f"{job};cluster" if "parsable" in options else f"Submitted batch job {job}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
