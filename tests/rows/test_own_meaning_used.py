"""A config whose rows are what a class beside it says, as a user has it: built, trained, looked at, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError
from forebay.measure.compared_ways import arms_of
from forebay.store.cache import open_cache
from forebay.train import make_loader
from forebay.train.select import select
from tests.commands import run, run_json
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import photo
from tests.rows.helpers import audio
from tests.rows.pictures import write_lines

DEMO = Path(__file__).resolve().parents[2] / "demo"
CLASS = '''
class Shown:
    """Somebody speaks of the photos that he shows."""

    columns = ("audio", "image", "text")
    groups = ("audio", "image")

    def row(self, record):
        said = {"text": record["said"], "id": record["name"], "language": "en"}
        return {**said, "audio": record["clip"], "image": record["photos"]}
'''
SECTIONS = f"""
name = "shown"
[source]
kind = "jsonl"
manifest = "m.jsonl"
meaning = "rows.py:Shown"
[audio]
features = "log_mel"
[vision]
processor = "{DEMO}/vision/model"
images = "processor"
[text]
tokenizer = "{DEMO}/speech/model"
prompt = "plain"
[run]
cache_root = "caches"
allow_code = true
num_workers = 1
max_failed_share = 0.5
[layout]
rows_per_shard = 4
[plan]
kind = "bucket"
edges_s = [1.0, 10.0]
batch_seconds = 2.0
"""
OFF = 'loader.cache="off"'


def config_of(folder: Path, *overrides: str) -> Config:
    for number in range(4):
        (folder / f"{number}.flac").write_bytes(audio(4000 + 800 * number, seed=number))
        (folder / f"{number}.jpg").write_bytes(photo(number))
    rows: list[dict[str, Any]] = [
        {
            "said": f"word {number}",
            "name": f"s{number}",
            "clip": f"{number % 4}.flac",
            "photos": [f"{(number + other) % 4}.jpg" for other in range(1 + number % 2)],
        }
        for number in range(12)
    ]
    bad = [{**rows[0], "name": "gone", "clip": "gone.flac"}, {**rows[0], "name": "odd", "said": 3}]
    write_lines(folder / "m.jsonl", [*rows, *bad])
    (folder / "rows.py").write_text(CLASS)
    (folder / "c.toml").write_text(SECTIONS)
    return load_config(folder / "c.toml", overrides=list(overrides))


def test_it_is_built_once_and_read_without_a_cache_to_the_same_values(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    report = build_here(config)
    assert (report.num_samples, report.failed) == (12, {"meaning_failed": 1, "missing_file": 1})
    assert build_here(config).already_sealed
    cache, online = open_cache(report.cache), select(config_of(tmp_path, OFF))
    assert list(cache.groups) == ["audio", "image", "text"]
    assert cache.ids_digest() == online.ids_digest()
    assert json.loads((Path(report.cache) / "metadata.json").read_bytes())["num_images"] == 4
    for index in range(len(cache)):
        cached, made = cache.read(index), online.read(index)
        assert cached.keys() == made.keys() >= {"input_features", "pixel_values", "input_ids"}
        for name, values in cached.items():
            for one, other in zip(values, made[name], strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("override", [(), (OFF,)])
def test_two_steps_are_trained_and_the_rest_is_resumed(tmp_path: Path, override: tuple[str, ...]) -> None:
    config = config_of(tmp_path, *override)
    if not override:
        build_here(config)
    loader, heard, seen = make_loader(config), torch.nn.LazyLinear(1), torch.nn.LazyLinear(1)
    batches = iter(loader)
    losses = []
    for _ in range(2):
        batch = next(batches)
        per_row = torch.zeros(len(batch["labels"]))
        per_row += heard(batch["input_features"].flatten(1).float())[:, 0]
        per_row += seen(batch["pixel_values"].float().mean(0)).mean()
        loss = ((per_row - (batch["labels"] >= 0).sum(1)) ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
    assert all(np.isfinite(losses))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch["labels"] for batch in batches]
    again = make_loader(config)
    again.load_state_dict(state)
    resumed = [batch["labels"] for batch in again]
    assert len(resumed) == len(rest) > 0
    for one, other in zip(resumed, rest, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_iterator_may_yield_both(tmp_path: Path) -> None:
    config_of(tmp_path)
    lines = [
        "class Made:",
        "    def __iter__(self):",
        "        for number in range(4):",
        f"            sound, photo = (open(f'{tmp_path}/{{number}}.{{e}}', 'rb').read() for e in ('flac', 'jpg'))",
        "            row = {'id': f's{number}', 'name': f's{number}', 'said': 'word'}",
        "            yield {**row, 'audio': sound, 'images': [photo]}",
    ]
    (tmp_path / "made.py").write_text("\n".join(lines))
    (tmp_path / "rows.py").write_text(CLASS.replace('"clip"', '"audio"').replace('"photos"', '"images"'))
    settings = ['source.kind="python"', 'source.manifest="made.py:Made"']
    report = build_here(load_config(tmp_path / "c.toml", overrides=settings))
    assert (report.num_samples, report.failed) == (4, {})
    heard = open_cache(report.cache).read(0)
    assert len(heard["pixel_values"]) == 1


def test_it_is_inspected_linted_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_here(config_of(tmp_path))
    path = tmp_path / "c.toml"
    document = run_json(capsys, "inspect", path)
    assert document["num_samples"] == 12
    assert document["recipe"]["source"]["meaning"]["class"] == "Shown"
    code, out, err = run(capsys, "inspect", path, "--sample", "0")
    assert (code, err) == (0, "")
    assert "image 0: 0.jpg" in out
    code, out, _ = run(capsys, "lint", path)
    assert "rows.py:Shown: field text is a number (3), wanted a string" in out
    code, out, err = run(capsys, "export", path, "--form", "parquet", "--out", tmp_path / "out")
    assert code == 0, err
    (file,) = (tmp_path / "out").rglob("*.parquet")
    assert sorted(pq.read_table(file, columns=["sample_id"])["sample_id"].to_pylist()) == sorted(
        f"s{number}" for number in range(12)
    )


def test_the_way_of_transformers_is_of_recordings_or_of_images(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert [arm.name for arm in arms_of("uncached,unbucketed", config)] == ["config", "uncached", "unbucketed"]
    with pytest.raises(ConfigError, match=r"--against names hf, but rows of .* are recordings with images"):
        arms_of("hf", config)
