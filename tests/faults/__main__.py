"""`make faults`: runs the fault table with its long counts, row by row, and goes on where it was interrupted."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.row import Row, Tally, made

_HERE = Path(__file__).parent
_STATE = _HERE.parents[1] / "runs" / "faults"
_SAVE_EVERY_S = 5.0


def main() -> int:
    """Runs the rows that are asked for, prints the table of all, and returns 1 where an outcome was wrong."""
    options = _options()
    table = rows()
    chosen = [row for row in table if not options.row or row.name in options.row]
    if not options.report:
        if options.jobs > 1:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(lambda row: _run_apart(row, options), chosen))
        else:
            for row in chosen:
                _run(row, options)
    if options.start is not None or options.count is not None:
        return 0
    tallies = {row.name: load(row.name) for row in table}
    print(markdown(table, tallies))
    return 1 if any(tally.wrong for tally in tallies.values()) else 0


def rows() -> list[Row[Any]]:
    """Returns every row: the `ROW` or `ROWS` of the modules here, in the order of the table."""
    found: list[Row[Any]] = []
    for name in _ORDER:
        module = importlib.import_module(f"tests.faults.test_{name}")
        found += getattr(module, "ROWS", None) or [module.ROW]
    return found


_ORDER = (
    "kill",
    "disk_errors",
    "signals",
    "workers",
    "devices",
    "ray_nodes",
    "two_builders",
    "texts",
    "folders",
    "nfs",
    "swap",
    "sources",
    "damage",
    "fuzz",
    "fuzz_vision",
    "fuzz_talks",
    "inspect",
    "strangers",
    "media",
    "vision",
    "limits",
    "readers",
    "node",
    "remote_store",
    "interrupt",
    "push",
    "stage",
    "fetch",
    "soak",
)


def load(name: str) -> Tally:
    """Returns what is kept of a row's trials."""
    path = _STATE / f"{name}.json"
    if not path.exists():
        return Tally()
    document = json.loads(path.read_text())
    return Tally(document["done"], document["planned"], Counter(document["outcomes"]), document["wrong"])


def save(name: str, tally: Tally) -> None:
    """Keeps what came of a row's trials so far."""
    document = {"done": tally.done, "planned": tally.planned, "outcomes": tally.outcomes, "wrong": tally.wrong}
    aside = made(_STATE) / f"{name}.{os.getpid()}"
    aside.write_text(json.dumps(document, indent=1))
    aside.replace(_STATE / f"{name}.json")


def markdown(table: list[Row[Any]], tallies: dict[str, Tally]) -> str:
    """Returns the fault table with counts and outcomes."""
    lines = ["| fault | must | runs | seen | wrong |", "|---|---|---|---|---|"]
    for row in table:
        tally = tallies[row.name]
        seen = "; ".join(f"{outcome} {count:,}" for outcome, count in tally.outcomes.most_common())
        count = f"{tally.done:,} of {tally.planned:,}"
        lines.append(f"| {row.fault} | {row.outcome} | {count} | {seen} | {len(tally.wrong)} |")
    lines += [f"\nwrong, {row.name}: {text}" for row in table for text in tallies[row.name].wrong]
    return "\n".join(lines)


def _run(row: Row[Any], options: argparse.Namespace) -> None:
    # A part that is asked for by number is run for itself and not kept.
    is_whole = options.start is None and options.count is None
    tally = load(row.name) if is_whole and not options.restart else Tally()
    if is_whole and tally.done and tally.done == tally.planned:
        return
    first = tally.done if options.start is None else options.start
    saved_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="forebay-faults-", dir=options.folder) as folder,
        row.prepared(made(Path(folder) / "prepared")) as shared,
    ):
        stop = row.long_count(shared) if options.count is None else first + options.count
        tally.planned = stop
        for number in range(first, stop):
            try:
                tally.outcomes[row.once(shared, number, Path(folder))] += 1
            except Exception as err:
                tally.wrong.append(f"{number}: {_where(err)}: {type(err).__name__}: {err}")
                print(f"wrong: {row.name} {tally.wrong[-1]}", file=sys.stderr)
            tally.done = number + 1
            if time.monotonic() - saved_s > _SAVE_EVERY_S or number + 1 == stop:
                saved_s = time.monotonic()
                print(f"{row.name}: {tally.done} of {stop}, {len(tally.wrong)} wrong", file=sys.stderr)
                if is_whole:
                    save(row.name, tally)
    if not is_whole:
        print(f"{row.name}: {dict(tally.outcomes)}, {len(tally.wrong)} wrong", file=sys.stderr)
        if tally.wrong:
            raise SystemExit(1)


def _run_apart(row: Row[Any], options: argparse.Namespace) -> None:
    """Runs a row in a process of its own, which keeps what comes of it."""
    how = ["--restart"] if options.restart else []
    how += [f"--folder={options.folder}"] if options.folder else []
    how += [f"--{name}={getattr(options, name)}" for name in ("start", "count") if getattr(options, name) is not None]
    subprocess.run(
        [sys.executable, "-m", "tests.faults", "--row", row.name, *how], stdout=subprocess.DEVNULL, check=False
    )


def _where(err: BaseException) -> str:
    frame = traceback.extract_tb(err.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row; may be given again")
    parser.add_argument("--start", type=int, metavar="N", help="from this trial on, kept nowhere")
    parser.add_argument("--count", type=int, metavar="N", help="so many trials, kept nowhere")
    parser.add_argument("--restart", action="store_true", help="begin again; default: go on where the last run stopped")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many rows beside each other; default: 1")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--folder", metavar="DIR", help="where the trials work; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    print(f"{platform.python_version()}, {os.cpu_count()} cores", file=sys.stderr)
    sys.exit(main())
