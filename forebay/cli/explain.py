"""The command `forebay explain`: what an error code, or the reason for which a sample was left out, means."""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.options import command, printed


def add_explain(commands: Any) -> None:
    """Adds `forebay explain [TOPIC]`."""
    summary = "say what an error code (FB101) or a reason (corrupt_audio) means, and what to do"
    parser = command(commands, "explain", _explain, summary, has_caches=False)
    parser.add_argument(
        "topic",
        metavar="CODE",
        nargs="*",
        help="a code, a reason, the class of an error, or words to look for; left out: the list of all codes",
    )


def _explain(options: argparse.Namespace) -> int:
    from forebay.explain import explained

    return printed(options, explained(" ".join(options.topic)))
