"""Indexes of many tars, made in parallel: what `forebay index` runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.config.remote import RemoteConfig, is_url
from forebay.errors import ForebayError, ManifestError, TarError
from forebay.preprocess.pool import Pool
from forebay.store.remote.raw.raw_sources import (
    at_hand,
    files_below,
    is_folder,
    local_entry,
    named_path,
    naming_urls,
    place_of,
    shown,
)
from forebay.store.source_files import COMPRESSED_TARS
from forebay.tar.index import current_index, is_indexed, json_path, load_index
from forebay.tar.index import export_json as write_json
from forebay.task_map import WorkerDied
from forebay.terminal import CommandReport, Progress


@dataclass(kw_only=True)
class IndexReport(CommandReport):
    """The result of an indexing run.

    indexed, current: tars. failed: (tar or manifest, why) of the others. members, refused: in all tars.
    """

    indexed: int = 0
    current: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    members: int = 0
    refused: int = 0

    def lines(self) -> list[str]:
        """Returns what `forebay index` prints, without why tars failed."""
        return [
            f"{self.indexed} tars indexed, {self.current} were current, {len(self.failed)} failed; "
            f"{self.members} members, {self.refused} refused"
        ]


def index_manifests(
    manifests: Iterable[str | os.PathLike[str]],
    *,
    remote: RemoteConfig = RemoteConfig(),  # noqa: B008  frozen
    cache_root: str | os.PathLike[str],
    num_workers: int,
    progress: bool = True,
    export_json: bool = False,
) -> IndexReport:
    """Indexes every tar that the manifests name; a manifest is a parquet file, a TSV, a tar, or a folder of tars.

    Each may be a URL of a store, which is asked as `remote` says; its tars are downloaded through the node's cache.

    A manifest that names no tars, and a tar that is compressed, stand in `failed` and cost nothing else. For the rest
    see `index_tars`, whose `export` is `export_json` here.
    """
    paths: dict[str, None] = {}
    failed: list[tuple[str, str]] = []
    for manifest in manifests:
        try:
            name = os.fspath(manifest)
            with naming_urls():
                paths |= dict.fromkeys(tars_of(local_entry(name, remote) if is_url(name) else name))
        except ManifestError as err:
            failed.append((os.fspath(manifest), str(err)))
    report = index_tars(
        list(paths), cache_root=cache_root, num_workers=num_workers, progress=progress, export=export_json
    )
    report.failed[:0] = failed
    return report


def index_tars(
    paths: Sequence[str | os.PathLike[str]],
    *,
    cache_root: str | os.PathLike[str],
    num_workers: int,
    progress: bool = True,
    export: bool = False,
) -> IndexReport:
    """Returns what indexing these tars gave; afterwards each of them has an index or stands in `failed`.

    Tars whose index is current are not read again. A tar that fails costs that tar. export: writes `<tar>.index.json`
    beside every tar, too. progress: a bar and the failures on standard error.
    """
    tars = [os.fspath(path) for path in paths]
    root = os.fspath(cache_root)
    report = IndexReport()
    task = functools.partial(_index_one, cache_root=root, export=export)
    with Progress(len(tars), unit="tar", desc="index", is_shown=progress) as bar:
        for outcome in _run(task, tars, num_workers):
            _count(report, outcome)
            bar.say(f"{report.members} members, {len(report.failed)} failed")
            bar.update()
            if outcome.error and progress:
                bar.print(f"failed: {shown(outcome.path)}: {outcome.error}")
    failed = {path for path, _ in report.failed}
    for path in tars:
        if shown(path) not in failed and not is_indexed(path, cache_root=root):
            report.failed.append(
                (shown(path), f"{shown(path)} has no index under {root}; is that folder writable? run again")
            )
    return report


def tars_of(manifest: str | os.PathLike[str]) -> list[str]:
    """Returns the paths of the tars that a manifest names, each once, in their order.

    A parquet manifest names them in `tar_path`, a TSV in its first column, both relative to the manifest's folder.
    Compressed tars are named as well, for `index_tars` to refuse. Raises ManifestError for what names none.
    """
    path = Path(manifest)
    if is_folder(path):
        found = sorted(map(str, files_below(path, _is_tar)))
    elif _is_tar(path):
        found = [str(path)]
    else:
        names = _parquet_names(path) if path.suffix == ".parquet" else _tsv_names(path)
        named = (named_path(name, path.parent, named_in=path) for name in names)
        found = list(dict.fromkeys(str(name) if place_of(name) else os.path.normpath(name) for name in named))
    if not found:
        raise ManifestError(
            f"{path} names no tar; give a parquet or TSV manifest, a tar, or a folder of tars", code="FB205"
        )
    return found


def _is_tar(path: Path) -> bool:
    return path.name.endswith((".tar", *COMPRESSED_TARS))


@dataclass(frozen=True)
class _Outcome:
    path: str
    was_current: bool = False
    members: int = 0
    refused: int = 0
    error: str | None = None


def _index_one(path: str, *, cache_root: str, export: bool) -> _Outcome:
    """Indexes one tar, in a worker process."""
    try:
        index = current_index(path, cache_root=cache_root)
        was_current = index is not None
        if index is None:
            index = load_index(path, cache_root=cache_root)
        if export:
            write_json(index, json_path(path))
    except TarError as err:
        return _Outcome(path, error=shown(str(err)))
    except (ForebayError, OSError) as err:  # a full disk; the other tars are told the same if it stays full
        return _Outcome(path, error=shown(f"cannot keep the index of {path}: {err}"))
    return _Outcome(path, was_current, len(index), len(index.refused))


def _run(task: functools.partial[_Outcome], paths: Sequence[str], num_workers: int) -> Iterator[_Outcome]:
    if num_workers <= 1 or len(paths) <= 1:
        yield from map(task, paths)
        return
    with Pool(min(num_workers, len(paths)), modules=(__name__,)) as pool:
        try:
            for _, outcome in pool.run(task, paths):
                yield outcome
        except WorkerDied as err:
            raise TarError(
                f"indexing {err.task} ended its process ({err}); run: forebay index {err.task}", code="FB302"
            ) from err


def _count(report: IndexReport, outcome: _Outcome) -> None:
    if outcome.error is not None:
        report.failed.append((shown(outcome.path), outcome.error))
        return
    report.current += outcome.was_current
    report.indexed += not outcome.was_current
    report.members += outcome.members
    report.refused += outcome.refused


def _parquet_names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with at_hand(path) as local:
            column = pq.read_table(local, columns=["tar_path"]).column("tar_path")
    except (OSError, UnicodeDecodeError, pa.ArrowException, KeyError) as err:  # the second: of a column's name
        raise ManifestError(f"cannot read column tar_path of manifest {path}: {err}; correct the manifest") from err
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ManifestError(f"{path}: column tar_path holds {column.type}, wanted string; correct the manifest")
    return [name for name in pc.unique(column).to_pylist() if name]


def _tsv_names(path: Path) -> list[str]:
    names: dict[str, None] = {}
    try:
        with at_hand(path) as local, open(local, encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    names[line.split("\t", 1)[0].rstrip("\n")] = None
    except OSError as err:
        raise ManifestError(f"cannot read manifest {path}: {err.strerror}; check the path", code="FB201") from err
    except UnicodeDecodeError as err:
        raise ManifestError(
            f"manifest {path} is neither a parquet file nor UTF-8 text ({err}); check the path", code="FB205"
        ) from err
    return list(names)
