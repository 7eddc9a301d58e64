"""Samples with a recording of their own and images that they list: opened, planned, collated, mixed; built by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.config import BucketConfig
from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, CacheMismatchError, ConfigError
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.sealed_cache import measure_cache
from forebay.inspect.facts import cache_facts
from forebay.inspect.listed_groups import listed_groups
from forebay.plan.make import make_plan, samples_of
from forebay.preprocess.group import with_group
from forebay.steps.form import BatchForm
from forebay.steps.step import Stored
from forebay.steps.table import axis_names, forms_of
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import Constants, FieldSpec
from forebay.store.seal import Contents, seal
from forebay.store.shard import shard_fields, shard_name, write_shard
from forebay.store.source import SourceUnion, has_untimed_items, without_seconds
from forebay.train.collate.collator import Collator
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import as_codes
from tests.golden import make_v4_declared as golden

TOKENS = ((4, 5, 2), (6, 2), (7, 8, 9, 2))
LISTED = ((0,), (), (2, 1, 0))
NAMES = [{"images": json.dumps([f"{number}.png" for number in listed])} for listed in LISTED]
FIELDS = (
    *with_group(golden.AUDIO_FORM.specs(), "audio"),
    FieldSpec(name="num_audio_samples", dtype="int64", group="audio", role="table"),
    *with_group(golden.IMAGES_FORM.specs(), "image"),
    FieldSpec(name="image_hash", dtype="str", group="image", role="table"),
    *(FieldSpec(name=name, dtype="int32", group="text") for name in ("input_ids", "prefix_len")),
    *(FieldSpec(name=name, dtype="str", group="text", role="table") for name in ("sample_id", "text", "images")),
)
CONSTANTS: dict[str, Any] = {
    "audio": {"features": "declared", "sample_rate_hz": 16_000, "form": golden.AUDIO_FORM.to_json()},
    "image": {"features": "images", "form": golden.IMAGES_FORM.to_json()},
    "text": {"prompt": "plain", "pad_token_id": 0},
}


def rows() -> dict[str, list[dict[str, Any]]]:
    said = [
        {"input_ids": np.array(ids, np.int32), "prefix_len": np.zeros(1, np.int32), "sample_id": f"s{i}", "text": "t"}
        for i, ids in enumerate(TOKENS)
    ]
    found = {"audio": golden.rows_of(golden.AUDIO)["audio"], "image": golden.rows_of(golden.IMAGES)["image"]}
    return {**found, "text": [row | names for row, names in zip(said, NAMES, strict=True)]}


def sealed(root: Path, **changes: Any) -> Path:
    shards: dict[str, Any] = {}
    for group, found in rows().items():
        (root / "scratch" / group).mkdir(parents=True)
        path = root / "scratch" / shard_name(group, 0)
        shards[group] = [(path, write_shard(path, shard_fields(FIELDS, group), found, key="ab" * 16))]
    lengths = [[n * 160 for n in golden.FRAMES], golden.FRAMES, list(map(len, TOKENS)), list(map(len, LISTED))]
    document = {
        **{"name": "both", "split": "train", "key": "cd" * 32, "recipe_key": "ef" * 32, "num_samples": len(TOKENS)},
        **{"recipe": {"source": {}, "audio": {}, "vision": {}, "text": {}}, "constants": CONSTANTS},
        **{"length_names": ["num_audio_samples", "num_frames", "num_tokens", "num_images"], "rows_per_shard": 4},
        **{"probe": {}, "excluded": {}, "failed": {}, "unused_fields": {}, "clipped": 0, "longer": 0, "languages": {}},
        **{"codec": "raw", "num_images": 3, "made_with": {}, "size_bytes": 1},
    }
    contents = Contents(
        fields=FIELDS,
        shards=shards,
        items={"image": golden.items_of(LISTED)},
        arrays={"slots.npy": np.arange(len(TOKENS), dtype="<i8"), "lengths.npy": np.array(lengths, "<i4")},
        files={"rejected.jsonl": b""},
        document={**document, **changes},
    )
    seal(root / "cache", contents, scratch=root / "scratch")
    return root / "cache"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(sealed(tmp_path), verify="open")


def test_constants_stand_under_their_groups_and_all_have_names(cache: Cache) -> None:
    assert list(cache.constants.groups) == ["audio", "image", "text"]
    assert (cache.constants["features"], cache.constants["image.features"]) == ("declared", "images")
    assert cache.constants.of("image")["form"] == golden.IMAGES_FORM.to_json()
    assert (cache.constants.of("video"), cache.constants.has_items) == ({}, True)
    assert cache.constants == {**dict(cache.constants)}
    assert cache.constants != Constants({**CONSTANTS, "text": {}})
    assert pickle.loads(pickle.dumps(cache.constants)) == cache.constants  # noqa: S301  our own
    assert axis_names(cache.constants)["image_grid_thw"] == 1
    facts = cache_facts(cache, plan_roots=[])
    assert facts["constants"]["image.form"] == golden.IMAGES_FORM.to_json()
    assert list(facts["promises"]) == ["audio", "image"]


def test_a_batch_has_the_fields_of_all_groups(cache: Cache) -> None:
    samples = [cache.read(index) for index in range(3)]
    batch = Collator(cache)(samples)
    heard = {"input_features", "attention_mask", "energy"}
    assert set(batch) == heard | {"pixel_values", "pixel_mask", "places", "labels"}
    assert batch["input_features"].shape == (3, 8, 4)
    assert batch["pixel_values"].shape[0] == 4
    assert batch["labels"].tolist() == [[4, 5, 2, -100], [6, 2, -100, -100], [7, 8, 9, 2]]
    bare = Collator(cache)([samples[1]])
    assert set(bare) == heard | {"labels"}
    assert Collator(cache).count_frames(samples) == (9, 24)
    assert not Collator(cache).has_rows


def test_codes_of_one_group_become_values_on_a_device(cache: Cache) -> None:
    samples = [cache.read(index) for index in range(3)]
    forms = list(forms_of(Stored.of(cache)).values())
    assert [as_codes(form) != form for form in forms] == [False, True]
    collator, wanted = Collator(cache, on_device=True), Collator(cache)(samples)
    values = collator.finish(collator(samples))
    assert set(values) == set(wanted)
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_plans_are_by_the_seconds_of_the_recordings(cache: Cache) -> None:
    samples = samples_of(cache)
    assert (samples.texts, samples.are_untimed, has_untimed_items(cache)) == (None, False, False)
    plan = make_plan(samples, BucketConfig(k=2, batch_seconds=0.06, tail="short"))
    order = plan.order(0, 0)
    batches = [order.batch(position) for position in range(len(order))]
    assert sorted(np.concatenate(batches).tolist()) == [0, 1, 2]
    assert without_seconds(cache) is None


def test_inspect_says_of_images_what_their_own_group_declares(cache: Cache) -> None:
    facts = cache_facts(cache, plan_roots=[])
    assert facts["processor"]["made_by"] == golden.IMAGES_FORM.made_by
    assert golden.AUDIO_FORM.made_by != golden.IMAGES_FORM.made_by
    assert {field["name"] for field in facts["form"]} == {field.name for field in golden.IMAGES_FORM.fields}
    group = listed_groups(cache)["image"]
    for index, row in enumerate(NAMES):
        found = group.items(index, cache.read(index), row["images"])
        assert [item.name for item in found] == json.loads(row["images"])
    assert (
        measure_cache(cache, Limits(), name="both", remote=RemoteConfig(), workers=1, most=None, progress=False).images
        is not None
    )


def test_packs_hold_items_of_one_group(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"packs hold items of one group, and samples have clips and images"):
        PackCollator(cache)


def test_two_caches_of_both_groups_are_mixed_where_they_agree(cache: Cache, tmp_path: Path) -> None:
    union = SourceUnion([cache, cache], ["a", "b"])
    assert union.constants == cache.constants
    assert len(Collator(union)([union.read(0), union.read(5)])["labels"]) == 2
    (tmp_path / "other").mkdir()
    changed = {**CONSTANTS, "image": {**CONSTANTS["image"], "form": replace_made_by(golden.IMAGES_FORM)}}
    other = open_cache(sealed(tmp_path / "other", constants=changed))
    with pytest.raises(CacheMismatchError, match=r"image\.form\.made_by is .* the same \[audio\] \[vision\]"):
        SourceUnion([cache, other], ["a", "b"])
    with pytest.raises(CacheMismatchError, match=r"cannot mix a and b: form\.made_by is 'GoldenImageProcessor'"):
        SourceUnion([cache, other], ["a", "b"], shares_batches=False)


def replace_made_by(form: BatchForm) -> Any:
    return replace(form, made_by="Another").to_json()


@pytest.mark.parametrize(
    ("form", "prompt", "message"),
    [
        ("pixel_values", "plain", r"two fields 'pixel_values', by GoldenImageProcessor and by GoldenFeature"),
        ("labels", "plain", r"two fields 'labels', by .*GoldenFeatureExtractor.* text.prompt = 'plain'"),
    ],
)
def test_fields_of_one_name_in_a_batch_are_refused(cache: Cache, form: str, prompt: str, message: str) -> None:
    first, *others = golden.AUDIO_FORM.fields
    named = replace(golden.AUDIO_FORM, fields=(replace(first, name=form), *(f for f in others if f.mask_of is None)))
    fields = {spec.name: spec for spec in with_group(named.specs(), "audio")}
    audio = {**CONSTANTS["audio"], "form": named.to_json()}
    constants = Constants({**CONSTANTS, "audio": audio, "text": {"prompt": prompt}})
    with pytest.raises(ConfigError, match=message):
        forms_of(Stored("cache x", constants, {**cache.fields, **fields}))


@pytest.mark.parametrize(
    "constants",
    [{"features": "declared"}, {**CONSTANTS, "video": {}}, {"audio": {}, "text": {}}, {**CONSTANTS, "image": []}],
)
def test_constants_of_other_groups_are_none_that_forebay_writes(tmp_path: Path, constants: Any) -> None:
    with pytest.raises(CacheCorruptError, match=r"constants are those of .*, its groups audio, image, text"):
        open_cache(sealed(tmp_path, constants=constants))
