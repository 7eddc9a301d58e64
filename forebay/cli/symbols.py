"""The command that writes a symbol table for a tokenizer: `symbols`."""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.options import add_config, command, load, on_disk, printed


def add_symbols(commands: Any) -> None:
    """Adds `forebay symbols`."""
    parser = command(
        commands, "symbols", _symbols, "write the phones or characters of a config's texts as a tokenizer's folder"
    )
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", type=on_disk, help="its folder; default: that of text.tokenizer")
    parser.add_argument(
        "--characters", action="store_true", help="a symbol is a character, also where phones are apart"
    )
    for name, default in (("pad", "<pad>"), ("unknown", "<unk>")):
        parser.add_argument(f"--{name}", metavar="TOKEN", default=default, help=f"the {name} token; default: {default}")
    for name, what in (("bos", "begins"), ("eos", "ends")):
        parser.add_argument(f"--{name}", metavar="TOKEN", help=f"a token that {what} sequences; default: none")
    parser.add_argument("--replace", action="store_true", help="write over another symbol table in that folder")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _symbols(options: argparse.Namespace) -> int:
    from forebay.preprocess.speech.symbols import SymbolsOptions, make_symbols
    from forebay.steps.text.symbols import Special

    wanted = SymbolsOptions(
        special=Special(pad=options.pad, unknown=options.unknown, bos=options.bos, eos=options.eos),
        out=options.out,
        split="characters" if options.characters else None,
        replace=options.replace,
        progress=not options.no_progress,
    )
    return printed(options, make_symbols(load(options), wanted))
