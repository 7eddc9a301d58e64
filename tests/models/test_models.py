"""The page of models: what it says of a class is what forebay does with it, and each class is in it or has a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import models
from benchmarks.zoo import compare, page
from benchmarks.zoo.classes import CannotError, Known, extractors, make, processors, reason, save, takes_other_input
from benchmarks.zoo.compare import Verdict, compared
from benchmarks.zoo.cost import Reused, cpu_times
from benchmarks.zoo.inputs import clips
from benchmarks.zoo.rows import Row, row_of
from forebay.steps.form import BatchForm, FieldForm, Promise

TEXT = page.PAGE.read_text(encoding="utf-8")

# Quick classes of different forms: lengths that are fixed, that grow along the first or last axis, in steps; masks that
# are stored, derived or there in batches alone; tolerances; outputs that are left out; normal forms of a clip.
EXTRACTORS = (
    "CohereAsrFeatureExtractor",
    "DacFeatureExtractor",
    "Gemma3nAudioFeatureExtractor",
    "Gemma4UnifiedAudioFeatureExtractor",
    "LasrFeatureExtractor",
    "MuseSparkFeatureExtractor",
    "Phi4MultimodalFeatureExtractor",
    "PocketTTSFeatureExtractor",
    "SeamlessM4TFeatureExtractor",
    "Speech2TextFeatureExtractor",
    "UnivNetFeatureExtractor",
    "Wav2Vec2FeatureExtractor",
)
# One size, padding with a mask, patches, tiles, several images a row, sizes that are not padded, uint16, floats.
PROCESSORS = (
    "BridgeTowerImageProcessorPil",
    "GLPNImageProcessorPil",
    "Idefics2ImageProcessorPil",
    "LlavaNextImageProcessorPil",
    "MiniCPMV4_6ImageProcessorPil",
    "MllamaImageProcessorPil",
    "PixtralImageProcessorPil",
    "Qwen2VLImageProcessorPil",
    "Siglip2ImageProcessorPil",
    "TvpImageProcessorPil",
    "ViTImageProcessorPil",
    "ZoeDepthImageProcessorPil",
)


def known(name: str) -> Known:
    return next(each for each in (*extractors(more=False), *processors(more=False)) if each.name == name)


@pytest.mark.parametrize("name", [*EXTRACTORS, *PROCESSORS])
def test_a_class_is_what_its_row_says(name: str) -> None:
    row = row_of(known(name))
    assert not row.cannot
    assert row.alone.is_exact, row.alone.why
    assert page.disagreement(row) == ""
    assert models.outdated([row]) == [], "run: python -m benchmarks.models"


def test_the_page_has_every_class_of_transformers() -> None:
    missing = [each.name for each in (*extractors(), *processors()) if f"`{each.name}`" not in TEXT]
    assert missing == []


def test_the_page_keeps_what_it_promises() -> None:
    rows = [page.fixed(text).split(" | ") for text in TEXT.splitlines() if re.match(r"\| `.*(\|.*){7}", text)]
    classes = {kind: {each.name for each in listed} for kind, listed in (("e", extractors()), ("p", processors()))}

    def names(kind: str, cells: dict[int, str]) -> set[str]:
        found = [row for row in rows if all(cell in row[place] for place, cell in cells.items())]
        return {row[0].split("`")[1] for row in found} & classes[kind]

    assert len(names("e", {})) == len(names("e", {4: "exact"})) >= 27
    assert len(names("e", {4: "exact", 5: "exact"})) >= 19
    assert len(names("p", {})) == len(names("p", {4: "exact"}))
    assert len(names("p", {2: "table of 25", 4: "exact"})) >= 80
    inexact = {row[0].split("`")[1] for row in rows if row[5] != "exact"}
    assert [name for name in inexact if f"- `{name}`: " not in TEXT] == []


def test_what_a_class_needs_is_its_reason() -> None:
    with pytest.raises(CannotError, match="needs torchaudio, which is not installed"):
        make(known("FunAsrNanoFeatureExtractor"))
    with pytest.raises(CannotError, match="needs essentia, librosa, scipy, which are not installed"):
        make(known("Pop2PianoFeatureExtractor"))
    assert reason(ValueError("a\n b")) == "ValueError: a b"
    assert row_of(known("SuperGlueImageProcessorPil")) == Row(
        known=known("SuperGlueImageProcessorPil"), cannot="takes pairs of images"
    )
    assert takes_other_input(known("ViTImageProcessorPil")) == ""


def test_two_settings_of_a_class_are_two_rows(tmp_path: Path) -> None:
    both = [each for each in extractors() if each.name == "Wav2Vec2FeatureExtractor"]
    assert [each.label for each in both] == [
        "Wav2Vec2FeatureExtractor",
        "Wav2Vec2FeatureExtractor (return_attention_mask)",
    ]
    assert "return_attention_mask" in (save(both[1], tmp_path) / "preprocessor_config.json").read_text()


FORM = BatchForm(
    made_by="Maker",
    fields=(
        FieldForm(name="values", dtype="float32", shape=(None,), stored_dtype="float32"),
        FieldForm(name="mask", dtype="int64", shape=(None,), stored_dtype="int64", mask_of="values"),
    ),
    promise=Promise(kind="exact"),
)
UNITS = [{"values": np.ones(2, np.float32)}, {"values": np.ones(3, np.float32)}]


def own_of(ours: dict[str, torch.Tensor], **changed: Any) -> dict[str, Any]:
    return {**{name: tensor.numpy() for name, tensor in ours.items()}, **changed}


def test_a_comparison_finds_what_differs() -> None:
    ours = compare.batch_of(FORM, [[unit] for unit in UNITS])
    assert compared(ours, own_of(ours)).is_exact
    assert compared(ours, own_of(ours, names=["a"], more=np.zeros(2))).left_out == ("names", "more")
    far = own_of(ours)["values"].copy()
    far[0, 2] += 2.0**-16
    assert str(compared(ours, own_of(ours, values=far))) == "within 2e-05"
    far[0, 2] = 0.25
    found = compared(ours, own_of(ours, values=far))
    assert (found.limit, str(found)) == (0.25, "no")
    assert "values differs by up to 0.25 in 17 % of the values" in found.why
    assert compare.own_values_are_equal(FORM, UNITS, own_of(ours, values=far))
    assert compare.masking(ours, own_of(ours, values=far)) == "mask"
    far[0, 0] += 0.25
    assert not compare.own_values_are_equal(FORM, UNITS, own_of(ours, values=far))
    assert compare.masking(ours, own_of(ours, values=far)) == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"values": np.ones((2, 4), np.float32)}, r"values is [2, 3], its own [2, 4]"),
        ({"values": np.ones((2, 3), np.float16)}, "values is float32, its own float16"),
        ({"mask": np.ones((2, 3), np.int64)}, "mask differs in 1 of 6 values"),
    ],
)
def test_another_array_is_no_tolerance(changed: dict[str, Any], why: str) -> None:
    ours = compare.batch_of(FORM, [[unit] for unit in UNITS])
    found = compared(ours, own_of(ours, **changed))
    assert (str(found), found.why) == ("no", why)


def test_what_a_batch_says_otherwise_is_compared_as_it_says_it() -> None:
    ours = {"scale": torch.tensor([0.5, 0.5]), "tiles": torch.tensor([2, 2]), "local": torch.zeros(0, 3)}
    assert compared(ours, {"scale": np.array([0.5, 0.5]), "tiles": np.array(2)}).is_exact
    assert not compared(ours, {"scale": np.array([0.5, 0.25]), "tiles": np.array(2)}).is_exact
    assert not compared(ours, {"scale": np.array([0.5, 0.5]), "tiles": np.array(3)}).is_exact
    assert compared(ours, {"scale": np.array([0.5, 0.5]), "tiles": [2, 2]}).is_exact


def test_a_mask_may_be_missing_where_it_says_nothing() -> None:
    alone = compare.batch_of(FORM, [UNITS[:1]])
    own = {"values": np.ones((1, 2), np.float32)}
    assert compared(alone, own, masks=("mask",)).is_exact
    assert compared(alone, own).why == "mask is not given"
    together = compare.batch_of(FORM, [[unit] for unit in UNITS])
    assert not compared(together, {"values": together["values"].numpy()}, masks=("mask",)).is_exact


def row(promise: Promise, batch: Verdict, alone: Verdict | None = None) -> Row:
    return Row(known=known("ViTImageProcessorPil"), alone=alone or Verdict(), batch=batch, promise=promise)


def test_a_promise_that_is_not_kept_is_a_disagreement() -> None:
    exact, within = Promise(kind="exact"), Promise(kind="within", limit=2e-6)
    assert page.disagreement(row(exact, Verdict())) == ""
    assert page.disagreement(row(within, Verdict(limit=2e-6))) == ""
    assert "promised within 2e-06" in page.disagreement(row(within, Verdict(limit=3e-6, why="it is off")))
    assert "promised exact, its batch no" in page.disagreement(row(exact, Verdict(limit=np.inf)))
    where = Promise(kind="exact", why="where mask is 1")
    assert page.disagreement(row(where, Verdict(limit=9, where="mask"))) == ""
    assert page.disagreement(row(where, Verdict(limit=9, where="other"))) != ""
    alone_only = Promise(kind="alone", why="it differs")
    assert page.disagreement(row(alone_only, Verdict(limit=9))) == ""
    assert "and its batch is exact" in page.disagreement(row(alone_only, Verdict()))
    assert "alone within 1e-06" in page.disagreement(row(alone_only, Verdict(limit=9), Verdict(limit=1e-6)))


def test_lines_are_held_without_what_moves_with_the_machine() -> None:
    before = "| `A` | a | `x` float32 [n] | 1.00 | exact | within 2e-06 | 30 |"
    after = "| `A` | a | `x` float32 [n] | 1.00 | exact | within 4e-06 | 0.7 |"
    assert page.fixed(before) == page.fixed(after)
    assert page.fixed(before) != page.fixed(after.replace("1.00", "0.50"))
    assert models.outdated([row(Promise(kind="exact"), Verdict())]) != []


def test_the_cost_is_of_batches_from_a_file() -> None:
    calls: list[int] = []
    assert cpu_times(FORM, UNITS, lambda: calls.append(sum(range(20_000))), rounds=2) > 0
    assert len(calls) == 2
    allocate = Reused()
    first = allocate("a", (2,), dtype=torch.float32)
    assert allocate("a", (2,), dtype=torch.float32) is first
    assert allocate("a", (3,), dtype=torch.float32) is not first


def test_clips_are_the_same_each_time() -> None:
    assert all(map(np.array_equal, clips(16_000), clips(16_000)))
    assert [len(clip) for clip in clips(8_000, durations_s=(0.5, 1))] == [4_000, 8_000]
