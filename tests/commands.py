"""forebay's commands, run in the test's own process as `cli.main` runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Returns the exit code of `forebay ARGUMENTS` and what it printed: out and err."""
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Returns the document that `forebay ARGUMENTS --json` prints; it must end with 0."""
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Returns what `run` returns of `forebay inspect ARGUMENTS`."""
    return run(capsys, "inspect", *arguments)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns what `forebay inspect ARGUMENTS` prints; it must end with 0 and warn of nothing."""
    code, out, err = inspect(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def inspected_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Returns the document of `inspected`."""
    return json.loads(inspected(capsys, *arguments, "--json"))
