"""`kind = "text"`: texts without audio, of lines (plain or JSON, compressed or not) or of a parquet column."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.errors import ManifestError
from forebay.rows.manifest import Manifest, require_rows, storable
from forebay.rows.named_files import manifest_files, path_stem
from forebay.rows.reader import Failures, Located, LocateTask, Reader, RecordingLister
from forebay.rows.readers.line_blocks import codec_of, line_blocks, plain_name
from forebay.rows.readers.line_index import count_rows
from forebay.rows.readers.text_lines import list_lines
from forebay.rows.readers.text_parquet import ENDING as PARQUET
from forebay.rows.readers.text_parquet import list_parquet, num_rows
from forebay.rows.readers.text_rows import LineFile, TextRows, Wanted, wanted_early
from forebay.rows.recording_rows import located
from forebay.store.remote.raw.sources import files_in, is_folder
from forebay.store.source_files import SourceFile

logger = logging.getLogger(__name__)


def list_text(source: SourceConfig, cache_root: Path | None = None) -> Manifest:
    """Returns the rows of texts without audio; each manifest is its own source file.

    A `.txt` file is a text a line, a `.parquet` file a text a row, anything else JSON lines `{"text", "language"?,
    "prompt"?, "sample_id"?}`, as is a `.txt` file whose first line is such an object; lines may be compressed, `.gz` or
    `.zst`. `id` is taken for `sample_id`, `[source.columns]` names other fields; further fields are counted by name. An
    id left out is the manifest's name without its extensions and the line or row, `texts/17`. Blank lines are passed
    over, and numbered.
    A text that is no UTF-8 fails as `bad_text`, one of more than `source.max_sample_bytes` as `too_large`.
    `source.rows` counts the rows of all manifests, blank lines left out; it and `max_samples` read no more than they
    need, except that languages which never occur can only be named when all was read. cache_root: where the index of a
    large file is kept, by which a slice finds its lines.
    Raises ManifestError for a file that is no text, and with the line for what is no such object.
    """
    manifests = manifest_files(source)
    _tell_what_is_beside(source, manifests)
    wanted = wanted_early(source.rows)
    if wanted is None:
        wanted = Wanted.of(source.rows or ":", _num_rows(source, manifests, cache_root))
    rows = TextRows(source)
    for group, manifest in enumerate(manifests):
        file = LineFile(manifest, group, storable(path_stem(plain_name(manifest.name))), rows)
        if manifest.path.suffix == PARQUET:
            list_parquet(file, wanted)
        else:
            list_lines(file, wanted, cache_root=cache_root)
        if rows.is_enough or wanted.next_from(rows.count) is None:
            break
    _require_some(rows, manifests, cache_root)
    return Manifest(
        files=tuple(manifests), rows=rows.table(), rejected=rows.failures.table(), unused=rows.unused.counts
    )


def _num_rows(source: SourceConfig, manifests: list[SourceFile], cache_root: Path | None) -> int:
    """Returns how many rows the manifests have, by their indexes where these know it."""
    most = source.max_sample_bytes
    count = 0
    for path in (manifest.path for manifest in manifests):
        if path.suffix == PARQUET:
            count += num_rows(path)
        elif codec_of(path) is None:
            count += count_rows(path, max_bytes=most, cache_root=cache_root)
        else:
            count += sum(int(block.is_row.sum()) for block in line_blocks(path, max_bytes=most))
    return count


def _require_some(rows: TextRows, manifests: list[SourceFile], cache_root: Path | None) -> None:
    """Raises ManifestError where there is no row, or `source.rows` selects none."""
    if rows.num_taken:
        return
    source = rows.source
    total = 0 if source.rows is None else _num_rows(source, manifests, cache_root)
    require_rows(total, manifests)
    raise ManifestError(
        f"{', '.join(source.manifests)}: source.rows is {source.rows}, which selects none of {total} rows; correct it",
        code="FB204",
    )


def _tell_what_is_beside(source: SourceConfig, manifests: list[SourceFile]) -> None:
    """Logs which files of texts in a folder are not read, since others go first: a licence may be a `.txt` too."""
    kind = SOURCE_KINDS[source.kind]
    read = {manifest.path for manifest in manifests}
    for entry in map(Path, source.manifests):
        if not is_folder(entry):
            continue
        patterns = [*kind.files, *(pattern for tier in kind.else_files for pattern in tier)]
        beside = [path.name for pattern in patterns[1:] for path in files_in(entry, pattern) if path not in read]
        beside = [name for name in beside if not name.endswith(".txt")]
        if beside:
            names = ", ".join(path.name for path in sorted(read)[:3])
            logger.warning(
                "%s: of this folder %s%s is read, and not %s%s; name what is meant by a glob",
                entry,
                names,
                " ..." if len(read) > 3 else "",
                ", ".join(beside[:3]),
                f" and {len(beside) - 3} more" if len(beside) > 3 else "",
            )


def _as_listed(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


READER = Reader(recordings=RecordingLister(list=list_text, locate=_as_listed, has_index=True))
