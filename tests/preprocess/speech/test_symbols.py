"""`forebay symbols`, and a cache of phones that are written with its table. The program espeak-ng is a fake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.here_pool import HerePool
from forebay.preprocess.groups import Groups
from forebay.preprocess.text_group import opened_text
from forebay.steps.recipe import load_config, recipe_of
from forebay.steps.text.normal import espeak
from forebay.steps.text.transcript import TextEncoder
from forebay.store.cache import open_cache
from tests.commands import run, run_json
from tests.steps.text.normal.phones.program import fake
from tests.store.sealed import DEMO_MODEL

CONFIG = """
name = "texts"
[source]
kind = "text"
manifest = "texts.txt"
[audio]
features = "none"
[text]
tokenizer = "symbols"
normalize = ["nfkc", "phones"]
phones = {backend = "espeak", voice = "en", punctuation = "keep"}
[run]
cache_root = "caches"
num_workers = 1
max_failed_share = 0.9
"""
TEXTS = ["no on", "Eno, no!", "...", "no on"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of four texts, whose program stands first on PATH."""
    fake(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    espeak._program_digest.cache_clear()
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


def test_texts_become_phones_of_the_table_that_the_command_wrote(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "symbols"
    report = run_json(capsys, "symbols", config, "--eos", "</s>")
    assert {name: report[name] for name in ("folder", "state", "split", "num_texts", "failed")} == {
        "folder": str(folder), "state": "written", "split": "spaces", "num_texts": 3, "failed": {"no_phones": 1},
    }  # fmt: skip
    assert report["symbols"] == {"!": 1, ",": 1, "n": 3, "o": 4, "|": 3, "ˈE": 1, "ˈn": 3, "ˈo": 2}
    assert json.loads((folder / "symbols.json").read_text())["symbols"] == report["symbols"]
    assert run_json(capsys, "symbols", config, "--eos", "</s>")["state"] == "kept"

    fake(config.parent / "bin", 'if line in ("no on", "Eno,", "no!"): sys.exit(1)')  # what was spoken is kept
    built = run_json(capsys, "preprocess", config)
    assert built["excluded"] == {"no_phones": 1}
    cache = open_cache(built["cache"])
    tokens = ["<pad>", "<unk>", "</s>", *sorted(report["symbols"])]
    written = [" ".join(tokens[i] for i in cache[row]["input_ids"]) for row in range(len(cache))]
    assert written == ["ˈn o | ˈo n </s>", "ˈE n o , | ˈn o ! </s>", "ˈn o | ˈo n </s>"]

    (config.parent / "texts.txt").write_text("no on\nnew on\n")
    again = run_json(capsys, "preprocess", config)
    assert (again["num_samples"], again["failed"]) == (1, {"unknown_symbol": 1})


def test_characters_of_normalised_texts_are_symbols_too(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG.replace(', "phones"]', ', "lower"]').replace("phones =", "#"))
    report = run_json(capsys, "symbols", config)
    assert (report["split"], report["num_texts"]) == ("characters", 4)
    assert report["symbols"] == {" ": 3, "!": 1, ",": 1, ".": 3, "e": 1, "n": 6, "o": 6}
    assert run_json(capsys, "preprocess", config)["num_samples"] == 4


def test_phones_are_taken_apart_where_they_are_asked_for_as_characters(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ˈ" in run_json(capsys, "symbols", config, "--characters")["symbols"]
    code, _, err = run(capsys, "symbols", config)
    assert code == 2
    assert "holds another table than the 10 tokens of these texts" in err
    assert "say --replace" in err
    assert run_json(capsys, "symbols", config, "--replace")["state"] == "written"
    assert sorted(path.name for path in config.parent.glob("symbols*")) == ["symbols"]


def test_what_is_no_table_is_never_written_over(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "symbols", config, "--out", DEMO_MODEL, "--replace")
    assert code == 2
    assert "no symbol table of forebay" in err
    code, _, err = run(capsys, "symbols", config, "--eos", "|")
    assert code == 2
    assert "'|' is a special token and a symbol too" in err
    (config.parent / "texts.txt").write_text("...\n")
    code, _, err = run(capsys, "symbols", config)
    assert code == 2
    assert "none of its texts has a symbol ({'no_phones': 1})" in err


def test_seldom_symbols_are_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "symbols", config)
    assert code == 0
    assert "10 tokens, 8 symbols of 3 texts (by spaces)" in out
    assert "seen fewer than 5 times: '!' 1, ',' 1, 'ˈE' 1" in out
    assert "without symbols: 1 no_phones" in out


def test_another_program_moves_the_probe_and_no_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "symbols", config)
    recipe = recipe_of(load_config(config))

    def probe(**changed: object) -> str:
        fake(config.parent / "bin", **changed)  # type: ignore[arg-type]
        espeak._program_digest.cache_clear()
        opened_text.cache_clear()
        return Groups.of(load_config(config), recipe).probe("text")

    first = probe()
    assert len({first, probe(), probe(version="2"), probe(data=b"x"), probe(behaviour='print("n")')}) == 4
    assert recipe_of(load_config(config)).key == recipe.key


def test_a_cache_of_phones_is_read_where_no_program_is(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_json(capsys, "symbols", config)
    built = run_json(capsys, "preprocess", config)
    monkeypatch.setenv("PATH", "")
    opened_text.cache_clear()
    found = run_json(capsys, "key", config)
    assert (found["key"], found["cache"]) == (built["key"], built["cache"])
    recipe = recipe_of(load_config(config))
    encoder = Groups.of(load_config(config), recipe).text.encoder
    assert isinstance(encoder, TextEncoder)
    assert encoder.decode(open_cache(built["cache"])[0]["input_ids"]) == "ˈn o | ˈo n"
    assert run_json(capsys, "preprocess", config)["shards_written"] == 0
    (config.parent / "texts.txt").write_text("no\n")
    code, _, err = run(capsys, "preprocess", config)
    assert code == 2
    assert "the program espeak-ng is not on PATH" in err
