from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.tar.header import TarWriter, id_of_key, member_key, member_size
from forebay.tar.index import load_index

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
