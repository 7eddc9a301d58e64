"""Conversations with clips in a folder: sources, configs, caches, and the processors' own batches of the same talks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from forebay import load_config
from forebay.config import Config
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.preprocess import Options, build
from forebay.preprocess.build_report import BuildReport
from forebay.steps.text.chat.processor_ids import Writer
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.cache import Cache, open_cache
from forebay.train.loader import Loader
from forebay.train.select import make_loader
from tests.sound_families import SEES, clips, listed, model_folder, said
from tests.vlm_families import picture

SECONDS = (1.2, 0.731, 1.9, 0.5, 1.0)
TALKS: Mapping[str, Sequence[Sequence[str]]] = {
    "one": [["clip0.flac", "What is it?"], ["A cat."]],
    "several": [["clip1.flac", "Both?", "clip2.flac"], ["Two dogs."], ["and ", "clip0.flac"], ["A cat."]],
    "none": [["Nothing?"], ["No."]],
    "twice": [["clip3.flac", "clip3.flac", "long?"], ["Yes, a dog."]],
    "seen": [["p0.png", "clip4.flac", "who ", "p1.png", " is?"], ["A."]],
    "seen later": [["clip1.flac", "clip3.flac", "p1.png", "p1.png"], ["A cat."], ["p0.png"], ["A dog."]],
    "only seen": [["p1.png", "Where?"], ["A."]],
}


@dataclass(frozen=True)
class Talks:
    """A folder with a model of a family, clips, and their list. names: of the rows of `TALKS` that are listed."""

    root: Path
    family: str
    names: tuple[str, ...]

    @classmethod
    def made(cls, root: Path, family: str) -> Talks:
        """Returns the folder, written."""
        model_folder(family, root)
        clips(root / "data", SECONDS)
        for number in range(2):
            picture(number, width=64 + 28 * number, height=56).save(root / "data" / f"p{number}.png")
        found = cls(root, family, tuple(name for name in TALKS if family in SEES or "seen" not in name))
        listed(root / "data", [{"id": name, "messages": found.messages(name)} for name in found.names])
        return found

    @property
    def model(self) -> Path:
        return self.root / self.family

    def messages(self, name: str, *, opened: bool = False) -> list[dict[str, Any]]:
        """Returns a talk with the names of its items, or with these opened."""
        parts = [[self._part(text, opened=opened) for text in turn] for turn in TALKS[name]]
        return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(parts)]

    def _part(self, text: str, *, opened: bool) -> dict[str, Any]:
        path = self.root / "data" / text
        if text.endswith(".flac"):
            return {"type": "audio", "audio": soundfile.read(path, dtype="float32")[0] if opened else text}
        if text.endswith(".png"):
            return {"type": "image", "image": Image.open(path) if opened else text}
        return {"type": "text", "text": text}

    def config(self, *overrides: str, manifest: str = "data/train.jsonl", kind: str = "jsonl", **more: str) -> Config:
        """Returns a config of the talks. more: lines of a section, by its name."""
        sections = {
            "source": f'kind = "{kind}"\nmanifest = "{manifest}"',
            "audio": f'features = "extractor"\nextractor = "{self.family}"',
            "vision": f'processor = "{self.family}"' if self.family in SEES else "",
            "text": f'tokenizer = "{self.family}"\nprompt = "chat"',
            "plan": 'kind = "bucket"\nedges_s = [100]\nbatch_size = 8\n',
            "run": 'cache_root = "caches"\nnum_workers = 1\nmax_failed_share = 1.0',
        }
        lines = {name: more.get(name, text) for name, text in sections.items()}
        text = "\n".join(f"[{name}]\n{text}" for name, text in lines.items() if text)
        path = self.root / "config.toml"
        path.write_text(f'name = "talks"\n{text}\n', encoding="utf-8")
        return load_config(str(path), overrides=overrides)

    @cached_property
    def writer(self) -> Writer:
        """The family's own processor."""
        vocabulary = Vocabulary(self.model, digest=tokenizer_digest(self.model))
        return Writer(vocabulary, self.model, ("audio", "image") if self.family in SEES else ("audio",))

    def own_batch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns the processor's own batch of talks."""
        made = self.writer.processor.apply_chat_template(
            [self.messages(name, opened=True) for name in names],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        return dict(made)


def built(config: Config) -> tuple[Cache, BuildReport]:
    """Returns the cache of a config, built here."""
    report = build(config, Options(progress=False))
    assert report.cache is not None
    return open_cache(report.cache), report


def packed_talks(root: Path, family: str) -> None:
    """Makes a folder with eleven packs of two talks, each with a clip, and an image where the model sees."""
    talks = Talks.made(root, family)
    shown = [["clip4.flac"], ["p0.png"]][: 1 + (family in SEES)]
    rows = []
    for number in range(22):
        parts = [talks._part(name, opened=False) for (name,) in shown]
        rows.append(row(*parts, {"type": "text", "text": f"{number:02} "}, id=str(number)))
    listed(root / "data", rows)
    cache, _ = built(talks.config(plan='kind = "pack"\nseq_len = 150\nmax_frames = 32'))
    assert len(cache) == 22


def talk_loader(root: Path, *, dp_rank: int = 0, dp_world_size: int = 1, seed: int = 1, tail: str = "drop") -> Loader:
    """Returns a rank's loader of the packs of `packed_talks`."""
    config = load_config(root / "config.toml", overrides=[f"loader.seed={seed}", f'plan.tail="{tail}"'])
    return make_loader(config, dp_rank=dp_rank, dp_world_size=dp_world_size)


def row(*parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Returns a row whose question has these parts."""
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "q?"}]}
    return {"messages": [asked, {"role": "assistant", "content": "A."}], **more}


def bad_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns rows, most of which cannot be used: the id of each begins with its reason. Writes their files."""
    names = clips(folder, [1.2, 3.0])
    sound = np.linspace(-0.5, 0.5, 8000, dtype=np.float32)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "junk.wav").write_bytes(b"RIFFxxxxnothing")
    (folder / "cut.flac").write_bytes((folder / names[0]).read_bytes()[:9000])
    soundfile.write(folder / "nan.wav", np.full(8000, np.nan, np.float32), 16_000, subtype="FLOAT")
    soundfile.write(folder / "stereo.wav", np.stack([sound, sound[::-1]], axis=1), 44_100)
    soundfile.write(folder / "mp3.mp3", sound, 16_000)
    soundfile.write(folder / "ogg.ogg", sound, 16_000)
    part = {"type": "audio"}
    return [
        said("<audio>ok", "A.", audio=names[0], id="good"),
        row({**part, "path": names[0]}, {**part, "audio": "stereo.wav"}, id="good parts"),
        said("<audio><audio>ok", "A.", audios=["mp3.mp3", "ogg.ogg"], id="good formats"),
        {"question": "what?", "answer": "A.", "audio": names[0], "id": "good question"},
        said("no clip", "A.", id="good words"),
        said("<audio>none", "A.", id="audio_count_mismatch no file"),
        said("<audio><audio>few", "A.", audio=[names[0]], id="audio_count_mismatch more marks"),
        said("more", "A.", audio=[names[0]], id="audio_count_mismatch more files"),
        said("<audio>x", "A.", audio="missing.wav", id="missing_file"),
        row({**part, "url": "http://x.y/z.wav"}, id="missing_file url"),
        said("<audio>x", "A.", audio="empty.wav", id="empty_file"),
        said("<audio>x", "A.", audio="junk.wav", id="unknown_duration"),
        said("<audio>x", "A.", audio="cut.flac", id="corrupt_audio"),
        said("<audio>x", "A.", audio="nan.wav", id="not_finite"),
        said("<audio><audio>x", "A.", audios=names, id="clip_too_long"),
        said("<image>x", "A.", images=["a.png"], id="has_images"),
        said("x", "A <audio>", audio=names[0], id="bad_conversation answer"),
        row({**part, "path": names[0], "audio": names[1]}, id="two_values"),
        row({"type": "video", "video": "x"}, id="has_video"),
        said("<|AUDIO|>", "A.", id="special_token_in_text"),
    ]
