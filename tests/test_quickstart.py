"""The commands of docs/quickstart.md: a folder of wavs, and photos with questions, to a trained model."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import soundfile

from forebay import cli
from forebay.train import load_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/quickstart.md").read_text()


def commands(heading: str) -> list[list[str]]:
    """The commands below a heading of the page."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (block,) = (body for language, body in blocks if not language)
    lines = block.splitlines()
    assert len(lines) <= 15
    return [shlex.split(line, comments=True)[1:] for line in lines]


def _short(command: list[str]) -> list[str]:
    """A command that trains two steps where it would train more."""
    return [*command, "--steps", "2"] if command[0] == "train" else command


def _model(kind: str, folder: Path) -> None:
    """A demo model with weights, as `save_pretrained` writes it."""
    shutil.copytree(ROOT / "demo" / kind / "model", folder)
    load_model(folder, seed=1, init="random").save_pretrained(folder)


def _wavs(folder: Path) -> None:
    """The demo's recordings as files of a folder for each language, a text beside each."""
    for row in pq.read_table(ROOT / "demo/speech/train.parquet").to_pylist():
        with tarfile.open(ROOT / "demo/speech" / row["tar_path"]) as tar:
            member = tar.extractfile(row["tar_member_name"])
            assert member is not None
            sound, rate_hz = soundfile.read(io.BytesIO(member.read()))
        place = folder / row["language"] / Path(row["tar_member_name"]).with_suffix(".wav").name
        place.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(place, sound, rate_hz, subtype="PCM_16")
        place.with_suffix(".txt").write_text(row["transcript"])


def _photos(folder: Path) -> None:
    shutil.copytree(ROOT / "demo/vision/photos", folder / "photos")
    shutil.copy(ROOT / "demo/vision/train.jsonl", folder)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    before = os.getcwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def test_a_config_is_written_for_wavs(here: Path) -> None:
    _wavs(here / "wavs")
    _model("speech", here / "models/whisper-small")
    assert cli.main(commands("My folder of wavs")[0]) == 0
    assert cli.main(["key", "my.toml"]) == 0


def test_a_config_is_written_for_photos(here: Path) -> None:
    _photos(here / "photos")
    _model("vision", here / "models/qwen3-vl")
    assert cli.main(commands("My photos and questions")[0]) == 0
    assert cli.main(["key", "vl.toml"]) == 0


@pytest.mark.wide
def test_wavs_become_a_trained_model(here: Path) -> None:
    _wavs(here / "wavs")
    _model("speech", here / "models/whisper-small")
    for command in commands("My folder of wavs"):
        assert cli.main(_short(command)) == 0, command
    assert (here / "report.html").stat().st_size > 10_000
    assert (here / "sample.png").exists()
    assert list((here / "runs").glob("*/checkpoint-*"))


@pytest.mark.wide
def test_photos_become_a_trained_model(here: Path) -> None:
    _photos(here / "photos")
    _model("vision", here / "models/qwen3-vl")
    for command in commands("My photos and questions"):
        assert cli.main(_short(command)) == 0, command
    assert (here / "photo.png").exists()
    assert list((here / "runs").glob("*/checkpoint-*"))
