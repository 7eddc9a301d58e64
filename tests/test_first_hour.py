"""The first hour with forebay: where things go, and what is named when something is wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import cli, load_config, open_cache
from forebay.errors import ConfigError
from forebay.version import __version__
from tests.commands import run
from tests.preprocess.corpus import flac, tone

IDS = ("a", "007", "12", "1")
CONFIG = (
    'name = "mine"\n[source]\nkind = "jsonl"\nmanifest = "clips.jsonl"\n[audio]\nfeatures = "waveform"\n'
    "[run]\nnum_workers = 1\n"
)


def write_project(folder: Path) -> Path:
    """A config without `[plan]` and `cache_root`, four clips, and returns the config's path."""
    rows = []
    for number, sample_id in enumerate(IDS):
        (folder / f"{number}.flac").write_bytes(flac(tone(number, duration_s=0.1 * (number + 1))))
        rows.append({"audio": f"{number}.flac", "text": "hello", "id": sample_id, "language": "en" if number else "fr"})
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.toml").write_text(CONFIG)
    return folder / "mine.toml"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose cache was made from another folder; tests write no more than plans and indexes."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("project", "elsewhere"):
        (folder / name).mkdir()
    config = write_project(folder / "project")
    with contextlib.chdir(folder / "elsewhere"):
        assert cli.main(["preprocess", "../project/mine.toml", "--no-progress"]) == 0
    return config


def cache_of(config: Path) -> Path:
    (found,) = (config.parent / "caches").glob("mine-*")
    return found


def test_caches_lie_beside_the_config_wherever_the_command_runs(built: Path) -> None:
    assert open_cache(cache_of(built)).metadata["num_samples"] == 4
    assert sorted(os.listdir(built.parents[1])) == ["elsewhere", "project"]
    assert os.listdir(built.parents[1] / "elsewhere") == []
    assert load_config(built).train.output_dir == str(built.parent / "runs")


