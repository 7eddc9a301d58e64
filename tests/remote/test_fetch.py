"""`forebay fetch`: objects of a store become files of a folder, each checked before it has its name."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.faults import SERVER_ERROR, Corrupt, Fault, Replace, Reset, Rule, Truncate
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket as Emptied
from forebay.cli.program import main
from forebay.config.remote import RemoteConfig, Url, parse_url
from forebay.errors import ConfigError, ManifestError, RemoteError, RemoteMissingError
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.carry import fetch_folder as folders
from forebay.store.remote.carry.fetch import fetch
from forebay.store.remote.carry.fetch_list import FetchOptions
from forebay.store.remote.carry.tally import FetchReport
from forebay.tar.index import check_members
from tests.remote.fake_store import Answer, Asked, fake_store, listing

pytestmark = pytest.mark.usefixtures("environment")


class Content(bytes):
    """Bytes that a failed comparison shows in one line, so that it says which file is missing or another."""

    def __repr__(self) -> str:
        return bytes.__repr__(self) if len(self) <= 20 else f"<{len(self)} bytes, MD5 {hashlib.md5(self).hexdigest()}>"


PIECE = 64 * 1024
LARGE = Content(bytes(range(251)) * 2000)  # eight pieces, and no power of two
FILES = {"hi_eval.tarx": LARGE, "bn_eval.tarx": Content(LARGE[::-1]), "more/deep/a b.txt": b"hello", "empty": b""}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.remote.bucket.bucket.CHUNK", PIECE)
    monkeypatch.setattr("forebay.store.remote.bucket.bucket._PAUSE_S", 0.01)


@pytest.fixture
def url(bucket: Emptied) -> Url:
    bucket.put_all([(f"sets/one/{name}", data) for name, data in FILES.items()])
    bucket.put("sets/oneself", b"not below it")
    return parse_url(f"{bucket.url}/sets/one")


def fetched(url: Url, folder: Path, *, retries: int = 0, num_threads: int = 4, **options: Any) -> FetchReport:
    """Fetches in this process. Prints what was refused: a failed test shows it."""
    settings = RemoteConfig(retries=retries, timeout_s=20, max_concurrent=num_threads)
    asked = FetchOptions(**{"max_bytes": 10**9, "max_files": 1000, **options})
    report = fetch(url, folder, settings, asked, examine=check_members)
    print("refused:", report.refused)
    return report


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of a folder's files by name; those that are being written too."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return {path.relative_to(folder).as_posix(): Content(path.read_bytes()) for path in paths}


def reasons(report: FetchReport) -> dict[str, str]:
    return {one["name"]: one["reason"] for one in report.refused}


# What comes, and what stays


def test_a_prefix_of_a_store_becomes_a_folder(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    report = fetched(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == FILES
    assert (report.files, report.moved_files, report.kept_files, report.refused) == (4, 4, 0, [])
    assert report.moved_bytes == report.size_bytes == sum(map(len, FILES.values()))
    assert report.checked_by == {"etag": 4}
    proxy.clear()
    again = fetched(url, tmp_path / "out")
    assert (again.moved_files, again.kept_files, again.checked_by) == (0, 4, {"etag": 4})
    assert {method for method, _ in proxy.requests} == {"LIST"}, "what is there is not asked for"
    assert next(again.lines()).startswith("already there: ")


def test_what_came_of_a_file_stays_and_the_next_request_goes_on_at_its_end(
    url: Url, tmp_path: Path, proxy: Proxy
) -> None:
    proxy.add(Rule(fault=Truncate(after_bytes=2 * PIECE + 5), method="GET", times=1))
    proxy.add(Rule(fault=SERVER_ERROR, method="GET", after=1))
    with pytest.raises(RemoteError, match="asked once"):
        fetched(url, tmp_path / "out", prefix="hi_", num_threads=1)
    proxy.clear()
    report = fetched(url, tmp_path / "out", prefix="hi_", num_threads=1)
    assert files_of(tmp_path / "out") == {"hi_eval.tarx": LARGE}
    assert report.resumed_bytes >= PIECE
    asked = [one.range for one in proxy.traffic().exchanges if one.method == "GET"]
    assert asked == [f"bytes={report.resumed_bytes}-"]
    assert proxy.bytes_of("sets/one/hi_eval.tarx") == len(LARGE) - report.resumed_bytes


def test_one_object_comes_by_its_own_url(url: Url, tmp_path: Path) -> None:
    report = fetched(url / "more/deep/a b.txt", tmp_path / "out")
    assert files_of(tmp_path / "out") == {"a b.txt": b"hello"}
    assert report.files == 1


def test_a_prefix_may_lie_in_a_folder(url: Url, tmp_path: Path) -> None:
    fetched(url, tmp_path / "out", prefix="more/deep/a")
    assert files_of(tmp_path / "out") == {"more/deep/a b.txt": b"hello"}


def test_a_prefix_of_nothing_names_what_there_is(url: Url, tmp_path: Path) -> None:
    with pytest.raises(RemoteMissingError, match=r"begins with 'xx_'; there are bn_eval.tarx, empty, hi_eval.tarx"):
        fetched(url, tmp_path / "out", prefix="xx_")
    with pytest.raises(RemoteMissingError, match=r"sets/none.*nothing is there, and nothing lies below it"):
        fetched(parse_url(f"{url.parent}/none"), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--prefix '../x' is of no name"):
        fetched(url, tmp_path / "out", prefix="../x")
    assert not (tmp_path / "out").exists()


def test_objects_that_mark_folders_are_left_out(url: Url, bucket: Emptied, tmp_path: Path, proxy: Proxy) -> None:
    for name in ("", "more/", "alone/"):
        put_as_it_is(bucket, f"sets/one/{name}")
    fetched(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == FILES


def put_as_it_is(bucket: Emptied, key: str) -> None:
    """Puts an empty object whose name obstore would change."""
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{bucket.endpoint}/{bucket.name}/{key}", method="PUT", data=b""))


def test_a_dry_run_lists_and_writes_nothing(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    report = fetched(url, tmp_path / "out", dry_run=True)
    assert list(report.lines()) == [*sorted(FILES), "would fetch: 4 of 4 files, 1 MB"]
    assert not (tmp_path / "out").exists()
    fetched(url, tmp_path / "out", prefix="hi_")
    assert fetched(url, tmp_path / "out", dry_run=True).names == ["bn_eval.tarx", "empty", "more/deep/a b.txt"]
    assert list(files_of(tmp_path / "out")) == ["hi_eval.tarx"]


# What the folder holds already


def test_other_bytes_are_left_alone_unless_they_may_go(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    out = tmp_path / "out"
    (out / "more" / "deep").mkdir(parents=True)
    (out / "more" / "deep" / "a b.txt").write_bytes(b"hellO")
    (out / "empty").write_bytes(b"full")
    (out / "own.txt").write_bytes(b"mine")
    before = files_of(out)
    with pytest.raises(ConfigError, match=r"(?s)out/empty is there, and has 4 bytes, wanted 0;.*MD5.*--overwrite"):
        fetched(url, out)
    assert files_of(out) == before
    assert not any(method == "GET" for method, _ in proxy.requests)
    report = fetched(url, out, overwrite=True)
    assert files_of(out) == {**FILES, "own.txt": b"mine"}
    assert report.moved_files == 4


@pytest.mark.parametrize("kind", ["link", "dangling", "folder link", "fifo", "folder", "hard link", "file on the way"])
def test_what_is_no_plain_file_is_refused_before_anything_comes(
    kind: str, url: Url, tmp_path: Path, proxy: Proxy
) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (outside / "file").write_bytes(b"hello")
    if kind == "link":
        (out / "hi_eval.tarx").symlink_to(outside / "file")
    elif kind == "dangling":
        (out / "hi_eval.tarx").symlink_to(outside / "new")
    elif kind == "folder link":
        (out / "more").symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(out / "hi_eval.tarx")
    elif kind == "folder":
        (out / "hi_eval.tarx").mkdir()
    elif kind == "hard link":
        (out / "more" / "deep").mkdir(parents=True)
        os.link(outside / "file", out / "more" / "deep" / "a b.txt")
    else:
        (out / "more").write_bytes(b"")
    wanted = {"hard link": "2 names", "folder": "is a folder, no file", "fifo": "a pipe", "file on the way": "no fold"}
    with pytest.raises(ConfigError, match=wanted.get(kind, r"is a link, no f.*nothing was fetched")):
        fetched(url, out)
    assert not any(method == "GET" for method, _ in proxy.requests)
    if kind == "hard link":  # the name is given to another file; nothing is written through it
        fetched(url, out, overwrite=True)
        assert files_of(out) == FILES
    else:
        with pytest.raises(ConfigError, match=wanted.get(kind, r"is a link")):
            fetched(url, out, overwrite=True)
    assert files_of(outside) == {"file": b"hello"}


def test_the_folder_itself_may_be_named_by_a_link(url: Url, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    fetched(url, tmp_path / "out")
    assert files_of(tmp_path / "real") == FILES
    with pytest.raises(ConfigError, match=r"empty is no folder, .*; name another --output"):
        fetched(url, tmp_path / "real" / "empty")
    with pytest.raises(ConfigError, match=r"empty/x is no folder, .*; name another --output"):
        fetched(url, tmp_path / "real" / "empty" / "x")


def test_a_link_that_is_planted_meanwhile_is_not_followed(
    url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()

    def act() -> None:
        if not (out / "more").exists():
            (out / "more").symlink_to(outside)

    before_each_stream(monkeypatch, act)
    report = fetched(url, out, num_threads=1)
    assert list(reasons(report)) == ["more/deep/a b.txt"]
    assert "more is a link, no folder" in report.refused[0]["reason"]
    assert report.moved_files == 3
    assert files_of(outside) == {}


def test_a_file_that_came_meanwhile_is_compared(url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    before_each_stream(monkeypatch, lambda: [(out / name).write_bytes(LARGE) for name in ("hi_eval.tarx", "empty")])
    report = fetched(url, out, num_threads=1)
    assert list(reasons(report)) == ["bn_eval.tarx", "empty"] or list(reasons(report)) == ["empty"]
    assert (out / "hi_eval.tarx").read_bytes() == LARGE
    assert (out / "empty").read_bytes() == LARGE


def before_each_stream(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    real = Bucket.stream

    def stream(self: Bucket, name: str, **options: Any) -> Iterator[bytes]:
        act()
        return real(self, name, **options)

    monkeypatch.setattr(Bucket, "stream", stream)


# A store or a link that goes wrong


@pytest.mark.parametrize("fault", [Truncate(after_bytes=10_000), Reset(after_bytes=10_000), SERVER_ERROR])
def test_what_breaks_off_is_asked_for_again(url: Url, tmp_path: Path, proxy: Proxy, fault: Fault) -> None:
    proxy.add(Rule(fault=fault, method="GET", times=5))
    report = fetched(url, tmp_path / "out", retries=6)
    assert files_of(tmp_path / "out") == FILES
    assert not report.refused


def interrupted(url: Url, out: Path, proxy: Proxy, *, after: int = 0, **options: Any) -> None:
    """Fetches until a body breaks off, after so many requests that go well."""
    proxy.add(Rule(fault=Truncate(after_bytes=4 * PIECE), method="GET", after=after))
    with pytest.raises(RemoteError, match=r"sets/one/.*asked once"):
        fetched(url, out, **options)
    proxy.clear()


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_fetch_goes_on_with_what_is_there(url: Url, tmp_path: Path, proxy: Proxy, after: int) -> None:
    out = tmp_path / "out"
    interrupted(url, out, proxy, after=after, num_threads=2)
    whole = {name: data for name, data in files_of(out).items() if ".tmp-" not in name}
    assert whole.items() <= FILES.items()
    left = sum(len(data) for data in files_of(out).values())
    report = fetched(url, out)
    assert files_of(out) == FILES
    assert sum(proxy.bytes_of(f"sets/one/{name}") for name in FILES) == sum(map(len, FILES.values())) - left
    assert report.resumed_bytes + report.kept_bytes == left >= 3 * PIECE


def test_what_was_left_and_is_torn_is_not_believed(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    """A machine died: the end of the bytes is on the disk, and some before it are not."""
    out = tmp_path / "out"
    interrupted(url, out, proxy, num_threads=1, prefix="hi_")
    (part,) = out.iterdir()
    with part.open("r+b") as file:
        file.seek(PIECE + 5)
        file.write(bytes(1000))
    report = fetched(url, out, prefix="hi_")
    assert files_of(out) == {"hi_eval.tarx": LARGE}
    assert report.resumed_bytes == 0
    assert not report.refused


def test_what_was_left_of_another_version_goes(url: Url, bucket: Emptied, tmp_path: Path, proxy: Proxy) -> None:
    out = tmp_path / "out"
    interrupted(url, out, proxy, num_threads=1, prefix="hi_")
    bucket.put("sets/one/hi_eval.tarx", LARGE[::-1])
    (part,) = out.iterdir()
    part.rename(out / re.sub("-[0-9a-f]+-([0-9a-f]{8})$", r"-3fffffff-\1", part.name))  # of a process that is gone
    report = fetched(url, out, prefix="hi_")
    assert report.resumed_bytes == 0
    assert files_of(out) == {"hi_eval.tarx": LARGE[::-1]}


def test_wrong_bytes_of_the_right_size_are_refused_and_named(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Corrupt(at=1000), method="GET", key="*/hi_eval.tarx"))
    report = fetched(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == {name: data for name, data in FILES.items() if not name.startswith("hi_")}
    md5 = hashlib.md5(LARGE).hexdigest()
    assert re.fullmatch(
        rf"{url}/hi_eval.tarx: the MD5 of its bytes is [0-9a-f]{{32}}, its etag {md5}; .*--ignore-etags",
        reasons(report)["hi_eval.tarx"],
    )
    assert (report.moved_files, len(report.refused)) == (3, 1)
    lines = list(report.lines())
    assert lines[0].startswith("not all is there: ")
    assert [line for line in lines if line.startswith("refused: hi_eval.tarx: ")]
    proxy.clear()
    assert fetched(url, tmp_path / "out").moved_files == 1
    assert files_of(tmp_path / "out") == FILES


def test_bytes_that_were_wrong_once_come_again(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    proxy.add(Rule(fault=Corrupt(at=1000), method="GET", key="*/hi_eval.tarx", times=1))
    assert not fetched(url, tmp_path / "out").refused
    assert files_of(tmp_path / "out") == FILES


def test_etags_that_are_no_md5_stop_a_fetch_early(bucket: Emptied, tmp_path: Path, proxy: Proxy) -> None:
    """The bucket encrypts with a key of its own: all etags look like an MD5, and none is."""
    bucket.put_all((f"x/{number:03}", b"12345678" * 1000) for number in range(40))
    url = parse_url(f"{bucket.url}/x")
    proxy.add(Rule(fault=Corrupt(at=1), method="GET"))
    with pytest.raises(RemoteError, match=r"x/0..: the MD5 of its bytes is .* then --ignore-etags"):
        fetched(url, tmp_path / "out", num_threads=1)
    assert proxy.traffic().sent < 20 * 8000
    assert files_of(tmp_path / "out") == {}
    report = fetched(url, tmp_path / "out", etags=False)
    assert report.checked_by == {"size": 40}
    assert "checked: 40 by size alone" in list(report.lines())
    assert fetched(url, tmp_path / "out", etags=False).kept_files == 40
    os.utime(tmp_path / "out" / "000", (0, 0))
    with pytest.raises(ConfigError, match="000 is there, and is older than the object of the same size"):
        fetched(url, tmp_path / "out", etags=False)


def test_an_object_that_is_replaced_meanwhile_is_one_version(
    url: Url, bucket: Emptied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, other = iter(range(10**6)), b"other" * 70_000

    def act() -> None:
        if next(calls) == 0:
            bucket.put("sets/one/hi_eval.tarx", other)

    before_each_stream(monkeypatch, act)
    report = fetched(url, tmp_path / "out", prefix="hi_", num_threads=2)
    assert files_of(tmp_path / "out") == {"hi_eval.tarx": other}
    assert not report.refused


def test_an_object_that_is_always_replaced_or_removed_is_refused(
    url: Url, bucket: Emptied, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("other", LARGE[1:] + b"x")
    proxy.add(Rule(fault=Replace(key="other"), method="GET", key="*/hi_eval.tarx"))
    report = fetched(url, tmp_path / "out")
    assert "sets/one/hi_eval.tarx was replaced: its etag is" in reasons(report)["hi_eval.tarx"]
    assert report.moved_files == 3
    proxy.clear()
    before_each_stream(monkeypatch, lambda: obstore_delete(bucket, "sets/one/hi_eval.tarx"))
    assert "hi_eval.tarx is not there" in reasons(fetched(url, tmp_path / "out"))["hi_eval.tarx"]


def obstore_delete(bucket: Emptied, key: str) -> None:
    import obstore

    obstore.delete(bucket.store(), key)


def test_a_full_disk_is_told_and_what_is_finished_stays(
    url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, real = tmp_path / "out", os.pwrite

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if len(list(out.iterdir())) == 3:  # two are done, the third is begun
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert main(["fetch", str(url), "--output", str(out), "--set", "remote.max_concurrent=1"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"No space left on device: .*hi_eval.tarx; what was finished is kept, run the command again", said)
    assert (out / "bn_eval.tarx").read_bytes() == FILES["bn_eval.tarx"]
    assert fetched(url, out).kept_files >= 2
    assert files_of(out) == FILES


def test_what_does_not_fit_the_disk_is_told_before(url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.TargetFolder, "free_bytes", lambda self: 1_000_000)
    with pytest.raises(
        ConfigError, match=r"1 MB \(1,004,005 bytes\) are to come and 1 MB \(1,000,000 bytes\) are free"
    ):
        fetched(url, tmp_path / "out")


def test_an_interrupt_ends_it_and_the_next_one_goes_on(
    url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = folders.FilePart.append, iter(range(10**6))

    def append(self: folders.FilePart, data: bytes) -> None:
        if next(calls) == 6:
            real(self, data[: len(data) // 2])  # it may be the first piece of a file
            raise KeyboardInterrupt
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(folders.FilePart, "append", append)
        asked = ["fetch", str(url), "--output", str(tmp_path / "out"), "--set", "remote.max_concurrent=1"]
        assert main(asked) == 130
    assert "run the command again to go on" in capsys.readouterr().err
    assert fetched(url, tmp_path / "out").resumed_bytes > 0
    assert files_of(tmp_path / "out") == FILES


def test_two_fetches_at_once_are_both_right(url: Url, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: fetched(url, tmp_path / "out"), range(3)))
    assert all(report.moved_files + report.kept_files == 4 for report in found)
    assert files_of(tmp_path / "out") == FILES


# Bounds


def test_bounds_are_held_before_a_byte_comes(url: Url, tmp_path: Path, proxy: Proxy) -> None:
    with pytest.raises(RemoteError, match=r"1,004,000 bytes \(1 MB\), at most 1,000,000 \(1 MB\) are.*--max-size-gb"):
        fetched(url, tmp_path / "out", max_bytes=1_000_000, max_files=10)
    with pytest.raises(RemoteError, match=r"has more than 3 files; name fewer by --prefix, or raise --max-files"):
        fetched(url, tmp_path / "out", max_bytes=10_000_000, max_files=3)
    assert not any(method == "GET" for method, _ in proxy.requests)
    assert fetched(url, tmp_path / "out", prefix="hi", max_bytes=502_000, max_files=1).moved_files == 1


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Url:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return parse_url("s3://bucket/data")


def test_a_listing_without_an_end_is_left_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_store(listing(10**9)) as store:
        url = at(monkeypatch, store.endpoint)
        with pytest.raises(RemoteError, match="more than 2,500 files"):
            fetched(url, tmp_path / "out", max_bytes=10**12, max_files=2500)
        assert len(store.asked) <= 5
        monkeypatch.setattr("forebay.store.remote.carry.fetch_list._MAX_LISTED", 3000)
        with pytest.raises(RemoteError, match="more than 3,000 objects to look through"):
            fetched(url, tmp_path / "out", prefix="none")


@pytest.mark.parametrize("key", ["data/../x", "data//x", "data/a\\b", "data/C:x", "data/x.tmp-00000000-1-00000000"])
def test_keys_that_lead_out_are_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_store(lying(key, size=5, body=b"12345")) as store:
        with pytest.raises(RemoteError, match=re.escape(key.rpartition("/")[2])[:1]):
            fetched(at(monkeypatch, store.endpoint), tmp_path / "out")
        assert not [one for one in store.asked if "list-type" not in one.query]
    assert not files_of(tmp_path / "out") if (tmp_path / "out").exists() else True


@pytest.mark.parametrize("body", [b"x" * 70_000, b"x" * 3])
def test_a_body_of_another_size_than_the_listing_says_is_refused(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_store(lying("data/a", size=5, body=body)) as store:
        report = fetched(at(monkeypatch, store.endpoint), tmp_path / "out")
    assert re.search("more than the 5 bytes|it has 3 bytes, 5 are wanted", report.refused[0]["reason"])
    assert files_of(tmp_path / "out") == {}


def lying(key: str, *, size: int, body: bytes) -> Callable[[Asked], Answer]:
    """Returns a store whose listing has one object, and whose object has this body."""

    def answers(asked: Asked) -> Answer:
        if "list-type" not in asked.query:
            return Answer(body=body)
        row = f"<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        row += f'<ETag>"one"</ETag><Size>{size}</Size></Contents>'
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{row}</ListBucketResult>"
        return Answer(body=text.encode(), headers={"Content-Type": "application/xml"})

    return answers


def test_names_that_are_one_in_the_folder_are_refused(
    bucket: Emptied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_all([("x/A.tar", b"1"), ("x/a.tar", b"2"), ("x/caf\u00e9", b"3"), ("x/cafe\u0301", b"4")])
    url = parse_url(f"{bucket.url}/x")
    with monkeypatch.context() as patch:
        patch.setattr(folders.TargetFolder, "tells_apart", lambda self: False)
        with pytest.raises(RemoteError, match=r"'A\.tar' and 'a\.tar' are one name in this folder"):
            fetched(url, tmp_path / "out")
    assert files_of(tmp_path / "out") == {}
    fetched(url, tmp_path / "out")
    assert len(files_of(tmp_path / "out")) == 4


# Manifests


def manifest_of(files: Mapping[str, bytes], kind: str = "xxh3_128", **changes: Any) -> bytes:
    """Returns a manifest of these files."""
    import xxhash

    made = {"xxh3_128": xxhash.xxh3_128_hexdigest, "sha256": lambda data: hashlib.sha256(data).hexdigest()}
    entries = [
        {"name": name, "size_bytes": len(data), kind: made[kind](data), **changes} for name, data in files.items()
    ]
    return json.dumps({"files": entries}).encode()


def test_the_manifest_beside_the_files_tells_their_hashes(url: Url, bucket: Emptied, tmp_path: Path) -> None:
    tar = {"hi_eval.tarx": LARGE}
    bucket.put("sets/one/evaluation_manifest.json", manifest_of(tar))
    report = fetched(url, tmp_path / "out")
    assert report.checked_by == {"xxh3_128": 2, "etag": 3}
    bucket.put("sets/one/evaluation_manifest.json", manifest_of(tar, xxh3_128="0" * 32))
    report = fetched(url, tmp_path / "two")
    assert re.search(f"its xxh3_128 is [0-9a-f]{{32}}, its manifest says {'0' * 32}; ", reasons(report)["hi_eval.tarx"])
    assert (tmp_path / "two" / "hi_eval.tarx").exists() is False
    bucket.put("sets/one/evaluation_manifest.json", manifest_of(tar, size_bytes=7))
    with pytest.raises(ManifestError, match=r"says that 'hi_eval.tarx' has 7 bytes, the store says 502000"):
        fetched(url, tmp_path / "out")
    bucket.put("sets/one/evaluation_manifest.json", manifest_of({"gone.tar": b""}))
    with pytest.raises(ManifestError, match=r"names 'gone.tar', which .* does not have"):
        fetched(url, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is a list, wanted an object"),
        (b"{}", "has no list `files`"),
        (b'{"files": [1]}', r"files\[0\] says no name"),
        (b'{"files": [{"name": "a", "size_bytes": true, "md5": "0"}]}', r"files\[0\] .* size_bytes True"),
        (b'{"files": [{"name": "a", "size_bytes": 1, "md5": "zz"}]}', "md5 'zz' is no 32 hex digits"),
        (b'{"files": [{"name": "a", "size_bytes": 1}]}', "'a' has no hash"),
        (manifest_of({"a": b""})[:-1] + b', "index": {"name": null}}', "index says no name"),
        (manifest_of({"a": b""})[:-2] + b', {"name": "a", "size_bytes": 0, "md5": "' + b"0" * 32 + b'"}]}', "twice"),
    ],
)
def test_a_wrong_manifest_is_named(text: bytes, match: str, bucket: Emptied, tmp_path: Path) -> None:
    bucket.put("x/evaluation_manifest.json", text)
    with pytest.raises(ManifestError, match=match):
        fetched(parse_url(f"{bucket.url}/x/evaluation_manifest.json"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@contextmanager
def web_server(folder: Path) -> Iterator[Url]:
    """Yields the URL of a folder behind Python's own server, which knows neither ranges nor etags."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Says nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Says nothing: clients go when they like."""

    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield parse_url(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_web_server_gives_what_a_manifest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for name, data in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    manifest = manifest_of(FILES, "sha256")
    (source / "evaluation_manifest.json").write_bytes(manifest)
    with web_server(source) as url:
        report = fetched(url / "evaluation_manifest.json", out)
        assert files_of(out) == {**FILES, "evaluation_manifest.json": manifest}
        assert report.checked_by == {"sha256": 4, "xxh3_128": 1}
        assert fetched(url, out).kept_files == 5
        assert fetched(url, tmp_path / "hi", prefix="hi_").files == 1
        with pytest.raises(
            RemoteError, match=r"lists nothing, and .*/more/evaluation_manifest.json is not there; name"
        ):
            fetched(url / "more", out)
        (source / "hi_eval.tarx").write_bytes(LARGE[::-1])
        (source / "empty").unlink()
        (source / "more" / "deep" / "a b.txt").write_bytes(b"hell")
        said = reasons(fetched(url, tmp_path / "other"))
        assert sorted(said) == ["empty", "hi_eval.tarx", "more/deep/a b.txt"]
        assert "its sha256 is" in said["hi_eval.tarx"]
        assert "the store has 4 bytes, 5 are wanted" in said["more/deep/a b.txt"]
        assert "empty is not there" in said["empty"]


def test_a_web_server_without_ranges_goes_on_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "hi_eval.tarx").write_bytes(LARGE)
    (source / "set.json").write_bytes(manifest_of({"hi_eval.tarx": LARGE}))
    with web_server(source) as url:
        with monkeypatch.context() as patch:
            patch.setattr(folders.FilePart, "append", failing(folders.FilePart.append, 3))
            with pytest.raises(RemoteError, match="the network has gone"):
                fetched(url / "set.json", out)
        report = fetched(url / "set.json", out)
    assert (out / "hi_eval.tarx").read_bytes() == LARGE
    assert report.resumed_bytes == 0, "what was there came again"
    assert not report.refused


