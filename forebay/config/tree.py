"""One frozen tree from one TOML file. Every field is in the recipe key unless its section says that it is run-time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast

from forebay.config.data import (
    MEANINGS,
    SOURCE_KINDS,
    STRICT,
    AudioConfig,
    LayoutConfig,
    Reads,
    SourceConfig,
    TextConfig,
    VisionConfig,
)
from forebay.config.filter import FilterConfig
from forebay.config.loader import LoaderConfig, MixtureConfig
from forebay.config.plan import ByKind, PackConfig, PlanConfig
from forebay.config.remote import RemoteConfig
from forebay.config.train import RunConfig, TrainConfig
from forebay.config.url import is_url


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole file; paths in it are absolute."""

    __pydantic_config__ = STRICT

    name: str
    """First part of the cache folder's name."""
    source: SourceConfig
    audio: AudioConfig = field(default_factory=AudioConfig)
    text: TextConfig | None = None
    """With `[vision]` it may be left out: the processor's folder, prompt "chat"."""
    vision: VisionConfig | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    plan: Annotated[PlanConfig, ByKind()] | None = None
    filter: FilterConfig = field(default_factory=FilterConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    path: str = ""
    """The file it was read from, for messages; set by `load_config`."""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "._-" for c in self.name) or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} becomes a folder: use letters, digits, '.', '_', '-'")
        split = self.source.split
        if not split or not all(c.isalnum() or c in "._-" for c in split):
            raise ValueError(f"source.split {split!r} becomes a folder: use letters, digits, '.', '_', '-'")
        if self.vision is not None:
            self._check_vision(self.vision)
        elif self.source.rows is not None and self.source.kind != "text":
            raise ValueError('source.rows is only for a config with [vision], and for source.kind = "text"')
        if isinstance(self.plan, PackConfig):
            self._check_packs(self.plan)
        if self.mixture.source and self.loader.cache_dir is not None:
            raise ValueError(
                "loader.cache_dir names one cache; with a mixture give each its own: [[mixture.source]] cache"
            )

        if self.run.cache_root.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"run.cache_root is {self.run.cache_root!r}, and a web server lists no folders: name one cache of it "
                "by loader.cache_dir, or a root in s3://, gs:// or az://"
            )

    def _check_packs(self, plan: PackConfig) -> None:
        if self.vision is None and self.text is None:
            raise ValueError('plan.kind is "pack", and packs are of tokens: add [text], or set plan.kind = "bucket"')
        if self.vision is None and self.loader.crop_s is not None:
            raise ValueError('plan.kind is "pack", and crops of loader.crop_s have no text; set plan.kind = "bucket"')
        if (plan.max_patches if self.vision is None else plan.max_frames) is not None:
            given, wanted = ("patches", "frames") if self.vision is None else ("frames", "patches")
            raise ValueError(f"plan.max_{given} is set, and this config has {wanted}: set plan.max_{wanted}")
        if self.vision is None and self.loader.pack_shapes == "fixed" and plan.max_frames is None:
            raise ValueError('loader.pack_shapes is "fixed", which needs plan.max_frames, the most that a pack has')
        if self.mixture.is_given:
            raise ValueError(
                'plan.kind is "pack", and mixtures are of plans with buckets; list all data in one manifest, or take '
                'images as their processor gives them: vision.images = "processor" and plan.kind = "bucket"'
            )

    def _check_vision(self, vision: VisionConfig) -> None:
        if self.text is None:
            object.__setattr__(self, "text", TextConfig(tokenizer=vision.processor, prompt="chat"))
        if self.audio != AudioConfig():
            raise ValueError("give one of [audio] and [vision]")
        foreign = {"min_duration_s": 0.0, "max_duration_s": None, "overlong": "keep", "languages": None}
        foreign["duration_tolerance"] = None
        for name, default in foreign.items():
            if getattr(self.source, name) != default:
                raise ValueError(f"source.{name} is only for audio, not for a config with [vision]")
        if self.loader.crop_s is not None:
            raise ValueError("loader.crop_s is only for audio, not for a config with [vision]")

    @property
    def modality(self) -> Literal["speech", "vision"]:
        """What the samples are: recordings and texts, or with `[vision]` images and conversations."""
        return "speech" if self.vision is None else "vision"

    @property
    def meaning(self) -> str:
        """The name of what a row of the source is, or the `file.py:Class` that says it."""
        return self.source.meaning or self.default_meaning

    @property
    def default_meaning(self) -> str:
        """The meaning of rows where `source.meaning` is left out."""
        kind = SOURCE_KINDS.get(self.source.kind)
        if kind is not None and not kind.has_audio:
            return "texts"
        if self.vision is None:
            return "recordings"
        prompt = "chat" if self.text is None else self.text.prompt
        return next((facts.name for facts in MEANINGS.values() if facts.prompt == prompt), "conversations")

    @property
    def reads(self) -> Reads:
        """The meaning of rows by its older name."""
        older: dict[str, Reads] = {"texts": "recordings", "captions": "texts"}
        return older.get(self.meaning, cast(Reads, self.meaning))

    @property
    def codec(self) -> str | None:
        """How images lie on disk: the `codec` of the caches' metadata. None for audio and texts."""
        return None if self.vision is None else self.vision.codec

    @property
    def cache_root(self) -> Path:
        """Folder of this machine under which caches are looked for and built; that of `remote_root` on this node."""
        return stand_in(self.run.cache_root, self.remote)

    @property
    def remote_root(self) -> str | None:
        """URL under which caches are looked for and put, where `run.cache_root` is one."""
        return self.run.cache_root if is_url(self.run.cache_root) else None


def stand_in(cache_root: str, remote: RemoteConfig) -> Path:
    """Returns the folder of this machine for a cache root: the root itself, or what stands for a URL on this node.

    Two endpoints have their own buckets of one name.
    """
    if not is_url(cache_root):
        return Path(cache_root)
    return remote.folder / "roots" / hashlib.sha256(f"{remote.endpoint or ''} {cache_root}".encode()).hexdigest()[:16]
