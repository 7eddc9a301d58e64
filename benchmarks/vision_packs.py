"""Measures what a pack costs to make: `python -m benchmarks.vision_packs [--tiny] [--json] [--rounds N]`.

The data is questions about JPEGs of the sizes of COCO (crops of the demo photos), under Qwen3-VL's image settings, in
packs of 8192 tokens: about 27 images a pack. Every row makes the same packs in one thread. All batches of a row are
compared with those of the first row before anything counts: tokens, labels, positions, grids and pixels, value by
value.

- **Online** is what a training script does at every step. Pillow decodes. transformers' PIL processor takes the images
  of the pack in one call. Its tokenizer takes the conversations as the chat template writes them, with `<|image_pad|>`
  repeated in the text as Qwen3VLProcessor repeats it.
- **Memmap** reads what a script may have stored before: the `pixel_values` of each pack in float32. One row reads into
  new memory, as most scripts do, and one into a buffer that is used again.

Files are in the page cache. Figures are CPU milliseconds a pack (user and system, whole process), medians of the
rounds; ratios are those within a round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from PIL import Image

from benchmarks.report import arguments, machine, median, ratio, show, timed
from forebay import load_config
from forebay.config import Config
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.pretrained import from_folder
from forebay.steps.image.qwen2_vl import load_processor
from forebay.steps.image.tables import expand_on_device
from forebay.store.cache import open_cache
from forebay.train import make_loader
from forebay.train.collate.mrope import mrope_positions
from forebay.train.collate.patches import PatchBatch, fields_of
from forebay.train.loader import Loader

DEMO = Path(__file__).parents[1] / "demo" / "vision"
COCO_SIZES = ((640, 480), (640, 427), (480, 640), (640, 426), (640, 480), (500, 375))
CODECS = ("raw", "zstd", "webp", "source")
FLOAT32_REUSED = "float32 memmap, into reused memory"
FLOAT32 = "float32 memmap, into new memory by numpy"
FLOAT32_TORCH = "float32 memmap, into new memory by torch"
ONLINE = "online, HF processor, PIL backend"
TORCHVISION = "online, HF processor, torchvision backend"

Batch = dict[str, Any]
Source = Callable[[], Iterator[Batch]]


@dataclass(frozen=True)
class Corpus:
    """Images with questions under one folder, a config beside them, and a cache of every codec."""

    folder: Path
    seq_len: int
    codecs: tuple[str, ...]

    def config(self, *overrides: str) -> Config:
        """Returns the config for a loader in the caller's thread; if a cache is wanted, the cache must be there."""
        fixed = (
            "loader.num_threads=0",
            "loader.prefetch=1",
            "loader.pixels=uint8",
            f"plan.seq_len={self.seq_len}",
            'loader.cache="require"',
        )
        return load_config(self.folder / "packs.toml", overrides=[*fixed, *overrides])

    def rows(self) -> dict[str, dict[str, str]]:
        lines = (self.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        return {row["id"]: row for row in map(json.loads, lines)}


def make_corpus(
    folder: Path, *, num_images: int, seq_len: int, codecs: tuple[str, ...], questions_each: int = 1
) -> Corpus:
    """Writes images, questions and config, and builds the caches."""
    folder.mkdir(exist_ok=True)
    photos = [Image.open(path).convert("RGB") for path in sorted((DEMO / "photos").iterdir())]
    lines = (DEMO / "train.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [row for row in map(json.loads, lines) if "question" in row]
    rng, rows = np.random.default_rng(0), []
    for number in range(num_images):
        photo, size = photos[number % len(photos)], COCO_SIZES[number % len(COCO_SIZES)]
        share = rng.uniform(0.6, 1.0)
        left, top = (round(rng.uniform(0, 1 - share) * side) for side in photo.size)
        box = (left, top, left + round(share * photo.width), top + round(share * photo.height))
        photo.crop(box).resize(size).save(folder / f"{number}.jpg", quality=90)
        text = asked[number % len(asked)]
        asking = {"image": f"{number}.jpg", **{n: text[n] for n in ("question", "answer")}}
        rows += [{"id": f"q{number}-{again}", **asking} for again in range(questions_each)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    processor = json.loads((DEMO / "model" / "preprocessor_config.json").read_text(encoding="utf-8"))
    processor["size"] = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # as Qwen3-VL ships
    (folder / "processor").mkdir()
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "packs.toml").write_text(
        'name = "packs"\n[source]\nkind = "jsonl"\nmanifest = "train.jsonl"\n[vision]\nprocessor = "processor"\n'
        f'[text]\ntokenizer = "{DEMO / "model"}"\nprompt = "chat"\n[plan]\nkind = "pack"\nseq_len = 1\n'
        '[run]\ncache_root = "caches"\nnum_workers = 2\n',
        encoding="utf-8",
    )
    corpus = Corpus(folder, seq_len, codecs)
    for codec in codecs:
        build(corpus.config(f"vision.codec={codec}"), Options(progress=False))
    return corpus


class Online:
    """Packs as a training script makes them with transformers: only which samples share a pack is prepared."""

    def __init__(self, corpus: Corpus, loader: Loader) -> None:
        from transformers import AutoTokenizer

        self._folder, self._constants = corpus.folder, loader.source.constants
        self._processor = load_processor(corpus.folder / "processor", "pil")
        self._tokenizer = from_folder(AutoTokenizer, DEMO / "model")
        rows, order = corpus.rows(), loader.plan.order(loader.state.seed, 0)
        packs = (order.batch(place).tolist() for place in range(len(order)))
        self.packs = [[rows[loader.source.sample_id(index)] for index in pack] for pack in packs]

    def __call__(self) -> Iterator[Batch]:
        return map(self.pack, range(len(self.packs)))

    def pack(self, place: int) -> Batch:
        """Makes one pack."""
        rows = self.packs[place]
        images = [Image.open(self._folder / row["image"]) for row in rows]
        made = self._processor(images=images, return_tensors="pt")
        unit = self._constants["merge_size"] ** 2
        samples = [
            self._tokens(row, num_tokens // unit)
            for row, num_tokens in zip(rows, made["image_grid_thw"].prod(1).tolist(), strict=True)
        ]
        return {**made, **self._packed(samples, made["image_grid_thw"].numpy())}

    def _tokens(self, row: dict[str, str], num_tokens: int) -> tuple[list[int], int, int]:
        """Returns the ids of a conversation and where what is learnt begins and ends."""
        question = [{"type": "image"}, {"type": "text", "text": row["question"]}]
        prompt: list[dict[str, Any]] = [{"role": "user", "content": question}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}
        write = self._tokenizer.apply_chat_template
        texts = [
            write(prompt, tokenize=False, add_generation_prompt=True),
            write([*prompt, answer], tokenize=False),
        ]
        texts = [text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens) for text in texts]
        before, whole = self._tokenizer(texts)["input_ids"]
        return whole, len(before), len(whole) - 1  # without the line end behind the answer

    def _packed(self, samples: list[tuple[list[int], int, int]], grids: Any) -> Batch:
        ids = torch.tensor([token for sample, _, _ in samples for token in sample])
        labels = torch.full_like(ids, -100)
        starts, place = [], 0
        for sample, low, high in samples:
            labels[place + low : place + high] = ids[place + low : place + high]
            starts.append(place)
            place += len(sample)
        counts = torch.cat([torch.arange(len(sample)) for sample, _, _ in samples])
        where = {"image_token_id": self._constants["image_token_id"], "merge_size": self._constants["merge_size"]}
        mrope = torch.from_numpy(mrope_positions(ids.numpy(), grids, starts=starts, **where))
        positions = torch.cat([counts[None], mrope])[:, None]
        return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions}


class Memmap:
    """Packs as they may be stored: an array a field and pack, `pixel_values` in float32."""

    def __init__(self, folder: Path, batches: Iterator[Batch]) -> None:
        self._folders, self._memory = [], np.empty(0, np.float32)
        for number, batch in enumerate(batches):
            self._folders.append(folder / str(number))
            self._folders[-1].mkdir(parents=True)
            for name, value in batch.items():
                np.save(self._folders[-1] / f"{name}.npy", value.numpy())
            self._memory = np.empty(max(self._memory.size, batch["pixel_values"].numel()), np.float32)

    def into_new_memory(self) -> Iterator[Batch]:
        """Copies as `torch.from_numpy(array.copy())` does; large arrays of numpy lie on huge pages."""
        return self._read(lambda array: torch.from_numpy(array.copy()))

    def by_torch(self) -> Iterator[Batch]:
        """Copies as `torch.tensor(array)` and `clone` do: memory of small pages, mapped one by one."""
        return self._read(torch.tensor)

    def into_reused_memory(self) -> Iterator[Batch]:
        """Copies into one buffer for all packs: the least that copying float32 costs."""
        return self._read(self._copied)

    def _copied(self, array: Any) -> torch.Tensor:
        values = self._memory[: array.size].reshape(array.shape)
        np.copyto(values, array)
        return torch.from_numpy(values)

    def _read(self, copy: Callable[[Any], torch.Tensor]) -> Iterator[Batch]:
        for folder in self._folders:
            stored = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
            pixels = copy(stored.pop("pixel_values"))
            yield {"pixel_values": pixels, **{name: torch.from_numpy(value.copy()) for name, value in stored.items()}}
            del pixels


def from_loader(config: Config) -> Source:
    """Returns the loader's batches of epoch 0, again at every call."""
    loader = make_loader(config)
    start = loader.state_dict()

    def batches() -> Iterator[Batch]:
        loader.load_state_dict(start)
        return map(tensors_of, loader)

    return batches


def tensors_of(batch: Batch | PatchBatch) -> Batch:
    """Returns the tensors of a batch of any form: the other sources have nothing but these."""
    return {name: value for name, value in fields_of(batch).items() if isinstance(value, torch.Tensor)}


def first_read(config: Config) -> Source:
    """Returns the batches of a cache that was just opened: every sample is hashed, every page is mapped."""

    def batches() -> Iterator[Batch]:
        return map(tensors_of, make_loader(config))

    return batches


def device_twin(packs: Source, table: torch.Tensor, copies: int, *, dtype: torch.dtype) -> Source:
    """Returns the batches of `packs`, their patches expanded by the gathers that a device does, here on the CPU."""

    def batches() -> Iterator[Batch]:
        for batch in packs():
            patches = batch.pop("patches")
            area = patches.shape[1] // len(table)
            out = expand_on_device(patches, table, 1, dtype=dtype, inner=area, copies=copies)
            yield {**batch, "pixel_values": out}

    return batches


def sources(corpus: Corpus) -> dict[str, Source]:
    """Returns every row's batches by its name; rows that cannot run here are left out."""
    raw = corpus.config()
    loader = make_loader(raw)
    constants = loader.source.constants
    table, copies = torch.tensor(constants["patch_table"]), int(constants["temporal_patch_size"])
    memmap = Memmap(corpus.folder / "packs", from_loader(corpus.config("loader.pixels=float32"))())
    packs = from_loader(raw)
    found: dict[str, Source] = {"cache raw, uint8": packs, "cache raw, uint8, just opened": first_read(raw)}
    for codec in corpus.codecs[1:]:
        found[f"cache {codec}, uint8"] = from_loader(corpus.config(f"vision.codec={codec}"))
    for dtype in ("bfloat16", "float32"):
        found[f"cache raw, {dtype} expanded by the loader"] = from_loader(corpus.config(f"loader.pixels={dtype}"))
    found["cache raw, bfloat16 by the device's gathers, on the CPU"] = device_twin(
        packs, table, copies, dtype=torch.bfloat16
    )
    return found | {
        FLOAT32_REUSED: memmap.into_reused_memory,
        FLOAT32: memmap.into_new_memory,
        FLOAT32_TORCH: memmap.by_torch,
        "forebay uncached, uint8": from_loader(corpus.config('loader.cache="off"')),
        ONLINE: Online(corpus, loader),
    }


def verify(found: dict[str, Source], wanted: Source, table: torch.Tensor) -> dict[str, float]:
    """Returns the bytes of a pack's batch by row; stops the benchmark if a batch is not the one in `wanted`."""
    sizes = {}
    for name, source in found.items():
        total = count = 0
        for batch, truth in zip(source(), wanted(), strict=True):
            total += sum(value.nbytes for value in batch.values())
            count += 1
            pixels = "patches" if "patches" in batch else "pixel_values"
            if pixels == "pixel_values":
                copies = batch[pixels].shape[1] // truth["patches"].shape[1]
                expanded = _looked_up(truth["patches"], table, copies).to(batch[pixels].dtype)
                truth = {**truth, pixels: expanded}
                truth.pop("patches")
            if batch.keys() != truth.keys() or not all(torch.equal(batch[n], truth[n]) for n in truth):
                raise SystemExit(f"{name}: another batch than that of the cache")
        sizes[name] = total / count
    return sizes


def _looked_up(patches: torch.Tensor, table: torch.Tensor, copies: int) -> torch.Tensor:
    """Returns what the definition gives: float32 [n, copies * w] for patches uint8 [n, w]."""
    rows = patches.view(len(patches), 3, 1, -1).long()
    channels = torch.arange(3).view(1, 3, 1, 1)
    values = table[channels, rows]
    return values.expand(-1, -1, copies, -1).reshape(len(patches), -1)


def stored_bytes(corpus: Corpus, num_packs: int) -> dict[str, float]:
    """Returns the bytes on disk of a pack's share by row, without metadata."""
    found = {}
    for codec in corpus.codecs:
        cache = open_cache(make_loader(corpus.config(f"vision.codec={codec}")).source.folder)  # type: ignore[attr-defined]
        shards = [entry.size_bytes for group in cache.groups for _, entry in cache.shard_entries(group)]
        found[f"cache {codec}, uint8"] = sum(shards) / num_packs
    found[FLOAT32] = sum(path.stat().st_size for path in (corpus.folder / "packs").rglob("*.npy")) / num_packs
    found[ONLINE] = sum(path.stat().st_size for path in corpus.folder.glob("*.jpg")) / num_packs
    return found


def rows(corpus: Corpus, *, rounds: int) -> list[dict[str, Any]]:
    """Returns one row a way to make the packs."""
    found = sources(corpus)
    first = next(iter(found))
    table = torch.tensor(make_loader(corpus.config()).source.constants["patch_table"])
    sizes = verify(found, found[first], table)
    num_packs = make_loader(corpus.config()).plan.num_batches
    cpu_s: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, source in found.items():
            cpu_s[name].append(timed(lambda source=source: _consume(source)).cpu_s / num_packs)
    stored = stored_bytes(corpus, num_packs)
    table_rows: list[dict[str, Any]] = [
        {
            "packs of": name,
            "cpu_ms": 1e3 * median(cpu_s[name]),
            "online_over_it": ratio(cpu_s[ONLINE], cpu_s[name]),
            "float32_over_it": ratio(cpu_s[FLOAT32], cpu_s[name]),
            "float32_reused_over_it": ratio(cpu_s[FLOAT32_REUSED], cpu_s[name]),
            "batch_mb": sizes[name] / 1e6,
            "stored_mb": stored[name] / 1e6 if name in stored else None,
        }
        for name in found
    ]
    if importlib.util.find_spec("torchvision") is None:
        table_rows.append({**dict.fromkeys(table_rows[0]), "packs of": f"{TORCHVISION}: not installed"})
    return table_rows


def beside_copy(corpus: Corpus, *, rounds: int) -> dict[str, Any]:
    """Returns the CPU of a raw pack, and of copies of its patches from the cache's mappings.

    They go into one buffer, and into two in turn, as a loop has that holds a batch while the next one is made.
    """
    config = corpus.config()
    packs, loader = from_loader(config), make_loader(config)
    order = loader.plan.order(0, 0)
    batches = order.batches(range(len(order)))
    views = [[own for index in batch.tolist() for own in loader.source.read(index)["patches"]] for batch in batches]
    rows = [sum(map(len, own)) for own in views]
    buffers = [np.empty((max(rows), views[0][0].shape[1]), np.uint8) for _ in range(2)]

    def copied(num_buffers: int) -> None:
        for place, (own, count) in enumerate(zip(views, rows, strict=True)):
            np.concatenate(own, out=buffers[place % num_buffers][:count])

    for _ in range(_WARM_PACKS // len(views) + 1):
        _consume(packs)
    works: dict[str, Callable[[], None]] = {
        "copy": lambda: copied(1),
        "copy_in_turn": lambda: copied(2),
        "raw": lambda: _consume(packs),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(timed(work).cpu_s / len(views))
    cpu_ms = {f"{name}_cpu_ms": 1e3 * median(took) for name, took in found.items()}
    return {**cpu_ms, **{f"{name}_over_raw": ratio(found[name], found["raw"]) for name in ("copy", "copy_in_turn")}}


_WARM_PACKS = 300
"""Packs until pages that are here are no longer asked for ahead, see `ReadAhead`."""


def _consume(source: Source) -> None:
    for batch in source():
        del batch  # before the next is made: its memory is used again


def workload(corpus: Corpus) -> dict[str, Any]:
    """Returns what is in the packs, on average."""
    loader = make_loader(corpus.config())
    lengths, count = loader.source.lengths, loader.plan.num_batches
    sums = {name: int(lengths[name].sum()) / count for name in ("num_images", "num_patches", "num_tokens")}
    return {"packs": count, "seq_len": corpus.seq_len, **{f"{name}_per_pack": round(n, 1) for name, n in sums.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    torch.set_num_threads(1)
    found = machine("torch", "pillow", "numpy", "transformers", "tokenizers", "pyarrow")
    folder = Path(tempfile.mkdtemp(prefix="vision-packs-"))
    try:
        size = {"num_images": 6, "seq_len": 1200} if options.tiny else {"num_images": 108, "seq_len": 8192}
        corpus = make_corpus(folder, **size, codecs=CODECS[:2] if options.tiny else CODECS)
        # An epoch of four packs would be a tenth its own beginning.
        long = make_corpus(folder / "long", **size, codecs=("raw",), questions_each=2 if options.tiny else 16)
        document = {
            "machine": found,
            "workload": workload(corpus),
            "packs": rows(corpus, rounds=options.rounds or (1 if options.tiny else 5)),
            "workload beside a copy": workload(long),
            "raw beside a copy": [beside_copy(long, rounds=options.rounds or (1 if options.tiny else 9))],
        }
    finally:
        shutil.rmtree(folder)
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
