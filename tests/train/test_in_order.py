"""`make_loader(shuffle=False, with_ids=True)`: the order of the cache, cached, uncached and of mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.errors import ResumeError
from forebay.train.loader import Loader
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.text_corpus import mixed_config, speech_config, text_config
from tests.train.test_uncached_resume import NUM_CLIPS, OFF, Listed, listed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Listed:
    """Sealed; no test changes it."""
    found = listed(tmp_path_factory.mktemp("listed"))
    build_here(found.config())
    return found


def pairs_of(loader: Any) -> list[tuple[dict[str, torch.Tensor], list[str], list[int]]]:
    """Batches with their ids, and the indices that the loader tells of each."""
    return [(batch, ids, loader.indices) for batch, ids in loader]


def ids_of(loader: Loader) -> list[list[str]]:
    return [ids for _, ids, _ in pairs_of(loader)]


@pytest.mark.parametrize("plan", ["bucket", "budget", "window"])
def test_every_sample_comes_once_at_every_seed_with_its_id(corpus: Listed, plan: str) -> None:
    config = corpus.config(plan=plan)
    loader = make_loader(config, shuffle=False, with_ids=True)
    first = ids_of(loader)
    assert sorted(each for ids in first for each in ids) == [f"clip-{number:02d}" for number in range(NUM_CLIPS)]
    assert ids_of(loader) == first  # the next epoch
    assert [min(ids) for ids in first] == sorted(min(ids) for ids in first)
    other = make_loader(corpus.config("loader.seed=99", plan=plan), shuffle=False, with_ids=True)
    assert ids_of(other) == first
    assert ids_of(make_loader(corpus.config(OFF, plan=plan), shuffle=False, with_ids=True)) == first


def test_a_batch_is_what_it_is_without_ids(corpus: Listed) -> None:
    plain = make_loader(corpus.config(), shuffle=False)
    paired = make_loader(corpus.config(), shuffle=False, with_ids=True)
    pairs = pairs_of(paired)
    assert len(pairs) == len(plain) > 3
    for batch, (other, ids, indices) in zip(plain, pairs, strict=True):
        assert isinstance(batch, dict)
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)
        assert indices == plain.indices
        assert ids == [plain.source.sample_id(index) for index in indices]


def test_two_ranks_share_it_and_a_state_goes_on(corpus: Listed) -> None:
    whole = ids_of(make_loader(corpus.config(), shuffle=False, with_ids=True))
    ranks = [make_loader(corpus.config(), shuffle=False, with_ids=True, dp_rank=r, dp_world_size=2) for r in range(2)]
    assert [ids for pair in zip(*map(ids_of, ranks), strict=True) for ids in pair][: len(whole)] == whole
    loader = make_loader(corpus.config(), shuffle=False, with_ids=True)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    again = make_loader(corpus.config(OFF), shuffle=False, with_ids=True)
    again.load_state_dict(state)
    assert ids_of(again) == whole[1:]
    with pytest.raises(ResumeError, match="or one of the two was made with shuffle = False"):
        make_loader(corpus.config()).load_state_dict(state)


def test_of_a_mixture_every_sample_comes_once_and_no_batch_is_of_two_sources(tmp_path: Path) -> None:
    """Two caches of the demo recordings, one without audio; 6 s of CPU for making both."""
    for config in (speech_config(tmp_path), text_config(tmp_path)):
        build_here(config)
    loader = make_loader(mixed_config(tmp_path), shuffle=False)
    seen: list[int] = []
    for batch in loader:
        audio = "input_features" in batch
        assert {index < loader.source.offsets[1] for index in loader.indices} == {audio}  # type: ignore[attr-defined]
        seen += loader.indices
    assert sorted(seen) == list(range(len(loader.source)))
