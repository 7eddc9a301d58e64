"""`forebay cache warm`: what the next micro-batches of a node need, brought to the node's cache before they run."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.cursor import Cursor, check_ranks
from forebay.store.layout import Ints
from forebay.store.remote.carry.tally import Tally, for_each
from forebay.store.remote.node.holdings import NEVER, ReaderUses
from forebay.store.remote.remote_shards import RemoteShards
from forebay.terminal import CommandReport
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import find_checkpoint, load_state, run_folder
from forebay.train.select import make_loader
from forebay.visible import human_bytes

_MAX_STEPS = 100_000
"""Steps of an epoch that are looked at: about 20 us each."""
_RANKS = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?/(?P<world>\d+)\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmOptions:
    """The shards that are to be brought.

    steps: micro-batches of each rank; None: all that fits. ranks: of this node, out of `world`. resume: from where the
    last checkpoint stands, else from `position` of `epoch` on.
    """

    steps: int | None = None
    ranks: tuple[int, ...] = (0,)
    world: int = 1
    resume: bool = False
    epoch: int = 0
    position: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}, wanted 1 or more")
        if self.resume and (self.epoch or self.position):
            raise ConfigError("--resume begins where the last checkpoint stands; leave --epoch and --position out")
        for rank in self.ranks:
            check_ranks(rank, self.world)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmReport(CommandReport):
    """The document of `forebay cache warm --json`; its fields are an interface."""

    steps: int | None
    """Micro-batches of each rank that were asked for; None: all."""
    ranks: list[int]
    dp_world_size: int
    epoch: int
    position: int
    """Where the first of them stands: the micro-batch of all ranks together."""
    num_shards: int
    """Shards that these micro-batches need, of all caches in stores."""
    needed_bytes: int
    here_shards: int
    """Of these, on this node by now."""
    here_bytes: int
    downloaded_bytes: int
    """By this command."""
    bound_bytes: int
    """What this node keeps at most: `remote.cache_size_gb`."""
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether all that is needed is here."""
        return self.here_shards == self.num_shards

    def lines(self) -> Iterator[str]:
        """Yields what `forebay cache warm` prints."""
        what = "all shards" if self.steps is None else f"shards of the next {self.steps} micro-batches"
        node = f" of {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        rate = human_bytes(self.downloaded_bytes / max(self.seconds, 1e-3))
        yield (
            f"{what}{node}: {self.here_shards} of {self.num_shards} are on this node "
            f"({human_bytes(self.here_bytes)} of {human_bytes(self.needed_bytes)})"
        )
        yield f"downloaded: {human_bytes(self.downloaded_bytes)} in {self.seconds:.1f} s, {rate}/s"
        if not self.fits:
            yield (
                f"no room: {self.num_shards - self.here_shards} shards, {human_bytes(self.needed_bytes)} are needed "
                f"and remote.cache_size_gb allows {human_bytes(self.bound_bytes)}; the loader downloads the rest when "
                "it comes to it, or raise remote.cache_size_gb"
            )


def ranks_of_node(text: str | None) -> tuple[tuple[int, ...], int] | None:
    """Returns the ranks of this node and the number of all; None where another process of this node warms for it.

    text: `0-7/64` or `3/8`; None: what torchrun has set, else rank 0 of 1. Raises ConfigError for anything else.
    """
    if text is not None:
        if (found := _RANKS.match(text)) is None:
            raise ConfigError(f"--dp-ranks is {text!r}, wanted FIRST-LAST/ALL, for example 0-7/64")
        first, world = int(found["first"]), int(found["world"])
        last = first if found["last"] is None else int(found["last"])
        if not first <= last < world:
            raise ConfigError(f"--dp-ranks is {text}, wanted FIRST <= LAST < ALL, for example 0-7/64")
        return tuple(range(first, last + 1)), world
    try:
        rank, world, local, beside = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError:
        return (0,), 1
    except ValueError as err:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are to be numbers: {err}") from err
    return (tuple(range(rank - local, rank - local + beside)), world) if local == 0 else None


