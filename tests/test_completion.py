"""Completions of a shell: commands, options, file names; by a script, without a start of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run


def completed(script: str, *words: str, folder: Path) -> set[str]:
    """Returns what bash offers for the last of some words of a command line."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_forebay; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], cwd=folder, capture_output=True, text=True, check=True)
    return {line.strip() for line in done.stdout.splitlines()}


def test_bash_completes_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "speech.toml").touch()
    code, script, err = run(capsys, "completion", "bash")
    assert (code, err) == (0, "")
    assert completed(script, "forebay", "pre", folder=tmp_path) == {"preprocess"}
    assert completed(script, "forebay", "inspect", "--ve", folder=tmp_path) == {"--verify", "--verbose"}
    assert completed(script, "forebay", "train", "sp", folder=tmp_path) == {"speech.toml"}
    assert "push" in completed(script, "forebay", "cache", "pu", folder=tmp_path)


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef forebay"), ("tcsh", "complete forebay")])
def test_other_shells(shell: str, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, _ = run(capsys, "completion", shell)
    assert code == 0
    assert mark in script


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "completion", "fish")
    assert "invalid choice: 'fish' (choose from 'bash', 'zsh', 'tcsh')" in capsys.readouterr().err


def test_without_shtab_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = run(capsys, "completion", "bash")
    assert (code, out) == (1, "")
    assert "pip install 'forebay[completion]'" in err
