"""Measures how full packs are and how fast they are made: `python -m benchmarks.plan_pack [--tiny] [--rounds N]`.

Packs hold 8192 tokens. There are two distributions of lengths: questions about images (200 to 400 tokens, 2 % of any
length up to 8192), and a lognormal of median 600, sigma 1. Every packer lists the samples of every pack. Beside
forebay's packers stand:

- best-fit-decreasing, a sample at a time, which finds packs by their room in a table, O(1) each;
- what online packers do in the order of arrival: next fit, and first fit with 64 packs open;
- padding without packs: a shuffle, padded to the longest sample of a batch.

More parts pack along the line with 8 to 256 samples in sight, of any length up to 8192 and of clips too (1 to 30 s, 50
tokens a second), beside packers that are greedy with as many in sight or as many packs open; under both budgets at
once, tokens and image patches; in fixed shapes and balanced; beside TRL's `pack_dataset`; and 10 million samples.
Speeds are samples a CPU second, medians of the rounds, on one thread. The order of the contestants turns from round
to round.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.report import arguments, machine, median, show
from forebay.config import PackConfig
from forebay.config.plan import PackCosts
from forebay.plan.pack.alike_packs import StepSpread, pack_costs
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from forebay.plan.statistics import padding_in_line

Array = np.ndarray[Any, Any]
SEQ_LEN = 8192
OPEN_PACKS = 64


def question_answers(count: int, *, seed: int = 0) -> Array:
    """Returns int32 [count] tokens: 200 to 400, 2 % of them 401 to 8192."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(200, 401, count, dtype=np.int32)
    is_long = rng.random(count) < 0.02
    lengths[is_long] = rng.integers(401, SEQ_LEN + 1, int(is_long.sum()))
    return lengths


def lognormal(count: int, *, seed: int = 0) -> Array:
    """Returns int32 [count] tokens of median 600, sigma 1, cut off at 8192."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(np.log(600), 1.0, count)), 1, SEQ_LEN).astype(np.int32)


def uniform(count: int, *, seed: int = 0) -> Array:
    """Returns int32 [count] tokens: any number up to 8192."""
    return np.random.default_rng(seed).integers(1, SEQ_LEN + 1, count, dtype=np.int32)


def clips(count: int, *, seed: int = 0) -> Array:
    """Returns int32 [count] tokens: 50 a second of clips of 1 to 30 s, by the usual histogram of ASR."""
    rng = np.random.default_rng(seed)
    edges_s, shares = np.array([1, 3, 5, 7, 10, 15, 20, 30]), np.array([12.6, 24.8, 13.7, 35.3, 13.1, 0.5, 0.01])
    part = rng.choice(len(shares), count, p=shares / shares.sum())
    found: Array = (50 * (edges_s[part] + (edges_s[part + 1] - edges_s[part]) * rng.random(count))).astype(np.int32)
    return found


LENGTHS: dict[str, Callable[..., Array]] = {
    "uniform": uniform,
    "VQA-like": question_answers,
    "lognormal": lognormal,
    "ASR": clips,
}


def photos_and_text(count: int) -> tuple[Array, Array]:
    """Returns tokens and patches: 90 % with 1 to 3 photos of 64 to 1280 tokens, 4 patches a token; 10 % text alone."""
    rng = np.random.default_rng(0)
    photos = rng.choice([1, 1, 1, 2, 3], count)
    sizes = np.clip(np.exp(rng.normal(np.log(400), 0.5, (3, count))), 64, 1280).astype(np.int64)
    images = (sizes * (np.arange(3)[:, None] < photos)).sum(0) * (rng.random(count) < 0.9)
    text = rng.integers(30, 300, count) + (images == 0) * rng.integers(0, 900, count)
    return np.minimum(images + text, SEQ_LEN).astype(np.int32), (4 * images).astype(np.int32)


# Peers: each returns the packs as lists of sample indices.


def best_fit_decreasing(lengths: Array) -> list[list[int]]:
    """Packs a sample at a time, the longest first, into the pack with the least room that is enough."""
    packs: list[list[int]] = []
    of_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = of_room[room].pop()
            if not of_room[room]:
                rooms ^= 1 << room
            packs[pack].append(sample)
        else:
            room, pack = SEQ_LEN, len(packs)
            packs.append([sample])
        of_room[room - length].append(pack)
        rooms |= 1 << (room - length)
    return packs


def next_fit(lengths: Array) -> list[list[int]]:
    """Packs in the order of arrival; closes a pack when a sample does not fit."""
    packs: list[list[int]] = []
    room = 0
    for sample, length in enumerate(lengths.tolist()):
        if length > room:
            packs.append([])
            room = SEQ_LEN
        packs[-1].append(sample)
        room -= length
    return packs


def first_fit(lengths: Array, *, open_packs: int = OPEN_PACKS) -> list[list[int]]:
    """Packs in the order of arrival into the first open pack with room; closes the fullest pack for a new one."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    current: list[list[int]] = []
    for sample, length in enumerate(lengths.tolist()):
        place = next((place for place, room in enumerate(rooms) if room >= length), None)
        if place is None:
            if len(rooms) == open_packs:
                fullest = rooms.index(min(rooms))
                packs.append(current.pop(fullest))
                rooms.pop(fullest)
            current.append([])
            rooms.append(SEQ_LEN)
            place = -1
        current[place].append(sample)
        rooms[place] -= length
    return packs + current


