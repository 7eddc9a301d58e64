"""Numbers are of seed, epoch, id and change alone, uniform, and pinned: a run resumed years later draws the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.augment.draws import EpochDraws, between, generator_of


def splitmix64(key: int, count: int) -> list[float]:
    """The generator as its paper writes it, in Python's integers."""
    state, found, most = key, [], (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & most
        bits = state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & most
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & most
        found.append(((bits ^ (bits >> 31)) >> 11) * 2.0**-53)
    return found


# What a file name holds: characters, and bytes that are none.
_CHARACTERS = st.characters(codec="utf-8") | st.sampled_from("\udc80\udcff")


@given(
    ids=st.lists(st.text(_CHARACTERS, min_size=1, max_size=9), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10_000),
    first=st.integers(0, 50),
)
def test_numbers_are_those_of_the_paper_whatever_stands_beside(
    ids: list[str], seed: int, epoch: int, first: int
) -> None:
    draws = EpochDraws(seed, epoch).of(ids, 3)
    found = draws.uniform(5, first=first)
    for place, name in enumerate(ids):
        alone = EpochDraws(seed, epoch).of([name], 3)
        assert found[place].tolist() == alone.uniform(5, first=first)[0].tolist()
        assert found[place].tolist() == splitmix64(int(alone.keys[0]), first + 5)[first:]
        assert generator_of(int(alone.keys[0])).random() == generator_of(int(draws.keys[place])).random()


def test_seed_epoch_id_and_place_each_give_other_numbers() -> None:
    streams = {
        EpochDraws(seed, epoch).of([name], place).uniform(1)[0, 0]
        for seed in (0, 1)
        for epoch in (0, 1)
        for name in ("a", "b", "\udcff")
        for place in (0, 1)
    }
    assert len(streams) == 24


def test_numbers_are_uniform_and_pinned() -> None:
    found = EpochDraws(0, 0).of([f"clip{i}" for i in range(20_000)], 0).uniform(2)
    assert np.abs(np.histogram(found, 20, (0, 1))[0] / 2_000 - 1).max() < 0.08
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.02
    assert ((found >= 0) & (found < 1)).all()
    pinned = EpochDraws(7, 3).of(["demo/0001"], 1).uniform(3)[0]
    assert [f"{number:.12f}" for number in pinned] == PINNED
    assert between(np.array([0.0, 0.5]), -6, 6).tolist() == [-6, 0]


PINNED = ["0.388387642092", "0.278340256772", "0.174495575247"]