def warm(config: Config, options: WarmOptions) -> WarmReport:
    """Downloads what the next micro-batches of a config need to this node, soonest first, as far as there is room.

    Runs beside a training, too: a shard is downloaded once a node, and nothing is evicted that is needed sooner.
    Raises ConfigError where nothing of the config lies in a store, ResumeError, RemoteError, and as `make_loader`.
    """
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    shards = RemoteShards(loader.source)
    if not len(shards):
        raise ConfigError(
            f"{config.path}: no cache that it reads lies in a store, so there is nothing to bring here; set "
            "run.cache_root or loader.cache_dir to a URL"
        )
    cursors = _cursors(config, loader, options)
    start = cursors[0].state
    first_use = _first_use(shards, cursors, steps=options.steps)
    needed = np.flatnonzero(first_use < NEVER)
    needed = needed[np.argsort(first_use[needed], kind="stable")]
    warming = _Warming(shards, first_use)
    started_s = time.monotonic()
    downloaded_bytes = warming.bring(needed.tolist(), progress=options.progress)
    seconds, here = time.monotonic() - started_s, np.array(warming.here, np.int64)
    return WarmReport(
        steps=options.steps,
        ranks=list(options.ranks),
        dp_world_size=options.world,
        epoch=start.epoch,
        position=start.position,
        num_shards=len(needed),
        needed_bytes=int(shards.sizes[needed].sum()),
        here_shards=len(here),
        here_bytes=int(shards.sizes[here].sum()),
        downloaded_bytes=downloaded_bytes,
        bound_bytes=shards.bound_bytes,
        seconds=seconds,
    )


def _cursors(config: Config, loader: Loader, options: WarmOptions) -> list[Cursor]:
    """Returns where each rank of this node stands."""
    state = {**loader.state_dict(), "epoch": options.epoch, "position": options.position}
    checkpoint = find_checkpoint(run_folder(config)) if options.resume else None
    if checkpoint is not None:
        state = load_state(checkpoint).loader
    cursors = [
        Cursor(loader.plan, loader.plan_key, seed=config.loader.seed, rank=rank, world=options.world)
        for rank in options.ranks
    ]
    for cursor in cursors:
        cursor.load_state_dict(state)
    return cursors


def _first_use(shards: RemoteShards, cursors: Sequence[Cursor], *, steps: int | None) -> Ints:
    """Returns the step of any rank that needs each shard first, int64 [num_shards]; NEVER: none of these steps does.

    steps: how many; None: those of an epoch, at most 100,000, or as many as need more than a node keeps. A shard that
    none of these needs comes last then.
    """
    found: Ints = np.full(len(shards), NEVER, np.int64)
    walks = [shards.ahead(step.samples for step in cursor.ahead()) for cursor in cursors]
    most = min(len(cursors[0]), _MAX_STEPS) if steps is None else steps
    room_bytes = shards.bound_bytes - shards.kept_bytes
    num_bytes = num_shards = 0
    for number, needed in enumerate(itertools.islice(zip(*walks, strict=True), most)):
        for each in needed:
            new = each[found[each] >= NEVER]
            found[new] = number
            num_shards += len(new)
            num_bytes += int(shards.sizes[new].sum())
        if num_shards == shards.num_used or (steps is None and num_bytes > room_bytes):
            break
    if steps is None:
        found[shards.is_used & (found >= NEVER)] = NEVER - 1
    return found


class _Warming:
    """Downloads shards in the order in which they are needed. Threads share it.

    The node is told when each of them is needed, as of any reader, so that none of them is evicted for another one.
    """

    def __init__(self, shards: RemoteShards, first_use: Ints) -> None:
        self.here: list[int] = []
        self._shards, self._first_use = shards, first_use
        self._is_full = False

    def bring(self, needed: Sequence[int], *, progress: bool) -> int:
        """Downloads these shards until there is no room, and returns the bytes that came."""
        sizes = np.cumsum(self._shards.sizes[np.array(needed, np.int64)])
        room_bytes = self._shards.bound_bytes - self._shards.kept_bytes
        may_fit = needed[: int(np.searchsorted(sizes, room_bytes, side="right"))]
        files = [wanted.size_bytes for shard in may_fit for wanted in self._shards.files(shard)]
        with self._told(), Tally(files, label="warm", progress=progress) as self._tally:
            most = self._shards.mirrors[0].settings.max_concurrent
            for_each(self._bring, may_fit, num_threads=most)
            return self._tally.bytes["moved"]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            shards = self._shards
            for cache, mirror, first in zip(shards.caches, shards.mirrors, shards.firsts, strict=False):
                reader = ReaderUses(mirror.node.folder, mirror.folder.name, num_shards=cache.num_units)
                stack.callback(reader.close)
                reader.next_use[:] = self._first_use[first : first + cache.num_units]
            yield

    def _bring(self, shard: int) -> None:
        part, _ = self._shards.place(shard)
        mirror = self._shards.mirrors[part]
        for wanted in self._shards.files(shard):
            if self._is_full:
                return
            if (mirror.folder / wanted.name).is_file():
                self._tally.add("kept", wanted.size_bytes)
            elif mirror.fetch_ahead(wanted, distance=max(1, int(self._first_use[shard]))):
                self._tally.add("moved", wanted.size_bytes)
            else:
                self._is_full = True
                return
        self.here.append(shard)
