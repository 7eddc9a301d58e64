"""Every member that tarfile finds is found where tarfile finds it; what is broken is refused by name, never lost."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from forebay.errors import TarError
from forebay.tar.header import RefusedHeader, TarIndex
from forebay.tar.scan import scan_tar
from tests.strategies import tar_contents
from tests.tar.files import END, FORMATS, clips, header, member, padded, pax, tar_bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tars") / "some.tar"


def scan(path: Path, data: bytes) -> TarIndex:
    path.write_bytes(data)
    return scan_tar(path)


def listed(index: TarIndex) -> list[tuple[str, int, int]]:
    return list(zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True))


def listed_by_tarfile(data: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        return [(m.name.removeprefix("./"), m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]


@given(members=tar_contents(), tar_format=st.sampled_from(FORMATS), mtime=st.sampled_from([0, 1.5]))
@example(members=[("./" + "d" * 120 + "/x.wav", b"1"), (".hidden", b""), ("..x", b"2")], tar_format=1, mtime=0)
def test_lists_what_tarfile_lists(path: Path, members: list[tuple[str, bytes]], tar_format: int, mtime: float) -> None:
    try:
        data = tar_bytes(members, tar_format=tar_format, mtime=mtime)
    except ValueError:  # a name that ustar cannot hold
        reject()
    index = scan(path, data)
    assert listed(index) == listed_by_tarfile(data)
    assert index.refused == ()
    for row, (_, content) in enumerate(members):
        assert data[index.offsets[row] :][: index.sizes[row]] == content
    names = index.names
    last = {name: row for row, name in enumerate(names)}
    for name in names:
        assert index.find("./" + name) == last[name]
        assert index.find(name) in (last[name], last.get(name.removeprefix("./")))
    assert set(index.rows) == set(names)


@pytest.mark.parametrize("tar_format", FORMATS)
@pytest.mark.parametrize("size", [0, 300, 8_000, 70_000])
@pytest.mark.few
def test_lists_more_members_than_one_run_holds(path: Path, tar_format: int, size: int) -> None:
    count = 2600 if size < 8_000 else 300
    data = tar_bytes(clips(count, size=size), tar_format=tar_format, mtime=0.5)
    index = scan(path, data)
    assert len(index) == count
    assert listed(index) == listed_by_tarfile(data)


def test_of_names_only_one_leading_dot_slash_is_removed(path: Path) -> None:
    names = ["./a", "././b", "../c", ".hidden", "..x", "/abs", "d/./e"]
    index = scan(path, tar_bytes([(name, b"") for name in names]))
    assert index.names == ["a", "./b", "../c", ".hidden", "..x", "/abs", "d/./e"]
    assert [index.find("a"), index.find("./a"), index.find(".hidden"), index.find("hidden")] == [0, 0, 3, None]


def test_of_equal_names_the_last_is_found_and_the_others_are_counted(path: Path) -> None:
    index = scan(path, tar_bytes([("a", b"1"), ("b", b"22"), ("./a", b"333")]))
    assert (index.find("a"), len(index.rows), index.names) == (2, 2, ["a", "b", "a"])


def test_sizes_in_base_256_and_in_twelve_digits_are_read(path: Path) -> None:
    base256 = b"\x80" + (5).to_bytes(11, "big")
    data = header(b"a", base256) + padded(b"12345") + header(b"b", b"000000000003") + padded(b"678")
    data += header(b"c", b"     4 \0\0\0\0\0") + padded(b"abcd") + END
    assert listed(scan(path, data)) == listed_by_tarfile(data) == [("a", 512, 5), ("b", 1536, 3), ("c", 2560, 4)]


def test_v7_and_signed_checksums_and_other_paddings_are_valid(path: Path) -> None:
    data = member(b"old", b"1", kind=b"\0", magic=b"") + member(b"folder/", b"", kind=b"\0", magic=b"")
    name = "\u00fcber".encode()
    data += member(name, b"2", signed=True)
    plain = header(b"p", 0)
    total = int(plain[148:154], 8)
    data += header(b"p", 0, checksum=b"%07o\0" % total) + header(b"p", 0, checksum=b"%7o " % total) + END
    index = scan(path, data)
    assert index.names == ["old", "\u00fcber", "p", "p"]
    assert listed(index) == listed_by_tarfile(data)
    assert index.refused == ()


def test_the_prefix_of_ustar_is_part_of_the_name_and_that_of_gnu_is_not(path: Path) -> None:
    data = member(b"x", b"", prefix=b"a/b") + member(b"y", b"", magic=b"ustar  \0", prefix=b"12345670123\0") + END
    assert scan(path, data).names == ["a/b/x", "y"]


def test_pax_path_and_size_win_over_the_header(path: Path) -> None:
    data = pax({"path": "long \u0928\u092e", "size": "3", "mtime": "1.5"}) + header(b"short", 0) + padded(b"abc")
    data += pax({"path": ""}) + member(b"kept", b"") + pax({"comment": "git"}, kind=b"g") + member(b"z", b"1") + END
    assert listed(scan(path, data)) == [("long \u0928\u092e", 1536, 3), ("kept", 3584, 0), ("z", 5120, 1)]


def test_global_pax_headers_hold_for_all_that_follow(path: Path) -> None:
    data = member(b"a", b"") + pax({"path": "g"}, kind=b"g") + member(b"b", b"") + pax({"path": "own"})
    data += member(b"c", b"") + member(b"d", b"") + END
    assert scan(path, data).names == ["a", "g", "own", "g"]


def test_links_devices_and_sparse_members_are_refused_by_name_and_folders_skipped(path: Path) -> None:
    sparse = bytearray(header(b"sparse", 512, kind=b"S", magic=b"ustar  \0"))
    sparse[482] = 1  # one more block of the map follows
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    data = header(b"hard", 700, kind=b"1") + header(b"soft", 0, kind=b"2") + header(b"pipe", 0, kind=b"6")
    data += bytes(sparse) + bytes(512) + padded(b"s" * 512) + header(b"dir/", 0, kind=b"5") + header(b"v", 0, kind=b"V")
    data += pax({"GNU.sparse.major": "1", "GNU.sparse.name": "real", "path": "GNUSparseFile.0/real"}) + member(
        b"g", b"1"
    )
    data += member(b"odd", b"12", kind=b"Q") + member(b"", b"1") + member(b"good", b"1") + END
    index = scan(path, data)
    assert index.names == ["good"]
    assert [(name, reason) for name, reason, _ in index.refused] == [
        ("hard", "hard_link"),
        ("soft", "symlink"),
        ("pipe", "special_file"),
        ("sparse", "sparse"),
        ("real", "sparse"),
        ("odd", "unknown_type"),
        ("", "no_name"),
    ]
    assert index.find_refused("./sparse") == RefusedHeader("sparse", "sparse", 1536)
    assert index.find_refused("good") is None


def test_an_archive_behind_the_end_mark_is_found(path: Path) -> None:
    first, second = tar_bytes(clips(3)), tar_bytes([("more/a", b"1"), ("more/b", b"2")])
    index = scan(path, first + bytes(3 * 1024 * 1024) + second)
    assert index.names == [name for name, _ in clips(3)] + ["more/a", "more/b"]
    assert index.refused == ()


def test_one_bad_checksum_costs_one_member(path: Path) -> None:
    members = clips(20)
    data = bytearray(tar_bytes(members))
    start = 7 * 1536
    data[start + 3] ^= 0x20
    index = scan(path, bytes(data))
    assert len(listed_by_tarfile(bytes(data))) == 7  # tarfile stops there without a word
    assert index.names == [name for name, _ in members[:7] + members[8:]]
    assert index.refused == (RefusedHeader(bytes(data[start : start + 15]).decode(), "bad_checksum", start),)


@given(count=st.integers(1, 9), row=st.integers(0, 8), byte=st.integers(0, 511), flip=st.integers(1, 255))
def test_a_broken_header_never_costs_another_member(path: Path, count: int, row: int, byte: int, flip: int) -> None:
    # A header that now looks like the name of the next member costs that too: it could have another name.
    assume(byte != 156 or chr(ord("0") ^ flip) not in "KLXgx")
    row %= count
    data = bytearray(tar_bytes(clips(count)))
    data[row * 1536 + byte] ^= flip
    try:
        index = scan(path, bytes(data))
    except TarError:
        assert count == 1
        return
    offsets = [512 + 1536 * other for other in range(count)]
    others = [offset for offset in offsets if offset != offsets[row]]
    assert [offset for offset in index.offsets.tolist() if offset != offsets[row]] == others
    broken = [refused.offset for refused in index.refused]
    assert (offsets[row] in index.offsets.tolist()) != (broken == [row * 1536])


@pytest.mark.parametrize("byte", [0, 126, 150, 156])
@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_member_behind_a_broken_extended_header_does_not_get_a_wrong_name(
    path: Path, tar_format: int, byte: int
) -> None:
    data = bytearray(tar_bytes([("d" * 150, b"1"), ("good", b"2")], tar_format=tar_format))
    data[byte] ^= 0x01
    index = scan(path, bytes(data))
    assert index.names == ["good"]
    assert [reason for _, reason, _ in index.refused] == ["bad_checksum", "bad_extended_header"]
    assert index.refused[1].name == "d" * 100


def test_truncated_members_and_headers_are_refused(path: Path) -> None:
    data = tar_bytes(clips(3))
    index = scan(path, data[: 2 * 1536 + 512 + 100])
    assert index.names == ["clips/0000.flac", "clips/0001.flac"]
    assert index.refused == (RefusedHeader("clips/0002.flac", "truncated", 2 * 1536),)
    index = scan(path, data[: 1536 + 200])
    assert index.refused == (RefusedHeader("clips/0001.flac", "truncated", 1536),)
    index = scan(path, data[: 2 * 1536 + 512 + 700])  # all of the data, not all of its padding
    assert (len(index), index.refused) == (3, ())


@pytest.mark.parametrize("end", [600, 1024, 1536 - 1])
def test_an_extended_header_without_its_member_is_refused(path: Path, end: int) -> None:
    data = member(b"a", b"") + tar_bytes([("d" * 150, b"")], tar_format=tarfile.GNU_FORMAT)
    index = scan(path, data[: 512 + end])
    assert index.names == ["a"]
    assert {reason for _, reason, _ in index.refused} == {"truncated"}


@pytest.mark.parametrize(
    "payload", [b"9 path\n", b"x path=a\n", b"99 path=a\n", b"9 path=ab", b"12 size=abc\n", b"0 path=b\n"]
)
def test_a_member_with_broken_pax_records_is_refused(path: Path, payload: bytes) -> None:
    data = member(b"PaxHeaders/a", payload, kind=b"x") + member(b"a", b"1") + member(b"b", b"2") + END
    index = scan(path, data)
    assert index.names == ["b"]
    assert index.refused == (RefusedHeader("a", "bad_extended_header", 1024),)


def test_pax_records_of_times_alone_change_nothing_and_lose_nothing(path: Path) -> None:
    times = pax({"mtime": "1.5", "atime": "2.5"})
    data = times + member(b"a", b"1") + times + header(b"dir/", 0, kind=b"5") + times + header(b"l", 0, kind=b"2")
    data += times + times + member(b"./b", b"2") + times + member(b"", b"3") + times
    index = scan(path, data + END)
    assert index.names == ["a", "b"]
    assert [(name, reason) for name, reason, _ in index.refused] == [
        ("l", "symlink"),
        ("", "no_name"),
        ("", "truncated"),
    ]
    broken = bytearray(data + END)
    broken[5] ^= 1
    assert scan(path, bytes(broken)).refused[:2] == (
        RefusedHeader("PaxHe`ders/x", "bad_checksum", 0),
        RefusedHeader("a", "bad_extended_header", 1024),
    )


def test_sizes_that_are_no_numbers_or_negative_cost_one_member(path: Path) -> None:
    data = header(b"word", b"size\0\0\0\0\0\0\0\0") + header(b"minus", b"\xff" * 12) + header(b"text", b"-0000000001\0")
    data += (
        header(b"long", b"oops\0\0\0\0\0\0\0\0", kind=b"L") + member(b"lost name", b"") + member(b"good", b"1") + END
    )
    index = scan(path, data)
    assert index.names == ["good"]
    assert [(name, reason) for name, reason, _ in index.refused] == [
        ("word", "bad_size"),
        ("minus", "bad_size"),
        ("text", "bad_size"),
        ("long", "bad_size"),
        ("lost name", "bad_extended_header"),
    ]


def test_a_giant_extended_header_is_not_read(path: Path) -> None:
    giant = 3 * 1024**3
    with open(path, "wb") as file:  # a hole: the bytes are there, and cost nothing until somebody asks for them
        file.write(header(b"PaxHeaders/a", giant, kind=b"x"))
        file.seek(512 + giant)
        file.write(member(b"a", b"1") + member(b"b", b"2") + END)
    tracemalloc.start()
    index = scan_tar(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    path.write_bytes(b"")
    assert index.names == ["b"]
    assert index.refused == (RefusedHeader("a", "extended_header_too_large", 512 + giant),)
    assert peak_bytes < 8 * 1024**2


def test_a_run_may_end_between_an_extended_header_and_its_member(path: Path) -> None:
    for count in range(1020, 1028):
        members = [(str(row), b"") for row in range(count)] + [("d" * 120, b"1"), ("z", b"2")]
        data = tar_bytes(members, tar_format=tarfile.GNU_FORMAT)
        assert listed(scan(path, data)) == listed_by_tarfile(data)
    cut = scan(path, (pax({"mtime": "1"}) + member(b"a", b"")) * 512 + pax({"mtime": "1"}) * 1024)
    assert len(cut) == 512
    assert {reason for _, reason, _ in cut.refused} == {"truncated"}
    chain = pax({"path": "chained"}) * 3_000 + member(b"a", b"") + END
    assert scan(path, chain).names == ["chained"]


def test_many_large_extended_headers_do_not_add_up(path: Path) -> None:
    one = pax({"path": "p" * 60_000, "comment": "c" * 900_000})
    path.write_bytes((one + member(b"a", b"")) * 40 + END)
    tracemalloc.start()
    index = scan_tar(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 40
    assert peak_bytes < 12 * 1024**2  # of 37 MiB of headers
    long = scan(path, pax({"path": "p" * 70_000}) + member(b"a", b"") + END)
    assert [(name, reason) for name, reason, _ in long.refused] == [("a", "extended_header_too_large")]


@pytest.mark.parametrize(
    ("compress", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz"), (None, "zstd")]
)
def test_compressed_tars_are_refused_by_kind(path: Path, compress: object, kind: str) -> None:
    data = tar_bytes(clips(30))
    path.write_bytes(compress(data) if callable(compress) else b"\x28\xb5\x2f\xfd" + data)
    with pytest.raises(TarError, match=rf"some\.tar is compressed \({kind}\).*decompress"):
        scan_tar(path)


def test_a_name_may_look_like_a_compressed_file(path: Path) -> None:
    assert scan(path, tar_bytes([("BZh.flac", b"1")])).names == ["BZh.flac"]


def test_files_that_are_no_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    like_a_header = header(b"a", 0, checksum=b"000001\0 ")
    for data, message in [
        (b"", "is empty"),
        (b"hello" * 999, "is no tar"),
        (b"\0" * 100, "is no tar"),
        (bytes(512) + b"hello" * 999, "is no tar"),
        (like_a_header + END, "is no tar"),
    ]:
        path.write_bytes(data)
        with pytest.raises(TarError, match=message):
            scan_tar(path)
    with pytest.raises(TarError, match=r"cannot read tar .*missing.tar: No such file"):
        scan_tar(tmp_path / "missing.tar")
    with pytest.raises(TarError, match="not a regular file"):
        scan_tar(tmp_path)
    with pytest.raises(TarError, match=r"cannot read tar .*null"):
        scan_tar("a\0b")
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(TarError, match="not a regular file"):
        scan_tar(tmp_path / "pipe.tar")


def test_an_archive_without_members_is_empty(path: Path) -> None:
    index = scan(path, tar_bytes([]))
    assert (len(index), index.names, index.refused, index.find("a")) == (0, [], (), None)


def test_a_tar_that_grows_under_the_scan_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(tar_bytes(clips(3)))
    read = os.pread

    def read_and_grow(descriptor: int, size: int, offset: int) -> bytes:
        with open(path, "ab") as file:
            file.write(b"more")
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", read_and_grow)
    with pytest.raises(TarError, match="changed while it was indexed"):
        scan_tar(path)


def test_read_errors_name_the_tar(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(tar_bytes(clips(3)))

    def fail(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(TarError, match=r"cannot read tar .*some\.tar: Input/output error"):
        scan_tar(path)


@given(
    members=tar_contents(),
    tar_format=st.sampled_from(FORMATS[1:]),
    flips=st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 255)), max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 40_000)),
)
def test_damage_gives_a_typed_error_or_ranges_within_the_file(
    path: Path, members: list[tuple[str, bytes]], tar_format: int, flips: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(tar_bytes(members, tar_format=tar_format))
    for position, flip in flips:
        data[position % len(data)] ^= flip
    try:
        index = scan(path, bytes(data[:cut]))
    except TarError:
        return
    ends = index.offsets + index.sizes
    assert (index.sizes >= 0).all()
    assert (index.offsets % 512 == 0).all()
    assert (ends <= len(data[:cut])).all()
    assert len(index.names) == len(index.offsets)
