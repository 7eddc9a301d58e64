"""`forebay inspect` as a user types it: what it prints, its JSON document, its exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from forebay import cli
from forebay.config import BucketConfig
from forebay.inspect.facts import INTERFACE
from forebay.store.cache import open_cache
from tests.commands import inspect, inspected_json
from tests.inspect.test_plans import save
from tests.store.trees import flip, tree
from tests.store_factory import make_cache

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache root of `DEMO`: ten of the demo recordings, log-mel and waveforms, Whisper's prompt."""
    root = tmp_path_factory.mktemp("caches")
    arguments = ["preprocess", *DEMO, "--cache-root", str(root), "--workers", "1", "--no-progress"]
    assert cli.main(arguments) == 0
    return root


DEMO = [str(REPOSITORY / "configs" / "demo_speech.toml"), "--max-samples", "10", "--set", "audio.keep_waveform=true"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", num_samples=9, failed_rows=[2], keep_waveform=True)


def test_the_report_is_printed_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, folder)
    assert (code, err) == (0, "")
    heads = ["\nlanguages ", "\nfields ", " durations (s) ", "\nplans", "\nskipped\n", "\nrecipe\n"]
    positions = [out.index(head) for head in heads]
    assert positions == sorted(positions)
    assert out.startswith(f"{folder.name}: a sealed cache")
    assert "verify" not in out


def test_json_is_one_document_with_the_fields_of_the_interface(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = save(folder.parent, open_cache(folder), BucketConfig(edges_s=(1.0, 2.0), batch_size=2))
    document = inspected_json(capsys, folder)
    assert list(document)[: len(INTERFACE)] == list(INTERFACE)
    assert "verify" not in document
    assert "sample" not in document
    assert document["key"] == open_cache(folder).key
    assert document["fields"]["input_features"] == {
        "dtype": "float16",
        "shape": ["frames", 80],
        "group": "audio",
        "role": "tensor",
    }
    assert document["failed"] == {"corrupt_audio": 1}
    metadata = json.loads((plan / "metadata.json").read_text())
    assert [entry["key"] for entry in document["plans"]] == [metadata["plan_key"]]
    assert document["plans"][0].keys() >= {"key", "kind", "num_batches", "padding"}


def test_plans_are_found_under_the_named_root_and_beside_a_relative_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder.parent, open_cache(folder), BucketConfig(batch_size=2))
    save(tmp_path / "other", open_cache(folder), BucketConfig(batch_size=3))
    assert len(inspected_json(capsys, folder, "--cache-root", tmp_path / "other")["plans"]) == 2
    monkeypatch.chdir(folder)
    assert [plan["settings"]["batch_size"] for plan in inspected_json(capsys, ".")["plans"]] == [2]


@pytest.mark.usefixtures("bars")
def test_verify_is_part_of_the_report_and_of_the_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, folder, "--verify")
    assert code == 0
    assert out.splitlines()[-1].startswith("verify: ok, ")
    assert "verify: " in err
    code, out, err = inspect(capsys, folder, "--verify", "--json", "--no-progress")
    assert (code, err) == (0, "")
    verify = json.loads(out)["verify"]
    assert verify == {"ok": True, "checked_bytes": verify["checked_bytes"], "problems": []}
    assert verify["checked_bytes"] > 100_000


def test_damage_ends_with_1_and_the_list_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / "audio/00000.tdz", 5000)
    targets = ("--sample", 1, "--wav", tmp_path / "a.wav", "--export", tmp_path / "a.parquet")
    code, out, _ = inspect(capsys, folder, "--verify", "--no-progress", *targets)
    assert code == 1
    assert "\nverify: 1 problems, " in out
    assert f"  {folder}/audio/00000.tdz: stored xxh3-128 " in out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["caches"]
    code, out, _ = inspect(capsys, folder, "--verify", "--no-progress", "--json")
    document = json.loads(out)
    assert (code, document["num_samples"], document["verify"]["ok"]) == (1, 9, False)


@pytest.mark.parametrize("name", ["metadata.json", "audio.npy", "lengths.npy"])
def test_a_cache_that_cannot_be_opened_is_reported_in_the_same_form(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flip(folder / name, (folder / name).stat().st_size - 2)
    code, out, err = inspect(capsys, folder, "--verify", "--no-progress", "--json")
    document = json.loads(out)
    assert (code, err) == (1, "")
    assert [document[field] for field in INTERFACE] == [None] * len(INTERFACE)
    assert not document["verify"]["ok"]
    assert name in document["verify"]["problems"][0]
    code, out, _ = inspect(capsys, folder, "--verify", "--no-progress")
    assert code == 1
    assert out.startswith("verify: 1 problems, ")
    # Without --verify the first thing that is wrong is an error like any other.
    code, out, err = inspect(capsys, folder)
    assert (code, out) == (1, "")
    assert name in err


def test_a_folder_that_is_no_cache_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, tmp_path)
    assert (code, out) == (1, "")
    assert "it is not sealed; run: forebay preprocess CONFIG" in err
    assert inspect(capsys, tmp_path, "--verify")[0] == 1


def test_one_sample_alone_and_in_the_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, folder, "--sample", 1)
    assert (code, err) == (0, "")
    assert out.startswith("sample 1\n")
    assert "languages" not in out
    document = inspected_json(capsys, folder, "--sample", 1)
    assert document.keys() > {*INTERFACE, "sample"}
    assert document["sample"]["row"]["sample_id"] == "clip-0001"
    assert document["sample"]["labels"]["ids"] == [1, 3, 4, 5, 2]


