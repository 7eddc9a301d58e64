"""Messages to a worker grow with a shard or a source file, never with the listing; few tasks are alive at once."""

from __future__ import annotations

import io
import json
import operator
import pickle
import tarfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import load_config
from forebay.preprocess.listing import resolve
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask
from forebay.rows import list_rows as locate
from forebay.rows import listed_media as conversation_images
from forebay.rows.readers import table_records
from forebay.rows.readers import table_records as json_lines
from forebay.steps.recipe import recipe_of
from forebay.store import memo
from forebay.store.memo import Memo
from tests.preprocess.vision.corpus import DEMO as VISION
from tests.preprocess.vision.corpus import photo
from tests.rows.helpers import audio
from tests.text_corpus import TOKENIZER

CLIP = audio(1600, kind="WAV")
PHOTOS = [photo(number, width=28, height=28) for number in range(3)]
PER_FILE = 8
Write = Callable[[Path, range], str]


def add_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tars(folder: Path, rows: range, members: Callable[[int], Mapping[str, bytes]]) -> list[str]:
    """Writes PER_FILE rows a tar; returns the tar of every row."""
    for start in rows[::PER_FILE]:
        part = {name: data for row in range(start, start + PER_FILE) for name, data in members(row).items()}
        add_tar(folder / f"{start:05d}.tar", part)
    return [f"{row - row % PER_FILE:05d}.tar" for row in rows]


