"""What transformers makes of a folder: nothing is fetched, no code of the folder is run, whoever says yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def from_folder(loader: Any, folder: Path, **options: Any) -> Any:
    """Returns `loader.from_pretrained(folder)`, for every class of transformers that has it; raises what that raises.

    Left out, `trust_remote_code` is a question on the terminal in transformers, and a `y` runs the folder's code.
    """
    return loader.from_pretrained(str(folder), **options, local_files_only=True, trust_remote_code=False)


def without_dropout(tokenizer: Any) -> None:
    """Makes a fast tokenizer give a text the same tokens each time."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        model.dropout = None
