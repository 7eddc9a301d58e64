"""The work of the arms, done here instead of in processes of their own, on a cache of the demo recordings."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import forebay
from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError, ManifestError
from forebay.measure import compared_ways as own
from forebay.measure import plain_loop as plain
from forebay.measure import plain_loop as plain_collators
from forebay.measure.compare import tasks_of
from forebay.measure.compared_ways import ArmTask, Block, BlockStep, Setup, arms_of
from forebay.measure.machine import ArmFinish, ArmTurn
from forebay.train.select import make_loader
from forebay.train.uncached.uncached_source import PlainSamples
from tests.processes import ROOT

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    # of transformers and torch about this machine and about each other
    pytest.mark.filterwarnings("ignore"),
]


class Parent:
    """Gives turns from a list and keeps what is sent."""

    def __init__(self, turns: list[int | None]) -> None:
        self._turns = deque(turns)
        self.sent: list[Any] = []

    def recv(self) -> int | None:
        return self._turns.popleft()

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("qwen3")
    overrides = [f"run.cache_root={folder}/caches", f"train.output_dir={folder}/runs", "plan.batch_seconds=20"]
    found = forebay.load_config(ROOT / "configs/demo_qwen3_asr.toml", overrides=overrides)
    forebay.preprocess.build(found)
    return found


def tasks(config: Config, *, against: str, steps: int, folder: Path) -> dict[str, ArmTask]:
    arms = arms_of(against, config)
    loader = make_loader(arms[0].config(config, folder=str(folder)), dp_rank=0, dp_world_size=1)
    return {task.arm.name: task for task in tasks_of(config, loader, arms, steps=steps, folder=str(folder))}


def done(task: ArmTask, *, order: list[int] | None = None) -> tuple[Setup, list[ArmTurn], ArmFinish]:
    """Returns what an arm tells of all its turns."""
    turns = list(range(len(task.blocks))) if order is None else order
    parent = Parent([*turns, None])
    (plain if task.arm.is_plain else own).work(task, parent)
    setup, *found, finish = parent.sent
    return setup, found, finish


@pytest.fixture(scope="module")
def found(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Setup, list[ArmTurn], ArmFinish]]:
    """Results of every arm for three blocks; three models are trained for `hf`, which takes most of the 20 s of CPU."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder, against = tmp_path_factory.mktemp("scratch"), "uncached,uncached+unbucketed,hf"
    results = {}
    for name, task in tasks(config, against=against, steps=4, folder=folder).items():
        results[name] = done(task)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    torch.set_num_threads(threads)
    return results


def test_every_arm_trains_on_the_same_samples_block_by_block(found: dict[str, Any]) -> None:
    ids = {name: [turn.ids for turn in turns] for name, (_, turns, _) in found.items()}
    assert len(ids) == 4
    assert [len(block) for block in ids["config"]] != [0, 0, 0]
    assert all(own == ids["config"] for own in ids.values())


def test_without_the_cache_losses_are_the_same_to_the_last_bit(found: dict[str, Any]) -> None:
    cached, uncached = ([turn.losses for turn in found[name][1]] for name in ("config", "uncached"))
    assert [len(losses) for losses in cached] == [2, 1, 1]
    assert uncached == cached


def test_shapes_frames_and_padding_without_the_cache_are_the_same(found: dict[str, Any]) -> None:
    cached, uncached = (
        [(turn.shapes, turn.frames, turn.room, [step.bucket for step in turn.steps]) for turn in found[name][1]]
        for name in ("config", "uncached")
    )
    assert uncached == cached
    random = [(turn.frames, [step.bucket for step in turn.steps]) for turn in found["uncached+unbucketed"][1]]
    assert random == [(frames, [-1] * len(buckets)) for _, frames, _, buckets in cached]


def test_the_plain_way_has_the_losses_of_random_batches_without_the_cache(found: dict[str, Any]) -> None:
    """The same batches and targets; features are those of the whole batch, where ours are those of the clip alone."""
    plainly, ours = (
        [loss for turn in found[name][1] for loss in turn.losses] for name in ("hf", "uncached+unbucketed")
    )
    assert plainly == pytest.approx(ours, rel=0.02)
    rooms = ([turn.room for turn in found[name][1]] for name in ("hf", "uncached+unbucketed"))
    assert all(abs(one - two) <= 100 * 20 for one, two in zip(*rooms, strict=True))  # a chunk of each clip


