"""Conversations that are longer than a pack: cut as a plain loop over messages cuts them, and packed exactly."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from forebay import load_config
from forebay.config import Config, PackConfig
from forebay.errors import CacheCorruptError, PlanError
from forebay.inspect.facts import read_pack, read_plan
from forebay.plan.disk import CUT
from forebay.plan.make import plan_of
from forebay.plan.pack.overlong import _turns, in_pieces
from forebay.plan.pack.pack_plan import PackPlan
from forebay.preprocess import build
from forebay.store.cache import open_cache
from forebay.store.cut_samples import CutSamples
from forebay.store.selection import first_samples
from forebay.train import CachedVLDataset, load_model, make_loader
from forebay.train.select import select
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo_corpus
from tests.steps.text.test_tools import ASKED, CALLED, HEARD, PLAIN, SAID, TOOL, model_of
from tests.train.tiny_vl import FakeVlSource

WORDS = ["red", "blue", "cat", "dog", "house", "tree", "what", "is", "this", "of", "sky", "under", "here"]
Talk = Mapping[str, Any]


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations of 1 to 5 exchanges, with and without a system message, images and turns that are not learnt."""
    rng = random.Random(7)

    def said(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    rows = []
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": said(9)}] * rng.choice((0, 1))
        images: list[str] = []
        for turn in range(rng.randint(1, 5)):
            shown = rng.choice((0, 1, 1, 2))
            images += [f"p{rng.randrange(4)}.jpg" for _ in range(shown)]
            messages += [{"role": "user", "content": said(6)}] * rng.choice((0, 0, 1))
            messages.append({"role": "user", "content": "<image>" * shown + said(12)})
            messages.append({"role": "assistant", "content": said(25), "loss": not turn or rng.random() < 0.7})
        rows.append({"id": f"t{number}", "messages": messages, "images": images})
    return rows


TALKS = {talk["id"]: talk for talk in talks(24)}
TOKENIZER = AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    """Talks about four photos, and their sealed cache."""
    found = photo_corpus(tmp_path_factory.mktemp("talks"))
    found.rows = list(TALKS.values())
    found.write_manifest()
    build(config_of(found))
    return found


def config_of(corpus: PhotoCorpus, *overrides: str, **plan: Any) -> Config:
    (corpus.folder / "config.toml").exists() or corpus.config()
    config = load_config(corpus.folder / "config.toml", overrides=overrides)
    return replace(config, plan=PackConfig(**{"seq_len": 120, "overlong": "split", **plan}))


def images_of(ids: list[int], constants: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where each image begins and ends, its two marks with it."""
    begins, ends = (constants[f"vision_{name}_token_id"] for name in ("start", "end"))
    return list(
        zip(
            [place for place, each in enumerate(ids) if each == begins],
            [place + 1 for place, each in enumerate(ids) if each == ends],
            strict=True,
        )
    )


def messages_at(talk: Talk, sample: Mapping[str, Any], constants: Mapping[str, Any]) -> list[int]:
    """Where each message begins, by the template's own text of all messages before it."""
    sizes = [int(np.prod(grid)) // constants["merge_size"] ** 2 for grid in sample["image_grid_thw"]]
    return [length + sum(sizes[:pads]) for length, pads in texts_before(talk["id"], constants["image_token_id"])]


@functools.cache
def texts_before(talk_id: str, pad_id: int) -> list[tuple[int, int]]:
    """The tokens before each message of a talk, without those of images, and how many images they have."""
    talk = TALKS[talk_id]
    parts: list[dict[str, Any]] = []
    for message in talk["messages"]:
        shown = [{"type": "image"}] * message["content"].count("<image>")
        text = {"type": "text", "text": message["content"].replace("<image>", "")}
        parts.append({"role": message["role"], "content": [*shown, text]})
    found = [(0, 0)]
    for stop in range(1, len(parts)):
        text = TOKENIZER.apply_chat_template(parts[:stop], tokenize=False)
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        pads = ids.count(pad_id)
        found.append((len(ids) - pads, pads))
    return found


def expected(talk: Talk, sample: Mapping[str, Any], plan: PackConfig, constants: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each piece, as places in the sample; of what cannot be cut all of them."""
    ids, patches = sample["input_ids"].tolist(), [len(image) for image in sample["patches"]]
    spans, every = images_of(ids, constants), list(range(len(ids)))

    def fits(piece: list[int]) -> bool:
        held = sum(size for (start, _), size in zip(spans, patches, strict=True) if start in piece)
        return len(piece) <= plan.seq_len and (plan.max_patches is None or held <= plan.max_patches)

    def is_learnt(piece: list[int]) -> bool:
        return bool(sample["label_mask"][piece].any())

    if fits(every):
        return [every]
    starts, roles = messages_at(talk, sample, constants), [message["role"] for message in talk["messages"]]
    head = every[: starts[1]] if plan.repeat_system and roles[0] == "system" else []
    if plan.overlong == "truncate":
        cuts = [place for place in range(len(ids) + 1) if not any(a < place < b for a, b in spans)]
        pieces = [every[:cut] for cut in cuts][::-1]
        if plan.truncate_side == "left":
            pieces = [[*head, *every[cut:]] for cut in cuts if cut >= len(head)]
        piece = next(piece for piece in pieces if fits(piece))
        return [piece] if is_learnt(piece) else [every]
    found: list[list[int]] = []
    exchanges: list[list[int]] = [[]]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        if number and roles[number - 1] == "assistant" and roles[number] == "user":
            exchanges.append([])
        exchanges[-1] += range(start, stop)
    for exchange in exchanges:
        if found and fits(found[-1] + exchange):
            found[-1] += exchange
        else:
            found.append(exchange if not found else [*head, *exchange])
    return [piece for piece in found if is_learnt(piece)] if len(found) > 1 else [every]


PLANS = st.one_of(
    st.fixed_dictionaries({"overlong": st.just("split"), "repeat_system": st.booleans()}),
    st.just({"overlong": "truncate"}),
    st.fixed_dictionaries(
        {"overlong": st.just("truncate"), "truncate_side": st.just("left"), "repeat_system": st.booleans()}
    ),
)


@settings(phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=PLANS,
    seq_len=st.integers(20, 260),
    max_patches=st.one_of(st.none(), st.integers(8, 200)),
)
def test_pieces_are_those_of_a_plain_loop_over_the_messages(
    corpus: PhotoCorpus, plan: dict[str, Any], seq_len: int, max_patches: int | None
) -> None:
    made = PackConfig(seq_len=seq_len, max_patches=max_patches, **plan)
    config = replace(config_of(corpus), plan=made)
    whole, found = select(replace(config, plan=replace(PackConfig(seq_len=seq_len)))), select(config)
    wanted = []
    for index in range(len(whole)):
        sample, talk = whole.read(index), TALKS[whole.sample_id(index)]
        for places in expected(talk, sample, made, whole.constants):
            spans = images_of(sample["input_ids"].tolist(), whole.constants)
            shown = [number for number, (start, _) in enumerate(spans) if start in places]
            wanted.append((talk["id"], sample, places, shown))
    assert len(found) == len(wanted)
    for index, (sample_id, sample, places, shown) in enumerate(wanted):
        piece = found.read(index)
        assert found.sample_id(index) == sample_id
        for name in ("input_ids", "label_mask"):
            assert np.array_equal(piece[name], sample[name][places])
        assert np.array_equal(piece["image_grid_thw"], sample["image_grid_thw"][shown])
        assert len(piece["patches"]) == len(shown)
        assert all(np.array_equal(one, sample["patches"][n]) for one, n in zip(piece["patches"], shown, strict=True))
        lengths = {name: int(values[index]) for name, values in found.lengths.items()}
        held = sum(len(image) for image in piece["patches"])
        assert lengths == {"num_tokens": len(places), "num_patches": held, "num_images": len(shown)}
    if isinstance(found, CutSamples):
        masks = [int(found.read(index)["label_mask"].sum()) for index in range(len(found))]
        of_whole = np.array([int(whole.read(index)["label_mask"].sum()) for index in range(len(whole))])
        assert found.learnt(of_whole).tolist() == masks


def test_a_loader_a_data_set_and_the_raw_data_give_the_same_pieces(corpus: PhotoCorpus) -> None:
    """States go on from one to the other, and a plan alone, without its config, has all that it takes."""
    config = config_of(corpus, overlong="split", repeat_system=True, seq_len=140)
    report = build(config)
    planned = plan_of(config, select(config))
    assert isinstance(planned.plan, PackPlan)
    assert planned.plan.cut["pieces"] > planned.plan.cut["samples"] > 3
    assert planned.folder is not None
    assert report.plan is not None
    said = f"{planned.plan.cut['samples']} cut into {planned.plan.cut['pieces']}"
    assert said in report.plan
    assert said in planned.plan.described()
    assert read_plan(planned.folder)["statistics"]["cut"] == planned.plan.cut
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    uncached = make_loader(replace(config, loader=replace(config.loader, cache="off")), dp_rank=0, dp_world_size=1)
    dataset = CachedVLDataset(report.cache, 0, 1, plan=planned.folder.name)
    assert len(loader) == len(uncached) == len(dataset) > 5
    for one, two, three in zip(loader, uncached, dataset, strict=True):
        for name, values in one.items():
            if isinstance(values, torch.Tensor):
                assert torch.equal(values, two[name]), name
                assert torch.equal(values, three[name]), name
    assert loader.state_dict() == uncached.state_dict() == dataset.state_dict()
    assert isinstance(dataset.source, CutSamples)
    copy = pickle.loads(pickle.dumps(dataset.source))  # noqa: S301
    assert np.array_equal(copy.read(3)["input_ids"], dataset.source.read(3)["input_ids"])
    first = first_samples(dataset.source, 5)
    assert [len(first.read(index)["input_ids"]) for index in range(5)] == dataset.source.lengths["num_tokens"][
        :5
    ].tolist()
    cache = open_cache(report.cache)
    for number in range(planned.plan.num_batches):
        pack = read_pack(cache, read_plan(planned.folder), str(number))
        assert pack.num_tokens <= 140
        assert [len(one.items["image"]) for one in pack.segments] == [one.row["num_images"] for one in pack.segments]
    np.save(planned.folder / CUT, np.zeros((3, 17), np.int64))
    with pytest.raises(CacheCorruptError, match=r"cut\.npy"):
        CachedVLDataset(planned.folder, 0, 1)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packs_of_pieces_are_those_of_separate_forwards(corpus: PhotoCorpus, attention: str) -> None:
    config = config_of(corpus, overlong="truncate", truncate_side="left", seq_len=150)
    model = load_model(DEMO / "model", seed=0, init="random")
    model.set_attn_implementation(attention)
    source = select(config)
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    packs = loader.plan.order(loader.settings.seed, 0).batches([0, 1, 2])
    for batch, samples in zip(loader, packs, strict=False):
        logits, token, patch = model(**batch).logits[0], 0, 0
        for sample in map(source.read, samples.tolist()):
            ids, grids = torch.tensor(sample["input_ids"]).long()[None], torch.tensor(sample["image_grid_thw"]).long()
            stop = patch + int(grids.prod(1).sum())
            images = {"pixel_values": batch["pixel_values"][patch:stop], "image_grid_thw": grids} if len(grids) else {}
            kinds = (ids == model.config.image_token_id).int()
            alone = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **images).logits[0]
            assert float((logits[token : token + len(alone)] - alone).abs().max()) < 1e-5
            token, patch = token + len(alone), stop


def test_what_cannot_be_cut_is_left_out_and_counted(corpus: PhotoCorpus) -> None:
    config = config_of(corpus, seq_len=40)
    source = select(config)
    over = int((source.lengths["num_tokens"] > 40).sum())
    plan = plan_of(config, source, keep=False).plan
    assert isinstance(plan, PackPlan)
    assert over > 5
    assert len(plan.unplaced["too_long"]) == over
    with pytest.raises(PlanError, match="too_long"):
        plan_of(replace(config, plan=PackConfig(seq_len=40, overlong="error")), source, keep=False)
    assert select(config_of(corpus, seq_len=4000)).are_whole


@pytest.mark.parametrize("repeat", [False, True])
def test_agents_are_split_where_users_speak_and_not_their_tools(tmp_path: Path, repeat: bool) -> None:  # noqa: FBT001
    corpus, folder = photo_corpus(tmp_path), model_of(tmp_path / "model", PLAIN)
    text = [{**ASKED, "content": "And now?"}, CALLED, HEARD, SAID]
    messages = [ASKED, CALLED, HEARD, HEARD, SAID, *text, {**ASKED, "content": "Sure?"}, SAID]
    corpus.rows = [{"id": "a", "tools": [TOOL], "messages": messages, "images": ["p0.jpg"]}]
    corpus.write_manifest()
    config = corpus.config(
        f"vision.processor={folder}", f"text.tokenizer={folder}", "text.prompt=chat", "plan.seq_len=4000"
    )
    build(config)
    most = int(select(config).lengths["num_tokens"][0]) - 1
    plan = PackConfig(seq_len=most, overlong="split", repeat_system=repeat)
    found = select(replace(config, plan=plan))
    said = [TOKENIZER.decode(found.read(index)["input_ids"]) for index in range(len(found))]
    head, user = "<|im_start|>system\n# Tools", "<|im_start|>user\n"
    assert len(said) == 2
    assert said[0].startswith(head)
    assert said[1].startswith(head if repeat else f"{user}Sure?")
    assert said[1].endswith(f"{user}Sure?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n")
    assert said[0].count("<tool_response>") == 3


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_pieces_fit_into_fixed_shapes(corpus: PhotoCorpus, overlong: str) -> None:
    """A piece of exactly `seq_len` tokens would fit into none, since every shape has tokens of images."""
    config = config_of(corpus, overlong=overlong, shapes="fixed")
    source = select(config)
    plan = plan_of(config, source, keep=False).plan
    assert isinstance(plan, PackPlan)
    assert isinstance(source, CutSamples)
    lengths, shapes = source.lengths, [shape // 4 for shape in plan.patch_classes]
    images = lengths["num_patches"] // 4
    fits = [
        any(i <= shape and n - i <= 120 - shape for shape in shapes)
        for n, i in zip(lengths["num_tokens"].tolist(), images.tolist(), strict=True)
    ]
    assert {*np.flatnonzero(~np.array(fits)).tolist()} == {*plan.unplaced["no_shape"].tolist()}
    pieces = {int(place) for place in source.cut[:, 0] if overlong == "truncate"}
    assert not pieces & {*plan.unplaced["no_shape"].tolist()}
    assert len(pieces) > 5 or overlong == "split"


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="truncate_side"):
        PackConfig(seq_len=8, truncate_side="left", overlong="split")
    with pytest.raises(ValueError, match="repeat_system"):
        PackConfig(seq_len=8, repeat_system=True, overlong="truncate")


def test_samples_without_turns_are_refused_by_name() -> None:
    texts = FakeVlSource([{"input_ids": np.zeros(9, np.int32), "patches": ()}], prompt="plain")
    with pytest.raises(PlanError, match="prompt 'plain'"):
        in_pieces(texts, PackConfig(seq_len=8, overlong="split"))
    assert in_pieces(texts, PackConfig(seq_len=9, overlong="split")) is texts


def test_turns_are_those_of_the_messages_or_none() -> None:
    ids = np.array([1, 5, 9, 1, 6, 9, 1, 7, 9, 1, 6, 9])
    starts, roles = _turns(ids, ["user", "assistant", "user"], "x")
    assert (starts.tolist(), roles) == ([0, 3, 6, 9], ["system", "user", "assistant", "user"])
    ids = np.array([1, 6, 1, 7, 1, 6, 1, 7])
    assert _turns(ids, ["user", "assistant", "tool", "tool", "assistant"], "x")[1] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    own = np.array([1, 6, 1, 7, 1, 8, 1, 8, 1, 7])
    assert len(_turns(own, ["user", "assistant", "tool", "tool", "assistant"], "x")[0]) == 5
    ids = np.array([1, 5, 9, 1, 6, 9, 1, 7, 9, 1, 6, 9])
    for others in (["user", "assistant"], ["user", "assistant", "user", "assistant"], ["user"] * 4):
        with pytest.raises(PlanError, match="that are not these"):
            _turns(ids, others, "x")
