"""Measures model steps beside bare loops: `python -m benchmarks.model_steps [--tiny] [--json] [--rounds N]`.

forebay makes the shards of a `[[model]]` section in this process: it decodes, prepares, collates, calls the model,
checks, writes and fsyncs. The bare loop calls the same model of transformers with the same batches, which are ready in
memory, and drops what it gives. The row `handing over` is what it costs to bring these batches to the process of a
device and the outputs back: both ends are in this process. Weights are random; sizes are those of small public models.
`reading` is the CPU of the loader for the same states, once of a recording, which a sample has, and once of a text,
which it lists: 6.4 kB a sample, so that what is not a copy shows.

Every round takes all contestants in turn. Figures are medians of the rounds, and ratios are medians of the ratios
within a round.
"""

from __future__ import annotations

import inspect
import itertools
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import soundfile
import torch
import transformers as T

from benchmarks.data import BENCH_DATA, SPEECH, Corpus, shard_tasks, write_corpus
from benchmarks.here_pool import HerePool
from benchmarks.plan import usual_durations
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay import load_config
from forebay.preprocess import build
from forebay.preprocess.device_process import ArrayChannel
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.pretrained import from_folder
from forebay.steps.model.open_model import OpenModel
from forebay.store.layout import TEXT
from forebay.train import make_loader

Ready = list[tuple[OpenModel, dict[str, Any], Sequence[int]]]


def _hubert(*, is_tiny: bool) -> tuple[Any, Any]:
    config = T.HubertConfig(num_hidden_layers=1 if is_tiny else 4)
    return T.HubertModel(config), T.Wav2Vec2FeatureExtractor(return_attention_mask=False)


def _whisper(*, is_tiny: bool) -> tuple[Any, Any]:
    layers = {"encoder_layers": 1 if is_tiny else 4, "decoder_layers": 1}
    config = T.WhisperConfig(d_model=384, encoder_attention_heads=6, encoder_ffn_dim=1536, **layers)
    return T.WhisperModel(config), T.WhisperFeatureExtractor()


def _dac(*, is_tiny: bool) -> tuple[Any, Any]:
    config = T.DacConfig(encoder_hidden_size=16 if is_tiny else 32, decoder_hidden_size=64)
    return T.DacModel(config), T.DacFeatureExtractor(sampling_rate=16_000, hop_length=512)


def _t5(*, is_tiny: bool) -> tuple[Any, Any]:
    config = T.T5Config(num_layers=1 if is_tiny else 6, vocab_size=808)
    return T.T5EncoderModel(config), from_folder(T.AutoTokenizer, SPEECH / "model")


MODELS = {"hubert": ("audio", _hubert), "whisper": ("audio", _whisper), "dac": ("audio", _dac), "t5": ("text", _t5)}


def tasks_of(folder: Path, data: Corpus, *, is_tiny: bool) -> dict[str, list[ShardTask]]:
    """Returns the shards of each model over a corpus. folder: for the models."""
    sections = []
    for name, (takes, make) in MODELS.items():
        torch.manual_seed(0)
        for each in make(is_tiny=is_tiny):
            each.save_pretrained(folder / name)
        sections.append(f'[[model]]\nname = "{name}"\nfolder = "{folder / name}"\ntakes = "{takes}"\n')
    path = data.folder / "models.toml"
    text = (data.folder / "bench.toml").read_text(encoding="utf-8")
    path.write_text(text + "\n" + "".join(sections), encoding="utf-8")
    config = load_config(path, overrides=[f"run.cache_root={folder / 'caches'}", "audio.features=lengths"])
    found = [task for task in shard_tasks(config, HerePool().map) if task.group not in (TEXT, "audio")]
    return {name: [task for task in found if task.group == name] for name in MODELS}


def recorded(tasks: Sequence[ShardTask], place: Path) -> Ready:
    """Returns the batches that a build gives its model."""
    ready: Ready = []

    def made(self: OpenModel, batch: Any, rows: Sequence[int]) -> Any:
        ready.append((self, dict(batch), rows))
        return real(self, batch, rows)

    real = OpenModel.made
    with patch.object(OpenModel, "made", made):
        _made(tasks, place)
    return ready


def _made(tasks: Sequence[ShardTask], place: Path) -> None:
    for task in tasks:
        make_shard(replace(task, folder=place))


def bare(ready: Ready) -> None:
    """Calls the model with every batch; what the call does not take is left out, as a user does."""
    for model, batch, _ in ready:
        call = getattr(model.model, model.family.call)
        taken = inspect.signature(call).parameters
        with torch.inference_mode():
            call(**{name: value for name, value in batch.items() if name in taken})


