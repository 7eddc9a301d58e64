"""Several captions a row, orders of their tags and the empty text, held against transformers and plain loops."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config.data import CaptionsConfig
from forebay.errors import ConfigError, ForebayError
from forebay.inspect.facts import cache_facts
from forebay.inspect.inspect_lines import report_lines
from forebay.preprocess.model_inputs import tag_orders
from forebay.steps.batch import fresh
from forebay.store.cache import Cache
from forebay.train import make_loader
from forebay.train.augment.draws import EpochDraws
from forebay.train.augment.stored_draws import CaptionDraws
from forebay.train.collate.collator import Collator
from tests.steps.model.test_families import Corpus, section
from tests.steps.model.tiny_frozen import save_tiny

CAPTIONS = '[source.captions]\ncolumn = "also"\nshuffles = 2\nkeep_tags = 1\nempty = true\n'
CONFIG = (
    'name = "said"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n'
    f'{CAPTIONS}[audio]\nfeatures = "lengths"\n[plan]\nkind = "bucket"\nbatch_size = 2\n'
)
FLOATS = 'keep = {%s = {output = "last_hidden_state", dtype = "float32"}}'
MODELS = "".join(section(name, "text", FLOATS % name) for name in ("t5", "clip_text"))
JUDGE = section("judge", "text", "args = {label = 'good'}\nkeep = {good = {output = 'probability'}}")
ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": "red, blue, green", "also": ["one", "two words", " ", None, "one"]},
    {"id": "b", "text": "", "also": ["only this one"]},
    {"id": "c", "text": "one"},
    {"id": "d", "text": "x, y", "also": '["x,y,z , w", \'no JSON'},
    {"id": "e", "text": " ", "also": [""]},
]
TEXTS = {"a": ["red, blue, green", "red, green, blue", "one", "two words"], "b": ["only this one"], "c": ["one"]}


class Captions(Corpus):
    """Recordings whose rows have captions, some of them none."""

    def config(self, text: str) -> Any:
        super().config(text)
        with (self.folder / "config.toml").open("a") as file:
            file.write("max_failed_share = 1\n")
        return load_config(self.folder / "config.toml")

    def write(self, *rows: dict[str, Any]) -> None:
        lines = [json.dumps({"audio": f"{number}.wav", **row}) + "\n" for number, row in enumerate(rows)]
        (self.folder / "rows.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captions, Cache]:
    corpus = Captions(tmp_path_factory.mktemp("said"), "t5", "clip_text", "judge")
    corpus.write(*ROWS)
    return corpus, corpus.cache(CONFIG + "[loader]\ncaption_dropout = 0.25\n" + MODELS + JUDGE)


def loaded(corpus: Corpus, *overrides: str, **more: Any) -> Any:
    return make_loader(load_config(corpus.folder / "config.toml", overrides=overrides), with_ids=True, **more)


def rows_of(loader: Any, *epochs: int) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Returns what both encoders give of each sample, without padding, by epoch and id."""
    found = {}
    for epoch in epochs:
        loader.set_epoch(epoch)
        for batch, ids in loader:
            for place, sample_id in enumerate(ids):
                found[epoch, sample_id] = tuple(
                    batch[name][place][batch[f"{name}_mask"][place].bool()].clone() for name in ("t5", "clip_text")
                )
    return found


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(all(map(torch.equal, one[key], other[key])) for key in one)


def test_each_different_text_is_stored_once_and_rows_list_theirs(said: tuple[Captions, Cache]) -> None:
    corpus, cache = said
    assert {cache.sample_id(index) for index in range(len(cache))} == TEXTS.keys()
    assert cache.metadata["failed"] == {"bad_text": 1}
    assert cache.metadata["excluded"] == {"empty_text": 1}
    for name, loader in (("t5", T.T5EncoderModel), ("clip_text", T.AutoModel)):
        tokenizer = T.AutoTokenizer.from_pretrained(corpus.folder / name)
        model = loader.from_pretrained(corpus.folder / name).eval()
        for index in range(len(cache)):
            texts, found = [*TEXTS[cache.sample_id(index)], ""], cache.read(index)[name]
            for text, values in zip(texts, found, strict=True):
                with torch.inference_mode():
                    wanted = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
                np.testing.assert_allclose(values, wanted.numpy(), atol=2e-5)
            assert cache.lengths[f"num_{name}"][index] == max(map(len, found))
        different = {text for texts in TEXTS.values() for text in texts} | {""}
        stored = {row for index in range(len(cache)) for row in cache.items_of(name, index)}
        assert len(stored) == len(different)
        assert cache.metadata[f"{name}_captions"] == {"min": 1, "mean": 2.0, "max": 4, "blank": 2}
    shown = "\n".join(report_lines(cache_facts(cache, plan_roots=[])))
    assert "t5: 1 to 4 texts a row, mean 2.0, 2 blank ones passed over" in shown


