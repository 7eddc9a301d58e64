"""Tiny folders of models that forebay has no code for, and pictures laid out as people keep them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import transformers

from forebay.steps.text.symbols import Special, SymbolTable
from tests.init.layouts import DEMO, clips, write_lines, write_tar
from tests.steps.text.test_caption import siglip as siglip_processor
from tests.train.models import foreign

SIZE = {"height": 16, "width": 16}
CLASSES = ("bird", "cat", "dog")
TEXTS = ("the dog", "a photo of the cat")
GEMMA3 = DEMO / "vision" / "gemma3_model"


def extractor(folder: Path, kind: str, **settings: Any) -> Path:
    """A feature extractor alone."""
    getattr(transformers, kind)(**settings).save_pretrained(folder)
    return folder


def ctc(folder: Path) -> Path:
    """A Parakeet that writes the letters of the recordings' texts."""
    table = SymbolTable.of([clip.text for clip in clips()], split="characters", special=Special(eos="</s>"))
    foreign.parakeet(folder, vocab_size=len(table.tokens), every=2)
    for name, data in table.files().items():
        (folder / name).write_bytes(data)
    return extractor(folder, "ParakeetFeatureExtractor", feature_size=16)


def vit(folder: Path, *names: str) -> Path:
    """A ViT of these classes."""
    foreign.vit(folder, id2label=dict(enumerate(names)))
    transformers.ViTImageProcessorPil(size=SIZE).save_pretrained(folder)
    return folder


def body(folder: Path) -> Path:
    """A ViT without a head: nothing says what it is trained on."""
    return changed(vit(folder), "config.json", architectures=["ViTModel"])


def siglip(folder: Path, *, tokenizer: bool = True) -> Path:
    """A SigLIP, with a tokenizer or without."""
    foreign.siglip(folder, vocab_size=64, max_position_embeddings=16)
    if tokenizer:
        siglip_processor().save_pretrained(folder)
    else:
        transformers.SiglipImageProcessorPil(size=SIZE).save_pretrained(folder)
    return folder


def changed(folder: Path, name: str, **settings: Any) -> Path:
    """The folder with other settings in one of its documents."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def pictures() -> list[Path]:
    """Six photos."""
    return sorted((DEMO / "vision" / "photos").glob("*.jpg"))[:6]


def class_folders(folder: Path) -> Path:
    """`train/cat/1.jpg`, and a test split."""
    for number, path in enumerate(pictures()):
        _copied(path, folder / "train" / CLASSES[number % 3])
    _copied(pictures()[0], folder / "test" / "cat")
    return folder


def texts_beside(folder: Path) -> Path:
    """`1.jpg` and `1.txt`."""
    for number, path in enumerate(pictures()):
        _copied(path, folder).with_suffix(".txt").write_text(TEXTS[number % 2])
    return folder


def bare(folder: Path) -> Path:
    """Photos alone."""
    for path in pictures():
        _copied(path, folder)
    return folder


def caption_lines(folder: Path) -> Path:
    """JSON lines of a photo and a caption, in a column of another name than the default."""
    rows = [{"image": f"photos/{path.name}", "caption": TEXTS[n % 2]} for n, path in enumerate(pictures())]
    bare(folder / "photos")
    write_lines(folder / "captions.jsonl", rows)
    return folder


def label_table(folder: Path) -> Path:
    """A CSV of file and category."""
    bare(folder)
    lines = [f"{path.name},{CLASSES[number % 3]}" for number, path in enumerate(pictures())]
    (folder / "classes.csv").write_text("\n".join(["file,category", *lines]) + "\n")
    return folder


def caption_parquet(folder: Path) -> Path:
    """Photos in the rows of a parquet file, with captions."""
    rows = [
        {"image": {"bytes": path.read_bytes(), "path": None}, "caption": TEXTS[n % 2]}
        for n, path in enumerate(pictures())
    ]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def label_parquet(folder: Path) -> Path:
    """Photos in the rows of a parquet file, with a ClassLabel."""
    rows = [{"image": {"bytes": path.read_bytes(), "path": None}, "kind": n % 3} for n, path in enumerate(pictures())]
    features = {"kind": {"names": list(CLASSES), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pa.Table.from_pylist(rows)
    told = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    folder.mkdir(parents=True)
    pq.write_table(table.replace_schema_metadata(told), folder / "train.parquet")
    return folder


def label_tars(folder: Path) -> Path:
    """A tar of `1.jpg` and `1.cls`."""
    members: dict[str, bytes] = {}
    for number, path in enumerate(pictures()):
        members |= {f"{number}.jpg": path.read_bytes(), f"{number}.cls": str(number % 3).encode()}
    write_tar(folder / "a-000.tar", members)
    return folder


def caption_tars(folder: Path) -> Path:
    """A tar of `1.jpg` and `1.txt`."""
    members: dict[str, bytes] = {}
    for number, path in enumerate(pictures()):
        members |= {f"{number}.jpg": path.read_bytes(), f"{number}.txt": TEXTS[number % 2].encode()}
    write_tar(folder / "a-000.tar", members)
    return folder


def _copied(path: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder))
