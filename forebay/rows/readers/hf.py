"""`kind = "hf"`: a `save_to_disk` folder of the `datasets` library, or parquet files, with an audio column."""

from __future__ import annotations

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.rows.kept_columns import concatenated
from forebay.rows.locate import DURATIONS, SpeechKind
from forebay.rows.manifest import Manifest, Unused, require_rows
from forebay.rows.named_files import NamedFiles, manifest_files
from forebay.rows.readers.arrow_files import HfFile, data_files
from forebay.rows.readers.table_rows import TableRows, locate_rows


def list_hf(source: SourceConfig) -> Manifest:
    """Returns the rows of `hf` data files: their place is a row number, or a file where the column holds only paths.

    The audio column is `Audio()`: bytes, path or both (paths relative to the data file), or plain binary or strings; it
    is never decoded here. With `source.columns.features` it is not looked at: that column holds the features, matrices
    of floats. With `source.columns.labels` the text of a row is the ids in that column, in decimal and parted by
    spaces. Text and language by `source.columns.text` and `source.columns.language` (null where those
    are left at their default and missing), a ClassLabel language by its name. Optional: `sample_id` or `id`,
    `duration_s` or `duration`, `prompt`; other columns are counted by name. An id left out is the path without
    extension, else `<file>/<row>`. Raises MissingExtraError without the `datasets` library, ManifestError for missing
    columns and other types.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    tables, rejected, unused = [], [], Unused()
    start = 0
    for number, manifest in data_files(source, manifests):
        file = TableRows(manifest, number, source, HfFile(manifest.path), durations=DURATIONS)
        rows, failed = file.rows(files, start)
        unused.add(file.unused, rows=len(rows) + len(failed))
        start += len(rows) + len(failed)
        tables.append(rows)
        rejected.append(failed)
    require_rows(start, manifests)
    return Manifest(
        files=tuple(files.files),
        rows=concatenated(tables),
        rejected=pa.concat_tables(rejected),
        unused=unused.counts,
    )


KIND = SpeechKind(list=list_hf, locate=locate_rows)