def test_scores_are_of_the_first_text(said: tuple[Captions, Cache]) -> None:
    corpus, cache = said
    tokenizer = T.AutoTokenizer.from_pretrained(corpus.folder / "judge")
    judge = T.BertForSequenceClassification.from_pretrained(corpus.folder / "judge").eval()
    for row in cache.table(["sample_id", "good", "also"]).to_pylist():
        with torch.inference_mode():
            logits = judge(**tokenizer(TEXTS[row["sample_id"]][0], return_tensors="pt")).logits[0]
        np.testing.assert_allclose(row["good"], logits.softmax(-1)[1], atol=1e-6)
        assert row["also"] == {"a": json.dumps(ROWS[0]["also"]), "b": '["only this one"]', "c": None}[row["sample_id"]]


def test_the_same_text_for_all_encoders_on_any_rank_after_any_resume(said: tuple[Captions, Cache]) -> None:
    corpus, cache = said
    stored = {cache.sample_id(index): cache.read(index) for index in range(len(cache))}
    whole = rows_of(loaded(corpus), *range(8))
    seen = set()
    for (epoch, sample_id), outputs in whole.items():
        texts = TEXTS[sample_id]
        (place, dropped), *_ = EpochDraws(0, epoch).of([sample_id], "caption").uniform(2).tolist()
        number = len(texts) if dropped < 0.25 else int(place * len(texts))
        seen.add((sample_id, number))
        for name, found in zip(("t5", "clip_text"), outputs, strict=True):
            np.testing.assert_array_equal(found.numpy(), stored[sample_id][name][number])
    assert len(seen) > 5
    assert any(number == len(TEXTS[sample_id]) for sample_id, number in seen)
    ranks = [rows_of(loaded(corpus, dp_rank=rank, dp_world_size=2), 0, 1) for rank in range(2)]
    first = {key: outputs for key, outputs in whole.items() if key[0] < 2}
    assert same(ranks[0] | ranks[1], first)
    assert same(rows_of(loaded(corpus, "loader.num_threads=0"), 0, 1), first)
    before, after = loaded(corpus), loaded(corpus)
    ids = next(iter(before))[1]
    after.load_state_dict(before.state_dict())
    (batch, rest), *_ = after
    assert {*ids, *rest} == TEXTS.keys()
    lengths = batch["t5_mask"].sum(dim=1).tolist()
    assert lengths == [len(first[0, sample_id][0]) for sample_id in rest]
    assert not same(rows_of(loaded(corpus, "loader.seed=1"), *range(8)), whole)


