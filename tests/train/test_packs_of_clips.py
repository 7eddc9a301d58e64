"""Packs of recordings and texts, from a config to batches, against a plain loop that concatenates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forebay
from forebay.config import Config, PackConfig
from forebay.errors import ConfigError
from forebay.measure.batch_search import pack_case
from forebay.plan.pack.pack_plan import PackPlan
from forebay.steps.audio.w2v_bert import output_frames, w2v_bert_input
from forebay.steps.text.qwen3_asr_prompt import num_audio_tokens
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from forebay.train.collate import packed
from forebay.train.collate.collator import Collator
from forebay.train.collate.patches import weight_of
from forebay.train.loop.schedule import count_samples
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.sound_families import listed, random_model
from tests.sound_talks import TALKS, Talks, built

DEMO = Path(__file__).parents[2] / "demo" / "speech"
KINDS = {
    "log_mel": ("whisper", "model"),
    "qwen3_asr": ("qwen3_asr", "qwen3_asr_model"),
    "w2v_bert": ("plain", "model"),
    "waveform": ("plain", "model"),
}
PLAN = "plan={kind='pack', seq_len=150}"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def config_of(corpus: Corpus, features: str, *overrides: str) -> Config:
    prompt, folder = KINDS[features]
    corpus.config()
    text = (corpus.folder / "config.toml").read_text()
    head, _, _ = text.partition("[plan]")
    settings = f'features = "{features}"\n[text]\ntokenizer = "{DEMO / folder}"\nprompt = "{prompt}"\n'
    tail = '[plan]\nkind = "pack"\nseq_len = 150\n[run]\ncache_root = "caches"\nnum_workers = 2\n'
    path = corpus.folder / "packs.toml"
    path.write_text(head.replace('features = "waveform"\n', settings) + tail)
    return forebay.load_config(path, overrides=overrides)


def row_of(features: str, sample: dict[str, Any]) -> dict[str, np.ndarray]:
    """The fields that a sample has in its pack: those of tokens, then the items'."""
    ids, prefix = sample["input_ids"].astype(np.int64), int(sample["prefix_len"][0])
    learnt = np.where(np.arange(len(ids)) >= prefix, ids, -100)
    if features == "log_mel":
        tokens = {"decoder_input_ids": ids[:-1], "labels": learnt[1:]}
        return {**tokens, "input_features": sample["input_features"].astype(np.float32)}
    if features == "qwen3_asr":
        at, frames = int(sample["audio_index"][0]), sample["input_features"]
        count = num_audio_tokens(len(frames))
        whole = np.concatenate([ids[:at], np.repeat(ids[at], count), ids[at + 1 :]])
        learnt = np.concatenate([learnt[:at], np.full(count, -100), learnt[at + 1 :]])
        learnt[0] = -100
        mask = {"input_features_mask": np.ones(len(frames), np.int32)}
        return {"input_ids": whole, "labels": learnt, "input_features": frames.astype(np.float32), **mask}
    if features == "w2v_bert":
        banks = sample["fbanks"][: int(sample["valid_frames"][0])]
        out = np.empty((output_frames(len(banks)), 160), np.float32)
        marks = np.empty(len(out), np.int32)
        w2v_bert_input(banks, out, marks)
        return {"labels": learnt, "input_features": out, "attention_mask": marks}
    wave = sample["waveform"].astype(np.float32) / np.float32(32768)
    return {"labels": learnt, "input_values": wave, "attention_mask": np.ones(len(wave), np.int32)}


def plainly(features: str, cache: Cache, indices: list[int]) -> dict[str, torch.Tensor]:
    rows = [row_of(features, dict(cache.read(index))) for index in indices]
    batch = {name: torch.from_numpy(np.concatenate([row[name] for row in rows])) for name in rows[0]}
    tokens = [name for name in batch if name in ("input_ids", "decoder_input_ids", "labels")]
    batch |= {name: batch[name][None] for name in tokens}
    main = next(name for name in batch if name.startswith(("input_features", "input_values")))
    lengths = torch.tensor([len(row[main]) for row in rows])
    positions = torch.cat([torch.arange(len(row["labels"])) for row in rows])[None]
    return {**batch, "position_ids": positions, f"{main}_lengths": lengths}