@pytest.mark.parametrize("index", [-1, 9])
def test_a_sample_that_is_not_there_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str], index: int) -> None:
    code, out, err = inspect(capsys, folder, "--sample", index)
    assert (code, out) == (1, "")
    assert f"--sample {index}: {folder} has 9 samples (0 to 8); name one of them" in err


def test_files_are_written_where_asked_and_the_cache_stays_as_it_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(folder)
    paths = {name: tmp_path / f"a.{name}" for name in ("wav", "png", "parquet")}
    options = ("--sample", 3, "--wav", paths["wav"], "--png", paths["png"], "--export", paths["parquet"])
    code, out, err = inspect(capsys, folder, *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [f"wrote {path}" for path in paths.values()]
    waveform = open_cache(folder).read(3)["waveform"]
    assert np.array_equal(soundfile.read(paths["wav"], dtype="int16")[0], waveform)
    assert pq.read_table(paths["parquet"]).equals(open_cache(folder).samples)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert inspected_json(capsys, folder, *options)["written"] == [str(path) for path in paths.values()]
    assert tree(folder) == before


def test_an_export_alone_prints_what_it_wrote(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    assert inspect(capsys, folder, "--export", path) == (0, f"wrote {path}\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wav", "a.wav"], "--wav needs --sample I"),
        (["--png", "a.png"], "--png needs --sample I"),
        (["--export", "a.csv"], "name a file that ends in .parquet"),
        (["--export", "nowhere/a.parquet"], "there is no folder"),
    ],
)
def test_options_that_do_not_go_together_end_with_2(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = inspect(capsys, folder, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["caches"]


def test_a_wav_from_a_cache_without_waveforms_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cache(tmp_path)
    code, out, err = inspect(capsys, folder, "--sample", 0, "--wav", tmp_path / "a.wav")
    assert (code, out) == (2, "")
    assert "set audio.keep_waveform = true" in err


def test_a_terminal_without_the_letters_gets_escapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    assert cli.main(["inspect", str(folder), "--sample", "1"]) == 0
    sys.stdout.flush()
    assert b"\\xbfQu\\xe9 tal?" in buffer.getvalue()


def test_a_read_only_cache_is_inspected(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "moved" / folder.name))
    for path in (*copy.rglob("*"), copy):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert inspected_json(capsys, copy, "--verify", "--no-progress")["verify"]["ok"]
    finally:
        for path in (copy, *copy.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)


def test_real_recordings_give_back_their_texts_and_their_sound(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = pq.read_table(REPOSITORY / "demo/speech/train.parquet").to_pylist()
    rows = {row["tar_member_name"]: row for row in manifest}
    seen = set()
    for index in range(10):
        wav = tmp_path / f"{index}.wav"
        options = ("--cache-root", built, "--sample", index, "--wav", wav)
        sample = inspected_json(capsys, *DEMO, *options)["sample"]
        member = next(name for name in rows if Path(name).stem == sample["row"]["sample_id"])
        seen.add(member)
        assert sample["labels"]["text"] == sample["row"]["text"] == rows[member]["transcript"]
        assert sample["labels"]["with_special_tokens"] == (
            f"<|startoftranscript|><|{rows[member]['language']}|><|transcribe|><|notimestamps|>"
            f"{rows[member]['transcript']}<|endoftext|>"
        )
        with tarfile.open(REPOSITORY / "demo/speech" / rows[member]["tar_path"]) as tar:
            recorded, rate = soundfile.read(io.BytesIO(tar.extractfile(member).read()), dtype="int16")  # type: ignore[union-attr]
        assert rate == 16_000
        assert np.array_equal(soundfile.read(wav, dtype="int16")[0], recorded[: 30 * rate])
    assert len(seen) == 10


def test_a_config_and_its_folder_give_one_report(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_config = inspected_json(capsys, *DEMO, "--cache-root", built)
    assert by_config["num_samples"] == 10
    assert [plan["kind"] for plan in by_config["plans"]] == ["bucket"]
    assert by_config == inspected_json(capsys, by_config["folder"])


@pytest.mark.parametrize("start", [".", "elsewhere", "caches", "caches/{name}", "caches/{name}/audio"])
@pytest.mark.parametrize("suffix", ["", "/", "/."])
@pytest.mark.few
def test_verify_takes_a_folder_however_it_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, suffix: str
) -> None:
    here = tmp_path / start.format(name=folder.name)
    here.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(here)
    there = os.path.relpath(folder, here)
    for named in (there, f"./{there}", os.path.relpath(tmp_path / "link", here), f"{there}/../{folder.name}"):
        assert cli.main(["inspect", named + suffix, "--verify", "--no-progress"]) == 0
        assert cli.inspect_cache(["--cache-dir", named + suffix, "--verify", "--no-progress"]) == 0


def test_verify_names_what_is_foreign_in_a_folder_that_is_named_relatively(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "audio" / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder.parent)
    code, out, _ = inspect(capsys, folder.name, "--verify", "--no-progress")
    assert code == 1
    assert f"{folder / 'audio' / 'notes.txt'} does not belong to this cache" in out
    assert out.count("does not belong") == 1
