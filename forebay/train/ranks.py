"""Which ranks share the batches, and which of them this process is: found from what runs here, never assumed."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forebay.errors import ConfigError
from forebay.plan.cursor import check_ranks

logger = logging.getLogger(__name__)

DATA_DIMENSIONS = frozenset(
    (
        *("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "batch", "replicate", "shard"),
        *("dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep"),
    )
)
"""Names of mesh dimensions along which every rank reads other data."""
MODEL_DIMENSIONS = frozenset(
    (
        *("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp"),
        *("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel"),
        *("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    )
)
"""Names of mesh dimensions along which all ranks read the same data."""

_LAUNCHED = "PARALLELISM_CONFIG_{}_SIZE"
"""How `accelerate launch` tells its processes what their Accelerator will split."""


class Ranks(NamedTuple):
    """The data-parallel ranks, and this process among them."""

    dp_rank: int
    dp_world_size: int


class _World(NamedTuple):
    """All processes of a run, those of one model replica included; rank None: not told."""

    rank: int | None
    size: int
    origin: str


def resolve_ranks(dp_rank: int | None = None, dp_world_size: int | None = None, *, device_mesh: Any = None) -> Ranks:
    """Returns the rank whose batches this process takes, out of how many.

    dp_rank, dp_world_size: both, and they win; or neither. device_mesh: a torch DeviceMesh, whose data-parallel
    dimensions (DATA_DIMENSIONS) are taken, the first the slowest. Without any of them: torch.distributed where it is
    initialised, else RANK and WORLD_SIZE, else 0 of 1. Raises ConfigError for a rank that is none of so many, a
    dp_world_size that does not divide the world, one of the two alone, a mesh that does not say which ranks read other
    data, and where nothing is given and ranks share a model (tensor, context, sequence or pipeline parallelism).
    """
    if dp_rank is not None and dp_world_size is not None:
        return _given(dp_rank, dp_world_size)
    if dp_rank is not None or dp_world_size is not None:
        raise _refused(
            f"dp_rank is {dp_rank} and dp_world_size is {dp_world_size}: give both, or neither, and they are found"
        )
    if device_mesh is not None:
        return _of_mesh(device_mesh)
    world = _world()
    if world is None:
        return Ranks(0, 1)
    if world.rank is None:
        raise _refused(
            f"WORLD_SIZE is {world.size} and RANK is not set; start with torchrun, or give dp_rank and dp_world_size"
        )
    if world.size > 1:
        _refuse_shared_models(world)
    logger.info("dp_rank %d of %d, from %s", world.rank, world.size, world.origin)
    return Ranks(world.rank, world.size)


def _given(dp_rank: int, dp_world_size: int) -> Ranks:
    check_ranks(dp_rank, dp_world_size)
    world = _world()
    if world is not None and world.size % dp_world_size:
        raise _refused(
            f"dp_world_size is {dp_world_size}, which does not divide the {world.size} processes of {world.origin}: "
            "ranks of one model replica read the same data, so replicas are of equal size"
        )
    return Ranks(int(dp_rank), int(dp_world_size))


def _world() -> _World | None:
    """Returns all processes of this run; None where nothing tells of others."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return _World(dist.get_rank(), dist.get_world_size(), "torch.distributed")
    rank, size = _from_environment("RANK", low=0), _from_environment("WORLD_SIZE", low=1)
    if size is None:
        if rank is not None:
            raise _refused(f"RANK is {rank} and WORLD_SIZE is not set; start with torchrun, or set both, or neither")
        return None
    if rank is not None and rank >= size:
        raise _refused(f"RANK is {rank} and WORLD_SIZE is {size}; start with torchrun, or mend these variables")
    return _World(0 if size == 1 else rank, size, "RANK and WORLD_SIZE")


def _from_environment(name: str, *, low: int) -> int | None:
    written = os.environ.get(name, "").strip()
    if not written:
        return None
    if not written.isascii() or not written.isdecimal() or int(written) < low:
        raise _refused(f"{name} is {written!r} in the environment, wanted an integer from {low} on")
    return int(written)


def _of_mesh(mesh: Any) -> Ranks:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise _refused(f"device_mesh is a {type(mesh).__name__}, wanted a torch.distributed.device_mesh.DeviceMesh")
    places = mesh.get_coordinate()
    if places is None:
        raise _refused(f"this process is in no place of device_mesh {mesh}; give it the mesh of its own ranks")
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    if names is None and len(sizes) == 1:
        return Ranks(places[0], sizes[0])
    if names is None:
        raise _refused(
            f"device_mesh has {len(sizes)} dimensions without names, so which ranks read other data is not known; name "
            'them (mesh_dim_names=("dp", "tp")), or give dp_rank and dp_world_size'
        )
    unknown = [name for name, size in zip(names, sizes, strict=True) if size > 1 and not _is_known(name)]
    taken = [number for number, name in enumerate(names) if name in DATA_DIMENSIONS]
    if unknown or not taken:
        what = f"a dimension {unknown[0]!r} that says nothing here" if unknown else "no dimension of data parallelism"
        raise _refused(
            f"device_mesh has {what} (its names are {', '.join(names)}; "
            f"known are {', '.join(sorted(DATA_DIMENSIONS))}); "
            'give the part of it that reads other data, as in mesh["dp"], or dp_rank and dp_world_size'
        )
    rank, size = 0, 1
    for number in taken:
        rank, size = rank * sizes[number] + places[number], size * sizes[number]
    return Ranks(rank, size)


def _is_known(name: str) -> bool:
    return name in DATA_DIMENSIONS or name in MODEL_DIMENSIONS


def _refuse_shared_models(world: _World) -> None:
    """Raises ConfigError where ranks hold parts of one model and therefore must read the same data."""
    for who, sizes in _parallelisms():
        shared = {name: size for name, size in sizes.items() if size > 1}
        if shared:
            found = ", ".join(f"{name} of {size}" for name, size in shared.items())
            raise _refused(
                f"{who} splits the model over ranks ({found}), and ranks of one model read the same data; give "
                f"device_mesh=..., or dp_rank and dp_world_size, instead of the {world.size} ranks of {world.origin}"
            )


def _parallelisms() -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yields who splits models here and how, as far as that is loaded; nothing is imported for it."""
    for mesh in _live_meshes():
        names = mesh.mesh_dim_names or ()
        yield (
            f"the DeviceMesh ({', '.join(names)})",
            {name: size for name, size in zip(names, mesh.shape, strict=False) if name in MODEL_DIMENSIONS},
        )
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        kinds = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        yield "Megatron", {kind: getattr(megatron, f"get_{kind}_world_size")() for kind in kinds}
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        settings = accelerate.AcceleratorState._shared_state.get("parallelism_config")
        sizes = {kind: getattr(settings, f"{kind}_size", None) or 1 for kind in ("tp", "cp", "sp")}
        yield "accelerate's parallelism_config", sizes
    launched = {kind: os.environ.get(_LAUNCHED.format(kind), "") for kind in ("TP", "CP", "SP")}
    yield "accelerate launch", {kind: int(size) for kind, size in launched.items() if size.isdecimal()}


def _live_meshes() -> list[Any]:
    # torch keeps no list of its meshes, and the group of a dimension that spans the world is the world's own, without
    # its name. A tensor-parallel model holds its mesh, so the collector knows it: some tenths of a second, once a
    # loader of several ranks.
    module = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(module, "DeviceMesh", None)
    return [found for found in gc.get_objects() if type(found) is kind] if kind is not None else []


def _refused(what: str) -> ConfigError:
    return ConfigError(what, code="FB705")
