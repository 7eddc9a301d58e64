"""Where the clips of a config lie in their tars, for what is written about a cache: that keeps no names of members."""

from __future__ import annotations

import os

import pyarrow as pa

from forebay.config import Config
from forebay.preprocess.sources.locate import read_rows

_TAR_KINDS = ("tar", "filelist", "webdataset")


def tar_places(config: Config) -> pa.Table | None:
    """Returns `sample_id`, `tar_path` (absolute) and `tar_member_name` of every eligible sample; None of a kind without tars.

    Raises ManifestError where the manifest cannot be used.
    """
    if config.source.kind not in _TAR_KINDS:
        return None
    listed = read_rows(config.source, cache_root=config.cache_root)
    paths = pa.array([os.path.abspath(file.path) for file in listed.files], pa.large_string())
    columns = {
        "sample_id": listed.rows["sample_id"],
        "tar_path": paths.take(listed.rows["file"].combine_chunks()),
        "tar_member_name": listed.rows["member"],
    }
    return pa.table(columns)
