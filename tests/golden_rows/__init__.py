"""Results of forebay for every kind of row, pinned: `python -m tests.golden_rows --write` makes the files anew.

`cases.py` says what is built and loaded, `data.py` writes the raw files, `pin.py` says what is recorded. All four use
what users use alone: configs, `build`, `open_cache`, `make_loader`, the commands, and files.
"""

WRITE, EXACT = "FOREBAY_GOLDEN_WRITE", "FOREBAY_GOLDEN_EXACT"
"""Environment of the tests, set by `python -m tests.golden_rows`: 1, or the folder of the files with all bits."""
