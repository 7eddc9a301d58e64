"""Sources that change while a cache is built of them, at a moment that is held open by a hook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image, ImageOps

from forebay.errors import BuildError, ManifestError
from forebay.preprocess import build_run as run
from forebay.preprocess import listing, pipeline, shard_task
from forebay.store.lookup import sealed_caches
from tests.faults.building import build_here
from tests.faults.children import Children
from tests.faults.row import Row, made
from tests.faults.shim import Fault
from tests.faults.vision import VisionSite, vision_site
from tests.preprocess.corpus import RATE_HZ, Corpus, flac, shard_bytes, tone, write_tar

_SIZE = 64 * 1024
_CLIPS = tuple(f"{tar}{number}" for tar in "ab" for number in range(4))

WINDOWS: dict[str, tuple[Any, str, bool]] = {
    "listed": (listing, "_with_hashes", False),
    "hashed": (pipeline, "resolve", True),
    "reading": (shard_task, "_rows", False),
    "made": (run, "require_unchanged", False),
}
"""Between listing and hash; between hash and shards; in the first shard, before its first byte; between shards and
seal: a function, and whether the change comes behind it."""

CHANGES = ("write", "same stat", "replace", "vanish", "touch")


@dataclass(frozen=True)
class Case:
    """A config and a file that it is built of. other: the same file with other content, as large as the first."""

    config: Path
    target: str
    other: Path


@dataclass(frozen=True)
class Shelf:
    """Cases by name and what uninterrupted builds of them give, and the server of children."""

    children: Children
    cases: dict[str, Case]
    wanted: dict[str, dict[str, bytes]]

    def trials(self) -> list[tuple[str, str, str]]:
        """Every case at every window with every change."""
        return [(case, window, change) for case in self.cases for window in WINDOWS for change in CHANGES]


def changed(place: Shelf, number: int, folder: Path) -> str:
    name, window, change = place.trials()[number % len(place.trials())]
    case = place.cases[name]
    here = Path(shutil.copytree(case.config.parent, folder / "data"))
    config, target, root = here / case.config.name, here / case.target, folder / "caches"
    ended = place.children.run(_build_while, config, root, window, change, target, case.other, folder / "done")
    assert (folder / "done").exists(), f"nothing was changed: {ended.error!r}"
    if change == "touch":
        assert ended.error is None, ended.error
        assert shard_bytes(Path(ended.value["cache"])) == place.wanted[name]
        return "touched: the same cache"
    if ended.error is not None:
        kinds = (BuildError, ManifestError) if change == "vanish" else BuildError
        assert isinstance(ended.error, kinds), repr(ended.error)
        assert case.target in str(ended.error)
        assert sealed_caches(root) == []
    if change == "vanish":
        assert ended.error is not None or window == "listed"
        return "gone: stopped, and named" if ended.error else "gone before it was hashed: counted as missing"
    fresh = place.children.run(build_here, config, folder / "fresh", Fault(), {})
    again = place.children.run(build_here, config, root, Fault(), {})
    assert fresh.error is None, fresh.error
    assert again.error is None, again.error
    honest = shard_bytes(Path(fresh.value["cache"]))
    assert honest != place.wanted[name]
    assert shard_bytes(Path(again.value["cache"])) == honest
    assert again.value["key"] == fresh.value["key"]
    assert not (root / ".building").exists()
    if ended.error is None:
        assert window == "listed"
        assert ended.value["key"] == fresh.value["key"]
        return "changed before it was hashed: listed again, the cache of the new content"
    if window == "made":
        assert again.value["shards_written"] < fresh.value["shards_written"]
        assert again.value["shards_linked"] == fresh.value["shards_written"] - again.value["shards_written"]
    return "changed later: stopped, and named; then built of the new content"


def _build_while(path: Path, root: Path, window: str, change: str, target: Path, other: Path, done: Path) -> Any:
    """Builds, and changes a file once, in the process and at the moment of a window."""
    module, name, is_behind = WINDOWS[window]
    real = getattr(module, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if not is_behind:
            _once(done, lambda: _change(change, target, other))
        result = real(*args, **kwargs)
        if is_behind:
            _once(done, lambda: _change(change, target, other))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, hooked)
        return build_here(path, root, Fault(), {})


def _once(done: Path, act: Callable[[], None]) -> None:
    """Does something in the first process that comes here; no other goes on before it is done."""
    import fcntl

    with open(f"{done}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            act()
            done.touch()


def _change(change: str, target: Path, other: Path) -> None:
    before = target.stat()
    if change == "vanish":
        target.unlink()
    elif change == "touch":
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    elif change == "replace":
        aside = target.with_name("aside")
        shutil.copyfile(other, aside)
        aside.replace(target)
    else:
        assert other.stat().st_size == before.st_size or change == "write"
        descriptor = os.open(target, os.O_WRONLY | os.O_TRUNC)  # in place: who has it open reads it too
        os.write(descriptor, other.read_bytes())
        os.close(descriptor)
        if change == "same stat":
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextlib.contextmanager
def speech_shelf(folder: Path) -> Iterator[Shelf]:
    """Prepares a corpus of 8 clips for every kind of source, in two tars or files."""
    cases = {
        name: case
        for make in (_tars, _sidecars, _loose, _parquet, _segments)
        for name, case in make(made(folder / make.__name__)).items()
    }
    with Children("datasets", "tests.faults.test_sources") as children:
        yield Shelf(children, cases, _wanted(children, cases, folder))


def _wanted(children: Children, cases: dict[str, Case], folder: Path) -> dict[str, dict[str, bytes]]:
    wanted = {}
    for name, case in cases.items():
        ended = children.run(build_here, case.config, folder / "built" / name, Fault(), {})
        assert ended.error is None, ended.error
        wanted[name] = shard_bytes(Path(ended.value["cache"]))
    return wanted


def _tars(folder: Path) -> dict[str, Case]:
    corpus = Corpus(made(folder / "data"))
    for tar in "ab":
        corpus.add_tar(f"{tar}.tar", [clip for clip in _CLIPS if clip[0] == tar])
        _padded(folder / "data" / f"{tar}.tar")
    corpus.config()
    config = folder / "data" / "config.toml"
    config.write_text(config.read_text().replace("rows_per_shard = 4", "rows_per_shard = 2"))
    members = {f"{clip}.flac": flac(tone(100 + n, duration_s=0.1)) for n, clip in enumerate(_CLIPS) if clip[0] == "b"}
    write_tar(folder / "b.tar", members)
    _padded(folder / "b.tar")
    rows = [{**row, "transcript": f"{row['transcript']}".replace("text of b", "TEXT OF B")} for row in corpus.rows]
    for path, table in ((folder / "data" / "train.parquet", corpus.rows), (folder / "train.parquet", rows)):
        _write_plain(path, table)
    return {
        "tar": Case(config, "b.tar", folder / "b.tar"),
        "manifest": Case(config, "train.parquet", folder / "train.parquet"),
    }


def _sidecars(folder: Path) -> dict[str, Case]:
    tars = made(folder / "data" / "tars")
    for where, word in ((tars, "text"), (folder, "TEXT")):
        for tar in "ab":
            members = {}
            for number, clip in enumerate(clip for clip in _CLIPS if clip[0] == tar):
                members[f"{clip}.flac"] = flac(tone(number, duration_s=0.1))
                members[f"{clip}.json"] = json.dumps({"text": f"{word} of {clip}"}).encode()
            write_tar(where / f"{tar}.tar", members)
    return {"sidecar": Case(_config(folder / "data", "webdataset", "tars"), "tars/b.tar", folder / "b.tar")}


def _loose(folder: Path) -> dict[str, Case]:
    data = made(folder / "data")
    for number, clip in enumerate(_CLIPS):
        (data / f"{clip}.wav").write_bytes(_wav(number))
    (folder / "b1.wav").write_bytes(_wav(99))
    for path, word in ((data / "train.jsonl", "text"), (folder / "train.jsonl", "TEXT")):
        texts = {clip: f"{word if clip == 'b1' else 'text'} of {clip}" for clip in _CLIPS}
        path.write_text("".join(json.dumps({"audio": f"{c}.wav", "text": t}) + "\n" for c, t in texts.items()))
    config = _config(data, "jsonl", "train.jsonl")
    return {
        "file": Case(config, "b1.wav", folder / "b1.wav"),
        "jsonl": Case(config, "train.jsonl", folder / "train.jsonl"),
    }


def _parquet(folder: Path) -> dict[str, Case]:
    parts = made(folder / "data" / "parts")
    for where, shift in ((parts, 0), (folder, 50)):
        for tar in "ab":
            clips = [clip for clip in _CLIPS if clip[0] == tar]
            rows = [{"audio": {"bytes": _wav(shift + n)}, "text": f"text of {c}"} for n, c in enumerate(clips)]
            _write_plain(where / f"{tar}.parquet", rows)
    return {"parquet": Case(_config(folder / "data", "hf", "parts"), "parts/b.parquet", folder / "b.parquet")}


def _segments(folder: Path) -> dict[str, Case]:
    place = made(folder / "data" / "set")
    for number, name in enumerate("ab"):
        (place / f"{name}.wav").write_bytes(_wav(number, duration_s=0.4))
    (folder / "b.wav").write_bytes(_wav(99, duration_s=0.4))
    (place / "wav.scp").write_text("a a.wav\nb b.wav\n")
    (place / "text").write_text("".join(f"{clip} text of {clip}\n" for clip in _CLIPS))
    for path, shift in ((place / "segments", 0.0), (folder / "segments", 0.01)):
        starts = {clip: 0.1 * int(clip[1]) + (shift if clip[0] == "b" else 0.0) for clip in _CLIPS}
        path.write_text("".join(f"{clip} {clip[0]} {at:.2f} {at + 0.08:.2f}\n" for clip, at in starts.items()))
    config = _config(folder / "data", "kaldi", "set")
    return {
        "recording": Case(config, "set/b.wav", folder / "b.wav"),
        "segments": Case(config, "set/segments", folder / "segments"),
    }


def _config(folder: Path, kind: str, manifest: str) -> Path:
    path = folder / "config.toml"
    path.write_text(
        f'name = "tones"\n[source]\nkind = "{kind}"\nmanifest = "{manifest}"\n[audio]\nfeatures = "waveform"\n'
        "[layout]\nrows_per_shard = 2\n[plan]\nbatch_size = 4\nedges_s = [0.2]\n[run]\nnum_workers = 2\n"
    )
    return path


def _padded(tar: Path) -> None:
    """Zeros behind the end of a tar are of it."""
    with open(tar, "r+b") as file:
        file.truncate(_SIZE)


def _wav(seed: int, *, duration_s: float = 0.1) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(seed, duration_s=duration_s), RATE_HZ, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def _write_plain(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes parquet whose size depends on the lengths of its values alone."""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


