"""`kind = "jsonl"` of conversations: one JSON object a line, or an array of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.meanings.conversation import identifier, image_names
from forebay.rows.parts import Part, PartTask, VisionKind, file_place, part_tasks
from forebay.rows.readers.json_lines import (
    JsonError,
    Where,
    array_members,
    is_array,
    not_lines,
    parse_object,
)
from forebay.store.remote.raw.sources import at_hand
from forebay.store.source_files import SourceFile

BLOCK_BYTES = 8 * 1024 * 1024

MAX_LINE_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


def jsonl_parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    """Returns the manifests in runs of lines of about 8 MiB."""
    return part_tasks(source, enumerate(manifests), cache_root, line_blocks)


def line_blocks(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, end, number of the first line from 1) of runs of whole lines, of about 8 MiB.

    Of an array: of its objects. Raises ManifestError where the file cannot be read, or a line has more than 16 MiB.
    """
    if is_array(path):
        yield from _member_blocks(path)
        return
    start, number = 0, 1
    try:
        with at_hand(path) as local, open(local, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                end = block.rfind(b"\n") + 1
                while not end and (more := file.read(BLOCK_BYTES)):
                    block += more
                    end = block.rfind(b"\n") + 1
                    if (block.find(b"\n") if end else len(block)) > MAX_LINE_BYTES:
                        raise not_lines(path, number, f"more than {MAX_LINE_BYTES} bytes; name a file of JSON lines")
                end = end or len(block)
                yield start, start + end, number
                start, number = start + end, number + block.count(b"\n", 0, end)
                file.seek(start)
    except OSError as err:
        raise ManifestError(
            f"cannot read manifest {path}: {err.strerror}; check the path and its permissions", code="FB201"
        ) from err


def _member_blocks(path: Path) -> Iterator[tuple[int, int, int]]:
    start = stop = 0
    first = number = 1
    for number, (at, data) in enumerate(array_members(path), 1):
        start = start or at
        if stop and at + len(data) - start > BLOCK_BYTES:
            yield start, stop, first
            start, first = at, number
        stop = at + len(data)
    if stop:
        yield start, stop, first


def read_jsonl_part(
    task: PartTask, *, renamed: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields
) -> Part:
    """Returns the rows of some lines; blank lines are none.

    A line: a conversation as `canonical` takes it, `image` or `images` (a path or paths, relative to the manifest), and
    optional `sample_id` or `id`. Or an image with `label`, with `text`, or alone, as `read_row`. Raises ManifestError,
    with the line, for what is no JSON object; a row that is no conversation, or has a field twice, fails. renamed:
    gives the fields of a line the names that rows have.
    """
    rows = task.rows()
    for place, line in _lines(task):
        where = f"{task.name}, {place}"
        try:
            fields = renamed(parse_object(line))
        except JsonError as err:
            if err.reason is not None:
                rows.reject(None, err.reason, f"{where}: {err}")
                continue
            raise not_lines(Path(task.path), place, str(err)) from err
        sample_id = None
        try:
            sample_id = identifier(fields)
            images = map(file_place, image_names(fields))
            rows.add(fields, images, sample_id=sample_id, explicit=sample_id is not None)
        except SampleError as err:
            rows.reject(sample_id, err.reason, f"{where}: {err}")
    return rows.part(task.group)


def _lines(task: PartTask) -> Iterator[tuple[Where, bytes]]:
    if is_array(Path(task.path)):
        members = enumerate(array_members(Path(task.path), task.start, task.stop), task.first)
        yield from ((Where(number, "object"), data) for number, (_, data) in members)
        return
    try:
        with at_hand(Path(task.path)) as local, open(local, "rb") as file:
            file.seek(task.start)
            data = file.read(task.stop - task.start)
    except OSError as err:
        raise ManifestError(f"cannot read manifest {task.path}: {err.strerror}; check the path", code="FB201") from err
    for number, line in enumerate(data.split(b"\n"), task.first):
        line = (line.removeprefix(_BOM) if number == 1 else line).removesuffix(b"\r")
        if line.strip():
            yield Where(number), line


KIND = VisionKind(parts=jsonl_parts, read=read_jsonl_part)
