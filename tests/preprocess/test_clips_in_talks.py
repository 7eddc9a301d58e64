"""Clips that conversations list: batches and losses of whole processors, each clip once, reasons, limits of lengths."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache
from forebay.train.select import make_loader, select
from tests.sound_families import QWEN2_AUDIO, clips, listed, random_model, said
from tests.sound_talks import Talks, bad_rows, built, row
from tests.vlm_families import write_family


@pytest.fixture(scope="module")
def talks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Talks]:
    made: dict[str, Talks] = {}

    def talks(family: str) -> Talks:
        if family not in made:
            made[family] = Talks.made(tmp_path_factory.mktemp(family), family)
        return made[family]

    return talks


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni"])
def test_a_batch_and_its_loss_are_the_processor_s_own(family: str, talks_of: Callable[[str], Talks]) -> None:
    talks = talks_of(family)
    cache, report = built(talks.config())
    assert (report.failed, len(cache)) == ({}, len(talks.names))
    (batch,) = make_loader(talks.config())
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    known = {tuple(cache.read(place)["input_ids"].tolist()): name for place, name in enumerate(_ids(cache))}
    own = talks.own_batch([known[tuple(row)] for row in ids])
    assert own.keys() == batch.keys() - {"labels"}
    for name, values in own.items():
        assert torch.equal(values.to(batch[name].dtype), batch[name]), name
    model = random_model(family, talks.model)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, model(**own, labels=batch["labels"]).loss)
    learnt = [row[row >= 0].tolist() for row in batch["labels"]]
    assert {talks.writer.processor.tokenizer.decode(row) for row in learnt} >= {"No.<|im_end|>", "A cat.<|im_end|>"}


def test_the_row_table_counts_all_clips_of_a_sample(talks_of: Callable[[str], Talks]) -> None:
    cache, _ = built(talks_of("qwen2_audio").config())
    rows = {each["sample_id"]: each for each in cache.samples.to_pylist()}
    counts = {name: rows[name]["num_audio_samples"] for name in ("none", "one", "several")}
    assert counts == {"none": 0, "one": 19_200, "several": 11_696 + 30_400 + 19_200}
    assert cache.samples["num_audio_samples"].to_pylist() == cache.lengths["num_audio_samples"].tolist()


def _ids(cache: Cache) -> list[str]:
    found: list[str] = cache.samples["sample_id"].to_pylist()
    return found


def test_a_clip_is_stored_once_a_source_file_and_made_again_for_no_text(talks_of: Callable[[str], Talks]) -> None:
    talks = talks_of("qwen2_audio")
    cache, _ = built(talks.config())
    assert sum(entry.rows for _, entry in cache.shard_entries("audio")) == 4
    samples = {name: cache.read(place) for place, name in enumerate(_ids(cache))}
    assert [len(samples[name]["input_features"]) for name in ("one", "several", "none", "twice")] == [1, 3, 0, 2]
    one, three = samples["one"]["input_features"][0], samples["several"]["input_features"]
    assert np.array_equal(one, three[2])
    names = dict(zip(_ids(cache), map(json.loads, cache.samples["audios"].to_pylist()), strict=True))
    assert names["several"] == ["clip1.flac", "clip2.flac", "clip0.flac"]
    _, report = built(talks.config('text.learn_through="newline"'))
    assert (report.shards_written, report.shards_linked) == (1, 1)


def test_every_bad_row_has_its_reason_and_is_named_once(
    tmp_path: Path, talks_of: Callable[[str], Talks], caplog: pytest.LogCaptureFixture
) -> None:
    talks = replace(talks_of("qwen2_audio"), root=tmp_path)
    (tmp_path / "qwen2_audio").symlink_to(talks_of("qwen2_audio").model)
    rows = bad_rows(tmp_path / "data")
    listed(tmp_path / "data", rows)
    cache, report = built(talks.config())
    good = [row["id"] for row in rows if row["id"].startswith("good")]
    assert sorted(_ids(cache)) == sorted(good)
    found = [json.loads(line) for line in (cache.folder / "rejected.jsonl").read_text().splitlines()]
    assert {each["sample_id"]: each["reason"] for each in found} == {
        row["id"]: row["id"].split()[0] for row in rows if row["id"] not in good
    }
    assert len(found) == sum(report.failed.values()) == len(rows) - len(good)
    select(talks.config('loader.cache="off"'))
    assert "clip_too_long 1," in caplog.records[-1].getMessage()  # by its length alone, as in the build
    said_of = {each["sample_id"]: each["message"] for each in found}
    for number, each in enumerate(rows, 1):
        if each["id"].startswith(("audio_count", "has_", "two_values")):
            assert f"train.jsonl, line {number}:" in said_of[each["id"]]


@pytest.mark.parametrize(("settings", "left", "cut"), [("drop", 1, 0), ("clip", 2, 1)])
def test_long_clips_are_dropped_or_cut_where_the_config_says_so(
    settings: str, left: int, cut: int, tmp_path: Path, talks_of: Callable[[str], Talks]
) -> None:
    talks = replace(talks_of("qwen2_audio"), root=tmp_path)
    (tmp_path / "qwen2_audio").symlink_to(talks_of("qwen2_audio").model)
    names = clips(tmp_path / "data", [1.2, 3.0])
    listed(tmp_path / "data", [said("<audio>q", "A.", audio=name, id=name) for name in names])
    cache, report = built(talks.config("source.max_duration_s=2.0", f'source.overlong="{settings}"'))
    assert (len(cache), cache.metadata["clipped"]) == (left, cut)
    assert report.excluded == ({} if cut else {"too_long": 1})
    if cut:
        place = _ids(cache).index("clip1.flac")
        assert cache.lengths["num_audio_samples"][place] == 32_000
        own = talks.writer.parts["audio"](
            soundfile.read(tmp_path / "data" / "clip1.flac", dtype="float32")[0][:32_000],
            sampling_rate=16_000,
            return_attention_mask=True,
        )
        assert np.array_equal(cache.read(place)["input_features"][0], own["input_features"][0])


def test_native_log_mels_are_the_processor_s_within_the_promise(tmp_path: Path) -> None:
    write_family(replace(QWEN2_AUDIO, image_settings={"feature_size": 128}), tmp_path / "qwen2_audio")
    talks = Talks(tmp_path, "qwen2_audio", ("one", "long"))
    clips(tmp_path / "data", [0.9, 30.0, 30.1])
    names = [f"clip{n}.flac" for n in range(3)]
    listed(tmp_path / "data", [said("<audio>q", "A.", audio=name, id=name) for name in names])
    cache, report = built(talks.config())
    assert report.failed == {"clip_too_long": 1}
    assert cache.constants["form"]["made_by"] == "WhisperFeatureExtractor"
    (batch,) = make_loader(talks.config())
    sounds = [soundfile.read(tmp_path / "data" / name, dtype="float32")[0] for name in _ids(cache)]
    own = talks.writer.parts["audio"](sounds, sampling_rate=16_000, return_attention_mask=True)
    order = np.argsort(batch["feature_attention_mask"].sum(dim=1).numpy())
    wanted = np.argsort(own["attention_mask"].sum(axis=1))
    assert np.array_equal(batch["feature_attention_mask"].numpy()[order], own["attention_mask"][wanted])
    assert np.abs(batch["input_features"].numpy()[order] - own["input_features"][wanted]).max() <= 1e-6


@pytest.mark.parametrize(
    ("section", "text", "message"),
    [
        ("audio", 'features = "log_mel"', r'audio\.features is "log_mel", and clips in conversations'),
        (
            "audio",
            'features = "extractor"\nextractor = "qwen2_audio"\nspeeds = [1.0, 1.1]',
            r"audio\.speeds is not for",
        ),
        ("text", 'tokenizer = "qwen2_audio"\nprompt = "chat"\n[loader]\ncrop_s = 1.0', r"loader\.crop_s cuts"),
        ("plan", 'kind = "bucket"\nbatch_size = 2\n[[augment]]\nkind = "speed"\nfactors = [0.9]', "augment changes"),
        ("source", 'kind = "folder"\nmanifest = "data"', "which has recordings and no conversations"),
        ("source", 'kind = "jsonl"\nmanifest = "data/train.jsonl"\nlanguages = ["en"]', r"source\.languages is not"),
    ],
)
def test_what_is_not_for_clips_is_refused(
    section: str, text: str, message: str, talks_of: Callable[[str], Talks]
) -> None:
    with pytest.raises(ConfigError, match=message):
        talks_of("qwen2_audio").config(**{section: text})


@pytest.mark.parametrize("named", [{"processor_class": "VoxtralProcessor"}, {"model_type": "voxtral"}])
def test_voxtral_is_refused_by_name_before_its_tokenizer_is_opened(
    named: dict[str, str], tmp_path: Path, talks_of: Callable[[str], Talks]
) -> None:
    model = tmp_path / "qwen2_audio"
    model.mkdir()
    extractor = json.loads((talks_of("qwen2_audio").model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps({**extractor, **named}))
    (model / "config.json").write_text(json.dumps(named))
    (model / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"[vV]oxtral\w* has its conversations written by mistral-common"):
        recipe_of(replace(talks_of("qwen2_audio"), root=tmp_path).config())


@pytest.mark.parametrize("is_array", [False, True])
def test_sound_that_stands_in_its_manifest_is_that_of_its_file(
    tmp_path: Path, talks_of: Callable[[str], Talks], *, is_array: bool
) -> None:
    talks = replace(talks_of("qwen2_audio"), root=tmp_path)
    (tmp_path / "qwen2_audio").symlink_to(talks_of("qwen2_audio").model)
    names = clips(tmp_path / "data", [0.6, 0.9])
    data = [base64.b64encode((tmp_path / "data" / name).read_bytes()).decode() for name in names]
    uri, part = f"data:audio/flac;base64,{data[0]}", {"type": "audio"}
    inside = {"type": "input_audio", "input_audio": {"data": data[1], "format": "flac"}}
    rows = [
        row({**part, "audio": uri}, inside, id="inside"),
        row({**part, "path": names[0]}, {**part, "path": names[1]}, id="files"),
        said("<audio>q", "A.", audio=uri, id="row"),
        row({**part, "audio": "data:audio/flac;base64,!!!"}, id="bad_inline_data"),
        row({**inside, "input_audio": {"data": "", "format": "flac"}}, id="missing_file"),
        # A place in the manifest is no name that a manifest can give.
        said("<audio>q", "A.", audio="\0" + 15 * "9" + ":5:x", id="missing_file of a stranger"),
    ]
    path = listed(tmp_path / "data", rows)
    if is_array:
        path.write_text(json.dumps(rows, indent=1))
    cache, report = built(talks.config())
    assert report.failed == {"bad_inline_data": 1, "missing_file": 2}
    found = {name: cache.read(place)["input_features"] for place, name in enumerate(_ids(cache))}
    assert all(map(np.array_equal, found["inside"], found["files"]))
    assert np.array_equal(found["row"][0], found["files"][0])
    assert sum(entry.rows for _, entry in cache.shard_entries("audio")) == 2
