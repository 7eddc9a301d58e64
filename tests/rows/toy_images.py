"""A kind of conversations that forebay does not have: tab-separated lines of an image, a question and an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from forebay.config.data import SourceConfig
from forebay.rows.named_files import shown_name
from forebay.rows.parts import Part, PartRows, PartTask, VisionKind, file_place
from forebay.rows.readers.json_lines import manifest_lines
from forebay.store.source_files import SourceFile


def parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    for group, file in enumerate(manifests):
        name = shown_name(file)
        yield PartTask(source=source, group=group, name=name, path=str(file.path), cache_root=cache_root)


def read(task: PartTask) -> Part:
    rows = PartRows()
    for _, line in manifest_lines(Path(task.path)):
        name, question, answer = line.decode().split("\t")
        rows.add({"question": question, "answer": answer}, [file_place(name)], sample_id=name, explicit=True)
    return rows.part(task.group)


KIND = VisionKind(parts=parts, read=read)
