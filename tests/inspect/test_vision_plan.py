"""`forebay inspect PLAN_FOLDER`: what a plan says of itself, and its packs over the cache beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forebay.config import BucketConfig, PackConfig
from forebay.inspect.command import usage_facts
from forebay.inspect.facts import plans_of
from forebay.inspect.plan_lines import usage_lines
from forebay.plan.disk import is_plan, load_plan
from forebay.plan.pack.pack_plan import PackPlan
from forebay.store.cache import open_cache
from forebay.store.metadata import checksum
from forebay.train.collate.packed import PackCollator
from forebay.train.loop.usage_log import UsageLog
from tests.commands import inspect, inspected_json
from tests.inspect.conftest import Built
from tests.inspect.test_plans import save
from tests.store.trees import flip, tree
from tests.store_factory import make_cache
from tests.train.loaders import loader_of


def test_packs_are_those_of_the_plan(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    cache = open_cache(photos.folder)
    plan = load_plan(photos.plan, cache_key=cache.key, settings=PackConfig(seq_len=400))
    assert isinstance(plan, PackPlan)
    seen: list[int] = []
    for index in range(plan.num_batches):
        pack = inspected_json(capsys, photos.plan, "--sample", index)["pack"]
        members = [segment["index"] for segment in pack["segments"]]
        assert members == plan.members[plan.offsets[index] : plan.offsets[index + 1]].tolist()
        seen += members
        end = 0
        for segment in pack["segments"]:
            assert segment["start"] == end
            end = segment["end"]
            stored = cache.read(segment["index"])
            assert end - segment["start"] == len(stored["input_ids"])
            assert [image["grid"] for image in segment["images"]] == stored["image_grid_thw"].tolist()
            assert segment["row"]["sample_id"] == cache.sample_id(segment["index"])
        assert pack["num_tokens"] == end == pack["seq_len"] - pack["pad_tokens"] <= 400
        assert pack["num_patches"] == cache.lengths["num_patches"][members].sum()
        assert pack["num_images"] == cache.lengths["num_images"][members].sum()
        assert pack["stored_bytes"] * 8 == pack["float32_bytes"] == pack["num_patches"] * 6144
    assert sorted(seen) == list(range(len(cache)))


def test_an_id_names_the_pack_that_holds_its_sample(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    packs = [inspected_json(capsys, photos.plan, "--sample", index)["pack"] for index in (0, 1)]
    for pack in packs:
        for segment in pack["segments"]:
            assert inspected_json(capsys, photos.plan, "--sample", segment["row"]["sample_id"])["pack"] == pack
    code, _, err = inspect(capsys, photos.plan, "--sample", "nobody")
    assert code == 1
    assert "--sample nobody: " in err
    assert "no sample with that id" in err


def test_a_pack_is_listed_segment_by_segment(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    before = [tree(photos.plan), tree(photos.folder)]
    outs = []
    for index in range(inspected_json(capsys, photos.plan)["num_packs"]):
        code, out, err = inspect(capsys, photos.plan, "--sample", index)
        assert (code, err) == (0, "")
        assert out.startswith(f"pack {index} of ")
        outs.append(out)
    text = "".join(outs)
    for row in open_cache(photos.folder).samples.to_pylist():
        assert f": {row['sample_id']}\n" in text
    assert text.count("  user       ") == 9
    assert "[image 1] Which costs $5 or less?" in " ".join(text.split())
    assert [tree(photos.plan), tree(photos.folder)] == before


def test_a_picture_of_a_pack_has_all_its_images(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = inspected_json(capsys, photos.plan, "--sample", 0, "--png", tmp_path / "p.png")
    assert document["written"] == [str(tmp_path / "p.png")]
    with Image.open(tmp_path / "p.png") as image:
        assert 700 < image.width <= 1440  # no wider than its images
        pixels = np.asarray(image.convert("RGB"))
    # Photos have thousands of colours, a page of text has a few dozen.
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5000


def test_the_report_has_settings_fill_and_bytes(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    document = inspected_json(capsys, photos.plan)
    statistics = json.loads((photos.plan / "packing_stats.json").read_text())
    assert document["statistics"] == statistics
    assert document["cache"] == str(photos.folder)
    (of_cache,) = plans_of(open_cache(photos.folder).key, [photos.corpus.root])
    assert {name: document[name] for name in of_cache} == of_cache
    code, out, err = inspect(capsys, photos.plan, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith(f"{photos.plan.name}: a plan of kind pack\n")
    assert "seq_len = 400" in out
    assert f"  packs       {statistics['total_packs']}, {100 * statistics['fill']:.1f} % fill" in out
    assert "of the cache; as float32 " in out
    assert out.endswith("are the bytes that were sealed\n")


def test_a_plan_by_a_relative_path_and_a_cache_under_another_root(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(photos.plan, tmp_path / "elsewhere" / photos.plan.name))
    monkeypatch.chdir(moved)
    document = inspected_json(capsys, ".")
    assert (document["folder"], document["cache"]) == (str(moved), None)
    code, out, err = inspect(capsys, ".", "--sample", 0)
    assert (code, out) == (3, "")
    assert f"packs the cache with key {document['cache_keys'][0][:16]}, which is not in" in err
    assert "--cache-root DIR" in err
    found = inspected_json(capsys, ".", "--sample", 0, "--cache-root", photos.corpus.root)
    assert found["cache"] == str(photos.folder)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--wav", "a.wav"], 2, "is a plan; name its cache"),
        (["--export", "a.parquet"], 2, "is a plan; name its cache"),
        (["--png", "a.png"], 2, "--png needs --sample I, the pack to draw"),
        (["--sample", "99"], 1, "packs (0 to "),
        (["--sample", "-1"], 1, "packs (0 to "),
    ],
)
def test_what_a_plan_has_no_answer_to_is_refused(
    photos: Built, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    found, out, err = inspect(capsys, photos.plan, *options)
    assert (found, out) == (code, "")
    assert message in err


@pytest.mark.parametrize("name", ["metadata.json", "packing_stats.json", "members.npy", "offsets.npy"])
def test_damage_is_named_with_the_way_out(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    plan = Path(shutil.copytree(photos.plan, tmp_path / "plans" / photos.plan.name))
    flip(plan / name, (plan / name).stat().st_size - 9)
    code, out, err = inspect(capsys, plan, "--sample", 0, "--cache-root", photos.corpus.root)
    assert (code, out) == (1, "")
    assert name in err
    assert "run: forebay preprocess CONFIG" in err
    if name.endswith(".npy"):
        code, out, _ = inspect(capsys, plan, "--verify")
        assert code == 1
        assert "verify: 1 problems" in out
    (plan / name).unlink()
    code, _, err = inspect(capsys, plan, "--sample", 0, "--cache-root", photos.corpus.root)
    assert (code, name in err) == (1, True)


def test_a_plan_of_other_samples_is_no_key_error(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Path(shutil.copytree(photos.plan, tmp_path / "plans" / photos.plan.name))
    document = json.loads((plan / "metadata.json").read_text())
    del document["num_samples"]
    (plan / "metadata.json").write_text(json.dumps({**document, "checksum": checksum(document)}))
    code, _, err = inspect(capsys, plan)
    assert code == 1
    assert "is none that forebay writes: it has no num_samples" in err


def test_a_newer_plan_asks_for_a_newer_forebay(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Path(shutil.copytree(photos.plan, tmp_path / "plans" / photos.plan.name))
    document = json.loads((plan / "metadata.json").read_text())
    (plan / "metadata.json").write_text(json.dumps({**document, "format_version": 3}))
    code, out, err = inspect(capsys, plan)
    assert (code, out) == (1, "")
    assert "format_version differs (3 stored, 2 is the newest that this forebay reads); install a newer forebay" in err


def test_a_plan_of_buckets_has_a_report_and_no_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=9))
    plan = save(tmp_path, cache, BucketConfig(edges_s=(1.0, 2.0), batch_size=2))
    assert (is_plan(plan), is_plan(cache.folder), is_plan(tmp_path)) == (True, False, False)
    code, out, err = inspect(capsys, plan)
    assert (code, err) == (0, "")
    assert out.startswith(f"{plan.name}: a plan of kind bucket\n")
    assert "batch_size = 2" in out
    assert "\nranks " in out
    code, out, err = inspect(capsys, plan, "--sample", 0)
    assert (code, out) == (2, "")
    assert 'is a plan of kind "bucket", wanted "pack"' in err


def test_usage_of_packs_is_reported(photos: Built, tmp_path: Path) -> None:
    cache = open_cache(photos.folder)
    plan = load_plan(photos.plan, cache_key=cache.key, settings=PackConfig(seq_len=400))
    loader = loader_of(cache, plan, plan_key="p", seed=3, num_threads=0, collator=PackCollator(cache))
    log = UsageLog(tmp_path / "u.jsonl", loader, step=0, sum_over_ranks=list, with_ids=True)
    batches = iter(loader)
    for step in range(1, plan.num_batches + 1):
        next(batches)
        log.record(step)
    facts = usage_facts(tmp_path / "u.jsonl")
    assert (facts["samples"], facts["never_used"]["samples"]) == (8, [])
    assert facts["sources"]["train.jsonl"]["samples"] == 8
    assert any("8 samples in" in line for line in usage_lines(facts))
