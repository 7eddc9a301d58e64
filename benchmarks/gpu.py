"""Measures what a GPU waits for: `python -m benchmarks.gpu [--tiny] [--json] [--part NAME]... [--out DIR]`.

Runs with whatever interpreter and torch a machine with a GPU has; forebay need not be installed. The parts are
`tests` (those marked `gpu`), `reading`, `speech`, `vision`, `calibration` and `copies`. Each writes `DIR/NAME.json`,
and the page `DIR/gpu.md` is written anew from all that are there.

`reading` takes batches of speech and does nothing with them: the device pads and casts them, makes features of
waveforms, or gets what the host has padded. `speech` trains a model of Whisper-small's shape on batches of 16, `vision`
one of Qwen3-VL-2B's shape on packs of 4,096 tokens; weights are random, the optimizer is AdamW, the precision is bf16
and fp16 (on a CPU bf16 alone). The same model is fed by forebay's cache, by one of waveforms whose features the device
makes (speech), by forebay without its cache, by a DataLoader whose workers call transformers' extractor or processor,
and by a DataLoader over an Arrow file of what these gave once (`datasets`). Rows show the share of wall time in which
the loop waited for data and in which no step was on the GPU (CUDA events), and samples a second. Feeds take turns; in
the others' turns workers go on until their queues are full, up to 16 batches of a turn. The part `calibration` shows
how 200 steps with the batches of `forebay calibrate` ended, `copies` GB/s to the device. Without CUDA all but `tests`
and `copies` run to their end on the CPU with small models.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import BENCH_DATA, ROOT, corpus
from benchmarks.report import machine, median, show
from benchmarks.vision_packs import DEMO as VISION_DEMO
from benchmarks.vision_packs import Corpus, Online, make_corpus, tensors_of
from forebay.config import BucketConfig, Config
from forebay.measure.plain_loop import sound_collator
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.pretrained import from_folder
from forebay.train import make_loader
from forebay.train.uncached.uncached_source import PlainSamples

Row = dict[str, Any]
Batch = dict[str, Any]
PARTS = ("tests", "reading", "speech", "vision", "calibration", "copies")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large the models are, and for how many steps each feed is watched."""

    whisper: dict[str, int]
    vision: dict[str, int]
    language: dict[str, int]
    steps: int
    rounds: int
    run: int
    hours: float
    images: int
    seq_len: int
    workers: int


