"""Sets that hold features and labels already: a cache of them gives what the set holds, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import cli
from forebay.config import Config
from forebay.errors import ConfigError, DecodeError, ManifestError
from forebay.steps.audio.given import Given, num_valid
from forebay.steps.audio.log_mel import MAX_FRAMES
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.train.loop.run import run
from forebay.train.select import make_loader
from tests.given_features import FORMS, NUM_CLIPS, Recordings, given_config, padded_labels, recordings, save
from tests.preprocess.here_pool import build_here
from tests.rows.helpers import read_rows


@pytest.fixture(scope="module")
def heard() -> Recordings:
    return recordings()


@pytest.fixture(scope="module")
def built(heard: Recordings, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The config of a set whose cache is built."""
    folder = tmp_path_factory.mktemp("given")
    save(folder / "set", heard.features, heard.labels)
    config = given_config(folder)
    build_here(config)
    return config


def cache_of(config: Config) -> Cache:
    return open_cache(Path(build_here(config).cache))


def batches(config: Config, *overrides: str) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Returns every batch of an epoch with the samples that it is of."""
    loader = make_loader(given_config(Path(config.path).parent, *overrides, has_labels=config.text is not None))
    loader.set_epoch(0)
    order = loader.plan.order(loader.state.seed, 0)
    indices = [list(batch) for batch in order.batches(range(len(order)))]
    return list(zip(indices, [dict(batch) for batch in loader], strict=True))


def rows_of(source: Any, ids: list[int]) -> list[int]:
    return [int(source.sample_id(index).rpartition("/")[2]) for index in ids]


def test_batches_are_the_features_of_the_set_bit_for_bit(built: Config, heard: Recordings) -> None:
    cache = cache_of(built)
    seen = []
    for indices, batch in batches(built, "loader.dtype=float32"):
        rows = rows_of(cache, indices)
        assert batch["input_features"].dtype == torch.float32
        assert batch["input_features"].numpy().tobytes() == heard.features[rows].tobytes()
        seen += rows
    assert sorted(seen) == list(range(NUM_CLIPS))
    stored = cache.lengths["num_frames"].sum()
    assert stored < NUM_CLIPS * MAX_FRAMES / 2  # the padding is not there
    assert cache.lengths["num_audio_samples"].tolist() == [160 * n for n in cache.lengths["num_frames"].tolist()]
    assert {name: cache.constants[name] for name in ("features", "prompt", "n_mels")} == {
        "features": "log_mel",
        "prompt": "whisper",
        "n_mels": 80,
    }


def test_batches_have_the_labels_of_a_trainer(built: Config, heard: Recordings) -> None:
    # The import of transformers' Whisper takes 8 s of CPU, which the training below has no more to pay then.
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    cache = cache_of(built)
    start, pad = heard.labels[0][0], int(cache.constants["pad_token_id"])
    for indices, batch in batches(built):
        wanted = torch.from_numpy(padded_labels([heard.labels[row] for row in rows_of(cache, indices)]))
        assert torch.equal(batch["labels"], wanted)
        inputs = shift_tokens_right(wanted, pad, start)
        # Behind a text's end the shift leaves its end token, which nothing learns from.
        learnt = wanted != -100
        assert torch.equal(batch["decoder_input_ids"][learnt], inputs[learnt])
    assert cache.samples["text"].to_pylist() == heard.texts


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_column_gives_one_cache(form: str, heard: Recordings, tmp_path: Path) -> None:
    features = heard.features[:2]
    dtype = "float16" if form == "fixed" else "float32"
    save(tmp_path / "set", features.astype(dtype), None, form=form)
    config = given_config(tmp_path, f"audio.dtype={dtype}", has_labels=False)
    build_here(config)
    made = batches(config, f"audio.dtype={dtype}", f"loader.dtype={dtype}")
    cache = cache_of(config)
    for indices, batch in made:
        assert list(batch) == ["input_features"]
        assert batch["input_features"].numpy().tobytes() == features[rows_of(cache, indices)].astype(dtype).tobytes()


def test_float16_is_the_rounded_set(heard: Recordings, tmp_path: Path) -> None:
    save(tmp_path / "set", heard.features[:2], heard.labels[:2])
    config = given_config(tmp_path, "audio.dtype=float16")
    cache = cache_of(config)
    for indices, batch in batches(config, "audio.dtype=float16", "loader.dtype=float32"):
        wanted = heard.features[rows_of(cache, indices)].astype(np.float16).astype(np.float32)
        assert batch["input_features"].numpy().tobytes() == wanted.tobytes()


def test_uncached_equals_cached(built: Config, caplog: pytest.LogCaptureFixture) -> None:
    uncached = batches(built, "loader.cache=off")
    assert "estimate" not in caplog.text
    for (ids, one), (other_ids, other) in zip(batches(built), uncached, strict=True):
        assert ids == other_ids
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_inspect_shows_it(built: Config, capsys: pytest.CaptureFixture[str], heard: Recordings, tmp_path: Path) -> None:
    assert cli.main(["inspect", built.path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recipe"]["audio"]["features"] == "given"
    assert facts["recipe"]["source"]["features_column"] == "input_features"
    assert facts["fields"]["input_features"]["shape"] == ["frames", 80]
    picture = tmp_path / "sample.png"
    assert cli.main(["inspect", built.path, "--sample", "0", "--json", "--png", str(picture)]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert sample["labels"]["ids"] == heard.labels[rows_of(cache_of(built), [0])[0]]
    assert sample["row"]["text"] in heard.texts
    assert picture.stat().st_size > 1000
    assert cli.main(["key", built.path]) == 0
    assert "sealed" in capsys.readouterr().out


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.wide
def test_the_demo_model_trains_on_it(built: Config, tmp_path: Path) -> None:
    # 7 s of CPU: two steps of the demo's Whisper, which is made anew.
    folder = Path(built.path).parent
    config = given_config(folder, f'train.output_dir="{tmp_path}"', "train.log_every=1")
    report = run(config)
    assert report is not None
    assert report.steps == 2
    assert 0 < report.loss_last < report.loss_first < 20


def test_the_key_moves_with_the_content(built: Config, heard: Recordings, tmp_path: Path) -> None:
    base = cache_of(built).metadata
    changed = heard.features.copy()
    changed[0, 0, 0] += 1
    for name, (features, labels) in {
        "f": (changed, heard.labels),
        "l": (heard.features, [heard.labels[1], *heard.labels[1:]]),
    }.items():
        (tmp_path / name).mkdir()
        save(tmp_path / name / "set", features, labels)
        config = given_config(tmp_path / name)
        assert recipe_of(config).key == base["recipe_key"]
        assert cache_of(config).metadata["key"] != base["key"]


def test_the_recipe_key_moves_with_the_columns(tmp_path: Path) -> None:
    changes = ("", 'source.columns.features="mel"', 'source.columns.labels="ids"', "audio.dtype=float16")
    keys = [recipe_of(given_config(tmp_path, *filter(None, [change]))).key for change in changes]
    assert len(set(keys)) == len(changes)


def test_bad_rows_cost_themselves(heard: Recordings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features: list[Any] = [np.array(matrix) for matrix in heard.features]
    labels = [list(ids) for ids in heard.labels]
    features[0][3, 7] = np.nan
    features[1] = features[1][:, :2999]
    features[2] = [row.tolist() for row in features[2][:79]] + [[0.0]]
    labels[3][4] = 51_000_000
    labels[4] = [-100, *labels[4]]
    save(tmp_path / "set", features, labels, id=list("abcdef"))
    report = build_here(given_config(tmp_path, "run.max_failed_share=1.0"))
    lines = (Path(report.cache) / "rejected.jsonl").read_text().splitlines()
    found = {line["sample_id"]: line["reason"] for line in map(json.loads, lines)}
    assert found == {
        "a": "not_finite",
        "b": "wrong_shape",
        "c": "wrong_shape",
        "d": "bad_labels",
        "e": "bad_labels",
    }
    for message in (
        "in bin 3, frame 7",
        "[80, 2999], wanted [80, 3000]",
        "its lists have lengths [3000, 1]",
        "label -100 is no id",
    ):
        assert message in caplog.text
    assert open_cache(Path(report.cache)).sample_id(0) == "f"


def test_labels_beyond_the_limit_and_empty_ones(heard: Recordings, tmp_path: Path) -> None:
    end = heard.labels[0][-1]
    labels = [heard.labels[0] + [end] * 9, heard.labels[1] + [-100] * 5, [], heard.labels[3][1:]]
    save(tmp_path / "set", heard.features[:4], labels)
    limit = len(heard.labels[3]) - 2
    cache = cache_of(given_config(tmp_path, "run.max_failed_share=1.0"))
    ids = {cache.sample_id(i).rpartition("/")[2]: cache.read(i)["input_ids"].tolist() for i in range(len(cache))}
    assert ids == {str(row): heard.labels[row] for row in (0, 1, 3)}  # padding gone, start token in front
    assert cache.metadata["excluded"] == {"empty_text": 1}
    small = cache_of(given_config(tmp_path, "run.max_failed_share=1.0", f"text.max_label_tokens={limit}"))
    assert small.metadata["excluded"]["label_too_long"] >= 1


def test_missing_columns_and_other_types_are_named(heard: Recordings, tmp_path: Path) -> None:
    save(tmp_path / "set", heard.features[:1], None, sentence=["text"])
    source = given_config(tmp_path, 'source.columns.features="input_feature"', has_labels=False).source
    with pytest.raises(ManifestError, match=r"no column input_feature .*did you mean input_features\?"):
        read_rows(source, cache_root=tmp_path)
    with pytest.raises(ManifestError, match=r"no column labels \(source\.columns\.labels\)"):
        read_rows(given_config(tmp_path).source, cache_root=tmp_path)
    with pytest.raises(ManifestError, match=r"column sentence is string, wanted lists of token ids"):
        read_rows(given_config(tmp_path, 'source.columns.labels="sentence"').source, cache_root=tmp_path)
    source = given_config(tmp_path, 'source.columns.features="sentence"', has_labels=False).source
    with pytest.raises(ManifestError, match=r"column sentence is string, wanted features as a matrix of floats"):
        read_rows(source, cache_root=tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("audio.features=log_mel", r"source\.columns\.features is 'input_features' and audio\.features is 'log_mel'"),
        ("text.prompt=whisper", r"source\.columns\.labels is 'labels' and text\.prompt is 'whisper'"),
        ("audio.keep_waveform=true", r"keep_waveform is for sound"),
        ("text.normalize=none", r"language_tag_mode, normalize and language are for texts"),
        ("loader.crop_s=1.0", r"frames depend on the whole clip"),
        ("audio.n_mels=81", r"audio\.n_mels"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given_config(tmp_path, override)


def test_features_need_their_column(tmp_path: Path) -> None:
    config = given_config(tmp_path, has_labels=False)
    text = Path(config.path).read_text().replace('[source.columns]\nfeatures = "input_features"\n', "")
    Path(config.path).write_text(text)
    with pytest.raises(ConfigError, match=r"source\.columns\.features is None and audio\.features is 'given'; feat"):
        load_config(config.path)


def test_labels_without_a_prompt_for_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source\.columns\.labels is 'labels' and text\.prompt is None; labels that"):
        given_config(tmp_path, 'source.columns.labels="labels"', has_labels=False)


def test_all_of_another_size_names_the_setting() -> None:
    with pytest.raises(DecodeError, match=r"\[128, 3000\], wanted \[80, 3000\]; set audio\.n_mels = 128"):
        Given().check(np.zeros((128, MAX_FRAMES), np.float32))


_values = st.sampled_from([0.0, -0.0, 1.0, -1.5, 0.1])


@given(data=st.data(), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_any_matrix_is_rebuilt_from_what_is_left(data: st.DataObject, dtype: str) -> None:
    bins, frames = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    matrix = np.array(data.draw(st.lists(_values, min_size=bins * frames, max_size=bins * frames)), dtype)
    matrix = matrix.reshape(bins, frames)
    matrix[:, frames - data.draw(st.integers(0, frames)) :] = data.draw(_values)
    count = num_valid(matrix)
    assert 1 <= count <= frames
    rebuilt = np.full_like(matrix, matrix[0, -1])
    rebuilt[:, :count] = matrix[:, :count]
    assert rebuilt.tobytes() == matrix.tobytes()
    if count > 1:  # no frame more could have been left out
        rebuilt[:, count - 1] = matrix[0, -1]
        assert rebuilt.tobytes() != matrix.tobytes()
