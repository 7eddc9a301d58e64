"""`python -m forebay.preprocess ...` is `forebay preprocess ...`."""

import sys

from forebay.cli import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
