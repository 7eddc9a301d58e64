from __future__ import annotations

import copy
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheIncompleteError,
    CacheMismatchError,
    CacheNotFoundError,
)
from forebay.store.metadata import check_file, load_array, read_metadata, save_array, save_file, write_metadata
from tests.strategies import json_documents

DOCUMENT: dict[str, Any] = {
    "format_version": 1,
    "key": "ab" * 32,
    "constants": {"pad": [1e-05, -1.5], "name": "é \ud83d", "table": [0, 255]},
}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sealed")
    write_metadata(folder, DOCUMENT)
    return (folder / "metadata.json").read_bytes()


@given(st.dictionaries(st.text(), json_documents(), max_size=4))
def test_a_document_comes_back(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp()
    document = {k: v for k, v in document.items() if k != "checksum"}
    before = copy.deepcopy(document)
    write_metadata(folder, document)
    read = read_metadata(folder, format_version=1)
    assert read.pop("checksum")
    assert read == before
    assert document == before


@given(st.data())
def test_every_changed_byte_is_found(
    sealed: bytes, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    position = draw.draw(st.integers(0, len(sealed) - 1))
    byte = draw.draw(st.integers(0, 255).filter(lambda value: value != sealed[position]))
    (folder / "metadata.json").write_bytes(sealed[:position] + bytes([byte]) + sealed[position + 1 :])
    with pytest.raises(CacheError, match=str(folder)):
        read_metadata(folder, format_version=1)


def test_every_truncation_is_found(sealed: bytes, tmp_path: Path) -> None:
    for size in range(len(sealed)):
        (tmp_path / "metadata.json").write_bytes(sealed[:size])
        with pytest.raises(CacheCorruptError, match=r"metadata\.json is not"):
            read_metadata(tmp_path, format_version=1)


@pytest.mark.parametrize(
    ("old", "new"), [(b"1e-05", b"1E-05"), (b"\n ", b"\n\t"), (b"\\u00e9", b"\\u00E9"), (b"\n}\n", b"\n} ")]
)
def test_the_same_values_in_another_spelling_are_no_seal(sealed: bytes, tmp_path: Path, old: bytes, new: bytes) -> None:
    assert old in sealed
    (tmp_path / "metadata.json").write_bytes(sealed.replace(old, new, 1))
    with pytest.raises(CacheCorruptError, match=r"is not as it was written; run: forebay preprocess CONFIG --rebuild"):
        read_metadata(tmp_path, format_version=1)


def test_a_changed_value_is_named_with_both_checksums(sealed: bytes, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(sealed.replace(b"255", b"254"))
    with pytest.raises(CacheCorruptError, match=r"stored checksum [0-9a-f]{32}, computed [0-9a-f]{32}; run:"):
        read_metadata(tmp_path, format_version=1)


def test_a_newer_format_is_refused_by_name_before_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"format_version": 3, "checksum": "in another way"}))
    with pytest.raises(CacheMismatchError, match=r"format_version is 3, this forebay reads up to 2; upgrade forebay"):
        read_metadata(tmp_path, format_version=2)


def test_an_older_format_is_read_where_the_caller_knows_it(tmp_path: Path) -> None:
    write_metadata(tmp_path, {**DOCUMENT, "recipe_key": "ab"})
    assert read_metadata(tmp_path, format_version=2, oldest=1)["format_version"] == 1
    with pytest.raises(CacheMismatchError, match="format_version is 1, this forebay reads 2; make it anew"):
        read_metadata(tmp_path, format_version=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[1]", "holds list, wanted an object"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": NaN}', "holds values that a cache never has"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b"{}\n", "stored checksum None"),
    ],
)
def test_what_is_no_document_is_corrupt(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "metadata.json").write_bytes(content)
    with pytest.raises(CacheCorruptError, match=message):
        read_metadata(tmp_path, format_version=1)


def test_a_document_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "metadata.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CacheCorruptError, match=r"has 1099511627776 bytes, at most \d+ are expected"):
        read_metadata(tmp_path, format_version=1)


def test_a_folder_without_metadata_is_incomplete_and_no_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CacheIncompleteError, match=r"has no metadata\.json: it is not sealed; run: forebay preprocess"):
        read_metadata(tmp_path, format_version=1)
    with pytest.raises(CacheNotFoundError, match="nowhere is not a folder"):
        read_metadata(tmp_path / "nowhere", format_version=1)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheNotFoundError, match="file is not a folder"):
        read_metadata(tmp_path / "file", format_version=1)


def test_a_disk_that_fails_is_no_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metadata(tmp_path, DOCUMENT)

    def broken(self: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(CacheError, match=r"cannot read .*metadata\.json: Input/output error") as caught:
        read_metadata(tmp_path, format_version=1)
    assert type(caught.value) is CacheError


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, np.float32(1), {1, 2}])
def test_what_json_cannot_hold_is_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"not JSON|canonical document"):
        write_metadata(tmp_path, {"a": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (4,), (2, 3)])
@pytest.mark.parametrize("verify", [True, False])
def test_arrays_come_back_read_only(tmp_path: Path, *, shape: tuple[int, ...], verify: bool) -> None:
    array = np.arange(np.prod(shape), dtype="<i8").reshape(shape)
    entry = save_array(tmp_path, "a.npy", array)
    loaded = load_array(tmp_path, "a.npy", entry, verify=verify)
    np.testing.assert_array_equal(loaded, array, strict=True)
    assert not loaded.flags.writeable


def test_a_file_is_checked_by_size_and_where_asked_by_content(tmp_path: Path) -> None:
    entry = save_file(tmp_path, "a", b"bytes")
    check_file(tmp_path / "a", entry, verify=True)
    (tmp_path / "a").write_bytes(b"Bytes")
    check_file(tmp_path / "a", entry, verify=False)
    with pytest.raises(CacheCorruptError, match=r"a: stored xxh3-128 [0-9a-f]{32}, computed [0-9a-f]{32}; run:"):
        check_file(tmp_path / "a", entry, verify=True)
    (tmp_path / "a").write_bytes(b"byte")
    with pytest.raises(CacheCorruptError, match="a has 4 bytes, its metadata says 5; run:"):
        check_file(tmp_path / "a", entry, verify=False)
    (tmp_path / "a").unlink()
    with pytest.raises(CacheCorruptError, match="a is missing; run:"):
        check_file(tmp_path / "a", entry, verify=False)


@pytest.mark.parametrize("data", [b"", b"PK", b"\x93NUMPY\x01\x00\xff\xff", b"\x80\x04N."])
def test_what_is_no_array_is_corrupt_and_never_unpickled(tmp_path: Path, data: bytes) -> None:
    entry = save_file(tmp_path, "a.npy", data)
    with pytest.raises(CacheCorruptError, match=r"a\.npy is not a \.npy file"):
        load_array(tmp_path, "a.npy", entry, verify=True)


def test_a_folder_of_caches_says_which_there_are(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        write_metadata(tmp_path / name, {"format_version": 1})
    with pytest.raises(CacheIncompleteError, match=r"is no cache but holds 2, the first is a; .*forebay cache ls"):
        read_metadata(tmp_path, format_version=1)
