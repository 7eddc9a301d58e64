"""docs/first-look.ipynb runs from its first cell to its last, on the demo recordings; its outputs are not kept.

`make docs` executes it too, for the site.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/first-look.ipynb"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as a clone is, which the notebook may write to."""
    for name in ("demo", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def _said(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")


def _cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_cells_are_code_without_outputs_and_use_public_names() -> None:
    cells = _cells(nbformat.read(PAGE, as_version=4))
    assert [cell.outputs for cell in cells if cell.outputs] == []
    assert [cell.execution_count for cell in cells if cell.execution_count] == []
    tree = ast.parse("\n".join(cell.source for cell in cells))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module)[:7] == "forebay"]
    assert [(node.module, alias.name) for node in found for alias in node.names] == [("forebay.train", "load_model")]


@pytest.mark.wide
def test_the_notebook_runs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(PAGE, as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(clone)}}).execute()
    cells = _cells(notebook)
    assert "52 samples" in _said(cells[1])
    assert any("image/png" in output.get("data", {}) for output in cells[3].outputs)
    assert "position': 1" in _said(cells[5])
    assert "goes on at micro-batch 1" in _said(cells[5])
    losses = [float(line.split()[-1]) for line in _said(cells[6]).splitlines()]
    assert losses[-1] < losses[0]
    assert len(list((clone / "caches").glob("prompts-train-*"))) == 1
