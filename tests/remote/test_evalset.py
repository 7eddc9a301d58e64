"""An evaluation set of raw data in a bucket is that of the same data on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.here_pool import HerePool
from benchmarks.objects.server import Bucket
from forebay.preprocess import evaluation_sets as make
from forebay.preprocess.evaluation_sets import EvalsetOptions, make_evalset
from tests.preprocess.corpus import file_bytes
from tests.remote.raw_data import SPEECH, config_of, put_folder


@pytest.mark.parametrize("kind", ["webdataset-folder", "jsonl", "hf"])
@pytest.mark.usefixtures("environment")
def test_a_bucket_gives_the_set_that_a_disk_gives(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(make, "Pool", HerePool)
    (tmp_path / "data").mkdir()
    manifest = SPEECH[kind][1](tmp_path / "data")
    put_folder(tmp_path / "data", bucket, "raw/")
    for place, out in ((tmp_path / "data", "here"), (f"{bucket.url}/raw", "there")):
        config = config_of(kind, f"{place}/{manifest}", root=tmp_path / out, node=tmp_path / "node")
        report = make_evalset(config, EvalsetOptions(out=tmp_path / f"{out}-set", per_language=3, progress=False))
        assert (report.num_samples, report.sets[0]["language"]) == (3, None)
    assert file_bytes(tmp_path / "here-set") == file_bytes(tmp_path / "there-set")
