"""The demo recordings' transcripts as texts without audio, and the configs of both."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from forebay.config import Config
from forebay.steps.recipe import load_config

ROOT = Path(__file__).parents[1]
SPEECH = ROOT / "configs" / "demo_qwen3_asr.toml"
TOKENIZER = ROOT / "demo" / "speech" / "qwen3_asr_model"


def demo_texts() -> list[dict[str, str]]:
    """Returns id, text and language of the 52 demo recordings."""
    rows = pq.read_table(ROOT / "demo" / "speech" / "train.parquet").to_pylist()
    return [{"id": row["sample_id"], "text": row["transcript"], "language": row["language"]} for row in rows]


def write_texts(path: Path, rows: list[dict[str, str]]) -> Path:
    """Makes `path` a manifest of texts."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def text_config(folder: Path, *overrides: str, rows: list[dict[str, str]] | None = None) -> Config:
    """Returns the config of the texts under `folder`, which are written where they are not there."""
    manifest = folder / "texts.jsonl"
    if rows is not None or not manifest.exists():
        write_texts(manifest, demo_texts() if rows is None else rows)
    path = folder / "texts.toml"
    path.write_text(
        'name = "texts"\n[source]\nkind = "text"\nmanifest = "texts.jsonl"\n[audio]\nfeatures = "none"\n'
        f'[text]\ntokenizer = "{TOKENIZER}"\n[layout]\nrows_per_shard = 2\n'  # 16 texts a shard
        "[plan]\nedges = [8, 16, 32, 64]\nbatch_tokens = 128\nlockstep = 1\n"
        '[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    return load_config(path, overrides=overrides)


def speech_config(folder: Path, *overrides: str) -> Config:
    """Returns `configs/demo_qwen3_asr.toml` with its caches and runs under `folder`."""
    own = [f'run.cache_root="{folder / "caches"}"', f'train.output_dir="{folder / "runs"}"', "run.num_workers=1"]
    return load_config(SPEECH, overrides=[*own, *overrides])


def mixed_config(folder: Path, *overrides: str, text: str = "asr_ratio = 0.8\n") -> Config:
    """Returns the config of a run on both, four micro-batches of five with audio; `text` goes into `[mixture]`."""
    path = folder / "mixed.toml"
    entries = "".join(f'[[mixture.source]]\nconfig = "{folder / name}.toml"\n' for name in ("speech", "texts"))
    speech = SPEECH.read_text().replace("../demo", str(ROOT / "demo")).replace("../caches", str(folder / "caches"))
    (folder / "speech.toml").write_text(speech)
    plan = "edges = [16, 64]\nbatch_tokens = 256\nbatch_seconds = 60"
    own = speech.replace("batch_seconds = 60", plan)
    path.write_text(f'{own}[mixture]\nbatches = "per_source"\n{text}{entries}')
    return load_config(path, overrides=[f'train.output_dir="{folder / "runs"}"', "loader.num_threads=1", *overrides])
