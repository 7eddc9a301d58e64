"""`forebay lint` as it is run: tables, JSON, lists of ids, exit codes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.inspect.checks.limits import CHECKS, Limits
from forebay.inspect.checks.raw_data import measure_raw
from forebay.preprocess.pool import Pool
from forebay.steps.recipe import recipe_of
from tests.commands import run, run_json
from tests.inspect.checks.planted import Planted, found, linted

PAGE = Path(__file__).parents[3] / "docs" / "caches.md"


@pytest.fixture
def config(planted: Planted) -> str:
    """The path of a config of six clips: one silent, one cut off, one twice, one of which has another text."""
    planted.keep(*list(planted.rows)[:6])
    planted.put("en_digits_oh", np.zeros_like(planted.samples("en_digits_oh")))
    planted.data["es_digits_day-1"] = planted.data["es_digits_day-1"][:300]
    planted.add("again\tand", "fr_digits_50")
    return planted.config().path


def test_a_table_and_the_first_findings_of_each_check_are_printed(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    code, out, err = run(capsys, "lint", config, "--no-progress")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("config.toml: 7 samples, by raw data")
    assert lines[1:4] == [
        "check            severity  findings",
        "  corrupt_audio  error            1",
        "  silent         error            1",
    ]
    assert "  en_digits_oh (row 0, train.tar): its loudest piece of 20 ms has -200.0 dBFS, the limit is -55" in lines
    assert "  again\\tand (row 6, train.tar): its content is that of 'fr_digits_50'" in lines
    assert lines[-1].startswith("3 findings: 2 of error, 1 of warning; ")


def test_lines_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(Path(config).parent)
    _, out, _ = run(capsys, "lint", "config.toml", "--no-progress")
    assert max(map(len, out.splitlines())) <= 40


def test_the_document_has_every_fact(capsys: pytest.CaptureFixture[str], config: str) -> None:
    document = run_json(capsys, "lint", config, "--no-progress")
    assert document["counts"] == {"error": 2, "warning": 1, "info": 0}
    assert [each["check"] for each in document["findings"]] == ["corrupt_audio", "silent", "duplicate"]
    silent = document["findings"][1]
    assert silent == {
        "check": "silent",
        "severity": "error",
        "set": config,
        "sample_id": "en_digits_oh",
        "row": 0,
        "source": "train.tar",
        "message": "its loudest piece of 20 ms has -200.0 dBFS, the limit is -55",
        "value": -200.0,
        "limit": -55.0,
        "other": None,
        "other_set": None,
    }
    assert document["limits"]["quiet_dbfs"] == -55.0
    assert document["sets"][0]["num_samples"] == 7


@pytest.mark.parametrize(
    ("severity", "ids"),
    [
        ("error", ["en_digits_oh", "es_digits_day-1"]),
        ("warning", ["en_digits_oh", "es_digits_day-1", "again\tand"]),
    ],
)
def test_ids_are_written_a_line_each(
    capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path, severity: str, ids: list[str]
) -> None:
    path = tmp_path / "drop.txt"
    code, out, _ = run(capsys, "lint", config, "--no-progress", "--drop-ids", path, "--severity", severity)
    assert code == 0
    assert path.read_text(encoding="utf-8") == "".join(f"{name}\n" for name in ids)
    assert f"wrote {len(ids)} ids of {severity} or worse" in out


def test_ids_that_are_no_line_are_named_and_left_out(
    capsys: pytest.CaptureFixture[str], planted: Planted, tmp_path: Path
) -> None:
    planted.keep("en_digits_oh")
    planted.add("two\nlines", "en_digits_oh", data=b"no sound")
    path = tmp_path / "drop.txt"
    _, out, _ = run(capsys, "lint", planted.config().path, "--no-progress", "--drop-ids", path)
    assert path.read_bytes() == b""
    assert "1 ids hold a line end" in out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 0),
        (("--strict",), 1),
        (("--strict", "--skip", "silent", "--skip", "corrupt_audio"), 0),
        (("--strict", "--skip", "silent", "--skip", "corrupt_audio", "--severity", "warning"), 1),
        (("--strict", "--skip", "corrupt_audio", "--limit", "quiet_dbfs=-300"), 0),
    ],
)
def test_strict_ends_with_1_where_something_was_found(
    capsys: pytest.CaptureFixture[str], config: str, options: tuple[str, ...], code: int
) -> None:
    assert run(capsys, "lint", config, "--no-progress", *options)[0] == code


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "lint needs a config or a cache"),
        (("nothing.toml",), "nothing.toml: no such cache or config"),
        (("CONFIG", "--limit", "quiet_db=1"), "no limit is called 'quiet_db'; did you mean quiet_dbfs?"),
        (("CONFIG", "--limit", "loops=many"), "'many' is no number"),
        (("CONFIG", "--max-samples", "0"), "--max-samples 0: wanted 1 or more"),
        (("CONFIG", "--skip", "no check"), "--skip no check: wanted the name of a check"),
        (("CONFIG", "--against", "gone.toml"), "gone.toml: no such cache or config"),
    ],
)
def test_wrong_use_is_refused(
    capsys: pytest.CaptureFixture[str], config: str, options: tuple[str, ...], says: str
) -> None:
    code, _, err = run(capsys, "lint", *(config if part == "CONFIG" else part for part in options))
    assert code == 2
    assert says in err


def test_only_the_first_samples_are_read(capsys: pytest.CaptureFixture[str], config: str) -> None:
    document = run_json(capsys, "lint", config, "--no-progress", "--max-samples", "2")
    assert document["sets"][0]["num_samples"] == 2


def test_the_checks_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "lint", "--explain-checks", "--limit", "loops=7")
    assert code == 0
    assert all(f"{check.name} ({check.severity}): " in out for check in CHECKS)
    assert "    loops = 7: times that the same words stand in a row" in out


def test_the_page_lists_the_checks_and_the_limits_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check.name}` | {check.severity} | {check.says} |" in page
    for line in Limits().described(list(Limits.__dataclass_fields__)):
        name, _, rest = line.partition(" = ")
        value, _, says = rest.partition(": ")
        assert f"| `{name}` | {value} | {says} |" in page


def test_every_limit_is_of_a_check() -> None:
    assert {name for check in CHECKS for name in check.limits.split()} == set(Limits.__dataclass_fields__)


def test_a_finding_is_the_same_with_any_number_of_workers(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.keep(*list(planted.rows)[:5])
    planted.put("en_digits_oh", np.zeros_like(planted.samples("en_digits_oh")))
    planted.add("again", "fr_digits_50")
    config = planted.config()
    here = linted(config)
    monkeypatch.setattr("forebay.inspect.checks.measured.Pool", Pool)
    monkeypatch.setattr("forebay.inspect.checks.raw_data._ITEMS", 2)
    there = linted(config)
    assert there.findings == here.findings
    assert found(there) == {("silent", "en_digits_oh"), ("duplicate", "again")}


def test_no_code_of_a_config_s_folder_is_imported(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.keep("en_digits_oh")
    config = planted.config()
    folder = Path(config.path).parent
    (folder / "conftest.py").write_text("raise SystemExit('imported')\n")
    (folder / "forebay_plugin.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(folder)
    assert found(linted(config)) == set()


def test_measured_facts_are_of_the_listing(planted: Planted) -> None:
    planted.keep(*list(planted.rows)[:3])
    config = planted.config()
    facts: Any = measure_raw(config, recipe_of(config), Limits(), name="x", progress=False)
    assert facts.ids.to_pylist() == list(planted.rows)
    assert facts.facts["file_rate_hz"].tolist() == [16_000.0] * 3
    assert np.allclose(facts.facts["seconds"], [row["duration_s"] for row in planted.rows.values()])
    assert json.dumps(list(facts.files)) == '["train.parquet", "train.tar"]'
