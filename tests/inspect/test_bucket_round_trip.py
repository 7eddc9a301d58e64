"""A bucket's table is a manifest: a cache that is built from it holds the same samples, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from forebay.store.cache import Cache, open_cache
from tests.commands import run_json
from tests.preprocess.corpus import Corpus, flac, tone, write_tar

CONFIG = (
    'name = "tones"\n[source]\nkind = "{kind}"\nmanifest = "{manifest}"\n[audio]\nfeatures = "waveform"\n'
    '[plan]\nbatch_size = 4\nedges_s = [0.2, 1.0]\n[run]\ncache_root = "caches"\nnum_workers = 1\n'
)


def write_raw(folder: Path) -> None:
    """Two tars, of clips in folders, with and without ids and languages of their own."""
    (folder / "data").mkdir(parents=True)
    corpus = Corpus(folder / "data")
    corpus.add_tar("a.tar", [f"a{i}" for i in range(6)])
    for number, row in enumerate(corpus.rows):
        row["sample_id"] = None if number % 2 else f"own-{number}"
        row["language"] = None if number == 3 else row["language"]
        row["prompt"] = "before" if number == 4 else None
    corpus.add_tar("b.tar", [f"deep/b{i}" for i in range(3)])
    (folder / "config.toml").write_text(CONFIG.format(kind="tar", manifest="data/train.parquet"))


def made(capsys: pytest.CaptureFixture[str], config: str) -> Cache:
    return open_cache(run_json(capsys, "preprocess", config, "--no-progress")["cache"])


def samples(cache: Cache) -> dict[str, tuple[bytes, Any]]:
    names = ("text", "language", "prompt")
    rows = cache.samples.select(["sample_id", *names]).to_pylist()
    return {
        row["sample_id"]: (np.asarray(cache.read(index)["waveform"]).tobytes(), [row[name] for name in names])
        for index, row in enumerate(rows)
    }


def test_buckets_build_the_same_samples_also_where_folders_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_raw(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    wanted = samples(made(capsys, "config.toml"))
    assert len(wanted) == 9
    assert run_json(capsys, "index", "data/train.parquet", "--export-json", "--cache-root", "caches")["failed"] == []
    written = run_json(capsys, "inspect", "config.toml", "--bucket-manifests", "buckets")["written"]
    assert [Path(path).name for path in written] == ["b_0_0.2.parquet", "b_0.2_1.parquet", "bucket_config.json"]
    rows = [row for path in written[:2] for row in pq.read_table(path).to_pylist()]
    assert {row["tar_path"] for row in rows} == {str(tmp_path / "here" / "data" / name) for name in ("a.tar", "b.tar")}
    assert all(json.loads(Path(row["tar_index_path"]).read_bytes())[row["tar_member_name"]]["size"] for row in rows)

    # The tables moved elsewhere.
    shutil.move("buckets", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("both.toml").write_text(CONFIG.format(kind="tar", manifest="*.parquet"))
    assert samples(made(capsys, "both.toml")) == wanted

    # All of it moved: the cache still answers, and the tables that are written now name the new place.
    shutil.move(tmp_path / "here", tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    written = run_json(capsys, "inspect", "config.toml", "--bucket-manifests", "buckets")["written"]
    Path("again.toml").write_text(CONFIG.format(kind="tar", manifest="buckets"))
    assert samples(made(capsys, "again.toml")) == wanted


@pytest.mark.parametrize("kind", ["filelist", "webdataset"])
def test_other_kinds_over_tars_become_manifests_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    members: dict[str, bytes] = {}
    for number in range(4):
        members[f"clips/{number}.flac"] = flac(tone(number, duration_s=0.1 + 0.1 * number))
        members[f"clips/{number}.json"] = json.dumps({"text": f"text {number}", "language": "en"}).encode()
    write_tar(Path("a.tar"), members)
    Path("list.tsv").write_text("".join(f"a.tar\tclips/{number}\t\t\n" for number in range(3)))
    manifest = "list.tsv" if kind == "filelist" else "a.tar"
    Path("config.toml").write_text(CONFIG.format(kind=kind, manifest=manifest))
    wanted = samples(made(capsys, "config.toml"))
    run_json(capsys, "inspect", "config.toml", "--bucket-manifests", "buckets")
    Path("again.toml").write_text(CONFIG.format(kind="tar", manifest="buckets"))
    assert samples(made(capsys, "again.toml")) == wanted
    assert len(wanted) == (3 if kind == "filelist" else 4)
