"""`make_loader(with_columns=...)`: what the row table says of each batch's samples, cached, uncached and mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError
from forebay.store.cache import open_cache
from forebay.train.collate.collator import BatchColumns
from forebay.train.select import make_loader, select
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here
from tests.rows.helpers import SPEECH
from tests.rows.tables import COLUMNS, write_clips, write_table

KEPT = ("client_id", "snr", "up_votes")
OFF = "loader.cache=off"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A config of a table whose cache is built."""
    root = tmp_path_factory.mktemp("columns")
    write_table(root / "t.csv", write_clips(root))
    made: dict[str, Any] = {
        "name": "columns",
        "source": {"kind": "table", "manifest": str(root / "t.csv"), "columns": COLUMNS, "keep_columns": [*KEPT]},
        "audio": {"features": "log_mel", "n_mels": 80, "dtype": "float16"},
        "text": {"tokenizer": str(SPEECH / "model"), "prompt": "whisper"},
        "plan": {"kind": "bucket", "edges_s": [30], "batch_size": 3, "lockstep": 1, "tail": "short"},
        "loader": {"num_threads": 0, "seed": 3},
        "run": {"cache_root": str(root / "caches"), "num_workers": 1},
    }
    build_here(load_config(made))
    return made


def config_of(document: dict[str, Any], *overrides: str) -> Config:
    return load_config(document, overrides=overrides)


def table_of(document: dict[str, Any]) -> Any:
    config = config_of(document)
    return open_cache(next(config.cache_root.glob("columns-*"))).samples


@pytest.mark.parametrize("overrides", [(), (OFF,)])
def test_columns_are_those_of_the_batches_samples(document: dict[str, Any], overrides: tuple[str, ...]) -> None:
    config = config_of(document, *overrides)
    loader: Any = make_loader(config, with_columns=("sample_id", *KEPT, "duration_s", "text"))
    plain = make_loader(config)
    expected = {row["sample_id"]: row for row in table_of(document).to_pylist()}
    seen = 0
    for (batch, columns), other in zip(loader, plain, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in other)
        assert batch.keys() == other.keys()
        assert [*columns] == ["sample_id", *KEPT, "duration_s", "text"]
        rows = [expected[name] for name in columns["sample_id"]]
        assert len(rows) == len(batch["input_features"])
        for name, values in columns.items():
            assert values == [row[name] for row in rows]
        seen += len(rows)
    assert seen == len(expected)


def test_uncached_reading_has_the_columns_of_the_cache(document: dict[str, Any]) -> None:
    table = table_of(document)
    source = select(config_of(document, OFF))
    assert source.column_names == table.column_names == select(config_of(document)).column_names
    assert {name: source.table([name])[name].to_pylist() for name in source.column_names} == table.to_pydict()
    for name in ("client_id", "up_votes", "snr", "language"):
        cached = select(config_of(document)).categories(name)
        uncached = source.categories(name)
        assert cached is not None
        assert uncached is not None
        assert cached[0] == uncached[0]
        np.testing.assert_array_equal(cached[1], uncached[1])
    assert source.categories("up_votes")[0] == ["0", "1", "2", "3"]  # type: ignore[index]
    with pytest.raises(KeyError, match="speakr"):
        source.table(["speakr"])


def test_a_name_that_is_not_there_is_refused_with_those_that_are(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no column 'client'; did you mean client_id\?; there are index, sample_id"):
        make_loader(config_of(document), with_columns=("client",))
    with pytest.raises(ConfigError, match=r"is the text 'snr', wanted names: with_columns=\(\"snr\",\)"):
        make_loader(config_of(document), with_columns="snr")
    with pytest.raises(ConfigError, match=r'both given; name "sample_id" among with_columns'):
        make_loader(config_of(document), with_ids=True, with_columns=("snr",))


def test_a_mixture_has_none_where_a_source_has_no_such_column(document: dict[str, Any], tmp_path: Path) -> None:
    bare = {**document, "name": "bare", "source": {**document["source"], "keep_columns": []}}
    cache = open_cache(build_here(load_config(bare)).cache)
    first = next(config_of(document).cache_root.glob("columns-*"))
    mixture = {"source": [{"cache": str(first), "weight": 1.0}, {"cache": str(cache.folder), "weight": 1.0}]}
    config = load_config({**document, "mixture": mixture})
    source = select(config)
    columns = BatchColumns(source, ("snr", "sample_id", "up_votes"))
    table = table_of(document)
    count = len(table)
    found = columns.of([count + 1, 3, 0, count, 2])
    assert found["up_votes"] == [None, 3, 0, None, 2]
    assert found["snr"] == [None, 3.75, 0.0, None, None]
    assert found["sample_id"] == [table["sample_id"][i].as_py() for i in (1, 3, 0, 0, 2)]


def test_a_mixture_weighs_the_values_of_a_kept_column(document: dict[str, Any]) -> None:
    mixture = {"column": "client_id", "weights": {"speaker 0": 3.0, "speaker 1": 1.0, "speaker 2": 0.0, "unknown": 0.0}}
    config = load_config({**document, "mixture": mixture})
    loader: Any = make_loader(config, with_columns=("client_id",))
    drawn = [name for _, columns in loader for name in columns["client_id"]]
    assert {*drawn} == {"speaker 0", "speaker 1"}
    assert drawn.count("speaker 0") > drawn.count("speaker 1")
    assert json.loads(json.dumps(loader.state_dict()))["position"] == 0


@pytest.mark.parametrize("overrides", [(), (OFF,)])
def test_a_filter_by_a_kept_column_leaves_its_columns(document: dict[str, Any], overrides: tuple[str, ...]) -> None:
    where = "snr > 1 and client_id in ('speaker 0', 'speaker 1')"
    config = load_config({**document, "filter": {"where": where}}, overrides=overrides)
    loader: Any = make_loader(config, with_columns=("sample_id", "snr", "client_id"))
    seen = {row for _, columns in loader for row in zip(*columns.values(), strict=True)}
    expected = {
        (row["sample_id"], row["snr"], row["client_id"])
        for row in table_of(document).to_pylist()
        if (row["snr"] or 0) > 1 and row["client_id"] in ("speaker 0", "speaker 1")
    }
    assert seen == expected
    assert len(seen) == 4


@pytest.mark.parametrize("beside", [{"with_ids": True}, {"with_columns": ("sample_id", "text")}])
def test_what_stands_beside_a_batch_is_of_the_samples_that_are_in_it(tmp_path: Path, beside: dict[str, Any]) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.add_tar("c.tar", ["c0", "c1"], broken={"c0": b"no"})
    corpus.add_tar("d.tar", ["d0"], broken={"d0": b"no"})
    loader: Any = make_loader(corpus.config(OFF, "run.max_failed_share=1.0", "loader.seed=3"), **beside)
    seen = 0
    for batch, found in loader:
        ids = found if isinstance(found, list) else found["sample_id"]
        assert [int(count) for count in batch["attention_mask"].sum(1)] == [len(corpus.audio[name]) for name in ids]
        assert [loader.source.sample_id(index) for index in loader.indices] == ids
        assert not {"c0", "d0"} & {*ids}
        seen += len(ids)
    assert seen == 20
