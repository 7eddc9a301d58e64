"""Batches of preference pairs against TRL's own collators, from a cache and without one."""

from __future__ import annotations

import io
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from forebay import load_config
from forebay.errors import ConfigError, TextError
from forebay.pretrained import from_folder
from forebay.rows.meanings.canonical_chat import canonical
from forebay.steps.image.processor.whole import image_processor_of, whole_processor
from forebay.train.loop.run import run
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import photo
from tests.processes import ROOT, python
from tests.vlm_families import FAMILIES, FOLDERS, random_model, write_family

ASKED = {"role": "user", "content": "<image>What is it?"}
SAID = {"role": "assistant", "content": "A cat."}
OTHER = {"role": "assistant", "content": "A dog, or two."}
EARLIER = [ASKED, OTHER, {"role": "user", "content": "Sure?"}]


def config_of(root: Path, rows: list[dict[str, Any]], *overrides: str, name: str = "qwen2_5_vl") -> Any:
    for number in range(2):
        (root / f"{number}.jpg").write_bytes(photo(number, width=64 + 32 * number))
    if name in FAMILIES:
        write_family(FAMILIES[name], root / "model")
    else:
        shutil.copytree(FOLDERS[name], root / "model", dirs_exist_ok=True)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "c.toml").write_text(
        'name = "pairs"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n[vision]\nprocessor = "model"\n'
        'images = "processor"\n[text]\ntokenizer = "model"\nprompt = "chat"\npairs = true\nlearn_through = "newline"\n'
        '[plan]\nkind = "bucket"\nbatch_size = 4\nedges = [512]\n[run]\ncache_root = "caches"\n'
        "num_workers = 1\nmax_failed_share = 1.0\n"
    )
    return load_config(root / "c.toml", overrides=overrides)


def shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "content": each["content"].replace("<image>", "")} for each in messages]


ROWS: list[dict[str, Any]] = [
    {"id": "a", "image": "0.jpg", "prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
    {"id": "b", "images": ["1.jpg"], "messages": EARLIER, "chosen": "A cat.", "rejected": OTHER["content"]},
    {"id": "c", "image": "1.jpg", "messages": [*EARLIER, SAID], "rejected_response": OTHER["content"]},
    {"id": "d", "image": "0.jpg", "chosen": [ASKED, OTHER], "rejected": [ASKED, SAID]},
]


def for_trl(root: Path) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The folder's tokenizer and processor, and ROWS as TRL takes them."""
    model = root / "model"
    tokenizer = from_folder(AutoTokenizer, model)
    parts = {"image": image_processor_of(model)}
    processor = whole_processor(model, tokenizer=tokenizer, tokenizer_folder=model, parts=parts)
    prompts, answers = [[ASKED], EARLIER, EARLIER, [ASKED]], [(SAID, OTHER)] * 3 + [(OTHER, SAID)]
    images = [[Image.open(io.BytesIO((root / f"{number}.jpg").read_bytes()))] for number in (0, 1, 1, 0)]
    return (
        tokenizer,
        processor,
        [
            {"images": image, "prompt": shown(prompt), "chosen": [one], "rejected": [other]}
            for image, prompt, (one, other) in zip(images, prompts, answers, strict=True)
        ],
    )


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "smolvlm"])
@pytest.mark.few("qwen2_5_vl", "gemma3")
def test_batches_of_pairs_are_those_of_trl(tmp_path: Path, name: str) -> None:
    bad = [
        {"id": "single", "image": "0.jpg", "messages": [ASKED, SAID]},
        {"id": "same", "image": "0.jpg", "messages": [ASKED], "chosen": "A cat.", "rejected": "A cat."},
        {"id": "half", "image": "0.jpg", "messages": [ASKED], "chosen": "A cat."},
    ]
    config = config_of(tmp_path, [*ROWS, *bad], name=name)
    report = build_here(config)
    assert (report.num_samples, report.failed) == (4, {"bad_pair": 3})
    _, processor, examples = for_trl(tmp_path)
    for loaded in (config, load_config(tmp_path / "c.toml", overrides=['loader.cache="off"'])):
        loader = make_loader(loaded)
        batch = next(iter(loader))
        order = [loader.source.sample_id(index) for index in loader.indices]
        wanted = DataCollatorForVisionPreference(processor)([dict(examples["abcd".index(name)]) for name in order])
        assert set(batch) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(batch[name].to(value.dtype), value), name


def example(config_path: Path, overrides: list[str], **options: Any) -> list[float]:
    """Returns the losses of examples/trl_dpo.py."""
    main = runpy.run_path(str(ROOT / "examples/trl_dpo.py"))["main"]
    found: list[float] = main(str(config_path), overrides, **options)
    return found


def of_training(root: Path, *, batches: int, steps: int = 3) -> list[str]:
    return [
        *(f"plan.batch_size={4 // batches}", f"train.grad_acc={batches}", f"train.max_steps={steps}"),
        *(f'train.model="{root / "model"}"', 'train.init="random"', "train.learning_rate=0.1", "loader.seed=0"),
        *(f'train.output_dir="{root / "runs"}"', "train.checkpoint_every=1"),
    ]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.few("2")
