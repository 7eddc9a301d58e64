"""A new kind is one file and one line of a table, for recordings and for images; an unknown kind is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import numpy as np
import pytest

from forebay import load_config
from forebay.cli import BAD_CONFIG, main
from forebay.config import Config
from forebay.config.data import MEANINGS, SOURCE_KINDS, MeaningFacts, SourceColumns, SourceKind
from forebay.errors import ConfigError
from forebay.rows.manifest import meaning_named
from forebay.rows.reader import RowReader
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.source_files import listed_files
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.rows.helpers import audio
from tests.rows.pictures import write_lines

LINES = {
    "speech": "a.flac\thello\nb.flac\tworld\n",
    "vision": "a.jpg\tWhat?\tWaves.\nb.jpg\tWhich?\tThese.\n",
}
STEPS = {"speech": '[audio]\nfeatures = "waveform"\n', "vision": f'[vision]\nprocessor = "{DEMO / "model"}"\n'}


def corpus(folder: Path, modality: str, *, kind: str = "toy", manifest: str = "toy.tsv") -> Config:
    """A corpus of two samples; its manifest lies in a folder of its own, media beside it under the same names."""
    (folder / "lists").mkdir()
    for number, name in enumerate("ab"):
        (folder / "lists" / f"{name}.flac").write_bytes(audio(1600 * (1 + number), seed=number))
        (folder / "lists" / f"{name}.jpg").write_bytes(photo(number))
    (folder / "lists" / "toy.tsv").write_text(LINES[modality])
    text = f'name = "toy"\n[source]\nkind = "{kind}"\nmanifest = "lists/{manifest}"\n{STEPS[modality]}'
    (folder / "c.toml").write_text(f'{text}[run]\ncache_root = "caches"\nnum_workers = 1\n')
    return load_config(folder / "c.toml")


def add_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = SourceKind(reader="tests.rows.toy:READER", holds=("speech", "vision"))
    monkeypatch.setitem(SOURCE_KINDS, "toy", line)


@pytest.mark.parametrize("modality", STEPS)
def test_a_new_kind_is_one_file_and_one_line(tmp_path: Path, modality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_line(monkeypatch)
    config = corpus(tmp_path, modality)
    report = build_here(config)
    assert (report.num_samples, report.failed) == (2, {})
    cache = open_cache(report.cache)
    extension = {"speech": "flac", "vision": "jpg"}[modality]
    assert [cache.sample_id(index) for index in range(2)] == [f"a.{extension}", f"b.{extension}"]
    assert isinstance(select(config), Cache)
    online = select(load_config(tmp_path / "c.toml", overrides=['loader.cache="off"']))
    assert online.ids_digest() == cache.ids_digest()
    for index in range(2):
        cached, made = cache.read(index), online.read(index)
        assert cached.keys() == made.keys()
        for name, values in cached.items():
            for one, other in zip(values, made[name], strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_new_meaning_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(MEANINGS["recordings"], name="whispered", target="tests.rows.toy:Whispered")
    monkeypatch.setitem(cast(dict[str, MeaningFacts], MEANINGS), "whispered", facts)
    config = corpus(tmp_path, "speech", kind="jsonl", manifest="m.jsonl")
    lines = [{"audio": f"{name}.flac", "text": f"HELLO {name.upper()}"} for name in "ab"]
    write_lines(tmp_path / "lists" / "m.jsonl", lines)
    plain = recipe_of(config).key
    config = load_config(tmp_path / "c.toml", overrides=["source.meaning=whispered"])
    assert recipe_of(config).key != plain
    cache = open_cache(build_here(config).cache)
    assert cache.table(["text"])["text"].to_pylist() == ["hello a", "hello b"]


def test_every_meaning_is_found_in_its_module() -> None:
    for name in MEANINGS:
        assert meaning_named(name).facts.name == name


def test_every_kind_is_found_in_its_module() -> None:
    assert len(SOURCE_KINDS) == len({kind.reader for kind in SOURCE_KINDS.values()}) == 14
    assert sum("vision" in kind.holds for kind in SOURCE_KINDS.values()) == 7
    for kind in SOURCE_KINDS.values():
        reader = resolve_name(kind.reader)
        assert isinstance(reader, RowReader)
        # Of images only records are read.
        assert reader.read is not None or kind.holds == ("speech",)
        assert reader.read is not None or reader.recordings is not None


UNKNOWN = [
    ("speech", "jsonll", r'source\.kind is "jsonll", for speech wanted one of tar, .*, text; did you mean jsonl\?$'),
    ("speech", "xyz", r'source\.kind is "xyz", for speech wanted one of tar, .*, text$'),
    ("vision", "text", r'source\.kind is "text", for vision wanted one of tar, webdataset, jsonl, hf, .*, python$'),
    ("vision", "webdatasets", r"one of tar, webdataset, jsonl, hf, table, folder, python; did you mean webdataset\?$"),
]
COMMANDS = ["key", "inspect", "train", "train --dry-run", "preprocess", "preprocess --dry-run"]


@pytest.mark.parametrize(("modality", "kind", "message"), UNKNOWN)
def test_an_unknown_kind_is_refused_with_the_nearest_and_all_others(
    tmp_path: Path, modality: str, kind: str, message: str
) -> None:
    config = corpus(tmp_path, modality, kind="jsonl")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.toml", overrides=[f"source.kind={kind}"])
    made_in_code = replace(config, source=replace(config.source, kind=kind))
    with pytest.raises(ConfigError, match=message):
        build_here(made_in_code)
    with pytest.raises(ConfigError, match=message):
        select(made_in_code)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_at_once_that_a_kind_is_unknown(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path, "speech", kind="jsonl", manifest="is_not_here.jsonl")
    assert main([*command.split(), str(tmp_path / "c.toml"), "--set", "source.kind=jsonll"]) == BAD_CONFIG
    assert re.search(r'source\.kind is "jsonll".*did you mean jsonl\?\n', capsys.readouterr().err)
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize(
    ("modality", "kind", "column", "message"),
    [
        (
            "speech",
            "jsonl",
            "text",
            r'columns\.text is "x", and .*"jsonl" for speech reads only the columns start, end, channel',
        ),
        (
            "speech",
            "hf",
            "image",
            r'columns\.image is "x", .*only the columns audio, text, .*, labels, start, end, channel; leave',
        ),
        ("vision", "hf", "audio", r'columns\.audio is "x", .*"hf" for vision reads only the columns image, question'),
    ],
)
def test_a_column_that_is_in_no_key_has_no_other_name(
    tmp_path: Path, modality: str, kind: str, column: str, message: str
) -> None:
    corpus(tmp_path, modality, kind=kind)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.toml", overrides=[f"source.columns.{column}=x"])


@pytest.mark.parametrize("modality", STEPS)
def test_the_line_of_a_kind_says_what_it_reads(tmp_path: Path, modality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = SourceKind(reader="tests.rows.toy:READER", holds=(modality,), files=("*.tsv",), has_columns=True)
    monkeypatch.setitem(SOURCE_KINDS, "toy", line)
    config = corpus(tmp_path, modality)
    config = replace(config, source=replace(config.source, manifest=str(tmp_path / "lists")))
    assert [file.name for file in listed_files(config.source)] == ["toy.tsv"]
    other = replace(config, source=replace(config.source, columns=SourceColumns(id="x")))
    assert recipe_of(other).key != recipe_of(config).key
    assert recipe_of(other).document["source"]["id_column"] == "x"
