"""One frozen tree from one TOML file. Every field is in the recipe key unless its section says that it is run-time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from forebay.config.data import MEANINGS, SOURCE_KINDS, STRICT, SourceConfig
from forebay.config.loader_sections import FilterConfig, LoaderConfig, MixtureConfig
from forebay.config.plan import ByKind, PackConfig, PlanConfig
from forebay.config.remote import RemoteConfig, is_url
from forebay.config.step_sections import AudioConfig, LayoutConfig, TextConfig, VisionConfig
from forebay.config.train import RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole file; paths in it are absolute."""

    __pydantic_config__ = STRICT

    name: str
    """First part of the cache folder's name."""
    source: SourceConfig
    audio: AudioConfig | None = None
    """Without `[vision]` it may be left out: its defaults."""
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
        if not self.vision and self.audio is None:
            object.__setattr__(self, "audio", AudioConfig())
        if self.vision and self.audio is None and self.text is None:
            object.__setattr__(self, "text", TextConfig(tokenizer=self.vision.processor, prompt="chat"))
        if isinstance(self.plan, PackConfig) and self.mixture.is_given:
            raise ValueError(
                'plan.kind is "pack", and mixtures are of plans with buckets; list all data in one manifest, or take '
                'images as their processor gives them: vision.images = "processor" and plan.kind = "bucket"'
            )
        if self.mixture.source and self.loader.cache_dir is not None:
            raise ValueError(
                "loader.cache_dir names one cache; with a mixture give each its own: [[mixture.source]] cache"
            )

        if self.run.cache_root.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"run.cache_root is {self.run.cache_root!r}, and a web server lists no folders: name one cache of it "
                "by loader.cache_dir, or a root in s3://, gs:// or az://"
            )

    @property
    def subjects(self) -> tuple[str, ...]:
        """The words for what the sections say is made, by which kinds of source say what they hold."""
        return (*(["speech"] if self.audio else []), *(["vision"] if self.vision else []))

    @property
    def meaning(self) -> str:
        """The name of what a row of the source is, or the `file.py:Class` that says it."""
        return self.source.meaning or self.default_meaning

    @property
    def default_meaning(self) -> str:
        """The meaning of rows where `source.meaning` is left out."""
        if not self.vision:
            kind = SOURCE_KINDS.get(self.source.kind)
            return "recordings" if kind is None else kind.meaning
        prompt = "chat" if self.text is None else self.text.prompt
        return next((facts.name for facts in MEANINGS.values() if facts.prompt == prompt), "conversations")

    @property
    def codec(self) -> str | None:
        """How images lie on disk: the `codec` of the caches' metadata. None for audio and texts."""
        return self.vision.codec if self.vision else None

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