def handing_over(ready: Ready, outputs: Sequence[Any]) -> None:
    """Brings every batch to the other end of a channel, and the outputs back."""
    with ThreadPoolExecutor(2) as threads:
        ends = [Connection(end.detach()) for end in socket.socketpair()]
        ours, theirs = threads.map(ArrayChannel, ends)
    for (_, batch, rows), made in zip(ready, outputs, strict=True):
        ours.send(({name: value.contiguous().numpy() for name, value in batch.items()}, rows))
        theirs.recv()
        theirs.send(made)
        [{name: array.copy() for name, array in of_one.items()} for of_one in ours.recv()]
    ours.close()
    theirs.close()


def measured(name: str, tasks: Sequence[ShardTask], folder: Path, *, rounds: int) -> dict[str, Any]:
    """Returns a row of the table."""
    _made(tasks, folder / f"{name}-first")  # opens the model, and finds its form
    ready = recorded(tasks, folder / f"{name}-second")
    outputs = [model.made(batch, rows) for model, batch, rows in ready]
    found: dict[str, list[Cost]] = {"forebay": [], "bare": [], "handing over": []}
    for round_ in range(rounds):
        place = folder / f"{name}-{round_}"
        found["forebay"].append(timed(lambda place=place: _made(tasks, place)))
        found["bare"].append(timed(lambda: bare(ready)))
        found["handing over"].append(timed(lambda: handing_over(ready, outputs)))
    cpu = {each: [cost.cpu_s for cost in costs] for each, costs in found.items()}
    return {
        "model": name,
        "samples": sum(len(task.rows) for task in tasks),
        "batches": len(ready),
        **{f"{each} CPU s": median(values) for each, values in cpu.items()},
        "bare of forebay": ratio(cpu["bare"], cpu["forebay"]),
        "handing over of bare": ratio(cpu["handing over"], cpu["bare"]),
    }


_OWN = """
import numpy as np

class States:
    version = 1
    fields = {"states": {"dtype": "float32", "shape": [None, 64]}}

    def prepare(self, sample):
        return np.zeros((50, 64), np.float32)

    def forward(self, batch):
        return {"states": batch}
"""
_READ = """
name = "{takes}"
source = {{kind = "jsonl", manifest = "rows.jsonl"}}
audio = {{features = "lengths"}}
plan = {{kind = "bucket", batch_size = 32}}
loader = {{num_threads = 0}}
run = {{allow_code = true, num_workers = 1}}
model = [{{name = "states", folder = "own.py:States", takes = "{takes}", dtype = "float16"}}]
"""


def reading(folder: Path, *, num_samples: int, rounds: int) -> dict[str, Any]:
    """Returns samples a second of the CPU by what the states are of, and their ratio."""
    (folder / "own.py").write_text(_OWN, encoding="utf-8")
    soundfile.write(folder / "one.wav", np.zeros(1600, np.int16), 16_000)
    rows = "".join(f'{{"audio": "one.wav", "text": "text {n}", "id": "{n}"}}\n' for n in range(num_samples))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    loaders = {}
    for takes in ("audio", "text"):
        (folder / f"{takes}.toml").write_text(_READ.format(takes=takes), encoding="utf-8")
        config = load_config(folder / f"{takes}.toml", overrides=[f"run.cache_root={folder / 'kept'}"])
        build(config)
        loaders[takes] = make_loader(config)
        deque(loaders[takes], maxlen=0)  # hashes every sample
    found: dict[str, list[float]] = {takes: [] for takes in loaders}
    for _, (takes, loader) in itertools.product(range(rounds), loaders.items()):
        found[takes].append(num_samples / timed(partial(deque, loader, maxlen=0)).cpu_s)
    named = {f"of {takes}, samples a CPU second": median(speeds) for takes, speeds in found.items()}
    return {**named, "text of audio": ratio(found["text"], found["audio"])}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 1 if options.tiny else options.rounds or 3
    torch.set_num_threads(1)
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as place:
        (folder := Path(place) / "speech").mkdir()
        data = write_corpus(folder, usual_durations(4 if options.tiny else 12), num_tars=2)
        tasks = tasks_of(Path(place), data, is_tiny=options.tiny)
        document = {
            "machine": machine("numpy", "torch", "transformers"),
            "rounds": rounds,
            "models": [measured(name, tasks[name], Path(place), rounds=rounds) for name in MODELS],
            "reading": [reading(Path(place), num_samples=64 if options.tiny else 3000, rounds=rounds)],
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
