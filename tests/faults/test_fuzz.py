"""Foreign bytes in every form that is read: hypothesis changes what was right and renews its checksum."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st

from forebay.config import BucketConfig, Config, SourceConfig
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.statistics import batch_statistics
from forebay.steps.recipe import load_config
from forebay.store.cache import open_cache
from forebay.store.key import canonical_json
from forebay.store.lookup import sealed_caches
from forebay.store.metadata import write_metadata
from forebay.store.seal import verify_folder
from forebay.store.shard import shard_name, to_table
from forebay.tar.index import load_index
from tests.faults.children import Children
from tests.faults.fuzzing import PER_TRIAL, WICKED, Fuzz, npy, object_arrays, sign
from tests.faults.row import Row, made
from tests.preprocess.corpus import Corpus, flac, tone
from tests.rows.helpers import read_rows
from tests.store_factory import make_cache
from tests.strategies import changed_bytes, changed_documents


def metadata_bytes(folder: Path, data: st.DataObject) -> None:
    cache = _cache(folder)
    path = cache / "metadata.json"
    path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    _read_cache(cache)


def metadata_signed(folder: Path, data: st.DataObject) -> None:
    cache = _cache(folder)
    document = json.loads((cache / "metadata.json").read_bytes())
    write_metadata(cache, data.draw(changed_documents(document)))
    _read_cache(cache)


def array_signed(folder: Path, data: st.DataObject) -> None:
    cache = _cache(folder)
    name = data.draw(st.sampled_from(["slots.npy", "lengths.npy", "audio.npy", "text.npy"]))
    changed = data.draw(st.one_of(changed_bytes((cache / name).read_bytes(), WICKED), object_arrays()))
    sign(cache, name, changed)
    _read_cache(cache)


def table_signed(folder: Path, data: st.DataObject) -> None:
    """A shard table with other numbers in it: places outside of the file, negative ones, too many rows."""
    cache = _cache(folder)
    table = np.load(cache / "audio.npy").copy()
    record = table[data.draw(st.integers(0, len(table) - 1))]
    number = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 2000))
    name = data.draw(st.sampled_from(["size_bytes", "rows", "hash_offset", "spans"]))
    if name == "spans":
        spans = record["spans"]
        spans[data.draw(st.integers(0, len(spans) - 1)), data.draw(st.integers(0, 2))] = data.draw(number)
    else:
        record[name] = data.draw(number)
    sign(cache, "audio.npy", npy(table))
    _read_cache(cache)


def shard_signed(folder: Path, data: st.DataObject) -> None:
    cache = _cache(folder)
    opened = open_cache(cache)
    changed = data.draw(changed_bytes((cache / shard_name("audio", 0)).read_bytes(), WICKED))
    entries = [entry for _, entry in opened.shard_entries("audio")]
    digest = xxhash.xxh3_128_hexdigest(changed)
    entries[0] = dataclasses.replace(entries[0], size_bytes=len(changed), xxh3_128=digest)
    (cache / shard_name("audio", 0)).write_bytes(changed)
    sign(cache, "audio.npy", npy(to_table(entries, len(entries[0].spans))))
    _read_cache(cache)


def plan(folder: Path, data: st.DataObject) -> None:
    root = folder / "plan"
    path = root / "metadata.json"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    else:
        document = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "checksum"}
        document = data.draw(changed_documents(document))
        document["checksum"] = xxhash.xxh3_128_hexdigest(canonical_json(document))
        path.write_text(json.dumps(document))
    loaded = load_plan(root, cache_key="ab" * 32, settings=_plan_settings())
    order = loaded.order(seed=1, epoch=0)
    list(order.batches(np.arange(len(order))))


def plan_array(folder: Path, data: st.DataObject) -> None:
    root = folder / "plan"
    path = root / data.draw(st.sampled_from(["members.npy", "offsets.npy", "batch_sizes.npy"]))
    path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    load_plan(root, cache_key="ab" * 32, settings=_plan_settings())


def tar(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "a.tar"
    path.write_bytes(data.draw(changed_bytes(path.read_bytes()[:4096], WICKED)))
    load_index(path, cache_root=folder / "root")
    read_rows(SourceConfig(kind="webdataset", manifest=(str(path.parent),)), cache_root=folder / "root")


def parquet(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "train.parquet"
    path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    read_rows(SourceConfig(kind="tar", manifest=(str(path),)), cache_root=folder / "root")


def tsv(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "list.tsv"
    path.write_bytes(data.draw(changed_bytes(b"a.tar\ta1\ten\t0.5\na.tar\ta2\tfr\t0.25\n", WICKED)))
    read_rows(SourceConfig(kind="filelist", manifest=(str(path),)), cache_root=folder / "root")


def jsonl(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "list.jsonl"
    rows = [{"audio": "a.flac", "text": "hello", "language": "en", "duration_s": 1.5, "sample_id": "a"}] * 2
    if data.draw(st.booleans()):
        rows = data.draw(changed_documents(rows))
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(data.draw(changed_bytes(lines, WICKED)))
    read_rows(SourceConfig(kind="jsonl", manifest=(str(path),)), cache_root=folder / "root")


def speech_set(folder: Path, data: st.DataObject) -> None:
    """A Kaldi folder, a manifest of NeMo, cuts of lhotse or subtitles, one file of which is changed."""
    name = data.draw(st.sampled_from(sorted(_SPEECH_SETS)))
    place, files = folder / "raw" / name, dict(_SPEECH_SETS[name])
    changed = data.draw(st.sampled_from(sorted(files)))
    if changed.endswith(("json", "jsonl")) and data.draw(st.booleans()):
        rows = data.draw(changed_documents([json.loads(line) for line in files[changed].splitlines()]))
        files[changed] = "\n".join(map(json.dumps, rows if isinstance(rows, list) else [rows])).encode()
    else:
        files[changed] = data.draw(changed_bytes(files[changed], WICKED))
    made(place)
    for each, content in files.items():
        (place / each).write_bytes(content)
    manifest = place if name in ("kaldi", "subtitles") else place / next(iter(files))
    read_rows(SourceConfig(kind=name.partition("_")[0], manifest=(str(manifest),)), cache_root=folder / "root")


def toml(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "config.toml"
    path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    assert isinstance(load_config(path), Config)


def _prepare(folder: Path) -> None:
    make_cache(folder / "caches", num_samples=3, rows_per_shard=2, max_duration_s=0.1, features="waveform")
    corpus = Corpus(made(folder / "raw"))
    corpus.add_tar("a.tar", ["a1", "a2"])
    corpus.config()
    lengths = np.random.default_rng(2).integers(500, 32_000, 40)
    made_plan = bucket_plan(lengths, sample_rate_hz=1000, settings=_plan_settings())
    found = batch_statistics(made_plan, lengths)
    save_plan(made_plan, folder / "plan", cache_key="ab" * 32, settings=_plan_settings(), statistics=found)


_NEMO = {"audio_filepath": "a.flac", "offset": 0.5, "duration": 1.5, "text": "hello", "lang": "en"}
_CUT = {
    "id": "c1",
    "type": "MonoCut",
    "start": 0.5,
    "duration": 1.5,
    "channel": 0,
    "supervisions": [{"id": "s1", "recording_id": "r1", "start": 0.0, "duration": 1.5, "text": "hello"}],
    "recording": {
        "id": "r1",
        "sources": [{"type": "file", "channels": [0], "source": "a.flac"}],
        "sampling_rate": 16_000,
        "num_samples": 48_000,
        "duration": 3.0,
        "channel_ids": [0],
    },
}
_LINES = (f"{json.dumps(_CUT)}\n" * 2).encode()
_TEXT_GRID = b"""File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0
xmax = 3
tiers? <exists>
size = 1
item []:
    item [1]:
        class = "IntervalTier"
        name = "words"
        xmin = 0
        xmax = 3
        intervals: size = 2
        intervals [1]:
            xmin = 0
            xmax = 1
            text = "hello"
        intervals [2]:
            xmin = 1
            xmax = 3
            text = ""
