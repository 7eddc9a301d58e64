"""Makes the pinned files anew, or compares all bits before and after a change: `python -m tests.golden_rows --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.golden_rows import EXACT, WRITE


def main() -> int:
    """Runs the tests in that way; returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden_rows", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the files anew")
    parser.add_argument("--exact", metavar="DIR", help="all bits: written to DIR where it has none, else compared")
    parser.add_argument("-k", metavar="NAME", default="", help="only cases whose names have this in them")
    chosen = parser.parse_args()
    if chosen.write:
        os.environ[WRITE] = "1"
    if chosen.exact is not None:
        os.environ[EXACT] = str(Path(chosen.exact).absolute())
    names = f"nothing_moved and ({chosen.k or 'nothing'})"
    return subprocess.call([sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-k", names])


if __name__ == "__main__":
    sys.exit(main())
