"""Measures a cache of texts beside the plain ways: `python -m benchmarks.text_line [--tiny] [--json] [--rounds N]`.

Lines are runs of words of this project's documents, as long as LJSpeech's. All arms make the ids of Whisper's demo
tokenizer, with the end token, of every line.

Two works are done: tokens alone; and before them the language of each text (py3langid, all languages) and Whisper's
basic normal form.

- **forebay** lists and hashes the file, tokenises in warm worker processes, writes hashed and fsynced shards, seals and
  plans. Its second run finds the cache by its key, opens it and reads a sample.
- **Thread pool** does it with a line at a time (`classify(line)`, `BasicTextNormalizer()(line)`, `tokenizer(line)`) in
  eight threads and keeps the ids in memory, in each run.
- **datasets** reads the file and does the same with a row at a time in `map` with two processes. Its second run finds
  its own cache. It is left out where it is not installed; `make bench-peers` installs it.
- **Bare** is the Rust tokenizer in a loop.

All arms take turns in one process that has imported everything. Seconds are medians of the rounds, ratios are medians
of the ratios within a round. CPU seconds are of this process and of all workers. Ids are compared before they count.

The last table is one new process from nothing to the first batch of a loader, and once more over the sealed cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import BENCH_DATA, ROOT, SPEECH
from benchmarks.report import Cost, arguments, machine, median, ratio, show
from forebay import load_config
from forebay.config import Config
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool
from forebay.pretrained import from_folder
from forebay.store.cache import open_cache

THREADS = 8
LINES, LJSPEECH = 40_000, 13_100

_CONFIG = """name = "lines"
[source]
kind = "text"
manifest = "lines.txt"
[audio]
features = "none"
[text]
tokenizer = "{tokenizer}"
prompt = "plain"
{work}
[plan]
edges = [16, 32, 64, 128]
batch_tokens = 4096
[run]
cache_root = "caches"
"""

_TO_A_BATCH = """import json, sys, time
start = time.perf_counter()
import forebay
from forebay.preprocess import build
from forebay.train import make_loader
imported = time.perf_counter()
config = forebay.load_config(sys.argv[1], overrides=["run.num_workers=2"])
report = build(config)
built = time.perf_counter()
batch = next(iter(make_loader(config)))
done = time.perf_counter()
assert len(batch["input_ids"]) and report.num_samples == int(sys.argv[2]), report
print(json.dumps({"imports_s": imported - start, "build_s": built - imported, "first_batch_s": done - built,
                  "wall_s_behind_imports": done - imported}))
"""

Row = dict[str, Any]


class Plain:
    """Does one line at a time what a work says. It is pickled into processes, by which `datasets` names its results."""

    def __init__(self, tokenizer: Any, *, is_all: bool) -> None:
        self._tokenizer, self._is_all = tokenizer, is_all

    def __call__(self, line: str) -> list[int]:
        """Returns the ids of a line."""
        if self._is_all:
            import py3langid

            py3langid.classify(line)
            line = _normalizer()(line).strip()
        return list(self._tokenizer(line).input_ids)

    def row(self, row: dict[str, str]) -> dict[str, list[int]]:
        """Returns the ids of a row of `datasets`."""
        return {"input_ids": self(row["text"])}


@functools.cache
def _normalizer() -> Any:
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    return BasicTextNormalizer()


WORKS = {
    "tokens": "",
    "languages, normal forms, tokens": 'language = "detect"\nnormalize = ["whisper_basic"]',
}
"""Name -> settings of `[text]`."""


@dataclass(frozen=True)
class Arm:
    """One way. run: returns the ids of the first and of the last line. pids: of processes that work for it."""

    name: str
    run: Callable[[], list[list[int]]]
    pids: tuple[int, ...] = ()


def lines_of(count: int) -> list[str]:
    """Returns lines of 2 to 40 words, 17 on average, each a run of words of the documents of this project."""
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    words = [word for page in pages for word in re.findall(r"[A-Za-z][a-z']+[,.;]?", page.read_text(encoding="utf-8"))]
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.normal(17, 7, count).astype(int), 2, 40)
    return [" ".join(words[start : start + n]) for n in lengths for start in [int(rng.integers(len(words) - n))]]


def corpus(folder: Path, count: int, work: str = "") -> Path:
    """Makes a folder hold `lines.txt` and `lines.toml`, and returns the config."""
    folder.mkdir()
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines_of(count)), encoding="utf-8")
    (folder / "lines.toml").write_text(_CONFIG.format(tokenizer=SPEECH / "model", work=work), encoding="utf-8")
    return folder / "lines.toml"


class Forebay:
    """Builds of one config in warm workers."""

    def __init__(self, config: Path, num_workers: int, pool: Pool) -> None:
        self._path, self._workers, self._pool = config, num_workers, pool
        self._round = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the workers, which are forks of one process."""
        forks = self._pool._forks
        assert forks is not None
        pid = forks._process.pid
        return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def config(self) -> Config:
        """Returns the config with the caches of this number of workers."""
        root = self._path.parent / f"caches{self._workers}-{self._round}"
        return load_config(self._path, overrides=[f"run.cache_root={root}", f"run.num_workers={self._workers}"])

    def first(self) -> list[list[int]]:
        """Builds the cache anew, under a root that no worker has seen: they keep what they made of texts."""
        shutil.rmtree(self.config().cache_root, ignore_errors=True)
        self._round += 1
        return self.again()

    def again(self) -> list[list[int]]:
        """Builds what is missing of the cache."""
        kept = contextlib.nullcontext(self._pool)
        with mock.patch("forebay.preprocess.pipeline.Pool", return_value=kept):
            report = build(self.config(), Options(progress=False))
        cache = open_cache(report.cache)
        return [cache.read(index)["input_ids"].tolist() for index in (0, len(cache) - 1)]


