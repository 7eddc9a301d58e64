"""The cases: what is built, and what batches are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.golden_rows import data
from tests.golden_rows.pin import ROOT, Case, merged

SPEECH = ROOT / "demo" / "speech"
WHISPER = {"tokenizer": SPEECH / "model", "prompt": "whisper", "max_label_tokens": 120}
PLAIN = {"tokenizer": SPEECH / "model", "prompt": "plain"}
QWEN_ASR = {"tokenizer": SPEECH / "qwen3_asr_model", "prompt": "qwen3_asr", "max_label_tokens": 120}
BUCKETS = {"edges_s": [0.5, 0.9, 1.2], "batch_seconds": 3.6, "lockstep": 2}
LIVE = {"loader": {"cache": "off"}}
QWEN3_VL, GEMMA3 = ROOT / "demo" / "vision" / "model", ROOT / "demo" / "vision" / "gemma3_model"
PACKS = {"kind": "pack", "seq_len": 420}
CROP = {"loader": {"crop_s": 0.3}}


def speech(kind: str, manifest: str = "raw", **sections: Any) -> dict[str, Any]:
    """Returns a config of recordings."""
    base = {"source": {"kind": kind, "manifest": manifest}, "layout": {"rows_per_shard": 4}, "plan": BUCKETS}
    return merged(base, sections)


def clips(
    kind: str = "tar", count: int = 14, *, bad: bool = False, form: str = "", **how: Any
) -> Callable[[Path], None]:
    """Returns what writes recordings."""

    def write(folder: Path) -> None:
        data.speech(kind, folder / "raw", [*data.clips(count, **how), *(data.bad_clips() if bad else [])], form=form)

    return write


def vision(kind: str, manifest: str = "raw", **sections: Any) -> dict[str, Any]:
    """Returns a config of images and conversations."""
    return merged({"source": {"kind": kind, "manifest": manifest}, "layout": {"rows_per_shard": 5}}, sections)


def talks(kind: str = "jsonl", count: int = 14, *, form: str = "") -> Callable[[Path], None]:
    """Returns what writes conversations over six pictures."""
    return lambda folder: data.vision(kind, folder / "raw", data.talks(count), data.pictures(), form=form)


def dtype(name: str) -> Mapping[str, Any]:
    """Returns a load whose floats have this type."""
    return {"loader": {"dtype": name}}


CASES: dict[str, Case] = {
    "log-mel-whisper-tar": Case(
        data=clips("tar"),
        config=speech("tar", audio={"features": "log_mel", "n_mels": 80}, text=WHISPER),
        loads={
            "live": LIVE,
            "half": dtype("float16"),
            "bfloat": dtype("bfloat16"),
            "window": {"plan": {"=": 1, "kind": "window", "window": 2, "batch_size": 3, "lockstep": 2}},
            "k": {"plan": {"=": 1, "k": 3, "batch_size": 3, "lockstep": 1, "tail": "short"}},
        },
    ),
    "waveform-plain-filelist": Case(
        data=clips("filelist"),
        config=speech("filelist", audio={"features": "waveform", "dtype": "int16"}, text=PLAIN),
        loads={"live": LIVE, "crop": CROP},
        exact=True,
    ),
    "qwen3-asr-webdataset": Case(
        data=clips("webdataset"),
        config=speech("webdataset", audio={"features": "qwen3_asr"}, text=QWEN_ASR),
        loads={"live": LIVE},
    ),
    "w2v-bert-jsonl": Case(
        data=clips("jsonl"),
        config=speech("jsonl", "raw/train.jsonl", audio={"features": "w2v_bert", "keep_waveform": True}),
        loads={"live": LIVE, "crop": CROP},
    ),
    "bad-rows-tar": Case(
        data=clips("tar", 8, bad=True),
        config=speech("tar", audio={"features": "waveform"}, text=WHISPER),
        loads={"live": LIVE},
    ),
    "packs-qwen3-vl-jsonl": Case(
        data=talks("jsonl"),
        config=vision("jsonl", "raw/train.jsonl", vision={"processor": QWEN3_VL}, plan=PACKS),
        loads={
            "live": LIVE,
            "uint8": {"loader": {"pixels": "uint8"}},
            "bfloat-varlen": {"loader": {"pixels": "bfloat16", "varlen": True}},
            "fixed": {"loader": {"pack_shapes": "fixed", "patch_classes": 2}, "plan": {"max_patches": 900}},
            "buffer": {"plan": {"buffer_size": 64, "pack_seed": 3}},
            "two-budgets": {"plan": {"max_patches": 400, "tail": "drop"}},
            "decreasing": {"plan": {"algorithm": "best_fit_decreasing", "tail": "pad"}},
        },
        exact=True,
    ),
    "chat-gemma3-hf": Case(
        data=talks("hf"),
        config=vision(
            "hf",
            vision={"processor": GEMMA3},
            text={"tokenizer": GEMMA3, "prompt": "chat"},
            plan={"edges": [48, 96], "batch_size": 3, "lockstep": 1},
        ),
        loads={"live": LIVE, "bfloat": dtype("bfloat16")},
        exact=True,
    ),
    "text-jsonl": Case(
        data=lambda folder: data.speech("text", folder / "raw", data.texts()),
        config=speech(
            "text",
            "raw/texts.jsonl",
            audio={"features": "none"},
            text=PLAIN,
            layout={"rows_per_shard": 1},
            plan={"=": 1, "edges": [16, 24, 40], "batch_tokens": 100, "lockstep": 2},
        ),
        loads={"live": LIVE, "k": {"plan": {"=": 1, "k": 3, "batch_tokens": 100, "lockstep": 1}}},
        exact=True,
    ),
}