def test_a_web_server_with_ranges_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of({"hi_eval.tarx": LARGE})

    def answers(asked: Asked) -> Answer:
        data = manifest if asked.path.endswith(".json") else LARGE
        if (found := re.fullmatch("bytes=([0-9]+)-", asked.headers.get("range", ""))) is None:
            return Answer(body=data)
        start = int(found[1])
        return Answer(
            status=206, body=data[start:], headers={"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        )

    with fake_store(answers) as store:
        url = parse_url(f"{store.endpoint}/a/set.json")
        with monkeypatch.context() as patch:
            patch.setattr(folders.FilePart, "append", failing(folders.FilePart.append, 3))
            with pytest.raises(RemoteError, match="the network has gone"):
                fetched(url, tmp_path / "out", num_threads=1)  # beside a second thread the manifest goes on too, or not
        report = fetched(url, tmp_path / "out")
        assert [one.headers["range"] for one in store.asked if "range" in one.headers] == [
            f"bytes={report.resumed_bytes}-"
        ]
    assert report.resumed_bytes >= PIECE
    assert (tmp_path / "out" / "hi_eval.tarx").read_bytes() == LARGE


def failing(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = iter(range(10**6))

    def call(*args: Any) -> Any:
        if next(calls) >= number:
            raise RemoteError("the network has gone")
        return real(*args)

    return call


# Tars of evaluation sets


def tar_of(*members: tarfile.TarInfo | str) -> bytes:
    """Returns a tar; a member that is a name holds its name."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            data = member.encode() if isinstance(member, str) else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize(
    ("member", "match"),
    [
        ("b.wav", "'b.wav' is there twice"),
        (link("a.wav", tarfile.SYMTYPE, "/etc/passwd"), "'a.wav' at offset 1024 is refused: symlink"),
        (link("a.wav", tarfile.LNKTYPE, "b.wav"), "'a.wav' at offset 1024 is refused: hard_link"),
        ("../a.wav", "'../a.wav' leads out of the folder"),
        ("/a.wav", "'/a.wav' is absolute"),
    ],
)
def test_members_that_lead_out_are_refused(member: Any, match: str, bucket: Emptied, tmp_path: Path) -> None:
    tars = {"hi_eval.tar": tar_of("b.wav", member), "bn_eval.tar": tar_of("b.wav", "b.json")}
    put_set(bucket, tars)
    report = fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out")
    assert f"{bucket.url}/x: hi_eval.tar: its member {match}; have the set" in reasons(report)["hi_eval.tar"]
    assert sorted(files_of(tmp_path / "out")) == ["bn_eval.tar", "evaluation_manifest.json", "index.json"]


def put_set(
    bucket: Emptied, tars: dict[str, bytes], change: Callable[[Any], None] = lambda index: None, *, below: str = "x/"
) -> None:
    """Puts an evaluation set, whose index may be another one."""
    index: dict[str, Any] = {"version": 1, "tars": {}}
    for name, data in tars.items():
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = [{"name": one.name, "offset": one.offset_data, "size": one.size} for one in tar]
        index["tars"][name] = {"members": members}
    change(index)
    said = json.dumps(index).encode()
    manifest = json.loads(manifest_of({**tars, "index.json": said}))
    manifest["index"] = manifest["files"].pop()
    manifest["files"].append({"language": "xx", "name": None})
    files = {**tars, "index.json": said, "evaluation_manifest.json": json.dumps(manifest).encode()}
    bucket.put_all((below + name, data) for name, data in files.items())


def test_sets_may_lie_below_each_other(bucket: Emptied, tmp_path: Path) -> None:
    put_set(bucket, {"hi_eval.tar": tar_of("b.wav")})
    put_set(bucket, {"hi_eval.tar": tar_of("longer.wav", "c.wav")}, below="x/more/")
    report = fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out")
    assert (report.refused, report.tars, report.checked_by) == ([], 2, {"xxh3_128": 6})


@pytest.mark.parametrize("place", ["", "/evaluation_manifest.json"])
def test_an_evaluation_set(place: str, bucket: Emptied, tmp_path: Path) -> None:
    tars = {"hi_eval.tar": tar_of("b.wav", "b.json"), "bn_eval.tar": tar_of("c.wav", "c.json")}
    put_set(bucket, tars)
    url = parse_url(f"{bucket.url}/x{place}")
    report = fetched(url, tmp_path / "out")
    assert report.checked_by == {"xxh3_128": 4}
    assert sorted(files_of(tmp_path / "out")) == [
        "bn_eval.tar",
        "evaluation_manifest.json",
        "hi_eval.tar",
        "index.json",
    ]
    assert list(report.lines())[-1] == (
        f'to evaluate on it: a config of kind = "webdataset" and manifest = "{tmp_path}/out/*_eval.tar", which '
        '[[train.eval]] names by config = "..."'
    )
    assert fetched(url, tmp_path / "hi", prefix="hi_").checked_by == {"xxh3_128": 1}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tars: tars["hi_eval.tar"]["members"][0].update(offset=7), "has the member 'b.wav' at offset 512 of 5"),
        (lambda tars: tars["hi_eval.tar"]["members"].pop(), "where its index.json says no member"),
        (lambda tars: tars["hi_eval.tar"]["members"].append({}), "says not which members it has"),
        (lambda tars: tars.update({"hi_eval.tar": 3}), "says not which members it has"),
        (lambda tars: tars.pop("hi_eval.tar"), "says not which members it has"),
    ],
    ids=["offset", "fewer", "entry", "type", "none"],
)
def test_a_tar_that_is_not_as_its_index_says_is_refused(
    change: Callable[[Any], None], match: str, bucket: Emptied, tmp_path: Path
) -> None:
    tars = {"hi_eval.tar": tar_of("b.wav", "b.json"), "bn_eval.tar": tar_of("c.wav")}
    put_set(bucket, tars, lambda index: change(index["tars"]))
    report = fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out")
    assert list(reasons(report)) == ["hi_eval.tar"]
    assert match in report.refused[0]["reason"]


def test_an_index_that_the_manifest_does_not_mean_is_refused(bucket: Emptied, tmp_path: Path) -> None:
    put_set(bucket, {"hi_eval.tar": tar_of("b.wav")})
    bucket.put("x/index.json", bucket.get("x/index.json").replace(b"512", b"513"))
    with pytest.raises(ManifestError, match=r"x/index.json is not what .*evaluation_manifest.json says: its xxh3_128"):
        fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out")
    put_set(bucket, {"hi_eval.tar": tar_of("b.wav")}, lambda index: index.update(tars=[]))
    with pytest.raises(ManifestError, match=r"x/index.json has no object `tars`"):
        fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out")


def test_a_tar_that_is_none_is_named_as_it_is_called(bucket: Emptied, tmp_path: Path) -> None:
    bucket.put("x/hi_eval.tar", b"\x1f\x8b" + bytes(1000))
    bucket.put("x/evaluation_manifest.json", manifest_of({"hi_eval.tar": b"\x1f\x8b" + bytes(1000)}))
    said = reasons(fetched(parse_url(f"{bucket.url}/x"), tmp_path / "out"))["hi_eval.tar"]
    assert re.match(rf"{bucket.url}/x: hi_eval.tar .*gzip", said)
    assert ".tmp-" not in said


# The command


@pytest.mark.usefixtures("bars")
def test_the_command(url: Url, tmp_path: Path, capsys: pytest.CaptureFixture[str], proxy: Proxy) -> None:
    out = tmp_path / "out"
    assert main(["fetch", f"{url}/", "--output", str(out), "--prefix", "hi_", "--no-progress", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["moved_files"] == 1
    assert said.err == ""
    proxy.add(Rule(fault=Corrupt(at=1000), method="GET", key="*/bn_eval.tarx"))
    assert main(["fetch", str(url), "--output", str(out)]) == 1
    said = capsys.readouterr()
    assert "refused: bn_eval.tarx: " in said.out
    assert "fetch: 3/4 files: " in said.err
    assert main(["fetch", str(url), "--output", str(out), "--max-size-gb", "0"]) == 2
    assert "--max-size-gb is 0.0, wanted more than 0" in capsys.readouterr().err