def pool_of_threads(path: Path, plain: Plain) -> list[list[int]]:
    with ThreadPoolExecutor(THREADS) as threads:
        made = list(threads.map(plain, _read(path)))
    return [made[0], made[-1]]


def bare(path: Path, tokenizer: Any) -> list[list[int]]:
    rust = tokenizer.backend_tokenizer
    made = [rust.encode(line).ids for line in _read(path)]
    return [made[0], made[-1]]


def datasets_map(path: Path, plain: Plain, folder: Path, *, is_first: bool) -> list[list[int]]:
    datasets: Any = importlib.import_module("datasets")
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)
    rows = datasets.load_dataset("text", data_files=str(path), split="train", cache_dir=str(folder))
    made = rows.map(plain.row, num_proc=2)
    return [made[index]["input_ids"] for index in (0, len(made) - 1)]


def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def cost_of(arm: Arm, wanted: Sequence[Sequence[int]]) -> Cost:
    """Returns what a run of an arm takes; SystemExit where it gives other ids."""
    wall, cpu = time.perf_counter(), _cpu_s(arm.pids)
    found = arm.run()
    cost = Cost(time.perf_counter() - wall, _cpu_s(arm.pids) - cpu)
    # The plain ways write Whisper's prompt in front; the ids of the text are compared.
    if [ids[-len(text) :] for ids, text in zip(found, wanted, strict=True)] != list(wanted):
        raise SystemExit(f"{arm.name} gives other ids")
    return cost


