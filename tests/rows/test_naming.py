from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.named_files import NamedFiles, manifest_files, path_stem, shown_name, usable_name
from forebay.store.source_files import SourceFile, anchor


def named(source: SourceConfig, *written: str, manifest: int = 0) -> list[str]:
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    numbers = [files.number(name, manifest=manifests[manifest]) for name in written]
    for number in numbers:
        file = files.files[number]
        # As a sealed cache finds its sources again.
        assert anchor(source.manifests[file.entry]) / file.name == file.path or file.path.samefile(
            anchor(source.manifests[file.entry]) / file.name
        )
    return [files.files[number].name for number in numbers]


def test_names_are_relative_to_the_folder_of_the_entry(tmp_path: Path) -> None:
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "sub" / "m.parquet").touch()
    (tmp_path / "out.tar").touch()
    glob = SourceConfig(kind="tar", manifest=str(tmp_path / "m" / "*" / "m.parquet"))
    assert named(glob, "a.tar", "../b.tar", str(tmp_path / "m" / "c.tar")) == ["sub/a.tar", "sub/../b.tar", "c.tar"]
    assert named(glob, "../../out.tar", str(tmp_path / "out.tar")) == ["sub/../../out.tar", str(tmp_path / "out.tar")]
    alone = SourceConfig(kind="tar", manifest=str(tmp_path / "m" / "sub" / "m.parquet"))
    assert named(alone, "a.tar", "./a.tar", "x/b.tar", "../../out.tar") == [
        "a.tar",
        "a.tar",
        "x/b.tar",
        "../../out.tar",
    ]


def test_a_moved_folder_keeps_every_name(tmp_path: Path) -> None:
    names = []
    for folder in ("here", "there/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "m.parquet").touch()
        source = SourceConfig(kind="tar", manifest=str(tmp_path / folder / "m.parquet"))
        names.append(named(source, "a.tar", "b/c.tar"))
    assert names[0] == names[1]


def test_entries_that_stand_for_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.parquet").touch()
    entries = (str(tmp_path / "m.parquet"), str(tmp_path / "*.gone"))
    with pytest.raises(ManifestError, match=r"\*\.gone does not exist; correct source\.manifest"):
        manifest_files(SourceConfig(kind="tar", manifest=entries))


@pytest.mark.parametrize(
    ("written", "stem"),
    [
        ("a.wav", "a"),
        ("d/a.b.wav", "d/a.b"),
        ("a", "a"),
        (".hidden", ".hidden"),
        ("d.x/a", "d.x/a"),
        ("d/.h.wav", "d/.h"),
    ],
)
def test_a_stem_keeps_folders(written: str, stem: str) -> None:
    assert path_stem(written) == stem


def test_names_that_no_file_has_are_told() -> None:
    assert usable_name("") == "is empty, wanted a file name"
    assert usable_name("a\0b") == "holds a NUL character, wanted a file name"
    assert usable_name("../a b.tar") is None


@given(parts=st.lists(st.sampled_from(["a", "b.c", ".d", "e.flac"]), min_size=1, max_size=3))
def test_a_stem_is_pathlibs(parts: list[str]) -> None:
    path = Path(*parts)
    assert path_stem(str(path)) == str(path.with_suffix(""))


@pytest.mark.parametrize(("name", "wanted"), [(b"a/caf\xe9.tar", r"a/caf\xe9.tar"), ("é.tar".encode(), "é.tar")])
def test_a_byte_that_is_not_utf_8_is_written_out(name: bytes, wanted: str) -> None:
    assert shown_name(SourceFile(os.fsdecode(name), Path("x"))) == wanted