def check_epochs(config: Config, features: str, cache: Cache) -> list[list[int]]:
    """Compares the batches of two epochs, and returns the packs of the first."""
    loader = make_loader(config)
    for epoch in range(2):
        order = loader.plan.order(0, epoch)
        packs = [batch.tolist() for batch in order.batches(range(len(order)))]
        assert sorted(index for pack in packs for index in pack) == list(range(len(cache)))
        found = list(loader)
        assert len(found) == len(packs)
        for batch, indices in zip(found, packs, strict=True):
            wanted = plainly(features, cache, indices)
            assert not batch.pop("use_cache")
            assert batch.keys() == wanted.keys()
            for name, value in wanted.items():
                assert batch[name].dtype == value.dtype, name
                assert torch.equal(batch[name], value), name
            assert batch["labels"].shape[1] <= 150
            assert count_samples(batch) == len(indices)
    return packs


@pytest.mark.parametrize("features", KINDS)
def test_packs_are_what_a_plain_loop_concatenates(features: str, corpus: Corpus) -> None:
    config = config_of(corpus, features)
    cache = open_cache(build_here(config).cache)
    packs = check_epochs(config, features, cache)
    assert len(packs) < len(cache) / 1.5
    uncached = list(itertools.islice(make_loader(config_of(corpus, features, "loader.cache=off")), 2))
    for one, other in zip(uncached, make_loader(config), strict=False):
        assert all(torch.equal(one[name], other[name]) for name in one if name != "use_cache")


def test_packs_keep_to_a_budget_of_frames(corpus: Corpus) -> None:
    config = config_of(corpus, "log_mel", "plan.max_frames=40")
    cache = open_cache(build_here(config).cache)
    frames = np.asarray(cache.lengths["num_frames"])
    packs = check_epochs(config, "log_mel", cache)
    assert max(int(frames[pack].sum()) for pack in packs) <= 40
    assert max(map(len, packs)) > 1
    small = make_loader(config_of(corpus, "log_mel", "plan.max_frames=20")).plan
    assert isinstance(small, PackPlan)
    assert set(np.asarray(small.unplaced["too_many_frames"]).tolist()) == set(np.flatnonzero(frames > 20).tolist())


def test_fixed_packs_are_padded_to_classes_of_frames(corpus: Corpus) -> None:
    overrides = ("plan.max_frames=64", "plan.shapes=fixed", "loader.varlen=true")
    config = config_of(corpus, "qwen3_asr", *overrides)
    cache = open_cache(build_here(config).cache)
    order = make_loader(config).plan.order(0, 0)
    for batch, indices in zip(make_loader(config), order.batches(range(len(order))), strict=True):
        wanted = plainly("qwen3_asr", cache, indices.tolist())
        used, frames = wanted["input_ids"].shape[1], len(wanted["input_features"])
        assert batch["input_ids"].shape == batch["position_ids"].shape == (1, 150)
        assert len(batch["input_features"]) in (32, 64)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(batch[name][:, :used], wanted[name])
        assert (batch["labels"][:, used:] == -100).all()
        assert torch.equal(batch["input_features"][:frames], wanted["input_features"])
        assert not batch["input_features"][frames:].any()
        assert int(batch["input_features_lengths"].sum()) == len(batch["input_features"])
        assert batch["cu_seq_lens_q"][-1] == 150


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.max_patches=8", r"plan\.max_patches is set, and this config has frames: set plan\.max_frames"),
        ("loader.crop_s=1.0", "crops of loader.crop_s have no text"),
        ("plan.shapes=fixed", r"needs plan\.max_frames"),
    ],
)
def test_settings_that_give_no_packs_are_refused(override: str, message: str, corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(corpus, "log_mel", override)


def test_packs_without_text_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"packs are of tokens: add \[text\]"):
        corpus.config(PLAN)


