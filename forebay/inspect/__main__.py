"""`python -m forebay.inspect ...` is `forebay inspect ...`."""

import sys

from forebay.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