def test_without_a_plan_the_build_says_that_there_is_none(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(built.parent)
    _, out, _ = run(capsys, "preprocess", built)
    assert out.splitlines()[-1] == (
        "plan: none, mine.toml has no [plan] section; training needs one, for example: [plan] with batch_seconds = 120"
    )
    code, out, _ = run(capsys, "preprocess", built, "--set", "plan.batch_seconds=120")
    assert code == 0
    assert "plan: 1 batches in 7 buckets" in out


def test_a_wide_glob_does_not_find_the_cache_itself(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (cache_of(built) / "rejected.jsonl").exists()
    code, out, _ = run(capsys, "preprocess", built, "--set", "source.manifest=**/*.jsonl")
    assert (code, out.split(":")[0]) == (0, "already sealed")


def test_a_build_without_samples_says_so(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ("--set", "source.languages=['de']", "--cache-root", tmp_path)
    code, out, _ = run(capsys, "preprocess", built, *nobody, "--no-progress")
    assert code == 0
    assert "excluded: language 4\nno sample is left: mend what was excluded or failed, or change the filters" in out
    code, _, err = run(capsys, "preprocess", built, *nobody, "--set", "plan.batch_seconds=120")
    assert code == 1
    assert "no samples to plan: " in err
    assert "has 0 samples (excluded: language 4); mend what was excluded or failed, or change the filters" in err
    (empty,) = tmp_path.glob("mine-train-*")
    run(capsys, "cache", "rm", empty, "--yes", "--force")
    assert not empty.exists()


def test_an_export_holds_what_a_filter_leaves_of_one_cache(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ("export", built, "--form", "parquet", "--out", tmp_path / "out")
    code, out, _ = run(capsys, *export, "--set", "filter.where=language == 'en'")
    assert (code, out.split(" samples")[0]) == (0, "parquet: 3")
    code, _, err = run(capsys, *export, "--set", f'mixture.source=[{{config="{built}"}}]')
    assert (code, "export each by its own config" in err) == (2, True)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"forebay {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "forebay", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"forebay {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "CACHE"],
        ["inspect", "CACHE", "--json"],
        ["inspect", "CACHE", "--sample", "0"],
        ["preprocess", "CONFIG"],
        ["key", "CONFIG"],
        ["index", "CONFIG.tar.gz", "--no-progress"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_ends_a_command_quietly(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    arguments = [a.replace("CACHE", str(cache_of(built))).replace("CONFIG", str(built)) for a in command]
    if "index" in command:
        arguments += ["--cache-root", str(built.parent / "index")]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert cli.main(arguments) == 141
    shown = capsys.readouterr().err
    assert "Broken pipe" not in shown
    assert "Traceback" not in shown


def test_the_interpreter_ends_quietly_as_well(built: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "forebay", "inspect", str(cache_of(built))]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_of_something_else_is_an_error(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("forebay.preprocess.pipeline.build", broken)
    code, _, err = run(capsys, "preprocess", built)
    assert code == 1
    assert "Broken pipe" in err


@pytest.mark.parametrize(("wanted", "index"), [("0", 0), ("1", 1), ("a", 0), ("007", 1), ("12", 2), ("3", 3)])
def test_a_sample_is_named_by_index_or_id(
    built: Path, capsys: pytest.CaptureFixture[str], wanted: str, index: int
) -> None:
    code, out, _ = run(capsys, "inspect", cache_of(built), "--sample", wanted)
    assert code == 0
    assert out.startswith(f"sample {index}\n")
    assert IDS[index] in out


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("4", r"has 4 samples \(0 to 3\)"),
        ("-1", r"has 4 samples \(0 to 3\)"),
        ("b", r"no sample with that id; what was left out: .*rejected\.jsonl"),
        ("9" * 5000, "no sample with that id"),
    ],
)
def test_a_sample_that_is_not_there_is_an_error(
    built: Path, capsys: pytest.CaptureFixture[str], wanted: str, message: str
) -> None:
    code, out, err = run(capsys, "inspect", cache_of(built), "--sample", wanted)
    assert (code, out) == (1, "")
    assert re.search(message, err)


def test_files_without_a_byte_have_one_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_project(tmp_path)
    for name in ("0.flac", "1.flac"):
        (tmp_path / name).write_bytes(b"")
    lines = (tmp_path / "clips.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "duration": 0.1})  # known without a look at the header
    (tmp_path / "clips.jsonl").write_text("\n".join(lines))
    code, out, _ = run(capsys, "preprocess", config, "--json", "--no-progress", "--set", "run.max_failed_share=1")
    assert code == 0
    assert json.loads(out)["failed"] == {"empty_file": 2}


def test_languages_that_never_occur_are_named(
    built: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(capsys, "key", built, "--set", 'source.languages=["EN", "hindi", "de"]')
    (record,) = [r for r in caplog.records if "source.languages" in r.message]
    assert record.message == (
        f"source.languages: no row of {built.parent / 'clips.jsonl'} has hindi, de; there are en (3), fr (1)"
    )


def test_a_csv_is_called_a_csv(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clips.csv").write_text("audio,text\n0.flac,hello\n")
    code, _, err = run(capsys, "preprocess", built, "--set", f"source.manifest={tmp_path / 'clips.csv'}")
    assert code == 1
    assert f"{tmp_path / 'clips.csv'} is a CSV, wanted JSON lines" in err


def test_names_of_the_hub_are_told_what_to_write(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "preprocess", built, "--set", "text.tokenizer=openai/whisper-small")
    assert code == 2
    assert "its commit belongs behind it; it is said by: forebay fetch openai/whisper-small" in err
    code, _, err = run(capsys, "preprocess", built, "--set", "source.kind=hf", "--set", "source.manifest=google/fleurs")
    assert code == 1
    assert f"load_dataset as l; l('google/fleurs').save_to_disk('{built.parent / 'google' / 'fleurs'}')" in err
    code, _, err = run(capsys, "preprocess", built, "--set", "text.tokenizer=mistyped")
    assert code == 2
    assert "Hub" not in err


@pytest.mark.parametrize("is_dict", [True, False])
def test_a_split_that_is_not_there_names_those_that_are(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_dict: bool
) -> None:
    for split in ("train", "test"):
        table = pa.table({"audio": [flac(tone(1, duration_s=0.1))], "text": [split]})
        if is_dict:
            (tmp_path / split).mkdir()
            (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
            (tmp_path / split / "state.json").write_text('{"_data_files": []}')
        pq.write_table(table, tmp_path / (f"{split}/0.parquet" if is_dict else f"{split}-00000-of-00001.parquet"))
    source = ("--set", "source.kind=hf", "--set", f"source.manifest={tmp_path}")
    code, _, err = run(capsys, "preprocess", built, *source, "--set", "source.split=validation")
    assert code == 1
    assert f'source.manifest {tmp_path} has no split "validation", it has test, train; set source.split' in err
    code, out, _ = run(
        capsys, "preprocess", built, *source, "--set", "source.split=test", "--dry-run", "--json", "--no-progress"
    )
    assert (code, json.loads(out)["num_samples"]) == (0, 1)


def test_a_root_that_cannot_be_written_says_who_may(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ("preprocess", built, "--set", "audio.dtype=float32", "--cache-root", tmp_path / "shared")
    (tmp_path / "shared").mkdir(mode=0o750)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    code, _, err = run(capsys, *command)
    assert code == 1
    assert f"cannot write to run.cache_root {tmp_path / 'shared'} (Permission denied)" in err
    assert f"{tmp_path / 'shared'} is drwxr-x--- of user " in err
    assert f"({os.getuid()})" in err.partition("this runs as ")[2]
    assert os.listdir(tmp_path / "shared") == []
    # A sealed cache is used from a root that cannot be written.
    assert run(capsys, "preprocess", built)[0] == 0


def test_a_root_below_a_file_says_so(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("preprocess", built, "--set", "audio.dtype=float32", "--cache-root", built / "caches")
    code, _, err = run(capsys, *command)
    assert code == 1
    assert f"(Not a directory); {built} is not a folder; name another folder: --cache-root DIR" in err


def test_a_refusal_in_the_middle_says_who_may_write(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "x.tdz"))

    monkeypatch.setattr("forebay.preprocess.pipeline.build", refused)
    code, _, err = run(capsys, "preprocess", built)
    assert code == 1
    assert f"Read-only file system: {tmp_path / 'x.tdz'}; {tmp_path} is drwx" in err
    assert "this runs as" in err


def test_a_config_that_is_not_there_names_the_nearest(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "key", built.parent / "mine")
    message, explain = err.splitlines()
    assert (code, message[-24:]) == (2, "; did you mean mine.toml?"[-24:])
    assert explain == "  FB103: forebay explain FB103"
    code, _, err = run(capsys, "inspect", built.parent / "caches" / "other")
    assert code == 2
    assert "no such cache, plan or config" in err


def test_a_dict_is_a_config(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "name": "mine",
        "source": {"kind": "jsonl", "manifest": (Path("clips.jsonl"),), "exclude": ()},
        "audio": {"features": "waveform"},
    }
    monkeypatch.chdir(built.parent)
    config = load_config(document, overrides=["source.languages=['en']"])
    assert config.source.manifests == (str(built.parent / "clips.jsonl"),)
    assert (config.cache_root, config.source.languages) == (built.parent / "caches", ("en",))
    assert "languages" not in document["source"]
    with pytest.raises(ConfigError, match=r"audio\.feature: unknown field; did you mean audio\.features\?"):
        load_config({**document, "audio": {"feature": "waveform"}})
    with pytest.raises(ConfigError, match=r"source\.languages is None, which no setting can be"):
        load_config({**document, "source": {"kind": "jsonl", "manifest": "m", "languages": None}})
    for wrong in (None, 3, [document], io.BytesIO()):
        with pytest.raises(ConfigError, match="path of a TOML file or a dict, not"):
            load_config(wrong)  # type: ignore[arg-type]
