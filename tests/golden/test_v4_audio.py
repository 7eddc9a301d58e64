"""The golden cache of audio of format 4 opens for ever, and the same values give the same shards today."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.store.cache import open_cache
from forebay.store.layout import FORMAT_VERSION
from forebay.store.seal import verify_folder
from forebay.store.source_files import ABSENT, StoredSource, load_sources
from tests.golden.make_v4_audio import COLUMNS, FOLDER, GROUPS, NAME, contents, main, write_shards

CACHE = FOLDER / NAME


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())
    return document


def test_every_sample_is_what_was_written(expected: dict[str, Any]) -> None:
    cache = open_cache(CACHE)
    assert cache.key == expected["key"]
    assert len(cache) == len(expected["samples"])
    for index, wanted in enumerate(expected["samples"]):
        sample = cache.read(index)
        assert list(sample) == list(wanted)
        for name, tensor in wanted.items():
            array = np.array(tensor["values"], tensor["dtype"]).reshape(tensor["shape"])
            np.testing.assert_array_equal(sample[name], array, strict=True)


def test_every_sample_comes_out_as_tensors(expected: dict[str, Any]) -> None:
    for sample, wanted in zip(open_cache(CACHE), expected["samples"], strict=True):  # type: ignore[call-overload]
        for name, tensor in wanted.items():
            assert str(sample[name].dtype) == f"torch.{tensor['dtype']}"
            assert list(sample[name].shape) == tensor["shape"]
            assert sample[name].reshape(-1).tolist() == tensor["values"]


def test_the_row_table_is_what_was_written(expected: dict[str, Any]) -> None:
    table: Any = open_cache(CACHE).samples
    assert {name: table[name].to_pylist() for name in expected["table"]} == expected["table"]
    kinds = {"snr": pa.float64(), "speaker": pa.large_string(), "takes": pa.int64()}
    assert {name: table.schema.field(name).type for name in COLUMNS} == kinds


def test_values_of_kept_columns_are_categories() -> None:
    cache = open_cache(CACHE)
    found = cache.categories("speaker")
    assert found is not None
    assert [found[0][code] for code in found[1].tolist()] == ["anna", "", "carl", "", "दीपा"]
    found = cache.categories("takes")
    assert found is not None
    assert [found[0][code] for code in found[1].tolist()] == ["1", "2", "", str(-(2**62)), ""]


def test_it_is_whole_and_says_what_became_of_every_row() -> None:
    report = verify_folder(CACHE)
    assert (report.ok, report.problems) == (True, [])
    assert load_sources(CACHE / "sources.parquet") == [
        StoredSource("a.tar", 0, listed=True, xxh3_128="0" * 32, size_bytes=10_240),
        StoredSource("gone.tar", 0, listed=False, xxh3_128=ABSENT, size_bytes=-1),
    ]
    cache = open_cache(CACHE)
    failures = [
        reason for index in range(cache.num_shards) for reason in cache.shard("audio", index).strings("failure")
    ]
    assert failures == ["", "", "corrupt_audio", "", "", "", "missing_member"]
    listed = [json.loads(line) for line in (CACHE / "rejected.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in listed] == ["corrupt_audio", "missing_member"]


def test_a_plain_tensordict_opens_its_shards(expected: dict[str, Any]) -> None:
    from tensordict import TensorDict

    archive = TensorDict.load_memmap(CACHE / "audio" / "00000.tdz", mode="r")
    begin, end = archive["offsets", "waveform"][:2].tolist()
    waveform = archive["values", "waveform"][begin:end].tolist()
    assert waveform == expected["samples"][0]["waveform"]["values"]
    del archive


def test_the_same_values_give_the_same_shards_today(tmp_path: Path) -> None:
    assert FORMAT_VERSION == 4, "new bytes on disk need a golden cache of their own beside this one"
    shards = write_shards(tmp_path)
    golden = open_cache(CACHE)
    for group in GROUPS:
        kept = golden.shard_entries(group)
        assert len(kept) == len(shards[group]) == 3
        for (path, entry), (golden_path, golden_entry) in zip(shards[group], kept, strict=True):
            assert path.read_bytes() == golden_path.read_bytes()
            assert entry == golden_entry


def test_its_metadata_would_be_sealed_in_the_same_bytes_today(tmp_path: Path) -> None:
    from forebay.store.seal import seal

    made = contents(tmp_path / "scratch")
    files = {name: (CACHE / name).read_bytes() for name in made.files}  # parquet's bytes are pyarrow's
    seal(tmp_path / NAME, replace(made, files=files), scratch=tmp_path / "scratch")
    assert (tmp_path / NAME / "metadata.json").read_bytes() == (CACHE / "metadata.json").read_bytes()


def test_it_is_small_and_is_never_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 70_000
    with pytest.raises(FileExistsError, match="v4_audio"):
        main()
    monkeypatch.setattr("tests.golden.make_v4_audio.FOLDER", tmp_path / "made")
    main()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "made").iterdir()) == [
        "made/expected.json",
        f"made/{NAME}",
    ]
    shutil.rmtree(tmp_path / "made")
