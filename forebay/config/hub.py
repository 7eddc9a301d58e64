"""Names of the Hugging Face Hub where a folder is wanted: what to run, since forebay downloads nothing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

Thing = Literal["tokenizer", "processor", "model", "dataset"]

_LINES: dict[Thing, str] = {
    "tokenizer": "from transformers import AutoTokenizer as A; A.from_pretrained({name!r}).save_pretrained({folder!r})",
    "processor": (
        "from transformers import AutoImageProcessor as A; A.from_pretrained({name!r}).save_pretrained({folder!r})"
    ),
    "model": "from huggingface_hub import snapshot_download as s; s({name!r}, local_dir={folder!r})",
    "dataset": "from datasets import load_dataset as l; l({name!r}).save_to_disk({folder!r})",
}


def hub_advice(folder: Path, thing: Thing) -> str:
    """Returns the end of a message about a folder that is not there, empty where its path looks like no name of the Hub.

    The path of `openai/whisper-small` beside a config ends so, and the folder `openai` is not there either. What the line
    saves is then found under the path that the config has.
    """
    name = "/".join(folder.parts[-2:])
    if folder.exists() or folder.parent.exists() or not folder.parent.parent.exists():
        return ""
    line = _LINES[thing].format(name=name, folder=str(folder))
    quoted = shlex.quote(line) if set(line) & set('"$`\\!') else f'"{line}"'
    return (
        f"; forebay takes folders and downloads nothing: if {name} is the name of a {thing} of the Hub, save it there: "
        f"python -c {quoted}"
    )