def largest_first(lengths: Array, *, seq_len: int, buffer_size: int) -> list[list[int]]:
    """Packs of `buffer_size` waiting samples the oldest and then, time and again, the largest that fits."""
    line = iter(enumerate(lengths.tolist()))
    waiting, packs = list(islice(line, buffer_size)), list[list[int]]()
    while waiting:
        number: int | None = 0
        room, pack = seq_len, list[int]()
        while number is not None:
            sample, length = waiting.pop(number)
            waiting += islice(line, 1)
            pack.append(sample)
            room -= length
            fitting = [place for place, (_, length) in enumerate(waiting) if length <= room]
            number = max(fitting, key=lambda place: (waiting[place][1], -place), default=None)
        packs.append(pack)
    return packs


def ours(lengths: Array, **settings: Any) -> PackPlan:
    return pack_plan(lengths, settings=PackConfig(seq_len=SEQ_LEN, **settings))


PACKERS: dict[str, Callable[[Array], PackPlan | list[list[int]]]] = {
    "forebay best_fit": ours,
    "forebay best_fit, buffer 64": lambda lengths: ours(lengths, buffer_size=64),
    "forebay best_fit, buffer 4096": lambda lengths: ours(lengths, buffer_size=4096),
    "forebay best_fit_decreasing": lambda lengths: ours(lengths, algorithm="best_fit_decreasing"),
    "best-fit-decreasing, by sample": best_fit_decreasing,
    "first fit, arrival order, 64 open": first_fit,
    "next fit, arrival order": next_fit,
}