LARGE = Size(
    whisper={"d_model": 768, "layers": 12, "heads": 12, "ffn_dim": 3072, "vocab_size": 51_865},
    vision={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048},
    language={"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151_936},
    steps=40,
    rounds=2,
    run=200,
    hours=2.0,
    images=512,
    seq_len=4096,
    workers=8,
)
SMALL = Size(
    whisper={"d_model": 16, "layers": 1, "heads": 2, "ffn_dim": 32, "vocab_size": 808},
    vision={"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64},
    language={"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1008},
    steps=1,
    rounds=1,
    run=2,
    hours=0.05,
    images=6,
    seq_len=1024,
    workers=2,
)


@dataclasses.dataclass
class Watched:
    """The cost of some steps: seconds in all, of waiting for batches, of steps on the GPU; and their samples."""

    wall_s: float = 0.0
    wait_s: float = 0.0
    steps_s: float = 0.0
    samples: int = 0


class Trained:
    """A model in training on a device: float32 weights, AdamW, autocast; a scaler where the precision is fp16."""

    def __init__(self, model: torch.nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model.to(device).train(), device, dtype
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(self, batch: Batch) -> None:
        """Does one optimizer step on a batch that is on the device."""
        with torch.autocast(self._device.type, self._dtype):
            loss = self._model(**batch).loss
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def watch(self, batches: Iterator[Batch], count: Callable[[Batch], int], *, steps: int) -> Watched:
        """Returns what some steps took, and how much of that was waiting and (CUDA) steps on the GPU."""
        is_cuda = self._device.type == "cuda"
        self.step(self._moved(next(batches)))  # after the other feeds' turns: workers and threads wait for room
        found = Watched()
        spans: list[tuple[Any, Any]] = []
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            found.wait_s += time.perf_counter() - asked
            found.samples += count(batch)
            batch = self._moved(batch)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
            for event in events[:1]:
                event.record()
            self.step(batch)
            for event in events[1:]:
                event.record()
                spans.append((events[0], event))
            if len(spans) > 1:
                spans[-2][1].synchronize()  # a loop that logs its loss is no further ahead of the GPU
        self._synchronize()
        found.wall_s = time.perf_counter() - began
        found.steps_s = sum(first.elapsed_time(last) for first, last in spans) / 1e3
        return found

    def _moved(self, batch: Batch) -> Batch:
        return {
            name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def forebay_feed(config: Config, device: torch.device, cache: str) -> Iterator[Batch]:
    """Yields the loader's batches, epoch after epoch. cache: `require` or `off`, as `loader.cache`."""
    loader = make_loader(_with(config, cache=cache), device=device)
    while True:
        yield from loader


def workers_feed(data: Any, *, size: Size, device: torch.device, **settings: Any) -> Iterator[Batch]:
    """Yields batches of a DataLoader with workers, epoch after epoch."""
    loader = torch.utils.data.DataLoader(
        data,
        num_workers=size.workers,
        persistent_workers=True,
        multiprocessing_context="fork",
        pin_memory=device.type == "cuda",
        **settings,
    )
    while True:
        yield from loader


def whisper(size: Size, folder: Path) -> None:
    """Writes the config of a Whisper of this size into a folder that has tokenizer and extractor."""
    path, shape = folder / "config.json", dict(size.whisper)
    layers, heads, ffn = (shape.pop(name) for name in ("layers", "heads", "ffn_dim"))
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": ffn}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | shape), encoding="utf-8")


def _speech_configs(size: Size, folder: Path, *overrides: str) -> tuple[Config, Config]:
    """Returns two configs whose caches are built: of log-mels, and of waveforms whose log-mels the device makes.

    The folder has a model of this size then, `whisper`.
    """
    data, model = corpus(hours=size.hours, num_tars=8), folder / "whisper"
    shutil.copytree(data.folder / "model", model)
    whisper(size, model)
    waves = ('audio={features="waveform"}', 'loader.device_features={features="log_mel"}')
    found = []
    for more in ((), waves):
        config = data.config(f"run.num_workers={size.workers}", *overrides, *more, cache_root=folder / "caches")
        config = dataclasses.replace(config, plan=BucketConfig(batch_size=16))
        build(config, Options(progress=False))
        found.append(config)
    return found[0], found[1]


def reading(size: Size, device: torch.device, folder: Path) -> list[Row]:
    """Returns samples/s of loops that take batches on the device and do nothing with them; the ways take turns."""
    stored, waves = _speech_configs(size, folder)

    class Padded:
        """A loader of the host, and copies to the device as a loop writes them."""

        def __init__(self, config: Config) -> None:
            self._loader = make_loader(config)

        def __iter__(self) -> Iterator[Batch]:
            for batch in self._loader:
                pinned = {name: value.pin_memory() if device.type == "cuda" else value for name, value in batch.items()}
                yield {name: value.to(device, non_blocking=True) for name, value in pinned.items()}

    ways: dict[str, Any] = {
        "log-mels, the device pads and casts": make_loader(stored, device=device),
        "log-mels, the host pads, casts and pins": Padded(stored),
        "log-mels, ragged": make_loader(_with(stored, form="ragged"), device=device),
        "waveforms, the device makes log-mels": make_loader(waves, device=device),
        "waveforms, the host makes log-mels": Padded(waves),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + 3 * size.rounds):
        for name in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
            began = time.perf_counter()
            for _ in ways[name]:
                pass
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - began)
    samples = len(make_loader(stored).source)
    return [{"way": name, "samples/s": samples / median(own[1:])} for name, own in times.items()]


def _with(config: Config, **settings: Any) -> Config:
    return dataclasses.replace(config, loader=dataclasses.replace(config.loader, **settings))


def speech(size: Size, device: torch.device, folder: Path) -> list[Row]:
    """Returns a row for each feed and precision of a Whisper."""
    from transformers import AutoConfig, WhisperForConditionalGeneration

    model = folder / "whisper"
    config, made = _speech_configs(size, folder, f"train.model={model}")
    source = make_loader(config).source
    clips = PlainSamples(config, [source.sample_id(index) for index in range(len(source))])
    clips.write_texts()
    collate = sound_collator(config, clips)

    def mapped() -> Iterator[Batch]:
        arrow = _kept(folder / "speech", lambda index: collate([clips[index]]), range(len(clips)), size=size)
        plain = {"batch_size": 16, "shuffle": True, "collate_fn": _padded}
        return workers_feed(arrow, size=size, device=device, **plain)

    hf = {"batch_size": 16, "shuffle": True, "collate_fn": collate}
    feeds: dict[str, Callable[[], Iterator[Batch]]] = {
        "forebay, cache": lambda: forebay_feed(config, device, "require"),
        "forebay, cache of waveforms, log-mel on the device": lambda: forebay_feed(made, device, "require"),
        "forebay, no cache": lambda: forebay_feed(config, device, "off"),
        f"DataLoader, HF extractor, {size.workers} workers": lambda: workers_feed(
            clips, size=size, device=device, **hf
        ),
        f"DataLoader, HF `map`ped Arrow, {size.workers} workers": mapped,
    }
    net = WhisperForConditionalGeneration(from_folder(AutoConfig, model))
    return _rows(net, feeds, lambda batch: len(batch["labels"]), size=size, device=device)


def vision(size: Size, device: torch.device, folder: Path) -> list[Row]:
    """Returns a row for each feed and precision of a Qwen3-VL; the plan's packs are those of every feed."""
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    text = size.language
    shape = json.loads((VISION_DEMO / "model/config.json").read_text(encoding="utf-8"))
    layers = [size.vision["depth"] * part // 4 for part in (1, 2, 3)] if size.vision["depth"] > 4 else [0, 1]
    shape["vision_config"] |= {**size.vision, "deepstack_visual_indexes": layers, "num_position_embeddings": 2304}
    shape["text_config"] |= text
    if text["hidden_size"] == 2048:
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        shape["text_config"] |= heads
        shape["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    (folder / "qwen").mkdir()
    (folder / "qwen/config.json").write_text(json.dumps(shape), encoding="utf-8")
    data = make_corpus(folder, num_images=size.images, seq_len=size.seq_len, codecs=("raw",))
    config = data.config("loader.num_threads=2", "loader.prefetch=4", "loader.pixels=float32")
    packs = Packs(data, config)

    def mapped() -> Iterator[Batch]:
        arrow = _kept(folder / "packs", packs.__getitem__, range(len(packs)), size=size)
        return workers_feed(arrow, size=size, device=device, batch_size=None, shuffle=True)

    feeds: dict[str, Callable[[], Iterator[Batch]]] = {
        "forebay, cache": lambda: forebay_feed(config, device, "require"),
        "forebay, no cache": lambda: forebay_feed(config, device, "off"),
        f"DataLoader, HF processor, {size.workers} workers": lambda: workers_feed(
            packs, size=size, device=device, batch_size=None, shuffle=True
        ),
        f"DataLoader, HF `map`ped Arrow, {size.workers} workers": mapped,
    }
    half = dataclasses.replace(size, steps=(size.steps + 1) // 2)  # they take four times as long
    with torch.device(device):
        made = Qwen3VLForConditionalGeneration(from_folder(AutoConfig, folder / "qwen"))
    return _rows(made, feeds, lambda batch: len(batch["image_grid_thw"]), size=half, device=device)


class Packs(torch.utils.data.Dataset[Batch]):
    """The plan's packs, each made by transformers' processor when it is asked for."""

    def __init__(self, data: Corpus, config: Config) -> None:
        self._online = Online(data, make_loader(config))

    def __len__(self) -> int:
        return len(self._online.packs)

    def __getitem__(self, place: int) -> Batch:
        made = self._online.pack(place)
        return {name: made[name] for name in ("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw")}


def _rows(
    model: torch.nn.Module,
    feeds: dict[str, Callable[[], Iterator[Batch]]],
    count: Callable[[Batch], int],
    *,
    size: Size,
    device: torch.device,
) -> list[Row]:
    """Returns the rows; feeds take turns, and the first round, in which kernels are chosen, does not count."""
    rows, is_cuda = [], device.type == "cuda"
    for precision, dtype in list(PRECISIONS.items())[: 2 if is_cuda else 1]:  # fp16 crawls on a CPU
        trained = Trained(model, device=device, dtype=dtype)
        with contextlib.ExitStack() as stack:
            opened = {name: stack.enter_context(contextlib.closing(feed())) for name, feed in feeds.items()}
            turns: dict[str, list[Watched]] = {name: [] for name in feeds}
            for number in range(1 + size.rounds):
                for name in [*feeds][number % len(feeds) :] + [*feeds][: number % len(feeds)]:
                    found = trained.watch(map(_plain, opened[name]), count, steps=size.steps)
                    turns[name].append(found)
                    print(f"{precision}, round {number}, {name}: {found}", file=sys.stderr, flush=True)
        for name, own in turns.items():
            wall_s = sum(turn.wall_s for turn in own[1:])
            samples = sum(turn.samples for turn in own[1:])
            rows.append(
                {
                    "precision": precision,
                    "fed by": name,
                    "samples/s": samples / wall_s,
                    "data wait": sum(turn.wait_s for turn in own[1:]) / wall_s,
                    "no step on the GPU": 1 - sum(turn.steps_s for turn in own[1:]) / wall_s if is_cuda else None,
                    "samples a step": samples / size.rounds / size.steps,
                    "ms a step": 1e3 * wall_s / size.rounds / size.steps,
                }
            )
    return rows


def _plain(batch: Any) -> Batch:
    """The tensors of a batch: of a mapping as it is, of a form of forebay's by its fields."""
    return dict(batch) if isinstance(batch, dict) else tensors_of(batch)


def _kept(folder: Path, made: Callable[[int], Batch], places: Sequence[int], *, size: Size) -> Any:
    """Returns an Arrow data set of what is made of each place, as `datasets` maps and keeps it."""
    import datasets

    if not folder.is_dir():

        def one(row: dict[str, int]) -> dict[str, Any]:
            torch.set_num_threads(1)  # the process was forked: its copy of the pool of threads is dead
            return {name: value.numpy() for name, value in made(row["place"]).items()}

        spread = datasets.Dataset.from_dict({"place": list(places)}).map(
            one,
            num_proc=size.workers,
            remove_columns=["place"],
            features=_features(made(places[0])),
        )
        spread.save_to_disk(folder)
    return datasets.load_from_disk(folder).with_format("torch")


def _features(batch: Batch) -> Any:
    import datasets

    found = {}
    for name, value in batch.items():
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_floating_point():  # the fixed form, which is read without a copy
            form = datasets.Array2D if value.dim() == 2 else datasets.Array3D
            found[name] = form(shape=(None, *value.shape[1:]), dtype=kind)
        else:
            found[name] = datasets.Value(kind)
            for _ in range(value.dim()):
                found[name] = datasets.List(found[name])
    return datasets.Features(found)


def _padded(rows: Sequence[Batch]) -> Batch:
    """Rows of one sample each to a batch: features as they are, ids padded on the right."""
    found: Batch = {}
    for name in rows[0]:
        parts = [row[name][0] for row in rows]
        fill = -100 if name == "labels" else 0
        longest = max(part.shape[-1] for part in parts)
        found[name] = torch.stack([torch.nn.functional.pad(p, (0, longest - p.shape[-1]), value=fill) for p in parts])
    return found


def calibration(size: Size, device: torch.device, folder: Path) -> list[Row]:
    """Returns what `forebay calibrate` took, and how 200 steps on its batches went with as much memory and no more."""
    data = corpus(hours=size.hours, num_tars=8)
    model = folder / "whisper"
    shutil.copytree(data.folder / "model", model)
    whisper(size, model)
    text = (data.folder / "bench.toml").read_text(encoding="utf-8")
    text = text.replace('"train.parquet"', f'"{data.folder}/train.parquet"').replace('"model"', f'"{model}"')
    path = folder / "bench.toml"
    path.write_text(
        f"{text}cache_root = 'caches'\n[plan]\nkind = 'bucket'\nedges_s = [15, 30]\nbatch_size = 16\n"
        f"[train]\nmodel = '{model}'\ninit = 'random'\nmixed_precision = 'bf16'\nmax_steps = {size.run}\n",
        encoding="utf-8",
    )
    _forebay("preprocess", folder)
    found, limit_gb = folder / "found.json", 16 if device.type == "cuda" else 1
    began = time.perf_counter()
    _forebay("calibrate", folder, "--out", str(found), "--max-memory-gb", str(limit_gb))
    seconds = time.perf_counter() - began
    entries = json.loads(found.read_bytes())
    path.write_text(
        path.read_text(encoding="utf-8").replace("batch_size = 16", "calibration = 'found.json'"), encoding="utf-8"
    )
    ended = _forebay("train", folder, check=False, limit_gb=limit_gb)
    return [
        {
            "limit, GB": limit_gb,
            "batches": ", ".join(f"{name} {entry['batch_size']}" for name, entry in entries.items()),
            "peak, GB": max(entry.get("peak_bytes") or 0 for entry in entries.values()) / 1e9,
            "trials": sum(entry["trials"] for entry in entries.values()),
            "calibration, s": seconds,
            "run": "ended well" if ended == "" else ended[-300:],
            "out of memory": ended.lower().count("out of memory"),
        }
    ]


_LIMITED = """
import sys, torch
if torch.cuda.is_available():
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(float(sys.argv[1]) * 1e9 / whole, 1.0), 0)
from forebay.cli import main
sys.exit(main(sys.argv[2:]))
"""


def _forebay(command: str, folder: Path, *more: str, check: bool = True, limit_gb: float = 1e6) -> str:
    """Returns the log of a command that failed, "" of one that did not; the log is told as it is written."""
    words = [sys.executable, "-c", _LIMITED, str(limit_gb), command, str(folder / "bench.toml"), *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log, began = "", time.perf_counter()
    with subprocess.Popen(words, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        for line in run.stdout:
            log += line
            print(f"{time.perf_counter() - began:.1f} s  {line}", end="", file=sys.stderr, flush=True)
    if check and run.returncode:
        raise RuntimeError(f"forebay {command} ended with {run.returncode}")
    return log if run.returncode else ""


def copies(_: Size, device: torch.device, __: Path) -> list[Row]:
    """Returns GB/s to the device for copies of a batch's size, and the limit: one pinned copy of 1 GiB."""
    if device.type != "cuda":
        return []
    rows = []
    for name, num_bytes in (("batch of 16, 15 MiB", 15 << 20), ("1 GiB", 1 << 30)):
        for is_pinned in (True, False):
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).fill_(1)
            times = []
            for _again in range(12):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                host.to(device, non_blocking=True)
                last.record()
                torch.cuda.synchronize(device)
                times.append(first.elapsed_time(last) / 1e3)
            rows.append({"copy": name, "pinned": str(is_pinned), "GB/s": num_bytes / 1e9 / median(times)})
    return rows


def tests(_: Size, device: torch.device, __: Path) -> list[Row]:
    """Returns how the tests marked `gpu` ended."""
    if device.type != "cuda":
        return []
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    print(ended.stdout[-8000:], ended.stderr[-2000:], file=sys.stderr, flush=True)
    return [{"tests": "marked `gpu`", "ended": (ended.stdout.strip().splitlines() or ["nothing"])[-1]}]


def page(folder: Path) -> str:
    """Returns the result page of all parts that are in a folder."""
    found = {name: json.loads((folder / f"{name}.json").read_bytes()) for name in PARTS if _is_there(folder, name)}
    about = next(iter(found.values()))["machine"]
    lines = [f"# A GPU: {about['device']}", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for name, document in found.items():
        rows = document["rows"]
        lines += [f"## {name.capitalize()}", ""]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
        lines += [f"| {' | '.join(cells)} |" for cells in table] if rows else ["Not measured: no CUDA device."]
        lines.append("")
    return "\n".join(lines)


def _is_there(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").is_file()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few seconds: does it run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given again")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where results go; build/gpu")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SMALL if options.tiny or device.type == "cpu" else LARGE
    about = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    about |= machine("torch", "transformers")
    work = {
        "tests": tests,
        "reading": reading,
        "speech": speech,
        "vision": vision,
        "calibration": calibration,
        "copies": copies,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    BENCH_DATA.mkdir(exist_ok=True)
    document: dict[str, Any] = {"machine": about}
    for name in options.part or PARTS:
        with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
            document[name] = work[name](size, device, Path(folder))
        kept = {"machine": about, "rows": document[name]}
        (options.out / f"{name}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    (options.out / "gpu.md").write_text(page(options.out), encoding="utf-8")
    show({name: part for name, part in document.items() if part}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