def _cpu_s(pids: Sequence[int]) -> float:
    """User and system seconds of this process, of the children it waited for, and of these processes."""
    times = os.times()
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return times.user + times.system + times.children_user + times.children_system + ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def arms(config: Path, few: Path, *, is_all: bool) -> Iterator[tuple[list[Arm], list[Arm], Any]]:
    """Yields the arms of a first run, those of a second, and the tokenizer.

    few: the config of some lines, by which workers get warm. is_all: languages and normal forms too.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = from_folder(AutoTokenizer, SPEECH / "model")
    path, kept = config.parent / "lines.txt", config.parent / "datasets"
    by_line = Plain(tokenizer, is_all=is_all)
    by_line("warm")
    with Pool(1) as one, Pool(2) as two:
        ours = [Forebay(config, 1, one), Forebay(config, 2, two)]
        for number, pool in ((1, one), (2, two)):
            pool.map(_warm, [str(config)] * (4 * number))
            Forebay(few, number, pool).first()
        first = [Arm(f"forebay, {n} worker{'s'[: n - 1]}", each.first, each.pids) for n, each in enumerate(ours, 1)]
        second = [Arm("forebay", ours[1].again, ours[1].pids)]
        plain = Arm(f"thread pool, {THREADS} threads", lambda: pool_of_threads(path, by_line))
        if importlib.util.find_spec("datasets") is not None:
            importlib.import_module("datasets").disable_progress_bars()
            first.append(Arm("datasets.map, 2 processes", lambda: datasets_map(path, by_line, kept, is_first=True)))
            second.append(Arm("datasets.map, cached", lambda: datasets_map(path, by_line, kept, is_first=False)))
        first += [plain] if is_all else [plain, Arm("bare tokenizer", lambda: bare(path, tokenizer))]
        yield first, [*second, plain], tokenizer


def _warm(path: str) -> int:
    """Loads the tokenizer of a config, in a worker."""
    from forebay.preprocess.groups import Groups
    from forebay.steps.recipe import recipe_of

    config = load_config(path)
    return len(Groups.of(config, recipe_of(config)).constants())


def measured(parts: Sequence[Arm], wanted: Sequence[Sequence[int]], *, rounds: int) -> dict[str, list[Cost]]:
    """Returns the costs of every arm by name, in rounds in which all arms take turns."""
    costs: dict[str, list[Cost]] = {arm.name: [] for arm in parts}
    for _ in range(rounds):
        for arm in parts:
            costs[arm.name].append(cost_of(arm, wanted))
    return costs


def rows_of(costs: dict[str, list[Cost]], count: int, *, ours: str, title: str) -> list[Row]:
    """Returns a row an arm. times: the wall seconds of an arm in those of `ours`."""
    base = [cost.wall_s for cost in costs[ours]]
    return [
        {
            title: name,
            "wall_s": median(cost.wall_s for cost in found),
            "cpu_s": median(cost.cpu_s for cost in found),
            "cpu_us_a_line": 1e6 / count * median(cost.cpu_s for cost in found),
            "times": ratio([cost.wall_s for cost in found], base),
        }
        for name, found in costs.items()
    ]


def to_a_batch(config: Path, count: int) -> list[Row]:
    """Returns the seconds of a new process to the first batch, from nothing and over the sealed cache."""
    rows = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("from nothing", "over the sealed cache"):
        command = [sys.executable, "-c", _TO_A_BATCH, str(config), str(count)]
        start = time.perf_counter()
        made = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        wall_s = time.perf_counter() - start
        rows.append({"to the first batch": name, "process_s": wall_s, **json.loads(made.stdout.splitlines()[-1])})
    return rows


def _wanted(texts: Sequence[str], tokenizer: Any, *, is_all: bool) -> list[list[int]]:
    """Returns the ids of the first and the last text with the end token, as all arms must give them."""
    found = [_normalizer()(text).strip() if is_all else text for text in (texts[0], texts[-1])]
    rust = tokenizer.backend_tokenizer
    return [[*rust.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id] for text in found]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    count, few = (1_500, 500) if options.tiny else (LINES, LJSPEECH)
    rounds = 1 if options.tiny else options.rounds or 3
    BENCH_DATA.mkdir(exist_ok=True)
    document: dict[str, Any] = {
        "machine": machine("numpy", "pyarrow", "tokenizers", "transformers"),
        "lines": count,
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        for number, (name, work) in enumerate(WORKS.items()):
            config = corpus(Path(folder) / f"lines{number}", count, work)
            warm = corpus(Path(folder) / f"warm{number}", 64, work)
            with arms(config, warm, is_all=bool(work)) as (first, second, tokenizer):
                wanted = _wanted(_read(config.parent / "lines.txt"), tokenizer, is_all=bool(work))
                begun = measured(first, wanted, rounds=rounds)
                again = measured(second, wanted, rounds=rounds)
            document[f"first run: {name}"] = rows_of(begun, count, ours="forebay, 2 workers", title=name)
            document[f"second run: {name}"] = rows_of(again, count, ours="forebay", title=name)
        document[f"{few} lines"] = to_a_batch(corpus(Path(folder) / "few", few), few)
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import what they run by it.
    from benchmarks import text_line

    sys.exit(text_line.main())
