from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.config import BucketConfig
from forebay.inspect.facts import cache_facts
from forebay.inspect.inspect_lines import report_lines, verify_lines
from forebay.store.cache import open_cache
from forebay.terminal import WIDEST
from tests.inspect.test_plans import save
from tests.store_factory import make_cache


def lines_of(folder: Path, **changes: Any) -> list[str]:
    facts = cache_facts(open_cache(folder), plan_roots=[folder.parent])
    return list(report_lines({**facts, **changes}))


def section(lines: list[str], head: str) -> list[str]:
    """The lines from the one that begins with `head` to the next empty one."""
    start = next(index for index, line in enumerate(lines) if line.lstrip().startswith(head))
    end = next((index for index in range(start, len(lines)) if not lines[index]), len(lines))
    return lines[start:end]


def test_the_report_names_the_cache_and_its_keys(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    cache = open_cache(folder)
    head = section(lines_of(folder), folder.name)
    assert head[0] == f"{folder.name}: a sealed cache, format 4"
    assert head[1:5] == [
        "  name        prompts, split train",
        f"  folder      {folder}",
        f"  key         {cache.key}",
        f"  recipe key  {cache.recipe_key}",
    ]
    assert "2 audio + 2 text, at most 4 rows each" in "\n".join(head)


def test_no_line_is_wider_than_a_terminal_but_for_paths(tmp_path: Path) -> None:
    languages = {f"l{index:02d}": {"samples": 10**7, "hours": 123_456.7} for index in range(40)}
    recipe = {"source": {"kind": "tar", "languages": list(languages)}, "audio": {"clip_s": 30.0}, "text": None}
    folder = make_cache(
        tmp_path,
        num_samples=40,
        metadata={
            "languages": languages,
            "clipped": 3,
            "recipe": recipe,
            "excluded": {f"some_long_reason_{index}": 10**6 for index in range(12)},
        },
    )
    save(tmp_path, open_cache(folder), BucketConfig(batch_seconds=40.0))
    lines = lines_of(folder)
    assert [line for line in lines if len(line) > WIDEST and str(folder) not in line] == []
    assert [line for line in lines if not line.isprintable() or line != line.rstrip()] == []


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_has_narrow_lines(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    folder = make_cache(tmp_path, num_samples=40)
    save(tmp_path, open_cache(folder), BucketConfig(batch_seconds=40.0))
    lines = lines_of(folder)
    # Names, keys and paths stay whole for copying.
    wide = [line for line in lines if len(line) > width and len(max(line.split(), key=len)) < 16]
    assert [line for line in wide if not line.startswith("  bucket ")] == []
    cells = {cell for line in lines for cell in line.replace(",", " ").split()}
    monkeypatch.setenv("COLUMNS", "100")
    whole = {cell for line in lines_of(folder) for cell in line.replace(",", " ").split()}
    assert {cell for cell in whole - cells if "#" not in cell} == set()  # nothing is lost


def test_languages_are_listed_by_hours_with_their_share(tmp_path: Path) -> None:
    languages = {"en": {"samples": 2, "hours": 0.001}, "es": {"samples": 1, "hours": 0.003}}
    lines = section(lines_of(make_cache(tmp_path), languages=languages, hours=0.004), "languages")
    assert [line.split() for line in lines] == [
        ["languages", "samples", "hours", "share"],
        ["es", "1", "0.0030", "75.0", "%"],
        ["en", "2", "0.0010", "25.0", "%"],
    ]


def test_many_languages_are_cut_off_in_so_many_words(tmp_path: Path) -> None:
    languages = {f"l{index:02d}": {"samples": 1, "hours": 1.0} for index in range(40)}
    lines = section(lines_of(make_cache(tmp_path), languages=languages), "languages")
    assert lines[-1] == "  and 16 more (--json lists them all)"


def test_the_histogram_is_aligned_and_its_last_bin_says_how_far_it_goes(tmp_path: Path) -> None:
    histogram = {"edges_s": [0.0, 1.0, 2.0, 3600.5], "samples": [50, 25, 1], "hours": [0.007, 0.01, 1.0]}
    lines = section(lines_of(make_cache(tmp_path), histogram=histogram), "durations (s)")
    assert [line.split() for line in lines[1:]] == [
        ["0", "-", "1", "50", "0.0070", "#" * 50],
        ["1", "-", "2", "25", "0.0100", "#" * 25],
        ["2", "-", "3600.5", "1", "1.00", "#"],
    ]
    assert len({line.index("#") for line in lines[1:]}) == 1


def test_plans_have_their_padding_in_all_and_by_bucket(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=40)
    save(tmp_path, open_cache(folder), BucketConfig(edges_s=(1.0, 2.0), batch_size=(4, 2)))
    plan = cache_facts(open_cache(folder), plan_roots=[tmp_path])["plans"][0]
    lines = section(lines_of(folder), "plans")
    assert lines[1].startswith(
        f"  bucket {plan['key'][:16]}: {plan['num_batches']} batches, {100 * plan['padding']:.1f} % padding, "
    )
    assert [line.split()[0] for line in lines[3:5]] == ["0.0-1.0s", "1.0-2.0s"]
    assert "batch_size = [4, 2]" in " ".join(map(str.strip, lines[5:]))


def test_plans_that_are_not_there_come_with_the_way_to_them(tmp_path: Path) -> None:
    lines = lines_of(make_cache(tmp_path))
    assert "plans: none yet (forebay preprocess CONFIG makes the one of its [plan])" in lines


def test_packs_of_later_plans_are_shown_by_their_fill(tmp_path: Path) -> None:
    plan = {"key": "a" * 64, "kind": "pack", "num_packs": 12, "fill": 0.9998, "settings": {}, "statistics": {}}
    lines = section(lines_of(make_cache(tmp_path), plans=[plan]), "plans")
    assert lines[1] == f"  pack {'a' * 16}: 12 packs, 100.0 % fill"


def test_what_was_skipped_is_counted_by_reason_with_its_list(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, failed_rows=[1, 2], metadata={"excluded": {"too_long": 4}, "clipped": 3})
    assert section(lines_of(folder), "skipped") == [
        "skipped",
        "  excluded    too_long 4",
        "  failed      corrupt_audio 2",
        "  clipped     3 kept for their first 30 s",
        f"  list        {folder / 'rejected.jsonl'}",
    ]
    assert "skipped: nothing" in lines_of(make_cache(tmp_path / "all"))


def test_a_language_cannot_move_the_cursor(tmp_path: Path) -> None:
    languages = {"\x1b[2J": {"samples": 1, "hours": 0.1}}
    assert "\\x1b[2J" in "\n".join(lines_of(make_cache(tmp_path), languages=languages))


def test_verifying_says_ok_or_lists_what_is_wrong() -> None:
    good = {"ok": True, "checked_bytes": 3_000_000, "problems": []}
    assert list(verify_lines(good)) == ["verify: ok, 3 MB are the bytes that were sealed"]
    bad = {"ok": False, "checked_bytes": 12, "problems": ["a is missing", "b\x07"]}
    assert list(verify_lines(bad)) == [
        "verify: 2 problems, 12 B are the bytes that were sealed",
        "  a is missing",
        "  b\\x07",
    ]
