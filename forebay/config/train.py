"""`[train]`, `[run]` and `[[augment]]`: how a run learns, where its files go, what is changed of a sample at load.

Changes are made after a sample was read, another way in every epoch. They are in no key of a cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from forebay.config.data import STRICT, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """A set that a run is evaluated on: its loss, and for speech WER and CER of what the model writes."""

    __pydantic_config__ = STRICT

    name: str = field(metadata={"example": '"dev"'})
    """What log lines, `eval.jsonl` and trackers call the set."""
    config: str | None = field(default=None, metadata={"path": True})
    """The config whose cache, or raw data, is evaluated. Its `[plan]` makes the batches."""
    cache: str | None = field(default=None, metadata={"path": True, "url": True})
    """Instead of the config: the folder or URL of a cache. The `[plan]` of this file makes the batches."""
    every: int = 0
    """Optimizer steps between evaluations. 0: only after the last step. The last step always evaluates."""
    max_samples: int | None = None
    """Samples at most: the first ones of the cache. Left out: all."""
    generate_max_tokens: int | None = None
    """Tokens that the model writes for a sample at most. Left out: the model's own limit."""
    text: Literal["none", "basic", "whisper"] = "none"
    """How texts are normalised before words are compared. `none`: not at all. `basic`: lower case, no punctuation, in
    any language. `whisper`: Whisper's normaliser of English, which also spells out numbers and abbreviations."""

    def __post_init__(self) -> None:
        if (self.config is None) == (self.cache is None):
            raise ValueError("give exactly one of config and cache")
        if not self.name or not self.name.isprintable():
            raise ValueError(f"name is {self.name!r}, wanted a name for log lines, for example dev")
        at_least(self, 0, "every")
        at_least(self, 1, "max_samples", "generate_max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) by peft: the adapters learn, all other weights rest."""

    __pydantic_config__ = STRICT

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Scale: adapters count `alpha / rank`."""
    dropout: float = 0.0
    """Dropout in front of the adapters."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Modules that get an adapter, by the last parts of their names."""

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha}, wanted more than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, wanted 0 or more and less than 1")
        if not self.targets or not all(self.targets):
            raise ValueError('targets is empty, wanted names of modules, for example ["q_proj", "v_proj"]')


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings by which a run learns. Run-time: in no key."""

    __pydantic_config__ = STRICT

    model: str | None = field(default=None, metadata={"path": True, "hub": True})
    """Folder of a transformers model, or a model of the Hub at one commit (`owner/name@COMMIT`). Only `forebay train`
    needs it."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained`: the weights in that folder, which must be there. `random`: weights from its config.json and
    `loader.seed`."""
    text_encoder: Literal["zeros", "silence"] = "zeros"
    """What a Whisper's decoder attends to beside text alone. `zeros`: one position of zeros, without a pass of the
    encoder. `silence`: what the encoder makes of 30 s of silence."""
    max_steps: int | None = None
    """Optimizer steps of the run. Left out, without `epochs` too: 100."""
    epochs: int | None = None
    """Epochs of the run, instead of `max_steps`: the run ends where epoch number `epochs` would begin."""
    learning_rate: float = 1e-4
    """Peak of the learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes on after warm-up: half a cosine towards 0, a line towards 0, or as it is."""
    warmup_steps: int = 0
    """Steps of linear warm-up. Step `warmup_steps` is the first at the full rate."""
    warmup_ratio: float | None = None
    """Share of the run's steps that are warm-up, instead of `warmup_steps`; rounded up to whole steps."""
    embed_lr_mult: float = 1.0
    """Factor on the learning rate of the input and output embeddings. 0: they do not learn."""
    freeze: tuple[str, ...] = ()
    """Modules that do not learn, for example `["encoder"]`. A name is of every module whose dotted name has all its
    parts in a row: `encoder` is of `base.encoder` and what is in it. Dropout goes on in them."""
    lora: LoraConfig | None = None
    """Adapters that learn instead of the model's weights."""
    gradient_checkpointing: bool = False
    """Activations of a layer are computed again in the backward pass: less memory, a third more time."""
    compile: bool = False
    """The model is compiled by `torch.compile`; of one that sees or hears the layers of its language model. A size that
    changes between batches is compiled once more, for all values."""
    weight_decay: float = 0.0
    """Weight decay of AdamW. Biases and norm weights are not decayed."""
    max_grad_norm: float = 1.0
    """Norm that gradients are clipped to. 0: no clipping."""
    grad_acc: int = 1
    """Micro-batches a step, where `plan.calibration` names no number of its own."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Precision of the forward and backward pass."""
    max_skipped_steps: int = 20
    """Steps that the scaler of fp16 skips, for gradients that are not finite: so many in a row end the run."""
    eval: tuple[EvalConfig, ...] = ()
    """Sets that the run is evaluated on: one table `[[train.eval]]` each."""
    repetition_limit: float = 0.2
    """Share of texts with an n-gram three times in a row, or as long as the model may write, above which an evaluation
    warns and cannot be the best."""
    log_every: int = 10
    """Steps between lines of the log."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0: only at the end."""
    save_total_limit: int = 10
    """Checkpoints that are kept, the newest ones. The best one is kept beside them."""
    save_best: Literal["wer", "cer", "loss", "accuracy", "f1"] | None = None
    """What the best checkpoint is chosen by, on the first set of `[[train.eval]]`; lower is better, and of `accuracy`
    and `f1` higher. An evaluation of that set then writes a checkpoint if it is the best so far."""
    trackers: tuple[str, ...] = ()
    """Where the figures of log lines and evaluations go too, by accelerate's names: `tensorboard`, `wandb`, `mlflow`
    and others. A resumed run goes on there. TensorBoard's files lie in `logs/` of the run."""
    usage_every: int = 100
    """Steps between lines of `logs/data_usage.jsonl`. Checkpoints and the end write a line too. 0: no log."""
    usage_ids: bool = False
    """Whether the lines also name the samples that were used, compactly."""
    output_dir: str = field(default="runs", metadata={"path": True})
    """Folder of runs, beside the config file: checkpoints and logs go to `<output_dir>/<name>/`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_steps", "epochs", "grad_acc", "log_every", "save_total_limit", "max_skipped_steps")
        at_least(self, 0, "warmup_steps", "checkpoint_every", "usage_every", "embed_lr_mult")
        for name in ("warmup_ratio", "repetition_limit"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, wanted 0 to 1")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(f"give one of max_steps and epochs, not {self.max_steps} and {self.epochs}")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                f"give one of warmup_steps and warmup_ratio, not {self.warmup_steps} and {self.warmup_ratio}"
            )
        names = [each.name for each in self.eval]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"eval has two sets of the name {repeated[0]!r}; give each set its own")
        if self.save_best is not None and not self.eval:
            raise ValueError(f'save_best is "{self.save_best}" and there is no set to choose by: add [[train.eval]]')


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a build writes, and with what. Run-time: in no key."""

    __pydantic_config__ = STRICT

    cache_root: str = field(default="caches", metadata={"path": True, "url": True})
    """Folder or URL under which caches are looked for and built, beside the config file."""
    num_workers: int | None = None
    """Processes of a build. Left out: as many as there are cores."""
    max_failed_share: float = 0.01
    """Share of bad samples above which a build stops with their list, a sealed cache is not called done, and training
    warns."""
    max_open_tars: int = 64
    """Tars and other source files that a process keeps open."""
    allow_code: bool = False
    """Whether `text.normalize` may name functions of yours, `"file.py:function"`: their files are run as you. It stands
    in the config file itself; `--set` and other overrides cannot change it."""
    devices: Literal["auto", "cpu"] | tuple[str, ...] = "auto"
    """What runs the models of `[[model]]`: `["cuda:0", "cuda:1"]`, a process each, for which the processes of the build
    prepare batches; `cpu`: each process of the build runs them by itself; `auto`: all CUDA devices, else `cpu`."""
    num_gpus: float = 0.0
    """GPUs of a Ray task whose shard a model makes: with 0.25 four such tasks share one."""
    gres: str = ""
    """What `--gres` of Slurm gets for the jobs that run models, `"gpu:1"`: those that prepare and the parts."""
    sbatch: tuple[str, ...] = ()
    """Options of Slurm's `sbatch` for the jobs of `forebay preprocess --runner slurm`, one a text:
    `["--partition=cpu", "--time=04:00:00", "--cpus-per-task=16", "--mem-per-cpu=3G"]`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_workers")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share is {self.max_failed_share}, wanted 0 to 1")
        at_least(self, 1, "max_open_tars")
        at_least(self, 0, "num_gpus")
        for name in () if isinstance(self.devices, str) else self.devices:
            if not re.fullmatch(r"cpu|cuda:\d+", name):
                raise ValueError(f'devices has {name!r}, wanted names as "cuda:0" or "cpu"')
        if not self.devices:
            raise ValueError('devices is empty, wanted "auto", "cpu" or names as "cuda:0"')
        if re.search(r"\s", self.gres):
            raise ValueError(f'gres is {self.gres!r}, wanted resources as "gpu:1"')
        for option in self.sbatch:
            if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\n]*)?", option):
                raise ValueError(f'sbatch has {option!r}, wanted options as "--partition=cpu" or "--exclusive"')


AugmentKind = Literal["spec_augment", "gain", "noise", "reverb", "speed", "flip", "colour", "function"]
_OF: Mapping[str, frozenset[str]] = {
    "spec_augment": frozenset(
        ("time_prob", "time_length", "time_min_masks", "feature_prob", "feature_length", "feature_min_masks")
    ),
    "gain": frozenset(("db",)),
    "noise": frozenset(("cache", "snr_db")),
    "reverb": frozenset(("cache",)),
    "speed": frozenset(("factors",)),
    "flip": frozenset(),
    "colour": frozenset(("brightness", "contrast")),
    "function": frozenset(("function", "processes", "changes_length")),
}
"""The settings of each kind, beside `kind` and `probability`."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "gain": ("db",),
    "noise": ("cache", "snr_db"),
    "reverb": ("cache",),
    "speed": ("factors",),
    "function": ("function",),
}
OF_WAVEFORMS = ("gain", "noise", "reverb", "speed")
"""The kinds that need the samples of a recording."""
OF_IMAGES = ("flip", "colour")
"""The kinds that change images, in packs of patches too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """One change of samples, drawn by (`loader.seed`, epoch, id of the sample): the same on any rank, after any resume.

    They are made in the order of the file, of training batches alone. Run-time: in no key.
    """

    __pydantic_config__ = STRICT

    kind: AugmentKind
    """`spec_augment`: stretches of frames and of bins become 0. `gain`, `noise`, `reverb`, `speed`: of waveforms.
    `flip`: images are mirrored. `colour`: they are brighter or darker, of more or less contrast. `function`: yours."""
    probability: float = 1.0
    """Share of the samples that are changed."""
    time_prob: float | None = None
    """Of `spec_augment`: share of the frames in masks, which may overlap. Left out, this and the next five: the numbers
    of `train.model` (`mask_time_prob`, ...), and without a model those of Whisper."""
    time_length: int | None = None
    """Frames of a mask."""
    time_min_masks: int | None = None
    """Masks of a clip at least."""
    feature_prob: float | None = None
    """Share of the bins in masks."""
    feature_length: int | None = None
    """Bins of a mask."""
    feature_min_masks: int | None = None
    """Masks of bins at least."""
    db: tuple[float, ...] | None = None
    """Of `gain`: lowest and highest gain in decibels."""
    cache: str | None = field(default=None, metadata={"path": True, "url": True})
    """Of `noise` and `reverb`: folder or URL of a cache of waveforms, noises or impulse responses, at the same rate."""
    snr_db: tuple[float, ...] | None = None
    """Of `noise`: lowest and highest ratio of the recording's power to the noise's, in decibels."""
    factors: tuple[float, ...] | None = None
    """Of `speed`: one of these is drawn: 1.1 is faster, shorter and higher."""
    brightness: tuple[float, ...] | None = None
    """Of `colour`: lowest and highest factor of all bytes of an image."""
    contrast: tuple[float, ...] | None = None
    """Of `colour`: lowest and highest factor of what lies between a byte, made brighter first, and 127.5."""
    function: str | None = None
    """Of `function`: `"file.py:name"` beside the config, with `allow_code = true` under `[run]`. It takes the stored
    fields of a sample and a `numpy.random.Generator`, and returns fields."""
    processes: int | None = None
    """Of `function`: processes that call it. Left out, or 0: the loader's threads do."""
    changes_length: bool | None = None
    """Of `function`: whether arrays may get another length."""

    def __post_init__(self) -> None:
        given = {each.name for each in fields(self) if getattr(self, each.name) is not None}
        given -= {"kind", "probability"}
        if foreign := sorted(given - _OF[self.kind]):
            owners = [kind for kind, names in _OF.items() if foreign[0] in names]
            raise ValueError(f'{foreign[0]} is of kind {", ".join(owners)}, and kind is "{self.kind}"')
        if missing := [name for name in _NEEDED.get(self.kind, ()) if name not in given]:
            raise ValueError(f'kind "{self.kind}" needs {" and ".join(missing)}')
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability is {self.probability}, wanted more than 0, at most 1")
        at_least(self, 0, "time_prob", "feature_prob", "time_min_masks", "feature_min_masks", "processes")
        at_least(self, 1, "time_length", "feature_length")
        for name in ("time_prob", "feature_prob"):
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at most 1")
        if self.kind == "colour" and not given:
            raise ValueError('kind "colour" needs brightness or contrast')
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("db", "snr_db", "brightness", "contrast"):
            pair = getattr(self, name)
            if pair is not None and (len(pair) != 2 or pair[0] > pair[1]):
                raise ValueError(f"{name} is {list(pair)}, wanted [lowest, highest]")
        for name in ("brightness", "contrast"):
            if min(getattr(self, name) or (0,)) < 0:
                raise ValueError(f"{name} is {list(getattr(self, name))}, wanted factors of 0 or more")
        if self.factors is not None and not (self.factors and all(0.5 <= factor <= 2 for factor in self.factors)):
            raise ValueError(f"factors is {list(self.factors)}, wanted numbers from 0.5 to 2")
