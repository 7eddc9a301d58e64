"""Losses of tiny models that hear, as docs/models.md has them; and that no class of its table is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.zoo.losses_of_sound import TINY, WITHOUT, loss_line
from benchmarks.zoo.page import PAGE

_SHOWN = ("Gemma4Unified", "MuseSpark")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n if n in _SHOWN else pytest.param(n, marks=pytest.mark.wide) for n in TINY])
def test_losses_are_those_of_the_processor_s_own_batches(name: str, tmp_path: Path) -> None:
    line = loss_line(f"{name}Processor", tmp_path)
    assert line in PAGE.read_text(encoding="utf-8").splitlines()
    assert line.count("the same") == 2 or "own log-mel" in line or "Phi4" in name


def test_every_class_that_writes_conversations_with_clips_has_a_line() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("## Sound in conversations") : page.index("### Losses")]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    works = {row[1] for row in rows if row[3] != "no"}
    assert works == {*(f"{name}Processor" for name in TINY), *WITHOUT}
    assert all(loss_line(name, Path()) in page.splitlines() for name in WITHOUT)