def test_trl_learns_from_a_loader_as_from_its_own_batches_and_goes_on(tmp_path: Path, batches: int) -> None:
    config_of(tmp_path, ROWS)
    # Adam makes much of the order in which the samples of a batch are added up.
    how: dict[str, Any] = {"optim": "sgd", "disable_tqdm": True}
    more = of_training(tmp_path, batches=batches)
    own = example(tmp_path / "c.toml", more, **how)
    shutil.rmtree(tmp_path / "runs/pairs-dpo/checkpoint-3")
    assert example(tmp_path / "c.toml", more, resume=True, **how) == own
    _, processor, examples = for_trl(tmp_path)
    arguments = DPOConfig(
        output_dir=str(tmp_path / "theirs"),
        max_steps=3,
        per_device_train_batch_size=4 // batches,
        gradient_accumulation_steps=batches,
        learning_rate=0.1,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        max_length=None,
        report_to=[],
        use_cpu=True,
        **how,
    )
    models = {name: random_model(tmp_path / "model") for name in ("model", "ref_model")}
    data = {"processing_class": processor, "train_dataset": Dataset.from_list(examples)}
    theirs = DPOTrainer(args=arguments, **models, **data)
    theirs.train()
    assert own == pytest.approx([entry["loss"] for entry in theirs.state.log_history if "loss" in entry], abs=1e-5)
    assert len({*own}) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.wide
def test_pairs_go_on_with_one_rank_where_two_stopped(tmp_path: Path) -> None:
    config_of(tmp_path, ROWS)
    more = of_training(tmp_path, batches=2)
    whole = example(tmp_path / "c.toml", more)
    shutil.rmtree(tmp_path / "runs")
    of_two = [each for each in more if "grad_acc" not in each]
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", 2, "--standalone")
    outcome = python(*launcher, "examples/trl_dpo.py", tmp_path / "c.toml", *of_two)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    shutil.rmtree(tmp_path / "runs/pairs-dpo/checkpoint-3")
    assert example(tmp_path / "c.toml", more, resume=True) == pytest.approx(whole, abs=1e-4)
    assert max(whole) - min(whole) > 0.01


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "chosen": "a", "rejected": "b"}, None),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, None),
        ({"query": "q", "response": "a", "rejected_response": "b"}, None),
        ({"instruction": "q", "output": "a", "rejected_response": "b"}, None),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}, None),
        ({"chosen": "a", "rejected": "b"}, "bad_pair"),
        ({"question": "q", "rejected": "b"}, "bad_pair"),
        ({"question": "q", "answer": "a", "rejected": "b"}, "bad_pair"),
        ({"question": "q", "chosen": "a", "rejected": "b", "rejected_response": "c"}, "bad_pair"),
        ({"question": "q", "chosen": "a", "rejected": ["b"]}, "bad_pair"),
        ({"messages": "q", "chosen": "a", "rejected": "b"}, "bad_pair"),
        ({"messages": [], "rejected_response": "b"}, "bad_pair"),
        ({"messages": [7], "rejected_response": "b"}, "bad_pair"),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "user", "content": "b"}]}, "bad_pair"),
        ({"prompt": "q", "chosen": [SAID, ASKED, SAID], "rejected": "b"}, "bad_pair"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "bad_pair"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "bad_pair"),
        ({"chosen": [ASKED, SAID], "rejected": [{**ASKED, "content": "q"}, SAID]}, "bad_pair"),
        ({"prompt": "q", "chosen": "a", "rejected_messages": [SAID]}, "bad_pair"),
        ({"messages": [{"role": "user", "content": "q"}], "rejected_images": ["x"]}, "preference_data"),
    ],
)
def test_rows_of_two_answers(row: dict[str, Any], reason: str | None) -> None:
    items = ["x"] if "<image>" in json.dumps(row) else []
    if reason is None:
        asked, said = json.loads(canonical(row, {"image": items})[0])
        assert asked["content"][-1]["text"] == "q"
        assert (said["content"][0]["text"], said["rejected"][0]["content"][0]["text"]) == ("a", "b")
        return
    with pytest.raises(TextError) as caught:
        canonical(row, {"image": items})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "chosen": "a", "rejected": "a"}, "the pair has equal answers"),
        ({"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID, ASKED, SAID]}, "is the beginning of the other"),
        ({"chosen": [ASKED, SAID], "rejected": [{**ASKED, "content": "z"}, SAID]}, r'other questions.*What is it.*"z"'),
        ({"question": "q", "answer": "a", "rejected_images": ["b.jpg"]}, "rejected_images.*of a rejected answer alone"),
    ],
)
def test_pairs_that_are_none_are_told_apart(row: dict[str, Any], said: str) -> None:
    with pytest.raises(TextError, match=said):
        canonical(row, {"image": []})


def test_where_pairs_have_no_place_they_are_refused_by_name(tmp_path: Path) -> None:
    rows = [{"image": "0.jpg", "prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]}]
    single = {"image": "0.jpg", "messages": [ASKED, SAID]}
    assert build_here(config_of(tmp_path, [*rows, single], "text.pairs=false")).failed == {"preference_data": 1}
    config = config_of(tmp_path, rows)
    build_here(config)
    for overrides, said in (
        (['text.train_on="all"'], "text.pairs is true and text.train_on is"),
        (['vision.images="patches"', 'plan={kind="pack",seq_len=512}'], "text.pairs: packs of patches have no pairs"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_here(config_of(tmp_path, rows, *overrides))
    with pytest.raises(ConfigError, match="has no loss of preferences"):
        run(config_of(tmp_path, rows, f'train.model="{tmp_path / "model"}"', 'train.init="random"'))
    sample = make_loader(config).source.read(0)
    assert np.count_nonzero(sample["label_mask"]) != np.count_nonzero(sample["rejected_label_mask"])
