from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.inspect.facts import INTERFACE, axes, cache_facts, unreadable_facts
from forebay.store.cache import open_cache
from forebay.store.layout import FieldSpec
from tests.store_factory import RATE_HZ, Features, make_cache


def facts_of(folder: Path) -> dict[str, Any]:
    facts = cache_facts(open_cache(folder), plan_roots=[folder.parent])
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    return facts


def test_counts_hours_and_sizes_are_those_of_the_samples(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=11, failed_rows=[0, 5])
    cache, facts = open_cache(folder), facts_of(folder)
    shards = sum(path.stat().st_size for path in folder.rglob("*.tdz"))
    rows = cache.samples.to_pylist()
    assert facts.keys() > set(INTERFACE)
    assert (facts["key"], facts["format_version"], facts["num_samples"]) == (cache.key, 4, 11)
    assert facts["hours"] == pytest.approx(sum(row["num_audio_samples"] for row in rows) / RATE_HZ / 3600)
    assert facts["size_bytes"] == shards == sum(group["size_bytes"] for group in facts["groups"].values())
    assert facts["bytes_per_hour"] == pytest.approx(shards / facts["hours"])
    assert facts["failed"] == {"corrupt_audio": 2}
    assert [group["rows"] for group in facts["groups"].values()] == [13, 13]
    assert sum(language["samples"] for language in facts["languages"].values()) == 11
    assert sum(facts["histogram"]["samples"]) == 11
    assert Path(facts["rejected"]).read_text().count("corrupt_audio") == 2


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        ("log_mel", {"input_features": ["float16", ["frames", 80]], "pad_value": ["float32", [1]]}),
        ("qwen3_asr", {"input_features": ["float16", ["frames", 128]]}),
        ("w2v_bert", {"fbanks": ["float32", ["frames", 80]], "waveform": ["int16", ["samples"]]}),
        ("waveform", {"waveform": ["int16", ["samples"]]}),
    ],
)
def test_fields_have_dtype_and_shape(tmp_path: Path, features: Features, wanted: dict[str, Any]) -> None:
    folder = make_cache(tmp_path, features=features, keep_waveform=features == "w2v_bert")
    text = {"input_ids": ["int32", ["tokens"]], "prefix_len": ["int32", [1]]}
    fields = facts_of(folder)["fields"]
    tensors = {name: [f["dtype"], f["shape"]] for name, f in fields.items() if f["role"] == "tensor"}
    assert tensors == {**wanted, **text}
    assert fields["text"] == {"dtype": "str", "shape": [], "group": "text", "role": "table"}


def test_a_field_that_nobody_named_has_n_values(tmp_path: Path) -> None:
    assert axes(FieldSpec(name="patches", dtype="uint8", shape=(768,)), {}) == ["n", 768]


def test_a_cache_without_samples_has_no_rate(tmp_path: Path) -> None:
    facts = facts_of(make_cache(tmp_path, num_samples=0))
    assert (facts["hours"], facts["bytes_per_hour"], facts["languages"]) == (0, None, {})


def test_what_cannot_be_opened_has_the_interface_with_null(tmp_path: Path) -> None:
    assert unreadable_facts(tmp_path) == {**dict.fromkeys(INTERFACE), "folder": str(tmp_path), "sealed": False}
