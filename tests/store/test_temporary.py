from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.store import files as temporary
from forebay.store.files import sweep, temporary_name

DAY_S = 24 * 3600


def gone_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left_by(folder: Path, name: str, *, pid: int, place: str | None = None) -> Path:
    path = folder / f"{name}.tmp-{place or temporary.this_place()}-{pid:x}-0123abcd"
    path.write_bytes(b"half")
    return path


def test_temporary_names_stand_beside_their_file_differ_and_name_their_process(tmp_path: Path) -> None:
    names = {temporary_name(tmp_path / "a") for _ in range(100)}
    assert len(names) == 100
    assert {name.parent for name in names} == {tmp_path}
    assert {name.name.split("-")[2] for name in names} == {f"{os.getpid():x}"}


def test_what_a_process_that_is_gone_left_is_removed_at_once(tmp_path: Path) -> None:
    file = left_by(tmp_path, "hashes.memo", pid=gone_process())
    folder = tmp_path / f"plan.tmp-{temporary.this_place()}-{gone_process():x}-0123abcd"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.npy").touch()
    (tmp_path / "hashes.memo").write_bytes(b"whole")
    assert sorted(sweep(tmp_path)) == sorted([file, folder])
    assert os.listdir(tmp_path) == ["hashes.memo"]


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    path = left_by(tmp_path, "a", pid=os.getpid())
    assert sweep(tmp_path) == []
    assert path.exists()


@pytest.mark.parametrize(("age_s", "is_removed"), [(0, False), (DAY_S - 60, False), (DAY_S + 60, True)])
def test_what_another_machine_writes_is_removed_after_a_day_of_the_file_systems_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, age_s: int, is_removed: bool
) -> None:
    path = left_by(tmp_path, "a", pid=1, place="ffffffff")
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))
    monkeypatch.setattr(time, "time", lambda: changed + 10 * DAY_S)  # our clock says nothing about it
    assert sweep(tmp_path) == ([path] if is_removed else [])


@pytest.mark.parametrize(
    "name", ["a.tmp-", "a.tmp-notes", "a.tmp-0123456789ab", "a.tmp-01234567-1-0123abcd.txt", "tmp"]
)
def test_a_name_that_is_not_ours_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    os.utime(path, (0, 0))
    assert sweep(tmp_path) == []
    assert path.exists()


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    link = tmp_path / f"a.tmp-{temporary.this_place()}-{gone_process():x}-0123abcd"
    link.symlink_to(kept)
    assert sweep(tmp_path) == [link]
    assert (kept / "inside").exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert sweep(tmp_path / "nowhere") == []
