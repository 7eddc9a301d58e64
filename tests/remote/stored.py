"""A folder put into a bucket as it is, and the settings of a node that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.objects.server import Bucket
from forebay.config.remote import GB, RemoteConfig


def put_folder(bucket: Bucket, folder: Path, prefix: str = "") -> str:
    """Puts the files of a folder below a prefix, metadata.json last; returns their URL."""
    prefix = prefix or folder.name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name == "metadata.json")
    bucket.put_all((f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in files)
    return f"{bucket.url}/{prefix}"


def node_settings(tmp_path: Path, endpoint: str, *, bound_bytes: int | None = None, **changes: Any) -> RemoteConfig:
    """Returns the settings of a node whose cache is `tmp_path`/node."""
    bound = {} if bound_bytes is None else {"cache_size_gb": bound_bytes / GB}
    return RemoteConfig(**{"endpoint": endpoint, "shard_dir": str(tmp_path / "node"), **bound, **changes})
