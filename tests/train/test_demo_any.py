"""`configs/demo_any.toml` from photos to a trained model: what the README shows, with a model of no code of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import cli, load_config
from forebay.store.image.codec import decode_image
from forebay.train.select import as_stored, make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.text.test_processor_chat import encoder_of, own_batch, own_labels
from tests.vlm_families import ANSWERS, talk

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo_any.toml"
PHOTOS = ROOT / "demo" / "vision"


def conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row of the manifest as the processor takes it, with its photo as forebay decodes it."""
    data = (PHOTOS / row["image"]).read_bytes()
    image = decode_image(data, max_pixels=1 << 24, alpha="white", sample_id=row["id"])
    return talk(row["answer"], images=[image], question=row["question"])


def test_the_demo_gives_the_processor_s_own_batches_and_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f'run.cache_root="{tmp_path / "caches"}"', f'train.output_dir="{tmp_path / "runs"}"',
        "train.max_steps=6", "source.max_samples=16",
        "run.num_workers=1", "train.log_every=6", "plan.lockstep=1",
    ]  # fmt: skip
    config = load_config(DEMO, overrides=overrides)
    assert config.vision is not None
    assert build_here(config).num_samples == 16
    lines = (PHOTOS / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines) if "question" in row}
    coder = encoder_of(Path(config.vision.processor))
    loader: Any = make_loader(config, with_ids=True)
    batch, ids = next((batch, ids) for batch, ids in loader if set(ids) <= set(rows))
    own = own_batch(coder, [conversation(rows[sample_id]) for sample_id in ids])
    own["labels"] = own_labels(coder, own["input_ids"], answer=ANSWERS["gemma3"])
    assert sorted(batch) == sorted(own)
    for name, values in own.items():
        assert torch.equal(batch[name], values), name
    capsys.readouterr()
    assert cli.main(["train", str(DEMO), *(part for one in overrides for part in ("--set", one)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loss_last"] < 0.9 * report["loss_first"]


def test_packs_of_patches_alone_keep_uint8_pixels() -> None:
    kept = [as_stored(load_config(ROOT / "configs" / f"demo_{name}.toml")) for name in ("any", "vision")]
    assert [config.loader.pixels for config in kept] == ["float32", "uint8"]
