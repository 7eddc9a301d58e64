"""The samples that `[filter]` leaves of a source: beside a plain loop, its counts, its messages, its key."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.load import parse_config
from forebay.config.tree import FilterConfig
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config
from forebay.store.selection import Filter, FilterChoice, filtered, missing_of_all, say_missing
from tests.store.table_source import TableSource

LANGUAGES = ["hi", "ta", "", None]


def rows_of(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "sample_id": f"clip-{number}",
            "language": draw.choice(LANGUAGES),
            "speaker": draw.choice([1, 2, None]),
            "snr": draw.choice([None, 5.0, 15.0, float("nan")]),
        }
        for number in range(count)
    ]


def chosen(source: TableSource, tmp_path: Path | None = None, **given_: Any) -> list[str]:
    return [source.sample_id(place) for place in choice(source, tmp_path, **given_).places.tolist()]


def choice(source: TableSource, tmp_path: Path | None = None, **given_: Any) -> FilterChoice:
    for name in ("ids", "drop_ids"):
        if tmp_path is not None and name in given_:
            (tmp_path / name).write_text("".join(f"{line}\n" for line in given_[name]), encoding="utf-8")
            given_[name] = str(tmp_path / name)
    return Filter.of(FilterConfig(**given_)).choose(source, name="the cache")


@st.composite
def _tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    row = st.fixed_dictionaries(
        {
            "language": st.sampled_from(LANGUAGES),
            "speaker": st.sampled_from([1, 2, -(2**62), None]),
            "snr": st.sampled_from([None, 5.0, 15.0]),
        }
    )
    rows = draw(st.lists(row, min_size=1, max_size=30))
    return [{"sample_id": f"s{number}/é", **each} for number, each in enumerate(rows)]


@given(
    rows=_tables(),
    most=st.sampled_from([None, 8.0, 20.0]),
    listed=st.one_of(st.none(), st.sets(st.integers(0, 40), min_size=1)),
    dropped=st.one_of(st.none(), st.sets(st.integers(0, 40))),
    quota=st.dictionaries(st.sampled_from(["language", "speaker"]), st.integers(1, 5)),
)
def test_a_filter_leaves_what_a_plain_loop_leaves(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    most: float | None,
    listed: set[int] | None,
    dropped: set[int] | None,
    quota: dict[str, int],
) -> None:
    source, folder = TableSource(rows), tmp_path_factory.getbasetemp()
    given_: dict[str, Any] = {"quota": quota or None}
    left = list(rows)
    if most is not None:
        given_["where"] = f"not snr > {most}"
        left = [row for row in left if row["snr"] is not None and not row["snr"] > most]
    if listed is not None:
        given_["ids"] = [f"s{number}/é" for number in sorted(listed)]
        left = [row for row in left if row["sample_id"] in given_["ids"]]
    if dropped is not None:
        given_["drop_ids"] = [f"s{number}/é" for number in sorted(dropped)]
        left = [row for row in left if row["sample_id"] not in given_["drop_ids"]]
    if not left:
        with pytest.raises(ConfigError, match=r"\[filter\] leaves none of the"):
            choice(source, folder, **given_)
        return
    # Which of a value's samples a quota takes is a function of their ids: the order of the table does not matter.
    turned = TableSource(rows[::-1])
    ids = {row["sample_id"] for row in left}
    for column, number in quota.items():
        kept: set[str] = set()
        for value in {row[column] for row in left}:
            own = [row for row in left if row[column] == value]
            alone = chosen(TableSource(own), quota={column: number})
            assert len(alone) == min(number, len(own))
            kept |= set(alone)
        ids &= kept
    if ids:
        found = choice(source, folder, **given_)
        assert {source.sample_id(place) for place in found.places.tolist()} == ids
        assert found.places.tolist() == sorted(found.places.tolist())
        assert set(chosen(turned, folder, **given_)) == ids
        assert [step.after for step in found.steps][-1:] in ([], [len(ids)])


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_larger_quota_takes_the_same_samples_and_more(most: int, more: int) -> None:
    source = TableSource(rows_of(60))
    few = set(chosen(source, quota={"language": most, "speaker": most}))
    many = set(chosen(source, quota={"language": most + more, "speaker": most + more}))
    assert few <= many


def test_a_quota_draws_the_same_samples_for_ever() -> None:
    """A moved draw would train on other samples under an unmoved key."""
    source = TableSource([{"sample_id": f"clip-{n}", "language": "hi"} for n in range(12)])
    assert chosen(source, quota={"language": 4}) == ["clip-0", "clip-1", "clip-3", "clip-8"]


def test_nulls_are_as_in_sql() -> None:
    rows = [{"sample_id": str(n), "snr": snr} for n, snr in enumerate([None, 5.0, 15.0])]
    source = TableSource(rows)
    for where, wanted in {
        "snr > 10": ["2"],
        "not snr > 10": ["1"],
        "not (snr > 10 and sample_id == '0')": ["1", "2"],
        "snr > 10 or sample_id == '0'": ["0", "2"],
        "not (snr is None)": ["1", "2"],
        "snr not in (5.0,)": ["2"],
        "not snr in (5.0,)": ["2"],
        "snr is None or not snr > 10": ["0", "1"],
        "not (not snr > 10)": ["2"],
        "True": ["0", "1", "2"],
    }.items():
        assert chosen(source, where=where) == wanted, where


def test_a_choice_says_what_each_setting_did(tmp_path: Path) -> None:
    rows = [{"sample_id": f"clip-{n}", "language": "hi" if n % 2 else "ta"} for n in range(2_000)]
    found = choice(
        TableSource(rows),
        tmp_path,
        where="language\n in ('hi', 'ta')",
        ids=[f"clip-{n}" for n in range(1_500)],
        drop_ids=["clip-3", "clip-4", "clip-3", "absent", "clip-1999"],
        quota={"language": 700},
    )
    assert str(found) == (
        "1,400 of 2,000 samples (where language in ('hi', 'ta') keeps 2,000, ids keeps 1,500, drop_ids drops 2, "
        "quota language = 700 drops 98)"
    )
    assert found.missing["ids"].to_pylist() == []
    assert found.missing["drop_ids"].to_pylist() == ["absent"]
    assert found.to_json()["steps"][2] == {"setting": "drop_ids", "value": "", "before": 1500, "after": 1498}


def test_ids_of_no_sample_are_one_line_for_all_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = [f"x{n}" for n in range(7)] + ["clip-1", "clip-2", "other-1"]
    first = choice(TableSource([{"sample_id": "clip-1"}, {"sample_id": "clip-2"}]), tmp_path, ids=ids)
    second = choice(TableSource([{"sample_id": "other-1"}]), tmp_path, ids=ids)
    say_missing(missing_of_all([first, second]), name="a and b")
    assert caplog.messages == ["filter.ids: 7 ids are of no sample of a and b: 'x0', 'x1', 'x2', 'x3', 'x4', ..."]
    caplog.clear()
    say_missing(missing_of_all([choice(TableSource([{"sample_id": "clip-1"}]), tmp_path, ids=["clip-1"])]), name="a")
    assert not caplog.messages


def test_nothing_left_names_the_condition_and_what_comes_near() -> None:
    source = TableSource([{"sample_id": str(n), "language": "hi" if n < 7 else "ta", "snr": 1.0} for n in range(10)])
    with pytest.raises(
        ConfigError,
        match=r"\[filter\] leaves none of the 10 samples of the cache: where language == 'xx' and snr < 3 keeps 0; "
        r"language == 'xx' alone keeps 0; snr < 3 alone keeps 10; language: 'hi' 7, 'ta' 3; change \[filter\]",
    ):
        choice(source, where="language == 'xx' and snr < 3")


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"where": "langage == 'hi'"},
            r"filter\.where: 'langage' at character 1 is no column; did you mean language\?",
        ),
        ({"where": "language > 3"}, "column language holds texts, and 3 at character 12 is a number"),
        ({"quota": {"langage": 3}}, r"filter\.quota: 'langage' is no column; did you mean language\?"),
        ({"quota": {"snr": 3}}, r"filter\.quota\.snr: the column holds double, wanted texts or whole numbers"),
        ({"ids": "/nowhere/keep.txt"}, r"filter\.ids /nowhere/keep\.txt cannot be read: No such file"),
        ({"where": "open('x')"}, r"filter\.where: this is no condition, at character 1"),
    ],
)
def test_wrong_use_is_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choice(TableSource(rows_of(5)), **settings_)


def test_lists_and_quotas_need_ids(tmp_path: Path) -> None:
    source = TableSource([{"language": "hi"}, {"language": "hi"}])
    for given_ in ({"drop_ids": ["a"]}, {"quota": {"language": 1}}):
        with pytest.raises(ConfigError, match=r"\[filter\]: the cache has no sample ids, so ids, drop_ids and quota"):
            choice(source, tmp_path, **given_)
    assert len(choice(source, where="language == 'hi'").places) == 2


def test_a_column_that_only_the_cache_has_asks_for_the_cache() -> None:
    source = TableSource(rows_of(5), is_sealed=False)
    for given_ in ({"where": "text == 'a'"}, {"quota": {"text": 3}}):
        with pytest.raises(ConfigError, match=r"'text'.* is no column; .* run: forebay preprocess CONFIG"):
            choice(source, **given_)


def test_an_empty_list_drops_nothing_and_keeps_an_error(tmp_path: Path) -> None:
    source = TableSource(rows_of(5))
    assert len(choice(source, tmp_path, drop_ids=[]).places) == 5
    with pytest.raises(ConfigError, match=r"filter\.ids .*ids holds no id; write one id a line"):
        choice(source, tmp_path, ids=[])


def test_a_line_of_a_list_is_an_id_whatever_it_begins_with(tmp_path: Path) -> None:
    source = TableSource([{"sample_id": "#1"}, {"sample_id": " a"}, {"sample_id": "a"}])
    assert chosen(source, tmp_path, drop_ids=["#1", "", " a"]) == ["a"]


def test_the_key_is_of_what_decides(tmp_path: Path) -> None:
    def key(**given_: Any) -> str:
        return Filter.of(FilterConfig(**given_)).key

    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a\nb\n")
    two.write_bytes(b"\xef\xbb\xbfb\r\n\r\na\r\nb")
    assert key(drop_ids=str(one)) == key(drop_ids=str(two)), "the ids count, not the file"
    keys = [
        key(),
        key(where="snr < 3"),
        key(where="snr < 4"),
        key(ids=str(one)),
        key(drop_ids=str(one)),
        key(quota={"language": 3}),
        key(quota={"language": 4}),
        key(quota={"speaker": 3}),
    ]
    assert len(set(keys)) == len(keys)
    assert key(quota={"language": 3, "speaker": 4}) == key(quota={"speaker": 4, "language": 3})
    assert key(where=" snr < 3 ") == key(where="snr < 3")
    two.write_bytes(b"a\nc\n")
    assert key(drop_ids=str(one)) != key(drop_ids=str(two))
    assert key(where="snr < 3") == "834ff901f9ee59a71182665baef5e45b26543b8be59111c9d83585ebe9f6e3a8"


def test_a_selection_has_a_key_of_its_source_and_its_filter() -> None:
    one, two = TableSource(rows_of(9)), TableSource(rows_of(9), key="ef" * 32)
    keys = {
        filtered(source, Filter.of(FilterConfig(where=w))).key for source in (one, two) for w in ("True", "not False")
    }
    assert len(keys | {one.key, two.key}) == 6


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"where": "snr ="}, r"filter\.where: .* at character"),
        ({"where": 3}, r"filter\.where: Input should be a valid string"),
        ({"quota": {"language": 0}}, r"quota\.language is 0, wanted 1 or more"),
        ({"quota": {"language": 1.5}}, r"filter\.quota\.language: "),
        ({"quota": 3}, r"filter\.quota: "),
        ({"wher": "True"}, r"filter\.wher: unknown field; did you mean filter\.where\?"),
        ({"drop_ids": "s3://bucket/drop.txt"}, r"filter\.drop_ids: s3://bucket/drop\.txt is a URL"),
    ],
)
def test_a_config_is_refused_when_it_is_read(section: dict[str, Any], message: str) -> None:
    document = {"name": "a", "source": {"kind": "tar", "manifest": "x"}, "filter": section}
    with pytest.raises(ConfigError, match=message):
        load_config(document)


def test_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    document = {"name": "a", "source": {"kind": "tar", "manifest": "x"}, "filter": {"drop_ids": "drop.txt"}}
    config = parse_config(document, path=tmp_path / "sub" / "config.toml")
    assert config.filter.drop_ids == str(tmp_path / "sub" / "drop.txt")
    assert config.filter.is_given
    assert not parse_config({**document, "filter": {}}, path=tmp_path / "config.toml").filter.is_given
