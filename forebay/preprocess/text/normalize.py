"""Text before it is tokenised."""

from __future__ import annotations

import unicodedata

from forebay.config.steps import Tokens
from forebay.errors import TextError


def normalize_text(text: str, step: Tokens, *, sample_id: str) -> str:
    """Returns the text in Unicode NFKC with runs of white space as one space and ends stripped; as it is for "none".

    White space is what `str.split` takes for it, line ends included. Normalising twice changes nothing.
    Raises TextError `bad_text` for what UTF-8 cannot hold (a lone surrogate) and for NUL.
    """
    if "\0" in text:
        raise TextError(
            "bad_text", f"{sample_id}: text has a NUL at character {text.index(chr(0))}; clean the manifest"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        found = f"U+{ord(text[err.start]):04X} at character {err.start}"
        raise TextError("bad_text", f"{sample_id}: text has a lone surrogate {found}; clean the manifest") from err
    return " ".join(unicodedata.normalize("NFKC", text).split()) if step.normalize == "nfkc" else text
