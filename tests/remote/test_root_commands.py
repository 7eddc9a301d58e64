"""`forebay cache ls|du|rm|prune|verify` of a root that lies in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.objects.server import Bucket
from forebay import cli
from forebay.caches.root_items import RootItem
from forebay.caches.survey import remove_stored
from forebay.store.remote.small_files import RemoteRoot
from tests.commands import run, run_json
from tests.remote.stored import put_folder
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def root(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a root with two caches, a folder that a push was cut off in, and somebody's note."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))
    for name in ("a", "b"):
        put_folder(bucket, make_cache(tmp_path / name, num_samples=10), f"caches/{name}")
    bucket.put("caches/half/lengths.npy", b"some")
    bucket.put("caches/notes.txt", b"some")
    return f"{bucket.url}/caches"


def test_ls_and_du_know_what_lies_in_the_store(root: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "cache", "ls", root)
    assert found["root"] == root
    assert [(cache["name"], cache["num_samples"]) for cache in found["caches"]] == [("a", 10), ("b", 10)]
    problems = {one["name"]: one["problem"] for one in found["foreign"]}
    assert problems == dict.fromkeys(("half", "notes.txt"), "it has no metadata.json, so no cache is sealed there")
    wanted = sum(len(bucket.get(name)) for name in bucket.names("caches/a/"))
    assert found["caches"][0]["size_bytes"] == wanted
    assert f"2 caches in {root}" in run(capsys, "cache", "ls", root)[1]
    sizes = run_json(capsys, "cache", "du", root)
    assert {item["name"]: item["size_bytes"] for item in sizes["items"] if item["kind"] == "cache"}["a"] == wanted


def test_rm_needs_yes_and_force_and_takes_one_cache_alone(
    root: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bucket.names()
    code, out, _ = run(capsys, "cache", "rm", f"{root}/a", "--yes")
    assert code == cli.FAILED
    assert "no lock of a store tells who reads it: --force" in " ".join(out.split())
    assert "1 would go" in run(capsys, "cache", "rm", f"{root}/a", "--force")[1]
    assert bucket.names() == before
    assert run(capsys, "cache", "rm", "a", "--cache-root", root, "--yes", "--force")[0] == cli.DONE
    assert bucket.names() == [name for name in before if not name.startswith("caches/a/")]
    assert [cache["name"] for cache in run_json(capsys, "cache", "ls", root)["caches"]] == ["b"]
    code, _, err = run(capsys, "cache", "rm", f"{root}/half", "--yes", "--force")
    assert (code, "half is not removed by forebay: it has no metadata.json" in err) == (cli.BAD_CONFIG, True)


def test_rm_leaves_a_cache_with_other_peoples_objects(
    root: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("caches/a/notes.txt", b"some")
    code, out, _ = run(capsys, "cache", "rm", f"{root}/a", "--yes", "--force")
    assert (code, "it holds what forebay did not write: notes.txt" in out) == (cli.FAILED, True)
    assert "caches/a/metadata.json" in bucket.names()


def test_rm_leaves_a_cache_that_changed_since_it_was_looked_at(
    root: str, bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(item: RootItem, remote: RemoteRoot) -> str | None:
        bucket.put("caches/a/audio.npy", b"made again")
        return remove_stored(item, remote)

    monkeypatch.setattr("forebay.caches.prune.remove_stored", changed)

    code, out, _ = run(capsys, "cache", "rm", f"{root}/a", "--yes", "--force")
    assert (code, "it changed meanwhile" in out) == (cli.FAILED, True)
    assert "caches/a/metadata.json" in bucket.names()


def test_prune_goes_by_size_and_verify_checks_all(
    root: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "cache", "verify", "--all", "--cache-root", root)
    assert code == cli.DONE, out
    assert f"{root}/a" in out
    code, out, _ = run(capsys, "cache", "prune", root, "--max-size", "1K", "--yes", "--force")
    assert [name for name in bucket.names() if name.endswith("metadata.json")] == [], out
    assert "caches/notes.txt" in bucket.names()


def test_a_root_that_holds_nothing_has_no_caches(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 caches in" in run(capsys, "cache", "ls", f"{bucket.url}/nowhere")[1]
