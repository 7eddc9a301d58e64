from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.rows.eligible import apply_filters, take_first
from forebay.rows.manifest import Manifest, row_table
from forebay.store.source_files import SourceFile
from tests.rows.helpers import audio, described, ids, read, rejected, write_manifest, write_tar


def manifest_of(rows: Sequence[tuple[str, float, str | None]]) -> Manifest:
    names, seconds, languages = zip(*rows, strict=True) if rows else ((), (), ())
    columns: dict[str, Any] = {
        "sample_id": pa.array(names, pa.large_string()),
        "group": pa.array([1] * len(rows), pa.int32()),
        "file": pa.array([1] * len(rows), pa.int32()),
        "duration_s": pa.array(seconds, pa.float64()),
        "language": pa.array(languages, pa.large_string()),
    }
    files = (SourceFile("m", Path("m")), SourceFile("a.tar", Path("a.tar"), 0, listed=False))
    return Manifest(files=files, rows=row_table(columns, num_rows=len(rows)))


def config(**settings: Any) -> SourceConfig:
    return SourceConfig(kind="tar", manifest="m", **settings)


def test_each_filter_counts_what_it_takes() -> None:
    rows = [("a", 0.5, "en"), ("b", 3.0, "EN"), ("c", 3.0, "hi"), ("d", 40.0, "en"), ("e", 3.0, None), ("f", 1.0, "en")]
    source = config(min_duration_s=1.0, max_duration_s=30.0, overlong="drop", languages=("en",), exclude=("b",))
    manifest = apply_filters(manifest_of(rows), source)
    assert ids(manifest) == ["f"]
    assert sorted(rejected(manifest)) == [
        ("a", "excluded", "too_short"),
        ("b", "excluded", "excluded_by_id"),
        ("c", "excluded", "language"),
        ("d", "excluded", "too_long"),
        ("e", "excluded", "language"),
    ]
    assert manifest.counts() == {
        "excluded": {"excluded_by_id": 1, "language": 2, "too_long": 1, "too_short": 1},
        "failed": {},
    }
    messages = dict(zip(*(manifest.rejected[name].to_pylist() for name in ("sample_id", "message")), strict=True))
    assert messages["a"] == "0.5 s is below source.min_duration_s 1"
    assert messages["c"] == "language hi is not in source.languages ['en']"
    assert messages["e"] == "language (none) is not in source.languages ['en']"


@pytest.mark.parametrize(("overlong", "kept"), [("keep", True), ("clip", True), ("drop", False)])
def test_only_drop_takes_overlong_clips(overlong: Any, *, kept: bool) -> None:
    manifest = apply_filters(manifest_of([("a", 31.0, None)]), config(max_duration_s=30.0, overlong=overlong))
    assert ids(manifest) == (["a"] if kept else [])


def test_bounds_are_inside_and_unknown_durations_pass() -> None:
    rows = [("a", 1.0, None), ("b", 30.0, None), ("c", math.nan, None)]
    source = config(min_duration_s=1.0, max_duration_s=30.0, overlong="drop")
    assert ids(apply_filters(manifest_of(rows), source)) == ["a", "b", "c"]


def test_max_samples_is_no_rejection_and_forgets_what_lies_behind() -> None:
    rows = [("a", 1.0, None), ("b", -1.0, None), ("c", 1.0, None), ("d", -1.0, None), ("e", 1.0, None)]
    manifest = apply_filters(manifest_of(rows), config())
    assert rejected(manifest) == [("b", "failed", "bad_metadata"), ("d", "failed", "bad_metadata")]
    first = take_first(manifest, 2)
    assert ids(first) == ["a", "c"]
    assert rejected(first) == [("b", "failed", "bad_metadata")]
    assert take_first(manifest, 3) is manifest
    assert take_first(manifest, None) is manifest


_rows = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.one_of(st.just(math.nan), st.floats(0, 50)),
        st.sampled_from([None, "en", "EN", "hi", "Hindi", "ß"]),
    ),
    max_size=12,
)


@given(
    rows=_rows,
    minimum=st.sampled_from([0.0, 1.0, 10.0]),
    maximum=st.sampled_from([None, 20.0, 30.0]),
    languages=st.sampled_from([None, ("en",), ("HI", "En"), ()]),
    exclude=st.sampled_from([(), ("a",), ("a", "zzz")]),
)
def test_filters_equal_a_plain_loop_and_lose_nothing(
    rows: Sequence[tuple[str, float, str | None]], minimum: float, maximum: Any, languages: Any, exclude: Any
) -> None:
    overlong: Any = "keep" if maximum is None else "drop"
    source = config(
        min_duration_s=minimum, max_duration_s=maximum, overlong=overlong, languages=languages, exclude=exclude
    )
    manifest = apply_filters(manifest_of(rows), source)
    kept = [
        (number, row)
        for number, row in enumerate(rows)
        if row[0] not in exclude
        and (languages is None or (row[2] or "").lower() in [name.lower() for name in languages])
        and not row[1] < minimum
        and not (maximum is not None and row[1] > maximum)
    ]
    assert manifest.rows["row"].to_pylist() == [number for number, _ in kept]
    both = [*manifest.rows["row"].to_pylist(), *manifest.rejected["row"].to_pylist()]
    assert sorted(both) == list(range(len(rows)))
    assert ids(apply_filters(manifest, source)) == ids(manifest)
    np.testing.assert_array_equal(manifest.rows["duration_s"].to_numpy(), [row[1] for _, row in kept])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records if "source.languages" in record.message]
    caplog.clear()
    return found


def test_languages_that_no_row_has_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"tar_member_name": f"{i}.flac", "language": tag} for i, tag in enumerate(("hi", "HI", "ta", None))]
    write_tar(tmp_path / "a.tar", {f"{i}.flac": audio(160) for i in range(4)})
    path = write_manifest(tmp_path / "m.parquet", rows)
    manifest = read("tar", path, root=tmp_path, languages=("Hi", "te", "en-US"), min_duration_s=5.0)
    assert ids(manifest) == []
    (message,) = warnings_of(caplog)
    assert message.endswith(f"no row of {path} has te, en-US; there are (none) (1), HI (1), hi (1), ta (1)")
    read("tar", path, root=tmp_path, languages=("hi", "TA"))
    read("tar", path, root=tmp_path)
    assert warnings_of(caplog) == []


def test_languages_of_tars_are_known_when_all_were_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10):
        language = "hi" if number < 9 else "ta"
        write_tar(
            tmp_path / f"{number}.tar", {"x.flac": audio(160), "x.json": described(id=str(number), language=language)}
        )
    read("webdataset", tmp_path, root=tmp_path, languages=("hi", "ta"))
    read("webdataset", tmp_path, root=tmp_path, languages=("hi", "ta"), max_samples=1)  # ta may be in what was not read
    assert warnings_of(caplog) == []
    read("webdataset", tmp_path, root=tmp_path, languages=("hi", "te"))
    assert warnings_of(caplog) == [f"source.languages: no row of {tmp_path} has te; there are hi (9), ta (1)"]
