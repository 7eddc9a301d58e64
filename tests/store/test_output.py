"""Outputs of commands replace earlier outputs of their kind, and nothing else."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import soundfile

from forebay import cli
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config
from forebay.store.output import check_output
from tests.inspect.checks.planted import DEMO
from tests.preprocess.here_pool import build_here
from tests.store_factory import make_cache


def test_targets_are_files_outside_the_cache_in_a_folder_that_is_there(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    check_output(tmp_path / "a.png", "--png", folder=folder)
    (tmp_path / "link").symlink_to(folder)
    refused: list[tuple[Path, str]] = [
        (tmp_path / "nowhere" / "a.png", r"--png .*a\.png: there is no folder .*nowhere; make it"),
        (tmp_path, r"is a folder; name a file"),
        (folder / "a.png", r"lies inside the cache .*, which is sealed; name a file elsewhere"),
        (folder / "audio" / "a.png", r"lies inside the cache"),
        (tmp_path / "link" / "a.png", r"lies inside the cache"),
    ]
    for path, message in refused:
        with pytest.raises(ConfigError, match=message):
            check_output(path, "--png", folder=folder)


def test_a_relative_target_is_one_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Any = make_cache(tmp_path)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="lies inside the cache"):
        check_output(Path("a.png"), "--png", folder=Path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings with texts beside them, a list of ids, a copy of a model's folder, a config and its cache."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(DEMO / "model", folder / "model")
    (folder / "wavs").mkdir()
    for number in range(3):
        soundfile.write(folder / "wavs" / f"{number}.wav", [0.1 * number] * 8000, 16_000)
    rows = "".join(f"{folder}/wavs/{n}.wav,word,{n}\n" for n in range(3))
    (folder / "train.csv").write_text(f"audio,text,id\n{rows}")
    (folder / "gone.txt").write_text("nobody\n")
    (folder / "config.toml").write_text(
        'name = "words"\n[source]\nkind = "table"\nmanifest = "train.csv"\n'
        '[audio]\nfeatures = "waveform"\n[text]\ntokenizer = "model"\nprompt = "whisper"\n'
        '[filter]\ndrop_ids = "gone.txt"\n[plan]\nbatch_size = 2\nedges_s = [2]\n'
        '[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    build_here(load_config(folder / "config.toml"))
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Digests of all files but those that the cache root has of its own."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "caches"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def cache_of(folder: Path) -> Path:
    return next(path.parent for path in (folder / "caches").glob("words-*/metadata.json"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "config.toml", "--html", "config.toml"], "is the file of the config"),
        (["inspect", "config.toml", "--html", "train.csv"], "is source.manifest of the config"),
        (["inspect", "config.toml", "--html", "wavs/1.wav"], "no earlier output"),
        (["inspect", "config.toml", "--sample", "0", "--png", "train.csv"], "is source.manifest of the config"),
        (["inspect", "config.toml", "--sample", "0", "--wav", "wavs/1.wav"], "is a source of the samples"),
        (["inspect", "CACHE", "--sample", "0", "--wav", "wavs/1.wav"], "is a source of the samples"),
        (["inspect", "CACHE", "--html", "CACHE/x.html"], "which is sealed"),
        (["inspect", "config.toml", "--export", "CACHE/rows.parquet"], "which is sealed"),
        (["inspect", "config.toml", "--export", "model/rows.parquet"], "lies inside of text.tokenizer"),
        (["inspect", "CACHE", "--html", "model/x.html"], "the folder of a model"),
        (["lint", "config.toml", "--drop-ids", "config.toml"], "is the file of the config"),
        (["lint", "config.toml", "--drop-ids", "train.csv"], "is source.manifest of the config"),
        (["lint", "config.toml", "--drop-ids", "gone.txt"], "is filter.drop_ids of the config"),
        (["lint", "config.toml", "--drop-ids", "model/merges.txt"], "lies inside of text.tokenizer"),
        (["lint", "CACHE", "--drop-ids", "model/merges.txt"], "the folder of a model"),
        (["lint", "CACHE", "--drop-ids", "CACHE/drop.txt"], "which is sealed"),
        (["lint", "CACHE", "--drop-ids", "train.csv"], "no earlier output"),
    ],
)
def test_an_output_never_replaces_what_is_none(
    folder: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    cache = cache_of(folder)
    before = digests(folder)
    code = cli.main([word.replace("CACHE", str(cache)) for word in arguments])
    assert (code, digests(folder)) == (cli.BAD_CONFIG, before)
    error = capsys.readouterr().err
    assert says in error
    assert "FB708" in error


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["inspect", "config.toml", "--html"], "x.html"),
        (["inspect", "config.toml", "--export"], "rows.parquet"),
        (["inspect", "config.toml", "--sample", "0", "--png"], "x.PNG"),
        (["inspect", "config.toml", "--sample", "0", "--wav"], "x.wav"),
        (["lint", "config.toml", "--no-progress", "--drop-ids"], "drop.txt"),
        (["lint", "config.toml", "--no-progress", "--drop-ids"], "wavs/drop.ids"),
    ],
)
@pytest.mark.few("command0-x.html", "command1-rows.parquet", "command3-x.wav")
def test_an_output_of_the_same_kind_is_replaced_as_a_repeated_run_expects(
    folder: Path, command: list[str], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path(name).write_bytes(b"older")
    assert cli.main([*command, name]) == 0
    assert Path(name).read_bytes() != b"older"
    assert f"to {name}" in (out := capsys.readouterr().out) or f"wrote {name}" in out


def test_a_link_to_a_source_is_a_source(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.wav").symlink_to(folder / "wavs" / "2.wav")
    config = load_config(folder / "config.toml")
    with pytest.raises(ConfigError, match=r"--wav .*x\.wav is a source of the samples"):
        check_output(tmp_path / "x.wav", "--wav", config=config, folder=cache_of(folder))
