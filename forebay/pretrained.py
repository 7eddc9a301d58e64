"""What transformers makes of a folder: nothing is fetched, no code of the folder is run, whoever says yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def from_folder(loader: Any, folder: Path, **options: Any) -> Any:
    """Returns `loader.from_pretrained(folder)`, for every class of transformers that has it; raises what that raises.

    Left out, `trust_remote_code` is a question on the terminal in transformers, and a `y` runs the folder's code.
    """
    return loader.from_pretrained(str(folder), **options, local_files_only=True, trust_remote_code=False)
