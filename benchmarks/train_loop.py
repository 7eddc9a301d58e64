"""Measures what the training loop costs beside its steps: `python -m benchmarks.train_loop [--tiny] [--json]`.

One contestant is `forebay.train.loop.run.train` itself, with its accelerate, counting, checks of batches, learning
rate, seeds and log line. The other is a bare torch loop: forward, loss, backward, clipping, AdamW, `zero_grad`. Both
train a random Whisper of the same first weights on the same ready batches, so reading data is in neither. The bare loop
takes a block of steps whenever the loop asks for the first batch of its next block: blocks take turns within one run.
Blocks are short, since a neighbour on the machine changes its mind within seconds, and every block has a log line.
Losses of both are compared before the figures count. CPU seconds stand beside wall time. The ratio is the median of the
pairs.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.nn import functional

from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.config import AudioConfig, Config, SourceConfig, TextConfig, TrainConfig
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.models.model_folder import load_model

LEARNING_RATE = 1e-4
NUM_FRAMES = 200
VOCAB_SIZE = 2000
IGNORED = -100
Batch = dict[str, torch.Tensor]


def batches_of(count: int, *, num_samples: int, num_tokens: int) -> list[Batch]:
    """Returns batches of random features and tokens; a few labels of each row are masked."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB_SIZE, (num_samples, num_tokens + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, :3] = IGNORED
        features = torch.randn(num_samples, 80, NUM_FRAMES, generator=generator)
        found.append({"input_features": features, "decoder_input_ids": ids[:, :-1].contiguous(), "labels": labels})
    return found


def make_config(folder: Path, *, num_steps: int, block: int, width: int, layers: int) -> Config:
    """Returns the config of a run that logs once a block; its model's folder is made."""
    model = {
        "model_type": "whisper",
        "vocab_size": VOCAB_SIZE,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "decoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_source_positions": NUM_FRAMES // 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return Config(
        name="train_loop",
        source=SourceConfig(kind="tar", manifest="none"),
        audio=AudioConfig(features="log_mel"),
        text=TextConfig(tokenizer=str(folder / "model"), prompt="whisper"),
        train=TrainConfig(
            model=str(folder / "model"),
            init="random",
            output_dir=str(folder / "runs"),
            max_steps=num_steps,
            schedule="constant",
            learning_rate=LEARNING_RATE,
            log_every=block,
        ),
        path=str(folder / "train_loop.toml"),
    )


class Bare:
    """The plain torch loop."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, seed=0, init="random")
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE, weight_decay=0.0)
        self.losses: list[float] = []

    def steps(self, batches: Sequence[Batch]) -> None:
        """Trains on each batch once and notes the mean of the losses."""
        losses = []
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = self.model(**inputs, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.losses.append(math.fsum(loss.item() for loss in losses) / len(losses))


class TakingTurns:
    """A loader of ready batches that lets `meanwhile` work between two blocks of the loop, and times the blocks."""

    weight = 1

    def __init__(self, batches: Sequence[Batch], *, block: int, meanwhile: Callable[[Sequence[Batch]], None]) -> None:
        self._batches, self._block, self._meanwhile = batches, block, meanwhile
        self.loop: list[Cost] = []
        self.bare: list[Cost] = []

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self._batches), self._block):
            block = self._batches[start : start + self._block]
            self.bare.append(timed(lambda block=block: self._meanwhile(block)))
            clock = Clock()
            yield from block  # the step of a batch is done when the next one is asked for
            self.loop.append(clock.stop())
        yield self._batches[0]  # the last block is over when this one is asked for

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        return {"padding": 0.0}


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def stop(self) -> Cost:
        """Returns what this process took since then."""
        return Cost(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, argv)
    block, pairs = (2, args.rounds or 2) if args.tiny else (5, args.rounds or 30)
    shape = {"num_samples": 2, "num_tokens": 16} if args.tiny else {"num_samples": 4, "num_tokens": 40}
    size = {"width": 64, "layers": 1} if args.tiny else {"width": 256, "layers": 2}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # One block before those that count, and one step behind them: the run's end writes a checkpoint.
        num_steps = (pairs + 1) * block + 1
        config = make_config(Path(folder), num_steps=num_steps, block=block, **size)
        bare = Bare(Path(str(config.train.model)))
        loader = TakingTurns(batches_of(num_steps - 1, **shape), block=block, meanwhile=bare.steps)
        lines: list[StepLog] = []
        train(config, loader=loader, source_kind="cache", log=lines.append)
    for line, loss in zip(lines, bare.losses, strict=False):
        if not math.isclose(line.loss, loss, rel_tol=1e-4):
            raise SystemExit(f"step {line.step}: the loop has loss {line.loss}, the bare loop has {loss}")
    loop, plain = loader.loop[1:], loader.bare[1:]
    document = {
        "machine": machine("torch", "transformers", "accelerate"),
        "model": {**size, **shape, "steps of a block": block, "pairs": len(loop)},
        "steps": [_row("forebay train", loop, block), _row("bare torch", plain, block)],
        "ratios (target: at most 1.02 of CPU seconds)": [
            {"of": "CPU seconds", "median of pairs": ratio((c.cpu_s for c in loop), (c.cpu_s for c in plain))},
            {"of": "wall time", "median of pairs": ratio((c.wall_s for c in loop), (c.wall_s for c in plain))},
        ],
    }
    show(document, as_json=args.json)
    return 0


def _row(name: str, costs: Sequence[Cost], block: int) -> dict[str, Any]:
    return {
        "loop": name,
        "cpu_ms_a_step": 1e3 * median(cost.cpu_s for cost in costs) / block,
        "wall_ms_a_step": 1e3 * median(cost.wall_s for cost in costs) / block,
    }


if __name__ == "__main__":
    sys.exit(main())
