"""Packs of a sealed vision cache as an iterable dataset, for torch's DataLoader and whatever wraps it.

From the folder of a vision cache to its plan of packs, and back: without a config.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from forebay.config.plan import PlanConfig
from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import CacheError, CacheNotFoundError, ConfigError, PlanError, ResumeError
from forebay.plan.cursor import LoaderState, next_position, num_steps, turn
from forebay.plan.disk import METADATA, STATISTICS, AnyPlan, load_plan, pack_settings, plan_key
from forebay.plan.make import key_of
from forebay.steps.batch import IGNORED
from forebay.steps.step import Allocate
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import FIELDS
from forebay.store.lookup import sealed_caches
from forebay.store.temporary import TEMPORARY_MARK
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.ranks import resolve_ranks
from forebay.train.ring import BufferRing
from forebay.train.select import make_loader, pack_collator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NUM_WORKERS = "num_workers"
"""In the state of a DataLoader's worker: how many there are. `position` is then that of the worker's own next batch."""


_KEPT_BUFFERS = 4


def build_vl_dataloader(
    config: Config,
    *,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    as_tensordict: bool = False,
    device: torch.device | str | None = None,
) -> Loader:
    """Returns the loader of this rank's packs: `make_loader`, of a config that has `[vision]` and packs.

    From the cache that answers the config, filled ahead by threads; without one, uncached after one warning that names the
    command to run, unless `train.cache` says otherwise. Raises as `make_loader`, and ConfigError for a config of another kind.
    """
    if config.vision is None or config.plan is None or config.plan.kind != "pack":
        found = "no [vision]" if config.vision is None else f"plan.kind = {config.plan and config.plan.kind!r}"
        raise ConfigError(
            f'{config.path}: {found}, wanted [vision] and plan.kind = "pack"; use forebay.train.make_loader for other configs'
        )
    return make_loader(
        config,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        device_mesh=device_mesh,
        as_tensordict=as_tensordict,
        device=device,
    )


class CachedVLDataset(IterableDataset[Batch]):
    """One rank's packed batches of an epoch, in the order of `Loader`; see `PackCollator` for their fields and form.

    For loops that must be given a DataLoader: `DataLoader(dataset, batch_size=None, num_workers=n)`. Workers take turns, so
    the order is the same for any number of them. `make_loader` gives equal batches with threads, without copies between
    processes. States go from one to the other.

    The next iteration is the next epoch. A DataLoader's workers are copies, and the dataset in the main process stands
    still: call `set_epoch` before each of its epochs, and for states take torchdata's StatefulDataLoader, with which every
    worker keeps its own. An epoch left before its end begins again where it had begun.

    Where an epoch's packs are no multiple of the ranks, its last step has packs of its head (`plan.tail` "short" and "pad"),
    or is left out ("drop").
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        infinite: bool = False,
        *,
        device_mesh: DeviceMesh | None = None,
        seed: int = 0,
        pixels: Literal["uint8", "float32", "float16", "bfloat16"] = "float32",
        pack_shapes: Literal["natural", "fixed"] = "natural",
        patch_classes: int = 8,
        varlen: bool = False,
        mask_fillers: bool = False,
    ) -> None:
        """Opens cache and plan; no config is needed.

        cache_dir: a cache's folder, whose one plan of packs under `../plans` is taken, or a plan's folder, whose cache beside
        `plans` is taken: of several codecs the one that is read the fastest.
        dp_rank, dp_world_size, device_mesh: see `resolve_ranks`; left out, they are found, here and not in a DataLoader's
        workers.
        infinite: the end of an epoch goes on with the next one. seed: of the order.
        pixels, pack_shapes, patch_classes, varlen: as in `[train]`.
        mask_fillers: packs of the head that fill the last step under tail "short" have all labels -100, see `Loader`.
        Raises CacheNotFoundError where cache or plan is missing, ConfigError where several plans could be meant or a value is
        impossible, CacheMismatchError or CacheCorruptError for folders that are not what was sealed, PlanError where no rank
        has a step.
        """
        self.dp_rank, self.dp_world_size = resolve_ranks(dp_rank, dp_world_size, device_mesh=device_mesh)
        if pixels not in ("uint8", "float32", "float16", "bfloat16") or pack_shapes not in ("natural", "fixed"):
            raise ConfigError(
                f'pixels is "{pixels}", wanted uint8, float32, float16 or bfloat16; pack_shapes is "{pack_shapes}", wanted '
                "natural or fixed"
            )
        self.source, self.plan_folder = cache_and_plan_folder(Path(cache_dir).absolute())
        self.plan, settings = self._open_plan()
        self.plan_key = key_of(self.plan, self.plan_folder, source=self.source, settings=settings)
        self._earlier_key = plan_key(self.source.key, settings)
        self.seed, self.infinite = seed, infinite
        wanted = TrainConfig(pixels=pixels, pack_shapes=pack_shapes, patch_classes=patch_classes, varlen=varlen)
        self.collator = pack_collator(wanted, settings, self.source)
        self._mask_fillers = mask_fillers
        self._start = self._next = LoaderState(plan_key=self.plan_key, seed=seed, epoch=0, position=0)
        self._is_own = False  # whether `_start` is the next batch of this worker, not of all of them
        if not self._steps_left(self._start):
            raise PlanError(
                f'{self.plan.num_batches} packs are no full step of {self.dp_world_size} ranks and plan.tail is "drop": '
                'use fewer ranks, or plan.tail = "short"'
            )

    def __len__(self) -> int:
        """Steps of this rank, as of every other, in a whole epoch. TypeError under `infinite`."""
        if self.infinite:
            raise TypeError("an infinite dataset has no length")
        return self._steps_left(self._start.at(0))

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        stride, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        place = self._next = self._after(self._start, 0 if self._is_own else first)
        if not self._steps_left(place):
            self._end(place)
        return self._batches(place, stride=stride)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`, from its head; in the epoch where it stands nothing changes."""
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}, wanted 0 or more")
        if epoch != self._start.epoch:
            self._stand_at(LoaderState(plan_key=self.plan_key, seed=self.seed, epoch=epoch, position=0))

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values: the state of a `Loader`, good for any number of ranks.

        In a DataLoader's worker: where its own next batch is, good for the same number of workers.
        """
        worker = get_worker_info()
        return self._next.to_json() | ({} if worker is None else {_NUM_WORKERS: worker.num_workers})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin at the batch that `state` names; its seed becomes the dataset's.

        Raises ResumeError as `Loader` does, and for a worker's state where there is another number of workers.
        """
        loaded = LoaderState.from_json(
            state, plan_key=self.plan_key, num_batches=self.plan.num_batches, earlier_key=self._earlier_key
        )
        stored, worker = state.get(_NUM_WORKERS), get_worker_info()
        if stored is not None and stored != (worker.num_workers if worker else 0):
            raise ResumeError(
                f"loader state: it is that of one of {stored} workers, here are {worker.num_workers if worker else 0}; "
                f"resume with num_workers = {stored}"
            )
        self.seed = loaded.seed
        is_own = stored is not None
        # A worker at its end stays there: the others still have batches of this epoch.
        self._stand_at(loaded if is_own or self._steps_left(loaded) else loaded.next_epoch(), is_own=is_own)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None}  # mapped from its folder again, not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.plan, _ = self._open_plan()

    def _open_plan(self) -> tuple[AnyPlan, PlanConfig]:
        _, settings = pack_settings(self.plan_folder)
        key, count = self.source.key, len(self.source)
        return load_plan(self.plan_folder, cache_key=key, settings=settings, num_samples=count), settings

    def _batches(self, place: LoaderState, *, stride: int) -> Iterator[Batch]:
        """Yields the batch at `place` and every `stride`-th of this rank behind it."""
        allocate = BufferRing(max_free=_KEPT_BUFFERS).take
        while self._steps_left(place):
            following = self._after(place, stride)
            # Before the batch is handed out: whoever asks for the state then has it.
            self._next = following
            if not self._steps_left(following):
                self._end(following)
            yield self._batch(place, allocate)
            place = following

    def _batch(self, place: LoaderState, allocate: Allocate) -> Batch:
        mine = turn(
            self.plan.num_batches,
            0,
            dp_rank=self.dp_rank,
            dp_world_size=self.dp_world_size,
            tail=self.plan.tail,
            start=place.position,
        )
        indices = self.plan.order(place.seed, place.epoch).batch(mine.position)
        batch = self.collator.collate([self.source.read(index) for index in indices.tolist()], allocate=allocate)
        if self._mask_fillers and not mine.weight:
            batch["labels"].fill_(IGNORED)
        return batch

    def _after(self, place: LoaderState, steps: int) -> LoaderState:
        """Returns where a rank is `steps` steps behind `place`: at most at the end of its epoch, unless `infinite`."""
        while self.infinite and steps >= (left := self._steps_left(place)):
            place, steps = place.next_epoch(), steps - left
        steps = min(steps, self._steps_left(place))
        count, world = self.plan.num_batches, self.dp_world_size
        return place.at(next_position(count, steps, dp_world_size=world, start=place.position))

    def _end(self, place: LoaderState) -> None:
        """Makes the next iteration the next epoch; a worker still says that it is at the end of this one."""
        self._start, self._is_own = place.next_epoch(), False
        if get_worker_info() is None:
            self._next = self._start

    def _stand_at(self, state: LoaderState, *, is_own: bool = False) -> None:
        self._start = self._next = state
        self._is_own = is_own

    def _steps_left(self, state: LoaderState) -> int:
        return num_steps(self.plan.num_batches, self.dp_world_size, tail=self.plan.tail, start=state.position)


logger = logging.getLogger(__name__)


def cache_and_plan_folder(folder: Path) -> tuple[Cache, Path]:
    """Returns the cache that `folder` is, or whose plan of packs it is, and the plan's folder.

    A cache's plan is the one of packs under `../plans`; a plan's cache lies beside `plans`: of several codecs the one that
    is read the fastest. Raises CacheNotFoundError where either is missing, ConfigError where several plans could be meant or
    the cache holds no images, CacheMismatchError or CacheCorruptError for a folder that is not what was sealed.
    """
    if (folder / STATISTICS).is_file():
        return _cache_of(folder), folder
    cache = open_cache(folder)
    if cache.constants.get("features") != "patches":
        raise ConfigError(
            f"{folder} is no cache of images: features are {cache.constants.get('features')!r}, wanted 'patches'"
        )
    return cache, _plan_of(cache)


def _cache_of(plan: Path) -> Cache:
    key, root = pack_settings(plan)[0], plan.parent.parent
    found = [sealed for sealed in sealed_caches(root) if sealed.key == key]
    if not found:
        raise CacheNotFoundError(f"{plan}: its cache {key[:16]} is not in {root}; run: forebay preprocess CONFIG")
    codecs = list(FIELDS)  # the quickest to read first
    fastest = min(found, key=lambda sealed: codecs.index(sealed.metadata["codec"]))
    return open_cache(fastest.folder)


def _plan_of(cache: Cache) -> Path:
    found = []
    for path in sorted((cache.folder.parent / "plans").glob(f"*/{METADATA}")):
        try:
            if TEMPORARY_MARK not in path.parent.name and pack_settings(path.parent)[0] == cache.key:
                found.append(path.parent)
        except CacheError as err:  # of buckets, or damaged
            logger.info("leaving out a plan: %s", err)
    if not found:
        raise CacheNotFoundError(
            f"no plan of packs for {cache.folder} in {cache.folder.parent / 'plans'}; run: forebay preprocess CONFIG, with "
            '[plan] kind = "pack"'
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{cache.folder} has several plans: {names}; name one: {cache.folder.parent}/plans/...")
    return found[0]
