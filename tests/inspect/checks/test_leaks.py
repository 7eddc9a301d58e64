"""Recordings that stand in a learnt set and in an evaluated one are leaks, whatever their ids and files are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.inspect.checks import lint as module
from forebay.inspect.checks.lint import LintOptions, Target, evaluated, lint
from forebay.steps.recipe import load_config
from tests.inspect.checks.planted import Planted, encoded, found, linted, one
from tests.preprocess.here_pool import build_here


@pytest.fixture
def dev(tmp_path: Path, planted: Planted) -> Planted:
    """Two recordings of its own, and one of the training set, under another id and as another file."""
    made = Planted.of_demo(tmp_path / "dev")
    names = ("en_demo-thanks", "es_demo-thanks", "ru_vm-options")
    made.keep(*names)
    for name in names[:2]:
        del planted.rows[name], planted.data[name]
    made.add("other", "ru_vm-options", data=encoded(made.samples("ru_vm-options"), form="WAV"))
    made.keep(*names[:2], "other")
    return made


def test_a_leak_is_found_and_is_of_the_set_that_is_linted(planted: Planted, dev: Planted) -> None:
    finding = one(linted(planted.config(), against=(dev.config(),)))
    assert (finding.check, finding.severity, finding.sample_id) == ("leak", "error", "ru_vm-options")
    assert finding.other == "other"
    assert finding.other_set == dev.config().path


def test_several_configs_are_compared_and_the_first_is_told_of(planted: Planted, dev: Planted) -> None:
    finding = one(linted(planted.config(), dev.config()))
    assert (finding.check, finding.sample_id, finding.other) == ("leak", "ru_vm-options", "other")


def test_a_text_that_two_sets_have_is_no_leak(planted: Planted, dev: Planted) -> None:
    dev.keep("en_demo-thanks")
    dev.rows["en_demo-thanks"]["transcript"] = planted.rows["fr_transfer"]["transcript"]
    assert found(linted(planted.config(), against=(dev.config(),))) == set()


def test_the_sets_that_a_config_is_evaluated_on_are_compared(
    planted: Planted, dev: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = dev.config().path
    path = Path(planted.config().path)
    path.write_text(f'{path.read_text()}[[train.eval]]\nname = "dev"\nconfig = "{named}"\n')
    assert one(linted(load_config(path))).other_set == named
    roots, given = {str(planted.folder)}, load_config(path, overrides=[f"run.cache_root={planted.folder}"])
    monkeypatch.setattr(
        module, "find_cache", lambda config, _: SimpleNamespace(found=config.run.cache_root in roots or None)
    )
    for root in (str(planted.folder), str(dev.folder / "caches")):  # the first one as `--cache-root` says it
        [other] = evaluated(Target(config=given), [])
        assert other.config is not None
        assert other.config.run.cache_root == root
        roots.clear()
    monkeypatch.undo()
    path.write_text(f"{path.read_text()}max_samples = 2\n")
    assert found(linted(load_config(path))) == set()  # the third sample, which leaks, is not evaluated on
    path.write_text(path.read_text().replace(named, str(dev.folder / "gone.toml")))
    report = linted(load_config(path))
    assert found(report) == set()
    assert any("gone.toml is not there" in note for note in report.notes)


def test_a_set_is_not_compared_with_itself(planted: Planted) -> None:
    path = Path(planted.config().path)
    path.write_text(f'{path.read_text()}[[train.eval]]\nname = "dev"\nconfig = "config.toml"\n')
    report = linted(load_config(path))
    assert found(report) == set()
    assert [note for note in report.notes if "not compared with itself" in note]


def test_caches_of_the_same_steps_are_compared_by_what_they_store(planted: Planted, dev: Planted) -> None:
    settings = ('audio.features="log_mel"',)
    caches = [Target(place=build_here(each.config(*settings)).cache) for each in (planted, dev)]
    report = lint(caches[:1], caches[1:], LintOptions(progress=False))
    assert [(each.check, each.sample_id, each.other) for each in report.findings] == [
        ("leak", "ru_vm-options", "other")
    ]


def test_sets_that_keep_nothing_of_the_same_form_are_told_of(planted: Planted, dev: Planted) -> None:
    cache = build_here(planted.config('audio.features="log_mel"')).cache
    report = lint([Target(place=cache)], [Target(config=dev.config())], LintOptions(progress=False))
    assert report.findings == []
    assert [note for note in report.notes if "keep no content of the same form" in note]
