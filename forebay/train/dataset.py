"""A source as a map-style dataset, for torch's DataLoader and whatever wraps it.

Packs of a sealed vision cache as an iterable dataset, which needs no config.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import LoaderConfig, stand_in
from forebay.errors import CacheError, CacheNotFoundError, ConfigError
from forebay.plan.cursor import Cursor, CursorStep, FollowedEpochs, Resumable
from forebay.plan.disk import STATISTICS, cache_key_of, is_of_all, pack_settings, planned_samples, read_metadata
from forebay.plan.make import Planned, opened_packs
from forebay.steps.batch import IGNORED
from forebay.steps.image.image_section import image_step_of
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.recipe import AnyConfig, as_config
from forebay.steps.step import Allocate
from forebay.store.cache import Cache, open_cache
from forebay.store.files import TEMPORARY_MARK
from forebay.store.image.codec import FIELDS
from forebay.store.layout import METADATA, PLANS
from forebay.store.lookup import sealed_caches
from forebay.store.memo import note
from forebay.store.remote.foresight import Foresight
from forebay.store.remote.small_files import RemoteRoot
from forebay.store.source import Sample, SampleSource
from forebay.train.augment.draws import Drawing, EpochDraws, Variants
from forebay.train.collate.collator import CropDraws
from forebay.train.collate.packed import PackShapes
from forebay.train.collate.patches import FillerSamples, as_filler, weight_of
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.prefetch import BufferRing
from forebay.train.ranks import resolve_ranks
from forebay.train.select import make_loader, pack_collator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


class SampleDataset(Dataset[dict[str, Any]]):
    """Samples by index, as dicts of tensors that are copies. A `Collator` of the same source is its `collate_fn`."""

    def __init__(self, source: SampleSource, *, crop_seed: int | None = None) -> None:
        """crop_seed: samples have the draw of their crop beside them, for a `Collator` with `crop_s`."""
        self.source = source
        self._crop_seed = crop_seed
        self._draws: CropDraws | None = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes crops those of `epoch`. Call it before the epoch's iterator is made: running workers have a copy."""
        if self._crop_seed is not None:
            self._draws = CropDraws(seed=self._crop_seed, epoch=epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the stored fields of one sample, each [n, *shape]; never aliases of the cache's read-only memory.

        Of images as their processor gives them a field is a tuple, a tensor an image.
        """
        sample, read = self.source.read_one(int(index))
        if self._draws is not None:
            sample = self._draws.beside(sample, self.source.sample_id(read))
        return {name: _copied(value) for name, value in sample.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several samples; DataLoader asks for whole batches in this way."""
        samples = [self[index] for index in indices]
        return samples if weight_of(indices) else FillerSamples(samples)


def _copied(value: Any) -> Any:
    """Returns an array as a tensor of its own; what is a tuple, an array an image, as a tuple of such."""
    return tuple(map(_copied, value)) if isinstance(value, tuple) else torch.from_numpy(value.copy())


class PlanSampler(Resumable):
    """The sample indices of one rank's batches, an epoch an iteration: a `batch_sampler` for torch's DataLoader.

    The batches are those of `Loader` under the same plan, seed and ranks, and so is the state: it goes from one to the
    other, and to another world size; what a DataLoader fetched ahead counts as given. torchdata's StatefulDataLoader
    keeps the state in its own, whatever its workers fetch ahead. What a `SampleDataset` and a `Collator` make of it
    keeps its weight: multiply each loss by `forebay.train.weight_of(batch)`.
    """

    def __init__(
        self,
        planned: Planned,
        *,
        seed: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """dp_rank, dp_world_size, device_mesh: see `resolve_ranks`; left out, they are found.

        Raises ConfigError for ranks that cannot be, PlanError where no rank has a step.
        """
        rank, world = resolve_ranks(dp_rank, dp_world_size, device_mesh=device_mesh)
        self.cursor = Cursor(planned.plan, planned.key, seed=seed, rank=rank, world=world, locality=planned.locality)
        self.sampler = FollowedEpochs(self.cursor)

    @property
    def batch_size(self) -> None:
        """None: batches differ in size. What asks for it wants to share the batches among ranks, which is done already.

        Raises ConfigError where that would be a second time (accelerate's `prepare` of a DataLoader asks).
        """
        if self.cursor.world > 1:
            raise ConfigError(
                f"these batches are already those of dp_rank {self.cursor.rank} of {self.cursor.world}, and sharing "
                "them again would leave samples out; do not give this DataLoader to accelerate's prepare, or make the "
                "PlanSampler "
                "with dp_rank=0, dp_world_size=1"
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.cursor.walk())

    def _batches(self, steps: Iterator[CursorStep]) -> Iterator[list[int]]:
        for step in steps:
            # Before the batch is handed out: whoever asks for the state then has it.
            self.cursor.hand_out(step)
            indices = step.samples.tolist()
            yield indices if step.turn.weight else FillerSamples(indices)


def build_vl_dataloader(
    config: AnyConfig,
    *,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    as_tensordict: bool = False,
    device: torch.device | str | None = None,
) -> Loader:
    """Returns the loader of this rank's packs: `make_loader`, of a config that has `[vision]` and packs.

    Threads fill the packs ahead, from the cache whose key is the config's. Without such a cache the samples are made on
    the fly after one warning that names the command to run, unless `loader.cache` says otherwise. Raises as
    `make_loader`, and ConfigError for a config of another kind.
    """
    config = as_config(config)
    has_images = image_step_of(config) is not None
    if not has_images or config.plan is None or config.plan.kind != "pack":
        found = f"plan.kind = {config.plan and config.plan.kind!r}" if has_images else "no [vision]"
        raise ConfigError(
            f'{config.path}: {found}, wanted [vision] and plan.kind = "pack"; use forebay.train.make_loader for other '
            "configs"
        )
    return make_loader(
        config,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        device_mesh=device_mesh,
        as_tensordict=as_tensordict,
        device=device,
    )


class CachedVLDataset(Resumable, IterableDataset[Batch]):
    """One rank's packed batches of an epoch, in the order of `Loader`; see `PackCollator` for their fields and form.

    For loops that must be given a DataLoader: `DataLoader(dataset, batch_size=None, num_workers=n)`. Workers take
    turns, so the order is the same for any number of them. `make_loader` gives equal batches with threads, without
    copies between processes. States go from one to the other.

    Windows of images (`vision.crops`) are drawn as the loader draws them.

    The next iteration is the next epoch. A DataLoader's workers are copies, and the dataset in the main process stands
    still: call `set_epoch` before each of its epochs, and for states take torchdata's StatefulDataLoader, with which
    every worker keeps its own. An epoch left before its end begins again where it had begun.

    Where an epoch's packs are no multiple of the ranks, `plan.tail` says what its last step has. What only fills it has
    weight 0: multiply each loss by `weight`, or under a DataLoader by `forebay.train.weight_of(batch)`.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        *,
        infinite: bool = False,
        device_mesh: DeviceMesh | None = None,
        plan: str | None = None,
        seq_len: int | None = None,
        seed: int = 0,
        pixels: Literal["uint8", "float32", "float16", "bfloat16"] = "float32",
        varlen: bool = False,
        mask_fillers: bool = False,
        remote: RemoteConfig | None = None,
    ) -> None:
        """Opens cache and plan; no config is needed.

        cache_dir: a cache's folder, whose one plan of packs under `../plans` is taken, or a plan's folder, whose cache
        beside `plans` is taken: of several codecs the one that is read the fastest. A plan of what a `[filter]` left
        is named by its own folder, and gives these samples. A cache may be a URL; its plan is
        then the one that `forebay preprocess`, or a run, has made on this node.
        dp_rank, dp_world_size, device_mesh: see `resolve_ranks`; left out, they are found, here and not in a
        DataLoader's workers.
        plan, seq_len: which of several plans of packs of the cache: the name of its folder, or its `plan.seq_len`.
        infinite: the end of an epoch goes on with the next one. seed: of the order.
        pixels, varlen: as in `[loader]`.
        remote: how the store of a URL is asked; None: the defaults of `[remote]`.
        mask_fillers: packs of weight 0 have all labels -100, see `Loader`.
        Raises CacheNotFoundError where cache or plan is missing, ConfigError where several plans could be meant or a
        value is impossible, CacheMismatchError or CacheCorruptError for folders that are not what was sealed, PlanError
        where no rank has a step.
        """
        rank, world = resolve_ranks(dp_rank, dp_world_size, device_mesh=device_mesh)
        if pixels not in ("uint8", "float32", "float16", "bfloat16"):
            raise ConfigError(f'pixels is "{pixels}", wanted uint8, float32, float16 or bfloat16')
        cache, self.plan_folder = cache_and_plan_folder(
            url_or_path(cache_dir), remote=remote, plan=plan, seq_len=seq_len
        )
        note(cache.folder)
        self.source = planned_samples(self.plan_folder, cache)
        planned, settings = opened_packs(self.plan_folder, self.source)
        self.cursor = Cursor(planned.plan, planned.key, seed=seed, rank=rank, world=world, is_endless=infinite)
        shapes = PackShapes.of(planned.plan, settings, self.source.constants)
        self.collator = pack_collator(LoaderConfig(pixels=pixels, varlen=varlen), self.source, shapes)
        self._variants = Variants.all_of(self.source.constants, self.source.fields.values())
        self._mask_fillers = mask_fillers
        self._weight: int | None = None

    @property
    def weight(self) -> int:
        """The weight of the batch that this object handed out last: 1, or 0 if it only fills the epoch's last step.

        Raises RuntimeError where it handed out none: a DataLoader's workers have copies of it.
        """
        if self._weight is None:
            raise RuntimeError("this dataset has handed out no batch itself; ask forebay.train.weight_of(batch)")
        return self._weight

    def __len__(self) -> int:
        """Steps of this rank, as of every other, in a whole epoch. TypeError under `infinite`."""
        if self.cursor.is_endless:
            raise TypeError("an infinite dataset has no length")
        return len(self.cursor)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        mine = {} if worker is None else {"worker": worker.id, "num_workers": worker.num_workers}
        steps = self.cursor.walk(**mine)
        ahead = Foresight.of(self.source, lambda: (step.samples for step in self.cursor.ahead(**mine)))
        return self._batches(steps, ahead)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values: the state of a `Loader`, good for any number of ranks.

        In a DataLoader's worker: where its own next batch is, good for the same number of workers.
        """
        return self.cursor.state_dict(num_workers=_num_workers())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin at the batch that `state` names; its seed becomes the dataset's.

        Raises ResumeError as `Loader` does, and for a worker's state where there is another number of workers.
        """
        self.cursor.load_state_dict(state, num_workers=_num_workers())

    def __getstate__(self) -> dict[str, Any]:
        cursor = copy.copy(self.cursor)
        cursor.plan = None  # type: ignore[assignment]  # mapped from its folder again, not copied
        return {**self.__dict__, "cursor": cursor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.cursor.plan = opened_packs(self.plan_folder, self.source)[0].plan

    def _batches(self, steps: Iterator[CursorStep], foresight: Foresight | None) -> Iterator[Batch]:
        allocate = BufferRing(max_free=4).take
        try:
            for number, step in enumerate(steps):
                # Before the batch is handed out: whoever asks for the state then has it.
                self.cursor.hand_out(step)
                self._weight = step.turn.weight
                yield self._batch(step, allocate)  # no name on it here: its buffers are free when the user drops it
                if foresight is not None:
                    foresight.done(number)
        finally:
            if foresight is not None:
                foresight.close()

    def _batch(self, step: CursorStep, allocate: Allocate) -> Batch:
        indices = step.samples.tolist()
        samples: Sequence[Sample] = [self.source.read(index) for index in indices]
        for variants in self._variants:
            draws = EpochDraws(step.place.seed, step.place.epoch)
            samples = variants.chosen(samples, Drawing([*map(self.source.sample_id, indices)], draws))
        batch = self.collator.collate(samples, allocate=allocate)
        if self._mask_fillers and not step.turn.weight:
            batch["labels"].fill_(IGNORED)
        return batch if step.turn.weight else as_filler(batch)


def _num_workers() -> int:
    worker = get_worker_info()
    return 0 if worker is None else worker.num_workers


def cache_and_plan_folder(
    place: str, *, remote: RemoteConfig | None = None, plan: str | None = None, seq_len: int | None = None
) -> tuple[Cache, Path]:
    """Returns the cache that a folder or URL is, or whose plan of packs it is, and the plan's folder.

    A cache's plan is the one of packs under `../plans`; a plan's cache lies beside `plans`: of several codecs the one
    that is read the fastest. Of a URL the plan lies where this node keeps what it makes for the root of the URL. Raises
    CacheNotFoundError where either is missing, ConfigError where several plans could be meant or the cache holds no
    images, CacheMismatchError or CacheCorruptError for a folder that is not what was sealed.
    """
    folder = Path(place).absolute()
    if not is_url(place) and (folder / STATISTICS).is_file():
        return _cache_of(folder), folder
    cache = open_cache(place if is_url(place) else folder, remote=remote)
    if (found := cache.constants.get("features")) != Patches.name:
        raise ConfigError(f"{cache.place} is no cache of images: features are {found!r}, wanted {Patches.name!r}")
    return cache, _plan_of(cache, name=plan, seq_len=seq_len)


def _cache_of(plan: Path) -> Cache:
    pack_settings(plan)  # it is one of packs
    key, root = cache_key_of(read_metadata(plan)), plan.parent.parent
    found = [sealed for sealed in sealed_caches(root) if sealed.key == key]
    stands_for = RemoteRoot.of(root)
    if not found:
        searched = root if stands_for is None else stands_for.url
        raise CacheNotFoundError(f"{plan}: its cache {key[:16]} is not in {searched}; run: forebay preprocess CONFIG")
    codecs = list(FIELDS)  # the quickest to read first
    fastest = min(found, key=lambda sealed: codecs.index(sealed.metadata["codec"]))
    return open_cache(fastest.place, remote=None if stands_for is None else stands_for.settings)


def _plan_of(cache: Cache, *, name: str | None, seq_len: int | None) -> Path:
    found: dict[Path, int] = {}
    chosen, root = [], cache.folder.parent
    if cache.mirror is not None:
        root = stand_in(str(cache.mirror.url.parent), cache.mirror.settings)
    for path in sorted((root / PLANS).glob(f"*/{METADATA}")):
        try:
            if TEMPORARY_MARK in path.parent.name:
                continue
            _, settings = pack_settings(path.parent)
            metadata = read_metadata(path.parent)
            if cache_key_of(metadata) != cache.key:
                continue
            if is_of_all(metadata):
                found[path.parent] = settings.seq_len
            else:
                chosen.append(path.parent.name)
        except CacheError as err:  # of buckets, or damaged
            logger.info("leaving out a plan: %s", err)
    if not found and chosen:
        raise CacheNotFoundError(
            f"no plan of packs for all samples of {cache.place} in {root / PLANS}; plans of what a [filter] left are "
            f"there: {', '.join(chosen)}; name one: {root / PLANS}/..."
        )
    if not found:
        raise CacheNotFoundError(
            f"no plan of packs for {cache.place} in {root / PLANS}; run: forebay preprocess CONFIG, "
            'with [plan] kind = "pack"'
        )
    wanted = [path for path, length in found.items() if name in (None, path.name) and seq_len in (None, length)]
    if len(wanted) != 1:
        there = ", ".join(f"{path.name} (seq_len {length})" for path, length in found.items())
        asked = "several plans" if wanted else f"no plan of plan={name!r}, seq_len={seq_len}"
        raise ConfigError(
            f'{cache.place} has {asked}: {there}; give plan="..." or seq_len=..., or name one: {root / PLANS}/...'
        )
    return wanted[0]