def test_a_cache_and_the_raw_data_give_the_same_texts(said: tuple[Captions, Cache]) -> None:
    corpus, _ = said
    cached = rows_of(loaded(corpus), *range(4))
    for key, outputs in rows_of(loaded(corpus, "loader.cache=off"), *range(4)).items():
        for one, two in zip(outputs, cached[key], strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("overrides", [None, ("loader.caption=first", "loader.caption_dropout=0")])
def test_the_first_text_where_it_is_wanted_and_where_nothing_is_drawn(
    said: tuple[Captions, Cache], overrides: tuple[str, ...] | None
) -> None:
    corpus, cache = said
    found = rows_of(loaded(corpus, shuffle=False) if overrides is None else loaded(corpus, *overrides), 3)
    for index in range(len(cache)):
        sample = cache.read(index)
        batch = Collator(cache).collate([sample], allocate=fresh)
        for name, outputs in zip(("t5", "clip_text"), found[3, cache.sample_id(index)], strict=True):
            np.testing.assert_array_equal(outputs.numpy(), sample[name][0])
            np.testing.assert_array_equal(batch[name][0].numpy(), sample[name][0])


def test_ragged_batches_hold_all_texts(said: tuple[Captions, Cache]) -> None:
    corpus, _ = said
    counts: dict[str, int] = {}
    for batch, ids in loaded(corpus, "loader.form=ragged", "loader.caption_dropout=0"):
        counts |= zip(ids, batch["t5_items"].diff().tolist(), strict=True)
    assert counts == {sample_id: len(texts) + 1 for sample_id, texts in TEXTS.items()}


def test_texts_are_drawn_evenly_and_a_share_is_dropped() -> None:
    ids, draws = [f"sample {number}" for number in range(6000)], EpochDraws(5, 0)
    samples: list[dict[str, Any]] = [{"one": ("a", "b", "c", ""), "two": (0, 1, 2, 3), "other": 7} for _ in ids]
    change = CaptionDraws(("one", "two"), has_empty=True, dropout=0.2)
    found = change.change(samples, draws.of(ids, "caption"), ids)
    assert {(*sample["one"], *sample["two"], sample["other"]) for sample in found} == {
        ("a", 0, 7),
        ("b", 1, 7),
        ("c", 2, 7),
        ("", 3, 7),
    }
    counts = Counter(sample["one"][0] for sample in found)
    shares = {"a": 0.8 / 3, "b": 0.8 / 3, "c": 0.8 / 3, "": 0.2}
    wanted = {text: len(ids) * share for text, share in shares.items()}
    assert sum((counts[text] - n) ** 2 / n for text, n in wanted.items()) < 16.3  # 3 degrees of freedom, p = 0.001
    again = change.change(samples, EpochDraws(5, 1).of(ids, "caption"), ids)
    assert 0.2 < np.mean([one == two for one, two in zip(found, again, strict=True)]) < 0.3  # 3 * 0.267^2 + 0.2^2
    assert change.longest({"one": ("a", "bcd", ""), "two": ("x", "y", "zz")})["one"] == ("bcd",)


TAGS = st.lists(st.text("abc ", min_size=1, max_size=3).map(str.strip).filter(bool), max_size=8, unique=True)


@given(tags=TAGS, shuffles=st.integers(1, 100), keep=st.integers(0, 3))
def test_orders_of_tags(tags: list[str], shuffles: int, keep: int) -> None:
    settings = CaptionsConfig(shuffles=shuffles, keep_tags=keep)
    found = tag_orders(" ,".join([*tags, ""]), settings)
    assert found == tag_orders(" ,".join([*tags, ""]), settings)
    orders = [tags, *(order.split(", ") for order in found)]
    assert len({*map(tuple, orders)}) == len(orders)
    assert len(orders) == min(shuffles + 1, math.factorial(max(len(tags) - keep, 0)))
    assert all(sorted(order) == sorted(tags) and order[:keep] == tags[:keep] for order in orders)
    assert tag_orders("a, a, a, a, a, a, a", settings) == []


def test_what_changes_which_key(said: tuple[Captions, Cache], tmp_path: Path) -> None:
    corpus, cache = said
    text = CONFIG + "[loader]\ncaption_dropout = 0.25\n" + MODELS + JUDGE
    shards = {group: entries(cache, group) for group in cache.groups}
    without_empty = corpus.cache(text.replace("empty = true\n", "").replace("caption_dropout = 0.25\n", ""))
    assert entries(without_empty, "judge") == shards["judge"]
    assert entries(without_empty, "t5") != shards["t5"]
    corpus.write({**ROWS[0], "also": ["one", "two words", None, "another"]}, *ROWS[1:])
    other = corpus.cache(text)
    corpus.write(*ROWS)
    corpus.config(text)
    assert len({cache.key, without_empty.key, other.key}) == 3
    changed = {group for group in cache.groups if entries(other, group) != shards[group]}
    assert changed == {"t5", "clip_text", "text"}


def entries(cache: Cache, group: str) -> list[str]:
    return [entry.xxh3_128 for _, entry in cache.shard_entries(group)]


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("[plan]", "[loader]\ncaption_dropout = 1.5\n[plan]", "caption_dropout is 1.5, wanted a share"),
        ("shuffles = 2\n", "", "keep_tags is of tags that are shuffled; give shuffles"),
        ("shuffles = 2", "shuffles = 101", "shuffles is 101, wanted 100 or less"),
        (MODELS, "", r"source.captions are of a \[\[model\]\] with takes = \"text\", and there is none"),
        ('"jsonl"', '"ljspeech"', 'keep_columns and source.captions.column are not read from .*wanted "tar" or'),
        ('column = "also"', 'column = "text"', "'text' is the name of a column that caches have anyway"),
        ("[plan]", '[loader]\nform = "ragged"\ncaption_dropout = 0.5\n[plan]', "caption_dropout is of padded batches"),
    ],
)
def test_settings_that_contradict(said: tuple[Captions, Cache], old: str, new: str, match: str) -> None:
    corpus, _ = said
    path = corpus.folder / "wrong.toml"
    path.write_text((CONFIG + MODELS).replace(old, new))
    with pytest.raises(ConfigError, match=match):
        load_config(path)


def test_what_cannot_be_drawn_is_refused_by_name(said: tuple[Captions, Cache]) -> None:
    corpus, _ = said
    plain = save_tiny("gpt2", corpus.folder / "gpt2")
    backend = T.AutoTokenizer.from_pretrained(plain).backend_tokenizer
    backend.post_processor = tokenizers.processors.ByteLevel()
    T.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(plain)
    path, run = corpus.folder / "more.toml", '[run]\ncache_root = "caches"\nmax_failed_share = 1\n'
    for change, models, match in (
        (
            ("empty = true\n", "[loader]\ncaption_dropout = 0.5\n"),
            MODELS,
            "no outputs for the empty text; set source.c",
        ),
        (("[plan]", '[text]\ntokenizer = "t5"\n[plan]'), MODELS, "tokens .input_ids. of a row's first text beside"),
        (("", ""), section("gpt2", "text"), "the tokenizer in .*gpt2 gives no token of the empty text"),
    ):
        path.write_text(CONFIG.replace(*change) + run + models)
        with pytest.raises(ForebayError, match=match):
            make_loader(load_config(path))
