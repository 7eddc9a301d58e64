"""An index is kept while it is true, and made again as soon as it is not."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.errors import BuildError, TarError
from forebay.store import files
from forebay.store.files import TEMPORARY_MARK
from forebay.tar import index as tar_index
from forebay.tar.header import TarIndex, TarWriter, id_of_key, member_key, member_size
from forebay.tar.index import current_index, export_json, index_path, is_indexed, json_path, load_index
from forebay.tar.scan import scan_tar
from tests.strategies import tar_contents
from tests.tar.files import clips, settle, tar_bytes


def same(a: TarIndex | None, b: TarIndex) -> bool:
    assert a is not None
    return (a.names, a.offsets.tolist(), a.sizes.tolist(), a.refused, a.stamp) == (
        b.names,
        b.offsets.tolist(),
        b.sizes.tolist(),
        b.refused,
        b.stamp,
    )


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "train-0.tar"
    path.write_bytes(tar_bytes(clips(5)))
    settle(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "caches"


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> TarIndex:
        raise AssertionError(f"{path} was scanned")

    monkeypatch.setattr(tar_index, "scan_tar", refuse)


def keep(tar: Path, root: Path) -> TarIndex:
    index = load_index(tar, cache_root=root)
    assert is_indexed(tar, cache_root=root)
    return index


@given(members=tar_contents(), tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_what_is_kept_is_what_was_scanned(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]], tar_format: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    path = folder / "a.tar"
    path.write_bytes(tar_bytes(members, tar_format=tar_format)[: 512 * 11 + 7])
    scanned = load_index(path, cache_root=folder)
    kept, _ = tar_index._read(index_path(path, cache_root=folder), str(path))
    assert same(kept, scanned)
    assert same(scanned, scan_tar(path))
    assert scanned.offsets.dtype == scanned.sizes.dtype == np.int64  # 16 bytes a member


def test_a_current_index_is_read_without_a_scan(tar: Path, root: Path, request: pytest.FixtureRequest) -> None:
    scanned = keep(tar, root)
    request.getfixturevalue("no_scan")
    assert same(load_index(str(tar), cache_root=str(root)), scanned)
    assert same(current_index(tar, cache_root=root), scanned)
    assert pq.read_table(index_path(tar, cache_root=root)).column_names == ["name", "offset", "size"]
    assert [path.name for path in root.rglob("*") if TEMPORARY_MARK in path.name] == []


def test_an_edit_that_keeps_size_and_time_is_seen(tar: Path, root: Path) -> None:
    before = os.stat(tar)
    keep(tar, root)
    tar.write_bytes(tar_bytes([(name.replace("clips", "other"), data) for name, data in clips(5)]))
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(tar).st_size == before.st_size
    assert current_index(tar, cache_root=root) is None
    assert load_index(tar, cache_root=root).names[0] == "other/0000.flac"


def test_a_tar_that_was_replaced_is_seen(tar: Path, root: Path) -> None:
    keep(tar, root)
    other = tar.with_name("other.tar")
    other.write_bytes(tar_bytes(clips(4)))
    other.replace(tar)
    assert len(load_index(tar, cache_root=root)) == 4


def test_an_index_made_in_the_tick_of_the_last_change_is_not_trusted(tar: Path, root: Path) -> None:
    index = scan_tar(tar)
    tar_index._keep(index, index_path(tar, cache_root=root), index.stamp.ctime_ns + 1_000_000)
    assert current_index(tar, cache_root=root) is None
    assert is_indexed(tar, cache_root=root)
    assert same(load_index(tar, cache_root=root), index)
    assert same(current_index(tar, cache_root=root), index)


def test_the_same_tar_by_another_path_has_one_index(tar: Path, root: Path) -> None:
    link = tar.with_name("link.tar")
    link.symlink_to(tar)
    assert index_path(link, cache_root=root) == index_path(tar, cache_root=root)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_index_is_made_again(
    tmp_path_factory: pytest.TempPathFactory, *, position: int, flip: int, cut: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    tar = folder / "a.tar"
    if not tar.exists():
        tar.write_bytes(tar_bytes(clips(5)) + bytes(512) + b"x" * 512)
        settle(tar)
    scanned = load_index(tar, cache_root=folder)
    path = index_path(tar, cache_root=folder)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= flip
    path.write_bytes(data[: position % len(data)] if cut else data)
    assert same(load_index(tar, cache_root=folder), scanned)
    assert same(load_index(tar, cache_root=folder), scanned)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not a parquet file", None])
def test_a_foreign_file_in_its_place_is_replaced(tar: Path, root: Path, data: bytes | None) -> None:
    path = index_path(tar, cache_root=root)
    path.parent.mkdir(parents=True)
    if data is None:
        import pyarrow as pa

        pq.write_table(pa.table({"offset": [1]}), path)
    else:
        path.write_bytes(data)
    assert same(load_index(tar, cache_root=root), scan_tar(tar))
    assert same(current_index(tar, cache_root=root), scan_tar(tar))


def test_an_index_of_another_version_is_made_again(tar: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_index, "_VERSION", 99)
    keep(tar, root)
    monkeypatch.undo()
    assert current_index(tar, cache_root=root) is None
    assert len(load_index(tar, cache_root=root)) == 5


def test_two_at_once_give_one_right_index(tar: Path, root: Path) -> None:
    found: list[TarIndex] = []
    threads = [threading.Thread(target=lambda: found.append(load_index(tar, cache_root=root))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(same(index, scan_tar(tar)) for index in found)
    assert [path.suffix for path in (root / "tar_index").iterdir()] == [".parquet"]


def test_a_full_disk_is_an_error_and_a_read_only_root_is_not(
    tar: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> None:
        def write(path: Path, data: memoryview) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(files, "write_bytes", write)

    fail(errno.ENOSPC)
    with pytest.raises(BuildError, match=r"index of .*train-0\.tar at .*No space left on device; free space"):
        load_index(tar, cache_root=root)
    fail(errno.EROFS)
    assert len(load_index(tar, cache_root=root)) == 5
    assert not is_indexed(tar, cache_root=root)


def test_tars_that_cannot_be_read_are_named(tmp_path: Path, root: Path) -> None:
    with pytest.raises(TarError, match=r"missing\.tar: No such file"):
        load_index(tmp_path / "missing.tar", cache_root=root)
    with pytest.raises(TarError, match=r"cannot read tar 'a\\x00b'"):
        load_index("a\0b", cache_root=root)
    (tmp_path / "text.tar").write_text("no tar")
    with pytest.raises(TarError, match=r"text\.tar is no tar"):
        load_index(tmp_path / "text.tar", cache_root=root)


def test_refused_members_are_logged_and_kept(
    tar: Path, root: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    data = tar.read_bytes()
    tar.write_bytes(data[: 4 * 1536 + 600])
    settle(tar)
    load_index(tar, cache_root=root)
    assert "1 members refused, first 'clips/0004.flac' at offset 6144: truncated" in caplog.text
    request.getfixturevalue("no_scan")
    assert load_index(tar, cache_root=root).find_refused("clips/0004.flac") is not None


def test_an_exported_index_is_what_other_tools_expect_and_is_used(
    tar: Path, root: Path, request: pytest.FixtureRequest
) -> None:
    members = [*clips(3), ("\udcff\u00e9\n", b"1"), ("clips/0000.flac", b"again")]
    tar.write_bytes(tar_bytes(members, tar_format=tarfile.GNU_FORMAT))
    scanned = scan_tar(tar)
    export_json(scanned, json_path(tar))
    document = json.loads((tar.parent / "train-0.tar.index.json").read_bytes())
    data = tar.read_bytes()
    assert {name: data[e["offset"] : e["offset"] + e["size"]] for name, e in document.items()} == dict(members)
    request.getfixturevalue("no_scan")
    loaded = load_index(tar, cache_root=root)
    assert {name: loaded.offsets[loaded.find(name)] for name, _ in members} == {
        name: scanned.offsets[scanned.find(name)] for name, _ in members
    }
    assert is_indexed(tar, cache_root=root)


def test_an_exported_index_older_than_its_tar_is_not_used(tar: Path, root: Path) -> None:
    export_json(scan_tar(tar), json_path(tar))
    os.utime(json_path(tar), ns=(0, os.stat(tar).st_mtime_ns - 1))
    assert current_index(tar, cache_root=root) is None
    assert not is_indexed(tar, cache_root=root)


@pytest.mark.parametrize(
    "document",
    [
        "no json",
        "[1]",
        "[" * 100_000,
        '{"a": 1}',
        '{"a": {"offset": 512}}',
        '{"a": {"offset": true, "size": 1}}',
        '{"a": {"offset": 512.0, "size": 1}}',
        '{"a": {"offset": 512, "size": -1}}',
        '{"a": {"offset": 512, "size": 99999999}}',
        '{"a": {"offset": 513, "size": 1}}',
        '{"a": {"offset": 0, "size": 1}}',
        '{"a": {"offset": 1024, "size": 1}}',
        '{"clips/0000.flac": {"offset": 512, "size": 699}}',
        '{"clips/0001.flac": {"offset": 512, "size": 700}}',
        '{"\\ud800": {"offset": 512, "size": 1}}',
    ],
)
def test_an_exported_index_that_is_not_true_is_not_used(
    tar: Path, root: Path, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    json_path(tar).write_text(document)
    assert same(load_index(tar, cache_root=root), scan_tar(tar))
    assert "train-0.tar.index.json is not used" in caplog.text


def test_importing_the_index_loads_no_pyarrow() -> None:
    import subprocess
    import sys

    code = "import sys, forebay.tar.index, forebay.tar.scan; print({'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


IDS = st.text(st.characters(codec="utf-8"), max_size=400) | st.binary(max_size=20).map(
    lambda data: data.decode("utf-8", "surrogateescape")
)


@given(IDS)
@example("")
@example("../../etc/passwd")
@example("a/b.c~d")
@example("x" * 180)
@example("x" * 181)
@example("100%2E")
def test_a_key_is_a_safe_name_before_the_first_dot(sample_id: str) -> None:
    key = member_key(sample_id)
    assert re.fullmatch(r"[A-Za-z0-9_%-]{1,180}", key)
    # the rule by which webdataset takes a name apart
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", f"{key}.input_features.npy")
    assert match is not None
    assert match.groups() == (key, "input_features.npy")


@given(IDS)
@example("%%" + "0" * 32)
def test_an_id_comes_back_from_its_key_unless_the_key_was_cut(sample_id: str) -> None:
    key = member_key(sample_id)
    assert id_of_key(key) == (sample_id if "%%" not in key else None)


@given(st.lists(IDS, unique=True, min_size=2, max_size=6))
@example(["x" * 200 + "a", "x" * 200 + "b"])
@example(["a/b", "a%2Fb"])
@example(["a", "A"])
def test_different_ids_have_different_keys(ids: list[str]) -> None:
    assert len({member_key(each) for each in ids}) == len(ids)


def test_an_ordinary_id_is_its_own_key() -> None:
    assert member_key("clip-0001_en") == "clip-0001_en"
    assert member_key("a/b.c") == "a%2Fb%2Ec"


@given(st.lists(st.tuples(IDS, st.binary(max_size=1500)), max_size=5, unique_by=lambda each: each[0]))
def test_a_tar_is_read_by_tarfile_and_says_nothing_of_its_writer(members: list[tuple[str, bytes]]) -> None:
    file = io.BytesIO()
    tar, sizes = TarWriter(file), []
    for sample_id, data in members:
        name, before = f"{member_key(sample_id)}.npy", tar.size_bytes
        offset = tar.add(name, data)
        assert tar.size_bytes - before == member_size(name, len(data))
        assert file.getvalue()[offset : offset + len(data)] == data
        sizes.append((name, len(data)))
    tar.close()
    assert len(file.getvalue()) == tar.size_bytes
    assert tar.size_bytes % 10_240 == 0
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as found:
        infos = found.getmembers()
        assert [(info.name, info.size) for info in infos] == sizes
        assert all((i.mtime, i.uid, i.gid, i.uname, i.gname, i.mode) == (0, 0, 0, "", "", 0o644) for i in infos)
        for info, (_, data) in zip(infos, members, strict=True):
            read = found.extractfile(info)
            assert read is not None
            assert read.read() == data


@pytest.mark.parametrize("length", [95, 96, 97, 176])
def test_names_beyond_a_header_are_read_by_tarfile_and_by_forebay(tmp_path: Path, length: int) -> None:
    path = tmp_path / "long.tar"
    with open(path, "wb") as file:
        tar = TarWriter(file)
        places = {f"{'x' * length}.wav": tar.add(f"{'x' * length}.wav", b"sound"), "b.json": tar.add("b.json", b"{}")}
        tar.close()
    index = load_index(str(path), cache_root=str(tmp_path))
    assert dict(zip(index.names, index.offsets.tolist(), strict=True)) == places
    with tarfile.open(path) as found:
        assert found.getnames() == list(places)