@contextlib.contextmanager
def image_shelf(folder: Path) -> Iterator[Shelf]:
    """Prepares photos and questions about them."""
    site: VisionSite
    with vision_site(made(folder / "data")) as site:
        shutil.rmtree(folder / "data" / "whole")
        other = folder / "p1.jpg"
        with Image.open(folder / "data" / "p1.jpg") as photo:  # a content that no other photo has
            ImageOps.invert(photo.convert("RGB")).save(other)
        # Two images a shard: one shard of images is that of before the change.
        site.config.write_text(re.sub(r"rows_per_shard = \d+", "rows_per_shard = 2", site.config.read_text()))
        size = max(path.stat().st_size for path in (folder / "data" / "p1.jpg", other))
        for path in (folder / "data" / "p1.jpg", other):  # what stands behind the end of a JPEG is none of it
            os.truncate(path, size)
        cases = {"image": Case(site.config, "p1.jpg", other)}
        yield Shelf(site.children, cases, _wanted(site.children, cases, folder))


ROWS: list[Row[Any]] = [
    Row(
        name="sources",
        fault="a manifest, tar, sidecar, loose clip or parquet is rewritten, replaced, removed or touched "
        "during a build",
        outcome="the build stops and names it, or is of the new content; touched, the same cache; never old values",
        prepared=speech_shelf,
        trial=changed,
        short=10,
        long=lambda place: len(place.trials()),
    ),
    Row(
        name="sources_vision",
        fault="an image is rewritten, replaced, removed or touched during a build",
        outcome="as above",
        prepared=image_shelf,
        trial=changed,
        short=3,
        long=lambda place: len(place.trials()),
    ),
]


def test_a_source_that_changes_during_a_build_never_gives_a_cache_of_old_values(tmp_path: Path) -> None:
    """Some 40 builds: what a change gave is compared with a fresh one, and the next run has to go on."""
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


@pytest.mark.wide
def test_an_image_that_changes_during_a_build_never_gives_a_cache_of_old_values(tmp_path: Path) -> None:
    """Some 10 builds, as above; transformers is loaded once for all of them."""
    assert sum(ROWS[1].check(tmp_path).values()) == ROWS[1].short