def test_text_alone_is_packed(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("".join(f"line {'and more ' * (n % 5)}{n}\n" for n in range(30)))
    (tmp_path / "text.toml").write_text(
        'name = "lines"\n[source]\nkind = "text"\nmanifest = "train.txt"\n[audio]\nfeatures = "none"\n'
        f'[text]\ntokenizer = "{DEMO / "model"}"\nprompt = "plain"\n[plan]\nkind = "pack"\nseq_len = 64\n'
        '[run]\ncache_root = "caches"\nnum_workers = 2\n'
    )
    config = forebay.load_config(tmp_path / "text.toml")
    cache, loader = open_cache(build_here(config).cache), make_loader(config)
    order = loader.plan.order(0, 0)
    for batch, indices in zip(loader, order.batches(range(len(order))), strict=True):
        ids = [cache.read(index)["input_ids"].astype(np.int64) for index in indices.tolist()]
        labels = [np.concatenate([[-100], each[1:]]) for each in ids]
        assert list(batch) == ["input_ids", "labels", "position_ids", "use_cache"]
        assert batch["input_ids"][0].tolist() == np.concatenate(ids).tolist()
        assert batch["labels"][0].tolist() == np.concatenate(labels).tolist()
        assert batch["position_ids"][0].tolist() == [place for each in ids for place in range(len(each))]


@pytest.mark.parametrize(
    ("family", "budgets", "sees"),
    [
        ("qwen2_audio", {"num_frames": 64}, False),
        ("qwen2_5_omni", {"num_frames": 64}, False),
        ("qwen2_5_omni", {"num_frames": 48, "num_patches": 60}, True),
        ("qwen3_omni", {"num_frames": 400, "num_patches": 30}, True),
    ],
)
@pytest.mark.few("qwen2_audio-budgets0-False", "qwen3_omni-budgets3-True")
def test_talks_are_read_from_a_pack_as_from_batches_of_one(
    family: str, budgets: dict[str, int], *, sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and values, in both attentions, on three ranks; frames and patches are the other budgets."""
    talks = Talks.made(tmp_path, family)
    names = [name for name in TALKS if sees or "seen" not in name]
    listed(tmp_path / "data", [{"id": name, "messages": talks.messages(name)} for name in names])
    plan = "\n".join(f"max_{name.removeprefix('num_')} = {most}" for name, most in budgets.items())
    config = talks.config(plan=f'kind = "pack"\nseq_len = 250\n{plan}', **({} if sees else {"vision": ""}))
    cache, _ = built(config)
    packs = [pack for rank in range(3) for pack in make_loader(config, dp_rank=rank, dp_world_size=3)]
    numbers = {tuple(cache.read(number)["input_ids"].tolist()): number for number in range(len(cache))}
    assert sorted(number for pack in packs if weight_of(pack) for number, _ in _segments(pack, numbers)) == [
        *range(len(cache))
    ]
    model, collate = random_model(family, talks.model), Collator(cache)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for pack in packs:
            with torch.no_grad():
                found = model(**pack).logits[0]
            held = _segments(pack, numbers)
            for name, most in budgets.items():
                assert sum(int(cache.lengths[name][number]) for number, _ in held) <= most
            for number, place in held:
                alone = collate([cache.read(number)])
                with torch.no_grad():
                    assert (found[place] - model(**alone).logits[0]).abs().max() < 1e-5
                if "image_grid_thw" in alone:
                    lengths = alone["feature_attention_mask"].sum(-1) if "feature_attention_mask" in alone else None
                    mask, grids = alone["attention_mask"], alone["image_grid_thw"]
                    wanted = model.get_rope_index(alone["input_ids"], grids, None, mask, audio_seqlens=lengths)[0]
                    assert torch.equal(pack["position_ids"][1:, :, place], wanted.long())
    if sees:
        monkeypatch.setattr(packed, "_OMNI", ())
        with pytest.raises(ConfigError, match=r"samples have clips and images: Qwen\w+Processor is none of"):
            make_loader(config)
    assert isinstance(config.plan, PackConfig)
    with pytest.raises(ConfigError, match="calibrate tries packs of images as patches"):
        pack_case(cache, config.plan)


def _segments(pack: Any, numbers: dict[tuple[int, ...], int]) -> list[tuple[int, slice]]:
    """Returns the samples of a pack, and where they stand."""
    ids = pack["input_ids"][0]
    starts = [*np.flatnonzero(pack["position_ids"].reshape(-1, len(ids))[0] == 0).tolist(), len(ids)]
    return [
        (numbers[tuple(ids[first:last].tolist())], slice(first, last)) for first, last in itertools.pairwise(starts)
    ]
