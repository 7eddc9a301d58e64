"""The pack plan of a config over a source of images and text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.config import MixtureConfig, PackConfig
from forebay.plan.make import plan_of
from forebay.plan.pack.pack_plan import PackPlan
from tests.plan.packs import photos_and_text

TOKENS, PATCHES = photos_and_text(300, text_share=0.2)


class Source(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.slots)


SOURCE: Any = Source(
    constants={},
    key="cd" * 32,
    recipe_key="ef" * 32,
    filter_key=None,
    ids_digest=lambda: "01" * 32,
    lengths={"num_tokens": TOKENS, "num_patches": PATCHES, "num_images": (PATCHES > 0).astype(np.int32)},
    slots=(np.arange(300) // 50 << 32) + np.arange(300) % 50,
)


def config(root: Path, **plan: Any) -> Any:
    return SimpleNamespace(
        constants={},
        name="vqa",
        path="vqa.toml",
        cache_root=root,
        source=SimpleNamespace(constants={}, split="train"),
        plan=PackConfig(seq_len=2048, **plan),
        mixture=MixtureConfig(),
    )


@pytest.mark.parametrize("changes", [{}, {"max_patches": 6000, "buffer_size": 64}])
def test_a_plan_is_made_kept_and_told(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned = plan_of(config(tmp_path, **changes), SOURCE)
    assert isinstance(planned.plan, PackPlan)
    assert planned.folder is not None
    statistics = json.loads((planned.folder / "packing_stats.json").read_bytes())
    assert statistics["images"]["max"] >= 1
    reasons = [f", {n} left out as {reason}" for reason, n in statistics["unplaced"].items() if n]
    assert len(reasons) == 1 + len(changes) // 2
    assert planned.summary() == (
        f"plan: {300 - statistics['dropped']} samples in {planned.plan.num_batches} packs{''.join(reasons)}, "
        f"{100 * statistics['fill']:.2f} % fill"
    )
    again = plan_of(config(tmp_path, **changes), SOURCE)
    assert isinstance(again.plan, PackPlan)
    assert again.plan.members.tolist() == planned.plan.members.tolist()
    assert again.key == planned.key


def test_a_plan_that_is_not_kept_is_the_same(tmp_path: Path) -> None:
    kept = plan_of(config(tmp_path / "a"), SOURCE)
    loose = plan_of(config(tmp_path / "b"), SOURCE, keep=False)
    assert isinstance(loose.plan, PackPlan)
    assert loose.folder is None
    assert not (tmp_path / "b").exists()
    assert loose.key == kept.key
    assert isinstance(loose.plan, PackPlan)
    assert isinstance(kept.plan, PackPlan)
    assert loose.plan.members.tolist() == kept.plan.members.tolist()
    assert "not kept on disk" in loose.summary()
