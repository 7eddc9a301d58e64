"""`python -m forebay.train ...` is `forebay train ...`."""

import sys

from forebay.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
