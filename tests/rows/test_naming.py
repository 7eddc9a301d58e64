from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.named_files import NamedFiles, manifest_files, path_stem, shown_name, usable_name
from forebay.rows.source_table import SourceFiles
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


_PART = st.sampled_from(["a", "b", "..", ".", "", "é", "c d"])
_WRITTEN = st.lists(st.lists(_PART, min_size=1, max_size=4).map("/".join).filter(bool), max_size=8)


class OneByOne:
    """Numbers of files as `pathlib` joins and compares their names, one after the other."""

    def __init__(self, manifests: list[SourceFile], bases: list[Path]) -> None:
        self.files, self._bases = [(file.name, file.path) for file in manifests], bases

    def number(self, written: str, *, folder: Path, entry: int) -> int:
        path, base = folder / written, self._bases[entry]
        if path not in [known for _, known in self.files]:
            if path.is_relative_to(base):
                name = path.relative_to(base).as_posix()
            elif PurePosixPath(written).is_absolute():
                name = written
            else:
                name = (Path(os.path.relpath(path.parent, base)) / path.name).as_posix()
            self.files.append((name, path))
        return [known for _, known in self.files].index(path)


@given(blocks=st.lists(st.tuples(st.integers(0, 1), _WRITTEN), max_size=4), is_elsewhere=st.booleans())
def test_names_of_a_column_are_numbered_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[int, list[str]]], *, is_elsewhere: bool
) -> None:
    root = tmp_path_factory.getbasetemp() / "m"
    for below in ("one/sub", "two/sub", "media"):
        (root / below).mkdir(parents=True, exist_ok=True)
        (root / below / "m.parquet").touch()
    entries = (str(root / "one" / "*" / "m.parquet"), str(root / "two" / "sub" / "m.parquet"))
    source = SourceConfig(kind="tar", manifest=entries, audio_dir=str(root / "media") if is_elsewhere else None)
    manifests = manifest_files(source)
    files, wanted = NamedFiles(manifests, source), OneByOne(list(manifests), [anchor(each) for each in source.places])
    for number, written in blocks:
        manifest = manifests[number]
        found = files.numbers(pa.array(written, pa.large_string()), manifest=manifest)
        folder, entry = (root / "media", 2) if is_elsewhere else (manifest.path.parent, manifest.entry)
        assert found.tolist() == [wanted.number(name, folder=folder, entry=entry) for name in written]
    assert [(file.name, file.path) for file in files.files] == wanted.files
    assert files.files.paths == [str(path) for _, path in wanted.files]
    assert files.listed(pa.array([str(file.path) for file in manifests], pa.large_string())).tolist() == [0, 1]


_FILE = st.builds(
    SourceFile,
    st.sampled_from(["a.wav", "b/c.wav", os.fsdecode(b"caf\xe9.wav")]),
    st.sampled_from(["/x/a.wav", "b.wav", os.fsdecode(b"/caf\xe9.wav")]).map(Path),
    entry=st.integers(0, 3),
    listed=st.booleans(),
    stat=st.none() | st.tuples(*[st.integers(-1, 2**62)] * 5),
    xxh3_128=st.sampled_from(["", "ab" * 16, "0" * 32]),
)


@given(st.lists(_FILE, max_size=6), st.data())
def test_files_by_column_are_the_files(files: list[SourceFile], data: st.DataObject) -> None:
    found = SourceFiles.of(files)
    assert found == files
    assert [(f.stat, f.xxh3_128) for f in found] == [(f.stat, f.xxh3_128) for f in files]
    assert found.hashes == [file.xxh3_128 for file in files]
    assert found.all_names == [file.name for file in files]
    assert found.shown_names == [shown_name(file) for file in files]
    chosen = data.draw(st.lists(st.integers(0, max(0, len(files) - 1)), max_size=4 if files else 0))
    part = found.take(np.array(chosen, np.int64))
    assert pickle.loads(pickle.dumps(part)) == [files[number] for number in chosen]  # noqa: S301
    assert SourceFiles.joined([found, part]) == [*files, *(files[number] for number in chosen)]
    assert found[1:4] == files[1:4]
