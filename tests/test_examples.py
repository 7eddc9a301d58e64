"""Every example runs on the demo configs, as a user would start it."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import forebay
from forebay.train.models.model_folder import load_model
from tests.processes import python
from tests.train.tiny_vl import expanded

_ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches and runs of all examples: the first one builds, the others find what it built."""
    return tmp_path_factory.mktemp("examples")


_SEVERAL = """
import runpy, sys
for example in sys.argv.pop(1).split():
    print("==", example, flush=True)
    runpy.run_path(f"examples/{example}.py", run_name="__main__")
"""
"""One process that runs several examples, each as its file says: most of an example's time is its imports."""


def outputs_of(examples: str, folder: Path, *, max_steps: int = 2, config: str = "demo_speech") -> dict[str, str]:
    """Returns what each of the examples prints."""
    overrides = [f"run.cache_root={folder}/caches", f"train.output_dir={folder}/runs", f"train.max_steps={max_steps}"]
    outcome = python("-c", _SEVERAL, examples, f"configs/{config}.toml", *overrides)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    parts = re.split(r"^== (\w+)\n", outcome.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def output_of(example: str, folder: Path, *, max_steps: int = 2, config: str = "demo_speech") -> str:
    return outputs_of(example, folder, max_steps=max_steps, config=config)[example]


@pytest.fixture(scope="module")
def of_dataloaders(folder: Path) -> dict[str, str]:
    """The output of the examples of speech under other dataloaders."""
    return outputs_of("torch_dataloader stateful_dataloader torchtitan_dataloader", folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> str:
    """The output of the plain loop for four steps."""
    return output_of("plain_loop", folder, max_steps=4)


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d: .*loss ([\d.]+)$", output, re.MULTILINE)]


def assert_equal_batches(output: str, *, num_batches: int) -> None:
    lines = output.splitlines()
    assert len(lines) == num_batches
    assert all(line.endswith("equal: True") for line in lines)


def test_plain_loop_and_hf_trainer_learn_from_the_same_batches(folder: Path, plain: str) -> None:
    losses = losses_of(plain)
    assert len(losses) == 4
    assert "the next batch is micro-batch 4 of epoch 0" in plain
    trainer = re.search(r"2 steps, mean loss ([\d.]+)", output_of("hf_trainer", folder))
    assert trainer is not None
    # The Trainer's first step is taken at a rate of 0, so only the losses before and after one update differ a little.
    assert float(trainer[1]) == pytest.approx(sum(losses[:2]) / 2, rel=0.05)


def test_lightning_goes_on_in_the_epoch_with_the_losses_of_a_loop_that_never_stopped(folder: Path, plain: str) -> None:
    """Two steps, a checkpoint, two more with a new Trainer and a new loader."""
    output = output_of("lightning_trainer", folder)
    assert losses_of(output) == pytest.approx(losses_of(plain), abs=0.002)
    assert len(losses_of(output)) == 4
    assert "4 steps; the next batch is micro-batch 4" in output


def test_torch_dataloader_gives_the_batches_of_the_loader(of_dataloaders: dict[str, str]) -> None:
    output = of_dataloaders["torch_dataloader"]
    assert_equal_batches(output, num_batches=11)
    assert sum(map(int, re.findall(r": (\d+) samples", output))) == 52


def test_stateful_dataloader_stops_and_goes_on_within_the_epoch(of_dataloaders: dict[str, str]) -> None:
    output = of_dataloaders["stateful_dataloader"]
    assert_equal_batches(output, num_batches=11)
    assert sum(map(int, re.findall(r": (\d+) samples", output))) == 52


def test_a_torchtitan_dataloader_of_two_ranks_goes_on_with_one(of_dataloaders: dict[str, str]) -> None:
    assert_equal_batches(of_dataloaders["torchtitan_dataloader"], num_batches=8)


@pytest.mark.wide
def test_packs_under_torch_s_dataloader_are_those_of_the_loader(folder: Path) -> None:
    output = output_of("vision_dataloader", folder, config="demo_vision")
    assert_equal_batches("\n".join(re.findall(r"^pack .*$", output, re.MULTILINE)), num_batches=7)
    assert re.search(r"^loss \d+\.\d\d$", output, re.MULTILINE)


# Packs in other people's trainers: each loss is that of the pack's samples, one by one.


def losses_one_by_one(config: forebay.Config, *, num_packs: int) -> list[float]:
    """Returns the mean loss over the learnt tokens of each pack, by forward passes of single samples."""
    model = load_model(Path(str(config.train.model)), seed=config.loader.seed, init=config.train.init)
    loader = forebay.train.make_loader(config)
    image_token_id = loader.source.constants["image_token_id"]
    found = []
    for indices in loader.plan.order(config.loader.seed, 0).batches(range(num_packs)):
        total, count = 0.0, 0
        for sample in map(loader.source.read, indices.tolist()):
            ids = torch.from_numpy(sample["input_ids"]).long()[None]
            labels = ids.masked_fill(torch.from_numpy(sample["label_mask"] == 0)[None], -100)
            images = {}
            if len(sample["patches"]):
                patches = torch.from_numpy(np.concatenate(sample["patches"]))
                grids = torch.from_numpy(sample["image_grid_thw"]).long()
                images = {"pixel_values": expanded(patches, loader.source.constants), "image_grid_thw": grids}
            with torch.no_grad():
                types = (ids == image_token_id).int()
                logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **images).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
            count += int((labels[0, 1:] != -100).sum())
        found.append(total / count)
    return found


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> list[float]:
    config = forebay.load_config(_ROOT / "configs/demo_vision.toml", overrides=[f"run.cache_root={folder}/caches"])
    forebay.preprocess.build(config)
    return losses_one_by_one(config, num_packs=3)


def run_here(
    example: str, folder: Path, *more: str, max_steps: int, config: str = "demo_vision", **options: bool
) -> list[float]:
    """Returns the losses of an example that is run in this process on a demo's config, at a learning rate of 0."""
    spec = importlib.util.spec_from_file_location(example, _ROOT / "examples" / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    overrides = [f"run.cache_root={folder}/caches", f"train.output_dir={folder}/runs"]  # one for all
    overrides += [f"train.max_steps={max_steps}", "train.learning_rate=0.0", *more]
    losses: list[float] = module.main(str(_ROOT / f"configs/{config}.toml"), overrides, **options)
    return losses


@pytest.mark.filterwarnings("ignore")  # as below
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("config", ["demo_text", "demo_any"])
def test_trl_learns_from_texts_and_from_images_and_resumes(folder: Path, config: str) -> None:
    """Real TRL; packs are below. The losses of a run that is resumed are those of a run that never stopped."""
    more = ["train.learning_rate=0.01", "source.max_samples=32", "train.checkpoint_every=1", f"name={config}"]
    if config == "demo_text":
        tokens = AutoTokenizer.from_pretrained(_ROOT / "demo/text/model")
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        llama = LlamaConfig(vocab_size=len(tokens), architectures=["LlamaForCausalLM"], **sizes)
        llama.save_pretrained(folder / "llama")
        more += [f"train.model={folder}/llama", "train.init=random", "plan.batch_tokens=128"]
    whole = run_here("hf_sft_trainer", folder / config, *more, max_steps=3, config=config)
    assert len(set(whole)) == 3
    shutil.rmtree(folder / config / f"runs/{config}-sft/checkpoint-3")
    assert run_here("hf_sft_trainer", folder / config, *more, max_steps=3, config=config, resume=True) == whole


@pytest.mark.filterwarnings("ignore")  # of the frameworks about this machine and about each other
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("example", "max_steps"),
    [
        ("plain_loop", 2),
        ("hf_trainer", 2),
        ("hf_seq2seq_trainer", 2),
        ("hf_sft_trainer", 2),
        ("lightning_trainer", 1),
        ("accelerate_loop", 2),
    ],
)
def test_packs_have_the_loss_of_their_samples_in_every_framework(
    folder: Path, one_by_one: list[float], example: str, max_steps: int
) -> None:
    """A learning rate of 0 makes every step one of the first model. All take 30 s of CPU: six frameworks are loaded."""
    losses = run_here(example, folder, max_steps=max_steps)
    assert losses == pytest.approx(one_by_one[:2], abs=1e-5)
    if example in ("hf_trainer", "hf_sft_trainer"):
        assert run_here(example, folder, max_steps=3, resume=True) == pytest.approx(one_by_one, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_accelerate")
def test_qwen_vl_finetune_learns_from_what_is_decoded_once(folder: Path) -> None:
    losses = run_here("qwen_vl_finetune", folder, "train.learning_rate=0.01", max_steps=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_accelerate")
def test_trl_goes_on_with_one_rank_where_two_stopped(folder: Path) -> None:
    """Packs of images: two ranks take three steps, one rank the third again, with twice the micro-batches a step."""
    place, more = folder / "ranks", ["train.learning_rate=0.01", "train.checkpoint_every=1"]
    one = [*more, "train.grad_acc=2"]
    whole = run_here("hf_sft_trainer", place, *one, max_steps=3)
    shutil.rmtree(place / "runs")
    options = [f"run.cache_root={place}/caches", f"train.output_dir={place}/runs", "train.max_steps=3"]
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", 2, "--standalone")
    outcome = python(*launcher, "examples/hf_sft_trainer.py", "configs/demo_vision.toml", *options, *more)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    shutil.rmtree(place / "runs/vqa-sft/checkpoint-3")
    assert run_here("hf_sft_trainer", place, *one, max_steps=3, resume=True) == pytest.approx(whole, abs=1e-3)