def packers(lengths: Array, *, rounds: int) -> list[dict[str, Any]]:
    """Returns a row a packer, and one for padding without packs."""
    names = list(PACKERS)
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    packs: dict[str, int] = {}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            found = PACKERS[name](lengths)
            cpu_s[name].append(time.process_time() - start)
            packs[name] = found.num_batches if isinstance(found, PackPlan) else len(found)
    total = int(lengths.sum(dtype=np.int64))
    rows: list[dict[str, Any]] = [
        {
            "packer": name,
            "packs": packs[name],
            "empty_percent": 100 * (1 - total / packs[name] / SEQ_LEN),
            "million_samples_per_cpu_s": len(lengths) / median(cpu_s[name]) / 1e6,
        }
        for name in names
    ]
    size = max(int(SEQ_LEN // lengths.mean()), 1)
    padding = padding_in_line(lengths, size).share
    return [*rows, {**dict.fromkeys(rows[0]), "packer": f"no packs, {size} a batch", "empty_percent": 100 * padding}]


def buffers(count: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of lengths and number of samples in sight: how full packs are, and the speed."""
    rows = []
    for name, make in LENGTHS.items():
        lengths = make(count)
        full = int(lengths.sum(dtype=np.int64)) / SEQ_LEN
        for size in (8, 16, 32, 64, 128, 256):
            start = time.process_time()
            plan = ours(lengths, buffer_size=size)
            cpu_s = time.process_time() - start
            greedy = largest_first(lengths, seq_len=SEQ_LEN, buffer_size=size)
            rows.append(
                {
                    "lengths": name,
                    "buffer_size": size,
                    "forebay_percent": 100 * full / plan.num_batches,
                    "largest_first_percent": 100 * full / len(greedy),
                    "first_fit_percent": 100 * full / len(first_fit(lengths, open_packs=size)),
                    "next_fit_percent": 100 * full / len(next_fit(lengths)),
                    "million_samples_per_cpu_s": count / cpu_s / 1e6,
                }
            )
    return rows


def two_budgets(count: int) -> list[dict[str, Any]]:
    """Returns a row for each way to pack photos and text under a budget of patches as well."""
    tokens, patches = photos_and_text(count)
    rows = []
    for max_patches in (32_768, 24_576, 16_384):
        for buffer_size in (0, 64):
            settings = PackConfig(seq_len=SEQ_LEN, max_patches=max_patches, buffer_size=buffer_size)
            start = time.process_time()
            plan = pack_plan(tokens, patches=patches, settings=settings)
            cpu_s = time.process_time() - start
            held = [int(lengths[plan.members].sum(dtype=np.int64)) for lengths in (tokens, patches)]
            rows.append(
                {
                    "max_patches": max_patches,
                    "buffer_size": buffer_size,
                    "tokens_percent": 100 * held[0] / plan.num_batches / SEQ_LEN,
                    "patches_percent": 100 * held[1] / plan.num_batches / max_patches,
                    "million_samples_per_cpu_s": count / cpu_s / 1e6,
                }
            )
    return rows


def fixed_shapes(count: int) -> list[dict[str, Any]]:
    """Returns a row for each mix of tokens and image tokens: what fixed shapes lose, beside natural packs."""
    photos, patches = photos_and_text(count)
    rng = np.random.default_rng(0)
    shown, is_text = rng.integers(160, 281, count), rng.random(count) < 0.5
    images = np.where(is_text, 0, rng.integers(200, 1200, count))
    texts = np.where(is_text, np.clip(np.exp(rng.normal(7, 0.9, count)), 10, 8100), rng.integers(30, 200, count))
    mixes = {
        "VQA": (shown + rng.integers(40, 121, count), shown),
        "photos, 10 % text": (photos.astype(np.int64), patches // 4),
        "half long text": (texts.astype(np.int64) + images, images),
    }
    rows = []
    for name, (tokens, of_images) in mixes.items():
        for seq_len in (4096, SEQ_LEN, 4 * SEQ_LEN):
            start = time.process_time()
            settings = PackConfig(seq_len=seq_len, shapes="fixed")
            plan = pack_plan(tokens, patches=4 * of_images, merge_size=2, settings=settings)
            cpu_s, natural = time.process_time() - start, pack_plan(tokens, settings=PackConfig(seq_len=seq_len))
            held, wanted = (int(tokens[each.members].sum()) / each.num_batches / seq_len for each in (plan, natural))
            rows.append(
                {
                    "mix": name,
                    "seq_len": seq_len,
                    "patches": " or ".join(map(str, plan.patch_classes)),
                    "lost_percent": 100 * (1 - held),
                    "natural_lost_percent": 100 * (1 - wanted),
                    "no_shape": len(plan.unplaced["no_shape"]),
                    "packs_per_cpu_s": plan.num_batches / cpu_s,
                }
            )
    return rows


def long_mix(count: int) -> Array:
    """Returns int32 [count] tokens: half of `question_answers`, half texts of median 1,100."""
    rng = np.random.default_rng(0)
    texts = np.clip(np.exp(rng.normal(np.log(1100), 0.9, count)), 10, SEQ_LEN)
    found: Array = np.where(rng.random(count) < 0.5, question_answers(count), texts).astype(np.int32)
    return found


def by_trl(lengths: Array, *, at_once: int) -> tuple[list[list[int]], float]:
    """Returns packs of TRL's `bfd`, which packs `at_once` samples and copies their tokens, and its CPU seconds.

    Tokens are of one byte here.
    """
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    data = Dataset(pa.table({"input_ids": tokens}))
    start = time.process_time()
    made = pack_dataset(data, SEQ_LEN, "bfd", map_kwargs={"batch_size": at_once, "keep_in_memory": True})
    return made["seq_lengths"][:], time.process_time() - start


def beside_trl(count: int) -> list[dict[str, Any]]:
    """Returns a row for each mix and packer: packs, fill and CPU seconds of the same lengths."""
    ways: dict[str, Callable[[Array], PackPlan | list[list[int]]]] = {
        "forebay": ours,
        "greedy, arrival order, 64 open": first_fit,
    }
    rows = []
    for name, make in (("VQA-like", question_answers), ("half long text", long_mix)):
        lengths = make(count)
        found: list[tuple[str, int, float]] = []
        for way, pack in ways.items():
            start = time.process_time()
            packs = pack(lengths)
            cpu_s = time.process_time() - start
            found.append((way, packs.num_batches if isinstance(packs, PackPlan) else len(packs), cpu_s))
        for way, at_once in (("TRL bfd", 1000), ("TRL bfd, all at once", count)):
            packs, cpu_s = by_trl(lengths, at_once=at_once)
            assert sum(map(sum, packs)) == lengths.sum(dtype=np.int64), f"{way} lost tokens"
            found.append((way, len(packs), cpu_s))
        full = int(lengths.sum(dtype=np.int64)) / SEQ_LEN
        rows += [
            {"lengths": name, "packer": way, "packs": packs, "fill_percent": 100 * full / packs, "cpu_s": cpu_s}
            for way, packs, cpu_s in found
        ]
    return rows


def balance(count: int) -> list[dict[str, Any]]:
    """Returns a row for each mix: how far the packs of 8 ranks lie apart, in any order and under `balance = "cost"`."""
    rng = np.random.default_rng(0)
    photos, patches = photos_and_text(count)
    shown = rng.integers(160, 281, count)
    questions = shown + rng.integers(40, 121, count)
    rows = []
    for name, tokens, seen in (("photos, 10 % text", photos, patches), ("VQA", questions, 4 * shown)):
        learnt = np.maximum((tokens - seen // 4) * rng.uniform(0.1, 0.6, count), 1).astype(np.int64)
        images = (seen > 0).astype(np.int64)
        held = {"tokens": tokens, "patches": seen, "images": images}
        settings = PackConfig(seq_len=SEQ_LEN, balance="cost", costs=PackCosts(token=0, token_squared=0))
        plain = pack_plan(tokens, settings=settings)
        row: dict[str, Any] = {"mix": name, "packs": plain.num_batches}
        order = np.random.default_rng(1).permutation(plain.num_batches)
        for way, plan, packs in (
            ("any order", plain, order),
            ("balanced", plain.balanced(**held, learnt=learnt), np.arange(plain.num_batches)),
        ):
            cost = pack_costs(plan.members, plan.offsets, **held, costs=settings.costs)
            spread = StepSpread.of(cost, np.add.reduceat(learnt[plan.members], plan.offsets[:-1]), packs)
            row |= {f"images, {way}": spread.cost, f"learnt, {way}": spread.learnt}
        rows.append(row)
    return rows


def large(make: Callable[[int], Array], count: int) -> dict[str, Any]:
    """Returns the row of a plan of many samples: its time, and from a second run its memory besides the lengths."""
    lengths = make(count)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = ours(lengths)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tracemalloc.start()
    ours(lengths)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = int(lengths.sum(dtype=np.int64))
    return {
        "lengths": make.__name__,
        "samples": count,
        "packs": plan.num_batches,
        "empty_percent": 100 * (1 - total / plan.num_batches / SEQ_LEN),
        "wall_s": wall,
        "cpu_s": cpu,
        "million_samples_per_cpu_s": count / cpu / 1e6,
        "peak_bytes_per_sample": peak_bytes / count,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    many, some, rounds = (20_000, 5_000, 1) if options.tiny else (10_000_000, 300_000, 3)
    document = {
        "machine": machine("numpy"),
        "many samples": [large(make, many) for make in (question_answers, lognormal)],
        "question_answers": packers(question_answers(some), rounds=options.rounds or rounds),
        "lognormal": packers(lognormal(some), rounds=options.rounds or rounds),
        "samples in sight": buffers(some // 5),
        "two budgets": two_budgets(some),
        "fixed shapes": fixed_shapes(some // 15),
        "balance": balance(some // 15),
        "beside TRL": beside_trl(some // 3),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
