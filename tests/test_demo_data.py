"""demo/ is what its README says: manifests, shards and configs agree with each other and with the recordings."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import soundfile as sf

from forebay import load_config

ROOT = Path(__file__).resolve().parent.parent
SPEECH = ROOT / "demo" / "speech"
CONFIGS = sorted((ROOT / "configs").glob("demo_*.toml"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(SPEECH / "train.parquet").to_pylist()
    return found


@pytest.fixture(scope="module")
def members() -> dict[tuple[str, str], bytes]:
    """(tar, member) to its bytes."""
    found = {}
    for path in sorted(SPEECH.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[path.name, member.name] = file.read()
    return found


def test_selection_is_as_wide_as_promised(rows: list[dict[str, Any]]) -> None:
    durations = [row["duration_s"] for row in rows]
    assert 50 <= len(rows) <= 60
    assert {row["language"] for row in rows} == {"en", "es", "fr", "it", "ru"}
    assert min(durations) < 0.4
    assert max(durations) > 30
    edges = (0, 3, 5, 7, 10, 15, 20, 30)
    assert all(any(a <= d < b for d in durations) for a, b in itertools.pairwise(edges))
    assert sum(path.stat().st_size for path in SPEECH.glob("train*")) <= 4_000_000


def test_every_row_is_a_clip_of_exactly_its_duration(
    rows: list[dict[str, Any]], members: dict[tuple[str, str], bytes]
) -> None:
    for row in rows:
        info = sf.info(io.BytesIO(members[row["tar_path"], row["tar_member_name"]]))
        assert (info.samplerate, info.channels, info.format, info.subtype) == (16_000, 1, "FLAC", "PCM_16")
        assert row["duration_s"] == info.frames / info.samplerate
        assert row["tar_member_name"] == f"{row['sample_id']}.flac"


def test_shards_describe_themselves_as_the_manifest_does(
    rows: list[dict[str, Any]], members: dict[tuple[str, str], bytes]
) -> None:
    assert len(members) == 2 * len(rows)
    for row in rows:
        described = json.loads(members[row["tar_path"], f"{row['sample_id']}.json"])
        assert described.pop("source").startswith(f"asterisk-core-sounds-{row['language']}-g722 1.6.1-1 ")
        assert described == {
            "id": row["sample_id"],
            "language": row["language"],
            "duration": row["duration_s"],
            "transcription": row["transcript"],
        }


def test_tsv_lists_the_rows_of_the_parquet(rows: list[dict[str, Any]]) -> None:
    with open(SPEECH / "train.tsv", encoding="utf-8", newline="") as file:
        listed = [(a, b, c, float(d)) for a, b, c, d in csv.reader(file, delimiter="\t")]
    assert listed == [(r["tar_path"], r["sample_id"], r["language"], r["duration_s"]) for r in rows]


def test_shards_carry_no_trace_of_the_machine_that_made_them() -> None:
    for path in SPEECH.glob("train-*.tar"):
        with tarfile.open(path) as tar:
            assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}


def test_licence_names_every_language_of_the_data(rows: list[dict[str, Any]]) -> None:
    licence = (ROOT / "demo" / "LICENSE.md").read_text(encoding="utf-8")
    assert all(f"`{language}_*`" in licence for language in {row["language"] for row in rows})
    assert f"{len(rows)} prompts" in licence


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_points_at_files_that_are_there(path: Path) -> None:
    config = load_config(path)
    for manifest in config.source.manifests:
        # `make demo-remote` puts the demo's own files at the URL.
        place = Path(manifest.replace("s3://demo/raw", str(SPEECH)))
        assert list(place.parent.glob(place.name))
    if config.text is not None:
        assert (Path(config.text.tokenizer) / "tokenizer.json").is_file()
    if config.train.model is not None:
        assert (Path(config.train.model) / "config.json").is_file()


def test_there_is_a_config_for_every_kind_of_feature() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo_speech", "demo_qwen3_asr", "demo_w2v_bert", "demo_waveform"}


@pytest.mark.parametrize("folder", ["model", "qwen3_asr_model"])
def test_model_folders_hold_configuration_and_no_weights(folder: str) -> None:
    assert (SPEECH / folder / "config.json").is_file()
    assert not [p for p in (SPEECH / folder).iterdir() if p.suffix in {".safetensors", ".bin", ".pt", ".h5"}]
    assert sum(p.stat().st_size for p in (SPEECH / folder).iterdir()) < 200_000


def test_making_the_models_again_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    make_models = importlib.import_module("make_models")

    texts = make_models.read_texts()
    make_models.make_whisper(tmp_path / "model", texts)
    make_models.make_qwen3_asr(tmp_path / "qwen3_asr_model", texts)
    for folder in ("model", "qwen3_asr_model"):
        made = {p.name: p.read_bytes() for p in (tmp_path / folder).iterdir()}
        assert made == {p.name: p.read_bytes() for p in (SPEECH / folder).iterdir()}


def test_the_long_recording_is_made_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    folder = ROOT / "demo" / "segments"
    assert importlib.import_module("make_segments").make(tmp_path).startswith("40 segments, 77.9 s")
    assert (tmp_path / "segments.csv").read_bytes() == (folder / "segments.csv").read_bytes()
    made, kept = (sf.read(each / "long.flac", dtype="int16")[0] for each in (tmp_path, folder))
    assert (made == kept).all()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
