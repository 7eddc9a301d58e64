"""`[train]` and `[run]`: how a run learns, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forebay.config.data import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What a run learns by. Run-time: in no key."""

    __pydantic_config__ = STRICT

    model: str | None = field(default=None, metadata={"path": True})
    """Folder of a transformers model. Only `forebay train` needs it."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained`: the weights in that folder, which must be there. `random`: weights from its config.json and
    `loader.seed`."""
    max_steps: int = 100
    """Optimizer steps of the run."""
    learning_rate: float = 1e-4
    """Peak of the learning rate. A cosine towards 0 follows."""
    warmup_steps: int = 0
    """Steps of linear warm-up. Step `warmup_steps` is the first at the full rate."""
    weight_decay: float = 0.0
    """Weight decay of AdamW. Biases and norm weights are not decayed."""
    max_grad_norm: float = 1.0
    """Norm that gradients are clipped to. 0: no clipping."""
    grad_acc: int = 1
    """Micro-batches a step, where `plan.calibration` names no number of its own."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Precision of the forward and backward pass."""
    log_every: int = 10
    """Steps between lines of the log."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0: only at the end."""
    usage_every: int = 100
    """Steps between lines of `logs/data_usage.jsonl`. Checkpoints and the end write a line too. 0: no log."""
    usage_ids: bool = False
    """Whether the lines also name the samples that were used, compactly."""
    output_dir: str = field(default="runs", metadata={"path": True})
    """Folder of runs, beside the config file: checkpoints and logs go to `<output_dir>/<name>/`."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "grad_acc", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        for name in ("warmup_steps", "checkpoint_every", "usage_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a build writes, and with what. Run-time: in no key."""

    __pydantic_config__ = STRICT

    cache_root: str = field(default="caches", metadata={"path": True})
    """Folder under which caches are looked for and built, beside the config file."""
    num_workers: int | None = None
    """Processes of a build. Left out: as many as there are cores."""
    max_failed_share: float = 0.01
    """Share of bad samples above which a build stops with their list, a sealed cache is not called done, and training
    warns."""
    max_open_tars: int = 64
    """Tars and other source files that a process keeps open."""

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers}, wanted 1 or more")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share is {self.max_failed_share}, wanted 0 to 1")
        if self.max_open_tars < 1:
            raise ValueError(f"max_open_tars is {self.max_open_tars}, wanted 1 or more")