def lines(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def tar(folder: Path, rows: range) -> str:
    tars = write_tars(folder, rows, lambda row: {f"{row:05d}.wav": CLIP})
    columns = {"tar_path": tars, "tar_member_name": [f"{row:05d}.wav" for row in rows]}
    columns |= {"transcript": [f"words {row}" for row in rows], "language": ["en"] * len(rows)}
    pq.write_table(pa.table({**columns, "duration_s": [0.1] * len(rows)}), folder / "m.parquet")
    return 'kind = "tar"\nmanifest = "m.parquet"\n'


def filelist(folder: Path, rows: range) -> str:
    tars = write_tars(folder, rows, lambda row: {f"{row:05d}.wav": CLIP, f"{row:05d}.txt": b"words"})
    entries = zip(tars, rows, strict=True)
    (folder / "m.tsv").write_text("".join(f"{name}\t{row:05d}\ten\t0.1\n" for name, row in entries))
    return 'kind = "filelist"\nmanifest = "m.tsv"\n'


def webdataset(folder: Path, rows: range) -> str:
    write_tars(folder, rows, lambda row: {f"{row:05d}.wav": CLIP, f"{row:05d}.txt": b"words"})
    return 'kind = "webdataset"\nmanifest = "."\n'


def jsonl(folder: Path, rows: range) -> str:
    for row in rows:
        (folder / f"{row:05d}.wav").write_bytes(CLIP)
    lines(folder / "m.jsonl", ({"audio": f"{row:05d}.wav", "text": f"words {row}"} for row in rows))
    return 'kind = "jsonl"\nmanifest = "m.jsonl"\n'


def ljspeech(folder: Path, rows: range) -> str:
    (folder / "wavs").mkdir()
    for row in rows:
        (folder / "wavs" / f"{row:05d}.wav").write_bytes(CLIP)
    (folder / "metadata.csv").write_text("".join(f"{row:05d}|words|words\n" for row in rows))
    return 'kind = "ljspeech"\nmanifest = "metadata.csv"\n'


def hf(folder: Path, rows: range) -> str:
    table = [{"audio": {"bytes": CLIP, "path": f"{row:05d}.wav"}, "text": f"words {row}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(table), folder / "m.parquet")
    return 'kind = "hf"\nmanifest = "m.parquet"\n'


def text(folder: Path, rows: range) -> str:
    lines(folder / "m.jsonl", ({"id": f"{row:05d}", "text": f"words {row}"} for row in rows))
    return 'kind = "text"\nmanifest = "m.jsonl"\n'


def image_jsonl(folder: Path, rows: range) -> str:
    for number, data in enumerate(PHOTOS):
        (folder / f"{number}.jpg").write_bytes(data)
    named = ({"image": f"{row % 3}.jpg", "question": f"What of {row:05d}?", "answer": "It."} for row in rows)
    lines(folder / "m.jsonl", named)
    return 'kind = "jsonl"\nmanifest = "m.jsonl"\n'


def image_tar(folder: Path, rows: range) -> str:
    asked = json.dumps({"question": "What?", "answer": "It."}).encode()
    write_tars(folder, rows, lambda row: {f"{row:05d}.jpg": PHOTOS[row % 3], f"{row:05d}.json": asked})
    return 'kind = "webdataset"\nmanifest = "."\n'


def image_hf(folder: Path, rows: range) -> str:
    table = [{"image": {"bytes": PHOTOS[row % 3]}, "question": f"What of {row:05d}?", "answer": "It."} for row in rows]
    pq.write_table(pa.Table.from_pylist(table), folder / "m.parquet", row_group_size=PER_FILE)
    return 'kind = "hf"\nmanifest = "m.parquet"\n'


SPEECH: Sequence[Write] = (tar, filelist, webdataset, jsonl, ljspeech, hf, text)
IMAGES: Sequence[Write] = (image_jsonl, image_tar, image_hf)


class Weighing:
    """A map in this process that keeps the size of every task and of every result by the name of its function."""

    def __init__(self) -> None:
        self.longest: dict[str, int] = {}

    def weigh(self, name: str, item: Any) -> Any:
        sent = pickle.dumps(item)
        self.longest[name] = max(self.longest.get(name, 0), len(sent))
        return pickle.loads(sent)  # noqa: S301  its own bytes

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        name = getattr(function, "__name__", "")
        return [self.weigh(f"{name} gives", function(self.weigh(name, item))) for item in items]


def longest_tasks(folder: Path, write: Write, num_rows: int) -> dict[str, int]:
    folder.mkdir()
    source = write(folder, range(num_rows))
    steps = f'[vision]\nprocessor = "{VISION / "model"}"\n[plan]\nkind = "pack"\nseq_len = 400\n'
    if write in SPEECH:
        steps = f'[audio]\nfeatures = "{"none" if write is text else "waveform"}"\n[text]\ntokenizer = "{TOKENIZER}"\n'
    (folder / "c.toml").write_text(f'name = "sizes"\n[source]\n{source}{steps}')
    config = load_config(folder / "c.toml", overrides=[f"run.cache_root={folder / 'caches'}"])
    found = Weighing()
    listing = resolve(config, Memo(config.cache_root), found.map, recipe=recipe_of(config))
    assert len(listing.rows) == num_rows
    groups = listing.groups
    rows_per_shard = PER_FILE if groups.items else 1
    for cut in groups.cuts(listing, probe=dict.fromkeys(groups.names, ""), rows_per_shard=rows_per_shard):
        files, rows = groups.task_rows(listing, cut)
        common: dict[str, Any] = {"key": cut.key, "folder": folder, "groups": groups, "max_open_tars": 1}
        task = ShardTask(group=cut.group, rows=rows, files=files, **common)
        sent = found.weigh(f"{cut.group} shard", task)
        assert sent.rows.equals(rows)
        assert (sent.key, sent.files, sent.groups) == (task.key, files, groups)
    return found.longest


@pytest.mark.parametrize("write", [*SPEECH, *IMAGES], ids=lambda write: write.__name__)
@pytest.mark.few("tar", "webdataset", "hf", "text", "image_jsonl")
def test_no_task_grows_with_the_listing(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "ROWS_PER_TASK", PER_FILE)
    monkeypatch.setattr(memo, "_TASK_FILES", 1)
    monkeypatch.setattr(conversation_images, "ITEMS_PER_TASK", PER_FILE)
    monkeypatch.setattr(table_records, "_ROWS_PER_PART", PER_FILE)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 512)
    small = longest_tasks(tmp_path / "small", write, 2 * PER_FILE)
    large = longest_tasks(tmp_path / "large", write, 16 * PER_FILE)
    assert small.keys() == large.keys()
    assert {"text shard"} < small.keys()
    for name, size in large.items():
        # Eight times the rows; what is left to differ are names, and into how many pieces a shard's rows fall.
        assert size <= 1.5 * small[name], (name, small[name], size)


class Task:
    """A task that can be counted while it lives."""

    alive: ClassVar[weakref.WeakSet[Task]] = weakref.WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.number,)


def test_a_task_is_made_when_a_worker_is_free_for_it() -> None:
    """Two processes start: 0.3 s of CPU."""
    most = 0
    done = []
    negated: Callable[[Any], Any] = operator.neg
    with Pool(2) as pool:
        for task, result in pool.run(negated, map(Task, range(60))):
            done.append((task.number, result))
            del task
            most = max(most, len(Task.alive))
    assert sorted(done) == [(number, -number) for number in range(60)]
    assert most <= 4  # one a worker, the one that was yielded, the one that is being made
