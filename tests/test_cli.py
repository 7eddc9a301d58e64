"""The commands as a user types them: what they print, their JSON documents, their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.here_pool import HerePool
from forebay import cli
from forebay.cli.program import make_parser
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, speech_corpus


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds run in this process: each worker would load transformers."""
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    made = speech_corpus(tmp_path)
    made.config()  # writes config.toml
    return made


@pytest.mark.usefixtures("_here")
def test_preprocess_then_key_then_preprocess_again(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.folder / "config.toml"
    before = run_json(capsys, "key", config)
    assert (before["cache"], before["sealed"], before["nearest"]) == (None, False, None)
    built = run_json(capsys, "preprocess", config, "--no-progress")
    wanted = {
        "key",
        "cache",
        "num_samples",
        "excluded",
        "failed",
        "shards_written",
        "shards_linked",
        "shards_kept",
        "seconds",
    }
    assert wanted <= built.keys()
    assert built["key"] == before["key"]
    assert run_json(capsys, "key", config) == {**before, "cache": built["cache"], "sealed": True}
    code, out, _ = run(capsys, "preprocess", config)
    assert code == 0
    assert out.startswith(f"already sealed: {built['cache']}")


def test_key_without_hashing_is_unknown_at_first(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.folder / "config.toml"
    assert run_json(capsys, "key", config, "--no-hash")["key"] is None


@pytest.mark.usefixtures("_here")
def test_key_explains_how_the_nearest_cache_differs(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.folder / "config.toml"
    built = run_json(capsys, "preprocess", config, "--no-progress")
    changed = run_json(capsys, "key", config, "--set", "audio.sample_rate_hz=8000", "--explain")
    assert changed["nearest"] == {
        "key": built["key"],
        "differs": [{"field": "audio.sample_rate_hz", "wanted": 8000, "stored": 16000}],
    }
    code, out, _ = run(capsys, "key", config, "--set", "audio.sample_rate_hz=8000", "--explain")
    assert code == 0
    assert "audio.sample_rate_hz: 8000 wanted, 16000 stored" in out
    corpus.add_tar("c.tar", ["c0"])
    differs = run_json(capsys, "key", config)["nearest"]["differs"]
    assert [row["field"] for row in differs] == ["sources.train.parquet"]


@pytest.mark.usefixtures("_here")
def test_overrides_enter_the_key_as_if_they_stood_in_the_file(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    config = corpus.folder / "config.toml"
    by_flag = run_json(capsys, "key", config, "--max-samples", 3)
    by_set = run_json(capsys, "key", config, "--set", "source.max_samples=3")
    text = config.read_text()
    config.write_text(text.replace("[audio]", "max_samples = 3\n[audio]"))
    assert by_flag["key"] == by_set["key"] == run_json(capsys, "key", config)["key"]
    config.write_text(text)
    assert run_json(capsys, "key", config)["key"] != by_flag["key"]


@pytest.mark.usefixtures("_here")
def test_dry_run_says_what_would_be_done(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "preprocess", corpus.folder / "config.toml", "--dry-run")
    assert code == 0
    assert "17 samples, about" in out
    assert "10 to make, 0 to link, 0 finished" in out


def test_a_wrong_config_ends_with_2_and_names_every_problem(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.folder / "config.toml"
    config.write_text(
        config.read_text().replace('features = "waveform"', 'feature = "waveform"\nsample_rate_hz = "16k"')
    )
    code, out, err = run(capsys, "preprocess", config)
    assert (code, out) == (2, "")
    assert "audio.feature: unknown field; did you mean audio.features?" in err
    assert "audio.sample_rate_hz" in err
    assert "16k" in err


def test_a_missing_file_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "key", tmp_path / "none.toml")
    assert code == 2
    assert "none.toml: No such file" in err


def test_a_manifest_that_is_not_there_ends_with_1(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus.folder / "train.parquet").unlink()
    code, _, err = run(capsys, "preprocess", corpus.folder / "config.toml")
    assert code == 1
    assert "train.parquet does not exist" in err


def test_inspect_without_a_cache_ends_with_3_and_the_command(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "inspect", corpus.folder / "config.toml")
    assert code == 3
    assert f"run: forebay preprocess {corpus.folder / 'config.toml'}" in err


def test_usage_errors_end_with_2() -> None:
    for arguments in ([], ["preprocess"], ["preprocess", "x.toml", "--shards", "64::3"], ["nothing"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)


def test_index_indexes_every_tar_of_a_manifest(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("index", corpus.folder / "train.parquet", "--cache-root", corpus.root, "--no-progress")
    first, second = run_json(capsys, *arguments), run_json(capsys, *arguments)
    assert (first["indexed"], first["current"], first["failed"], first["members"]) == (2, 0, [], 17)
    assert (second["indexed"], second["current"]) == (0, 2)


def test_index_names_what_failed_and_indexes_the_rest(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    packed = corpus.folder / "c.tar.gz"
    packed.write_bytes(b"\x1f\x8b" + b"x" * 2000)
    tars = (corpus.folder / "a.tar", packed, corpus.folder / "b.tar")
    code, out, err = run(capsys, "index", *tars, "--cache-root", corpus.root, "--no-progress")
    assert code == 1
    assert out == "2 tars indexed, 0 were current, 1 failed; 17 members, 0 refused\n"
    assert f"{packed} is compressed (gzip)" in err


@pytest.mark.parametrize("room", ["preprocess", "inspect", "train"])
def test_every_room_runs_as_a_module(room: str) -> None:
    command = [sys.executable, "-m", f"forebay.{room}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"forebay {room}" in done.stdout


@pytest.mark.usefixtures("_here")
def test_inspect_cache_takes_the_folder_both_ways(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    cache = run_json(capsys, "preprocess", corpus.folder / "config.toml", "--no-progress")["cache"]
    documents = []
    for arguments in ([cache], ["--cache-dir", cache], [f"--cache-dir={cache}"]):
        assert cli.inspect_cache([*arguments, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0]["num_samples"] == 17
    assert documents[0] == documents[1] == documents[2]


def test_a_config_with_a_byte_order_mark_is_the_same(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.folder / "config.toml"
    before = run_json(capsys, "key", config)
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert run_json(capsys, "key", config) == before


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "a.wav", "texts.txt", "large.tar", "set"])
@pytest.mark.parametrize("command", ["preprocess", "key", "train", "inspect", "lint", "status", "text"])
def test_data_in_the_place_of_a_config_gets_the_command_that_takes_it(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "it's" / name
    data.parent.mkdir()
    if name == "set":
        data.mkdir()
    else:
        data.write_bytes(b'{"audio": "a.flac"}\n' if name == "train.jsonl" else b"RIFF\xff\xff\n")
    if name == "large.tar":
        os.truncate(data, 1 << 34)
    code, out, err = run(capsys, command, data)
    assert (code, out) == (2 if command not in ("inspect", "lint") or name != "set" else 1, "")
    assert "forebay init " in err


def test_a_cache_in_the_place_of_a_config_gets_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    code, _, err = run(capsys, "preprocess", tmp_path)
    assert code == 2
    assert "is a cache, and a config (a TOML file) is wanted; to look at it: forebay inspect " in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepocess", "x.toml"], "forebay: error: there is no command 'prepocess'; did you mean forebay preprocess?"),
        (["cache", "prun"], "forebay cache: error: there is no command 'prun'; did you mean forebay cache prune?"),
        (["qqq"], "there is no command 'qqq'; all of them: forebay --help"),
        ([str(Path(__file__).parent)], "did you mean forebay init "),
        (["eval"], "forebay eval: error: the following arguments are required: CONFIG"),
    ],
)
def test_the_nearest_command_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert said in capsys.readouterr().err


def test_help_lists_every_command_once_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: forebay [-h] [--version] COMMAND ..."
    assert lines[2].startswith("From recordings, texts and images to a cache")
    groups = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["options:", "first day:", "data:", "training:", "caches:", "machines:"]
    listed = [line.split()[0] for line in lines[lines.index("first day:") :] if line.startswith("  ")]
    (commands,) = [each.choices for each in make_parser()._actions if each.dest == "command" or each.choices]
    assert sorted(listed) == sorted(commands or ())
    assert len(listed) == 21
    assert listed[:4] == ["init", "preprocess", "inspect", "train"]


def test_only_the_commands_that_are_asked_for_have_options() -> None:
    parser = make_parser(frozenset({"cache", "ls"}))
    assert parser.parse_args(["cache", "ls", "--sort", "size"]).sort == "size"
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["key", "--no-hash", "config.toml"])
    assert make_parser().parse_args(["key", "--no-hash", "config.toml"]).no_hash
