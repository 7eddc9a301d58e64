"""`forebay index`: every tar of the manifests is indexed once, and what fails is named."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.errors import ManifestError
from forebay.preprocess import index_tars as index
from forebay.preprocess.index_tars import IndexReport, index_manifests, index_tars, tars_of
from forebay.store import files
from forebay.tar.index import index_path, is_indexed, json_path, load_index
from forebay.tar.scan import scan_tar
from tests.preprocess.audio_files import DEMO
from tests.tar.files import clips, settle, tar_bytes


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.tar").write_bytes(tar_bytes(clips(number + 1)))
    settle(folder / "3.tar")
    return [str(folder / f"{number}.tar") for number in range(4)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_tar_is_indexed_once(tars: list[str], tmp_path: Path, num_workers: int) -> None:
    root = tmp_path / "caches"
    report = index_tars(tars, cache_root=root, num_workers=num_workers, progress=False)
    assert report == IndexReport(indexed=4, members=10)
    for path in tars:
        assert load_index(path, cache_root=root).names == scan_tar(path).names
    Path(tars[1]).write_bytes(tar_bytes(clips(9)))
    report = index_tars(tars, cache_root=root, num_workers=num_workers, progress=False)
    assert report == IndexReport(indexed=1, current=3, members=17)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.usefixtures("bars")
def test_a_tar_that_fails_costs_that_tar(
    tars: list[str], tmp_path: Path, num_workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "caches"
    Path(tars[0]).write_bytes(Path(tars[0]).read_bytes()[:900])
    Path(tars[1]).write_bytes(b"no tar")
    absent = str(tmp_path / "absent.tar")
    report = index_tars([*tars, absent], cache_root=root, num_workers=num_workers)
    assert (report.indexed, report.current, report.members, report.refused) == (3, 0, 7, 1)
    reasons = dict(report.failed)
    assert set(reasons) == {tars[1], absent}
    assert "is no tar" in reasons[tars[1]]
    assert "No such file" in reasons[absent]
    out, err = capfd.readouterr()
    assert out == ""
    assert "1.tar is no tar" in err
    assert "index: 5/5 tars" in err
    assert "7 members, 2 failed" in err
    assert json.loads(json.dumps(report.to_json()))["refused"] == 1


def test_a_full_disk_is_told_for_every_tar(tars: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_bytes", write)
    report = index_tars(tars[:2], cache_root=tmp_path, num_workers=1, progress=False)
    assert [path for path, _ in report.failed] == tars[:2]
    assert all("No space left on device" in reason for _, reason in report.failed)


def test_it_ends_by_checking_that_every_tar_has_an_index(
    tars: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(path: str, *, cache_root: str) -> object:
        found = load_index(path, cache_root=cache_root)
        if path == tars[2]:
            index_path(path, cache_root=cache_root).unlink()
        return found

    monkeypatch.setattr(index, "load_index", lose)
    report = index_tars(tars, cache_root=tmp_path, num_workers=1, progress=False)
    assert [path for path, _ in report.failed] == [tars[2]]
    assert "has no index" in report.failed[0][1]


def test_manifests_of_every_kind_name_their_tars(tars: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    pq.write_table(
        pa.table({"tar_path": ["0.tar", "1.tar", "0.tar", tars[3]], "x": [1, 2, 3, 4]}), folder / "m.parquet"
    )
    (folder / "m.tsv").write_text("./2.tar\ta\ten\t1.0\n\n0.tar\tb\tde\t2\n2.tar\tc\ten\t1.0\n")
    assert tars_of(folder / "m.parquet") == [tars[0], tars[1], tars[3]]
    assert tars_of(folder / "m.tsv") == [tars[2], tars[0]]
    assert tars_of(folder) == tars
    assert tars_of(tars[1]) == [tars[1]]
    report = index_manifests(
        [folder / "m.parquet", folder / "m.tsv"],
        cache_root=tmp_path / "caches",
        num_workers=2,
        progress=False,
        export_json=True,
    )
    assert report == IndexReport(indexed=4, members=10)
    for path in tars:
        assert is_indexed(path, cache_root=tmp_path / "elsewhere")  # by its exported form
        assert list(json.loads(json_path(path).read_bytes())) == scan_tar(path).names


def test_a_compressed_tar_and_a_lost_manifest_cost_no_other_tar(tars: list[str], tmp_path: Path) -> None:
    packed = tmp_path / "data" / "packed.tar.gz"
    packed.write_bytes(gzip.compress(Path(tars[0]).read_bytes()))
    lost = tmp_path / "lost.parquet"
    asked: list[list[str | Path]] = [[*tars, packed, lost], [tmp_path / "data", lost]]
    for manifests in asked:
        report = index_manifests(manifests, cache_root=tmp_path / "caches", num_workers=1, progress=False)
        assert (report.indexed + report.current, report.members) == (4, 10)
        reasons = dict(report.failed)
        assert set(reasons) == {str(packed), str(lost)}
        assert reasons[str(packed)].endswith(
            f"is compressed (gzip): members cannot be read by offset; decompress it: gzip -dk {packed}"
        )
        assert "cannot read column tar_path" in reasons[str(lost)]


def test_the_demo_is_indexed_from_both_its_manifests(tmp_path: Path) -> None:
    report = index_manifests(
        [DEMO / "train.parquet", DEMO / "train.tsv"], cache_root=tmp_path, num_workers=1, progress=False
    )
    assert report.indexed == len(list(DEMO.glob("*.tar"))) > 1
    assert (report.failed, report.refused) == ([], 0)
    rows = pq.read_table(DEMO / "train.parquet", columns=["tar_path", "tar_member_name"]).to_pylist()
    assert all(
        load_index(DEMO / r["tar_path"], cache_root=tmp_path).find(r["tar_member_name"]) is not None for r in rows
    )


def test_manifests_that_name_no_tars_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"cannot read manifest .*absent\.tsv: No such file"):
        tars_of(tmp_path / "absent.tsv")
    with pytest.raises(ManifestError, match=r"cannot read column tar_path of manifest .*absent\.parquet"):
        tars_of(tmp_path / "absent.parquet")
    pq.write_table(pa.table({"audio": ["a"]}), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="tar_path"):
        tars_of(tmp_path / "m.parquet")
    pq.write_table(pa.table({"tar_path": [1]}), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="column tar_path holds int64, wanted string"):
        tars_of(tmp_path / "m.parquet")
    (tmp_path / "m.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="neither a parquet file nor UTF-8 text"):
        tars_of(tmp_path / "m.tsv")
    with pytest.raises(ManifestError, match="names no tar"):
        tars_of(tmp_path)
