"""Builds of photos and questions in children that have transformers loaded, which takes longer than such a build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.building import build_here
from tests.faults.children import Children
from tests.faults.shim import Fault
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.vision.corpus import photo_corpus

_LOADED = (
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "tests.faults.test_media",
    "tests.faults.test_vision",
)


@dataclass(frozen=True)
class VisionSite:
    """4 photos and 13 questions, which are 4 shards a group; what an unbroken build of them gives, and its calls."""

    config: Path
    children: Children
    wanted: dict[str, bytes]
    num_calls: int

    def build(self, root: Path, fault: Fault | None = None) -> Any:
        """Returns how a build ended."""
        return self.children.run(build_here, self.config, root, fault or Fault(), {})


@contextlib.contextmanager
def serving_vision(_folder: Path) -> Iterator[Children]:
    """Prepares a server."""
    with Children(*_LOADED) as children:
        yield children


@contextlib.contextmanager
def vision_site(folder: Path) -> Iterator[VisionSite]:
    """Prepares the corpus and builds it once."""
    photo_corpus(folder).config()
    config = folder / "config.toml"
    with serving_vision(folder) as children:
        ended = children.run(build_here, config, folder / "whole", Fault(), {})
        assert ended.error is None, ended.error
        yield VisionSite(config, children, shard_bytes(Path(ended.value["cache"])), ended.value["num_calls"])