"""
_SPEECH_SETS: dict[str, dict[str, bytes]] = {
    "kaldi": {
        "wav.scp": b"r1 a.flac\nr2 b.flac\n",
        "segments": b"u1 r1 0.0 1.5\nu2 r1 1.5 2.5\nu3 r2 0 -1\n",
        "text": b"u1 hello\nu2 there\nu3 you\n",
        "utt2spk": b"u1 s\nu2 s\nu3 t\n",
        "utt2lang": b"u1 en\nu2 fr\n",
        "reco2file_and_channel": b"r1 r1 A\nr2 r2 B\n",
    },
    "nemo": {"train.json": (f"{json.dumps(_NEMO)}\n" * 2).encode()},
    "lhotse": {"cuts.jsonl": _LINES},
    "subtitles": {
        "a.flac": flac(tone(1, duration_s=3.0)),
        "a.srt": b"1\n00:00:00,100 --> 00:00:01,000\nhello\n\n2\n00:00:01,200 --> 00:00:02,000\n<i>there</i>\n",
        "b.flac": flac(tone(2, duration_s=3.0)),
        "b.vtt": b"WEBVTT\n\n00:00.100 --> 00:01.000\n<v Ann>hello\n\nNOTE no cue\n\n00:01.200 --> 00:02.000\nyou\n",
        "c.flac": flac(tone(3, duration_s=3.0)),
        "c.TextGrid": _TEXT_GRID,
    },
    "lhotse_packed": {"cuts.jsonl.gz": gzip.compress(_LINES, mtime=0)},
}


@contextlib.contextmanager
def _serving(_folder: Path) -> Iterator[Children]:
    with Children("tests.faults.test_fuzz") as children:
        yield children


def _plan_settings() -> Any:
    return BucketConfig(batch_seconds=60.0)


def _cache(folder: Path) -> Path:
    return next((folder / "caches").glob("prompts-*"))


def _read_cache(cache: Path) -> None:
    sealed_caches(cache.parent)
    verify_folder(cache)
    opened = open_cache(cache)
    assert opened.lengths is not None
    for index in range(min(len(opened), 4)):
        opened.read(index)
        opened.sample_id(index)
    assert opened.samples is not None


FUZZ = Fuzz(
    _prepare,
    {
        metadata_bytes: "caches",
        metadata_signed: "caches",
        array_signed: "caches",
        table_signed: "caches",
        shard_signed: "caches",
        plan: "plan",
        plan_array: "plan",
        tar: "raw",
        parquet: "raw",
        tsv: "raw",
        jsonl: "raw",
        speech_set: "raw",
        toml: "raw",
    },
)
ROW: Row[Any] = Row(
    name="fuzz",
    fault="fuzzed metadata.json, plan, npy, tdz, tar, parquet, TSV, JSONL, sets of speech, TOML "
    f"({PER_TRIAL} inputs a run)",
    outcome="typed error; no crash, no import, no code execution, no path outside the root, memory bounded",
    prepared=_serving,
    trial=FUZZ.trial,
    short=len(FUZZ.targets),
    long=1000,
)


def test_foreign_bytes_give_typed_errors(tmp_path: Path) -> None:
    with _serving(tmp_path) as children:
        numbers = range(len(FUZZ.targets))
        outcomes = [FUZZ.trial(children, number, made(tmp_path / str(number)), count=4) for number in numbers]
    assert outcomes == [f"{target.__name__} x 4" for target in FUZZ.targets]