def test_times_add_up_and_figures_are_there(found: dict[str, Any]) -> None:
    for name, (setup, turns, finish) in found.items():
        assert setup.data_s > 0 < setup.model_s
        assert sorted(setup.workers) == ([0, 2] if name == "hf" else []) or name == "hf"
        for turn in turns:
            assert 0 < turn.first_batch_s <= turn.wait_s < turn.seconds
            assert sum(step.seconds for step in turn.steps) == pytest.approx(turn.seconds, rel=0.05, abs=0.02)
            assert turn.cpu_s > 0
            assert turn.skipped == 0
        assert finish.host_bytes > 10_000_000
        assert finish.flops.keys() == {shapes for turn in turns for shapes in turn.shapes}
        assert min(finish.flops.values()) > 1e6


def test_a_sample_that_the_raw_data_lacks_is_named(config: Config, tmp_path: Path) -> None:
    source = make_loader(
        arms_of("uncached", config)[0].config(config, folder=str(tmp_path)), dp_rank=0, dp_world_size=1
    ).source
    ids = {index: source.sample_id(index) for index in range(len(source))}
    assert own.places_in(source, ids) == {index: index for index in ids}
    moved = {index + 1: ids[index] for index in range(3)}
    assert own.places_in(source, moved) == {1: 0, 2: 1, 3: 2}
    with pytest.raises(CacheMismatchError, match=r"sample 'gone' of the cache is not in the raw data.*preprocess"):
        own.places_in(source, {0: "gone"})


def test_the_extractor_has_to_be_there(config: Config, tmp_path: Path) -> None:
    task = tasks(config, against="hf", steps=1, folder=tmp_path)["hf"]
    clips = PlainSamples(task.config, list(task.ids.values()))
    bare = dataclasses.replace(task.config, train=dataclasses.replace(task.config.train, model=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--against hf needs the extractor's preprocessor_config\.json in"):
        plain_collators.PlainCollator(bare, clips)


def test_a_config_of_any_extractor_has_that_extractor_s_batches(tmp_path: Path) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    extractor.save_pretrained(tmp_path)
    audio = ('audio.features="extractor"', f'audio.extractor="{tmp_path}"', 'text.prompt="plain"')
    wanted = forebay.load_config(ROOT / "configs/demo_qwen3_asr.toml", overrides=audio)
    clips = PlainSamples(wanted, ["en_digits_oh", "en_digits_17"])
    collator, samples = plain_collators.sound_collator(wanted, clips), [clips[0], clips[1]]
    batch = collator(samples)
    heard = [sample["waveform"] for sample in samples]
    made = extractor(heard, sampling_rate=16_000, padding=True, return_tensors="pt")
    assert batch.keys() == {*made, "labels"} == {"input_values", "attention_mask", "labels"}
    assert all(torch.equal(batch[name], made[name]) for name in made)
    assert collator.room(batch) == 2 * max(map(len, heard))


def test_the_plain_way_has_the_mean_micro_batches_in_every_step(config: Config, tmp_path: Path) -> None:
    wanted = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_acc=2))
    task = tasks(wanted, against="hf", steps=4, folder=tmp_path)["hf"]
    blocks = plain.plain_blocks(task)
    assert {len(step) for block in blocks for step in block} == {2}
    few = Block((BlockStep(bucket=0, batches=((3,), (5,))), BlockStep(bucket=0, batches=((7,),))))
    small = dataclasses.replace(task, blocks=(few,), ids={3: "a", 5: "b", 7: "c"})
    assert [[len(batch) for batch in step] for block in plain.plain_blocks(small) for step in block] == [[2], [1]]
    ids = list(task.ids)
    assert [sorted(ids[i] for step in block for batch in step for i in batch) for block in blocks] == [
        sorted(block.samples) for block in task.blocks
    ]


def test_clips_are_the_decoded_recordings_with_the_tokens_of_the_cache(config: Config, tmp_path: Path) -> None:
    loader = make_loader(arms_of("hf", config)[0].config(config, folder=str(tmp_path)), dp_rank=0, dp_world_size=1)
    source = loader.source
    order = [3, 0, 7]
    clips = PlainSamples(config, [source.sample_id(index) for index in order])
    assert len(clips) == 3
    for place, index in enumerate(order):
        found, stored = clips[place], source.read(index)
        assert found["waveform"].shape == (source.lengths["num_audio_samples"][index],)
        assert found["waveform"].dtype == np.float32
        for name in ("input_ids", "prefix_len", "audio_index"):
            assert found[name].tolist() == stored[name].tolist()
    with pytest.raises(ManifestError, match=r"sample 'gone' of the cache is not in .*train\.tsv; run: forebay prepro"):
        PlainSamples(config, ["gone"])
