"""A cache at a prompt: slices, ids, tensordicts, and what a notebook shows."""

from __future__ import annotations

import html
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from forebay.config.tree import FilterConfig
from forebay.store.by_hand import table_html
from forebay.store.cache import Cache, open_cache
from forebay.store.lazy_tensordict import SamplesTensorDict
from forebay.store.selection import Filter, Selection, filtered
from tests.store_factory import make_cache
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_vl_cache

IDS = [f"clips/speaker-{n // 4}/{n:03d}.wav" for n in range(20)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(make_cache(tmp_path_factory.mktemp("by_hand"), num_samples=20, sample_ids=IDS))


@pytest.fixture(scope="module")
def selection(cache: Cache) -> Selection:
    return filtered(cache, Filter.of(FilterConfig(where="language == 'es'")))


@given(
    start=st.one_of(st.none(), st.integers(-25, 25)),
    stop=st.one_of(st.none(), st.integers(-25, 25).map(np.int64)),
    step=st.one_of(st.none(), st.integers(-4, 4).filter(bool)),
)
def test_a_slice_is_what_a_list_gives(cache: Cache, selection: Selection, start: Any, stop: Any, step: Any) -> None:
    for source in (cache, selection):
        wanted = [source.sample_id(i) for i in range(len(source))][start:stop:step]
        found = source[start:stop:step]
        assert len(found) == len(wanted)
        for sample, sample_id in zip(found, wanted, strict=True):
            assert torch.equal(sample["input_ids"], source[source.find(sample_id)]["input_ids"])


def test_samples_of_a_selection_are_copies_of_those_of_the_cache(cache: Cache, selection: Selection) -> None:
    assert selection.places.tolist() == [1, 4, 7, 10, 13, 16, 19]
    for index in (2, np.int32(2), torch.tensor(2), -5):
        sample = selection[index]
        for name, value in cache[7].items():
            assert torch.equal(sample[name], value)
        sample["input_ids"].zero_()
    assert cache[7]["input_ids"].any()
    for source in (cache, selection):
        with pytest.raises(TypeError, match=r"an index of samples is an integer or a slice, not str; .* \.find\(id\)"):
            source["clips/speaker-0/000.wav"]  # type: ignore[call-overload]
        with pytest.raises(IndexError, match=r"sample 20 of"):
            source[20]


def test_every_id_is_found(cache: Cache, selection: Selection) -> None:
    assert [cache.find(sample_id) for sample_id in IDS] == list(range(20))
    assert [selection.find(IDS[place]) for place in selection.places] == list(range(7))
    assert selection.find_all(IDS[0]) == []


def test_an_unknown_id_is_answered_with_its_neighbours(cache: Cache, selection: Selection) -> None:
    with pytest.raises(KeyError, match=r"no sample of .* has the id 'clips/speaker-0/00x.wav'; did you mean 'clips/sp"):
        cache.find("clips/speaker-0/00x.wav")
    with pytest.raises(KeyError, match=r"did you mean .*clips/speaker-1/007\.wav"):
        cache.find("007.wav")
    with pytest.raises(KeyError, match=r"no sample of .* has the id '\?'\"?'?$"):
        cache.find("?")
    with pytest.raises(KeyError, match=r"no sample of .* has the id 'clips/speaker-0/000.wav'"):
        selection.find(IDS[0])
    with pytest.raises(TypeError, match="an id is a text, not int"):
        cache.find(3)  # type: ignore[arg-type]


def test_an_id_that_several_samples_have_is_not_guessed(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=6, sample_ids=["a", "b", "a", "c", "é", "a"]))
    assert cache.find("b") == 1
    assert cache.find("é") == 4
    assert cache.find_all("a") == [0, 2, 5]
    with pytest.raises(LookupError, match=r"3 samples of .* have the id 'a': 0, 2, 5; all of them: \.find_all\(id\)"):
        cache.find("a")


def test_ids_whose_hashes_meet_are_told_apart(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.by_hand.xxhash.xxh3_64_intdigest", lambda _data, _seed: 7)
    again = open_cache(cache.folder)
    assert [again.find(sample_id) for sample_id in IDS] == list(range(20))
    assert again.find_all("nobody") == []


class Reads:
    """Counts the samples that a cache reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indices: list[int] = []
        read = Cache.read

        def counted(cache: Cache, index: int) -> dict[str, Any]:
            self.indices.append(index)
            return read(cache, index)

        monkeypatch.setattr(Cache, "read", counted)

    def taken(self) -> list[int]:
        taken, self.indices[:] = list(self.indices), []
        return taken


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_a_tensordict_reads_a_sample_when_it_is_asked_for(cache: Cache, reads: Reads) -> None:
    td = cache.as_tensordict()
    assert isinstance(td, LazyStackedTensorDict)
    assert (len(td), td.batch_size, td.ndim, td.device) == (20, torch.Size([20]), 1, None)
    assert reads.taken() == []
    sample = td[3]
    assert reads.taken() == [3]
    assert isinstance(sample, TensorDict)
    assert sample.batch_size == torch.Size([])
    assert set(sample.keys()) == set(cache[3])
    reads.taken()
    assert torch.equal(td[-1]["input_ids"], cache[19]["input_ids"])
    assert reads.taken() == [19, 19]
    assert sorted(td.keys()) == ["input_features", "input_ids", "pad_value", "prefix_len"]
    assert reads.taken() == [0]
    some = td[2:5]
    assert type(some) is LazyStackedTensorDict
    assert reads.taken() == [2, 3, 4]
    assert [len(td[index]) for index in ([1, 4], torch.arange(20) > 17, slice(0, 0), slice(15, 99))] == [2, 2, 0, 5]
    reads.taken()
    iterator = iter(td)
    assert torch.equal(next(iterator)["input_ids"], cache[0]["input_ids"])
    assert reads.taken() == [0, 0]
    assert len(list(iterator)) == 19
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        td[20]


def test_a_field_of_all_samples_comes_in_every_form(cache: Cache, reads: Reads) -> None:
    td = cache.as_tensordict()
    assert torch.equal(td["prefix_len"], torch.ones(20, 1, dtype=torch.int32))
    listed = td.get("input_ids", as_list=True)
    for index, values in enumerate(listed):
        assert torch.equal(values, cache[index]["input_ids"])
    padded = td.get("input_ids", as_padded_tensor=True, padding_value=-1)
    assert padded.shape == (20, max(map(len, listed)))
    assert padded[1].tolist()[: len(listed[1])] == listed[1].tolist()
    nested = td.get("input_ids", as_nested_tensor=True, layout=torch.jagged)
    assert [len(values) for values in nested.unbind()] == list(map(len, listed))
    with pytest.raises(RuntimeError, match="as_nested_tensor=True or as_list=True"):
        td["input_ids"]
    with pytest.raises(KeyError, match='key "tokens" not found'):
        td["tokens"]
    assert td.get("tokens", None) is None
    assert "tokens" not in td.keys()  # noqa: SIM118


def test_what_is_taken_is_a_copy_and_the_samples_are_not_written(cache: Cache) -> None:
    td, before = cache.as_tensordict(), cache[3]["input_ids"]
    sample = td[3]
    sample["input_ids"].zero_()
    sample["more"] = torch.zeros(2)
    copies = td[2:5].clone()
    copies["mark"] = torch.zeros(3)
    assert torch.equal(td[3]["input_ids"], before)
    assert "more" not in td[3].keys()  # noqa: SIM118
    whole = td.clone()
    assert type(whole) is LazyStackedTensorDict
    whole["mark"] = torch.zeros(20)
    value = torch.zeros(20, 1, dtype=torch.int32)
    writing: list[Any] = [
        lambda: td.set("mark", torch.zeros(20)),
        lambda: td.__setitem__("mark", torch.zeros(20)),
        lambda: td.__setitem__(3, td[4]),
        lambda: td.__delitem__("input_ids"),
        lambda: td.update({"mark": torch.zeros(20)}),
        lambda: td.update_({"prefix_len": value}),
        lambda: td.set_("prefix_len", value),
        lambda: td.pop("prefix_len"),
        lambda: td.append(td[0]),
        lambda: td.apply_(lambda tensor: tensor + 1),
        td.zero_,
        td.clear,
        td.unlock_,
    ]
    for write in writing:
        with pytest.raises(RuntimeError, match="the samples of a cache are read and not written; take copies first"):
            write()


def test_operations_give_plain_tensordicts(cache: Cache, selection: Selection) -> None:
    td = selection.as_tensordict()
    assert len(td) == 7
    for made in (
        td.select("input_ids"),
        td.float(),
        td.to(torch.float64),
        td.apply(lambda tensor: tensor + 1),
        td.cpu(),
    ):
        assert type(made) is LazyStackedTensorDict
        assert len(made) == 7
    assert torch.equal(td.to(torch.float64)[2]["input_ids"], cache[7]["input_ids"].to(torch.float64))
    again = pickle.loads(pickle.dumps(td))  # noqa: S301  our own
    assert isinstance(again, SamplesTensorDict)
    assert torch.equal(again[2]["input_ids"], cache[7]["input_ids"])
    assert repr(td).startswith("SamplesTensorDict(input_features, pad_value, input_ids, prefix_len; batch_size=[7], of")


def test_no_sample_is_an_empty_tensordict(tmp_path: Path) -> None:
    td = open_cache(make_cache(tmp_path, num_samples=0)).as_tensordict()
    assert (len(td), list(td.keys()), list(td)) == (0, [], [])


def test_a_notebook_shows_what_it_is_and_reads_no_sample(cache: Cache, selection: Selection, reads: Reads) -> None:
    for source in (cache, selection):
        shown = source._repr_html_()
        assert cache.key[:16] in repr(cache)
        for wanted in (html.escape(cache.place), "samples</th>", "input_ids int32 [n]"):
            assert wanted in shown
    assert "7 of 20 samples (where language == &#x27;es&#x27; keeps 7)" in selection._repr_html_()
    assert "7 of the 20 samples of Cache(" in repr(selection)
    assert reads.taken() == []
    assert "_id_index" not in vars(open_cache(cache.folder))


@given(st.text(max_size=40), st.text(max_size=400))
def test_other_peoples_text_stays_text(name: str, value: str) -> None:
    shown = table_html(value, [(name, value)])
    assert re.findall(r"<(?!/?(?:div|strong|table|tr|th|td)\b)", shown) == []
    assert shown.count("<tr>") == 1
    assert html.unescape(shown).isprintable() or "\u3000" in value + name or "\u200d" in shown or "\u200c" in shown


@pytest.mark.parametrize(
    "languages",
    [None, [], {"hi": 3}, {"hi": {"samples": "x", "hours": 1}}, {"<b>": {"samples": 3, "hours": 0.5}}, {"hi": {}}],
)
def test_metadata_of_strangers_are_shown_or_left_out(tmp_path: Path, languages: Any) -> None:
    cache = open_cache(make_cache(tmp_path))
    cache.metadata["languages"] = languages
    assert "<b>" not in cache._repr_html_()


def test_images_of_a_sample_are_one_tensor_of_patches(tmp_path: Path) -> None:
    cache = open_cache(make_vl_cache(tmp_path, conversations(3, 6)))
    td = cache.as_tensordict()
    for index in range(6):
        patches = [np.asarray(image) for image in cache.read(index)["patches"]]
        assert td[index]["patches"].shape == (sum(map(len, patches)), cache[index]["patches"].shape[1])
        assert torch.equal(td[index]["patches"], cache[index]["patches"])
    assert [len(each) for each in td.get("input_ids", as_list=True)] == [len(cache[i]["input_ids"]) for i in range(6)]
    assert "patches" in td.keys()  # noqa: SIM118
