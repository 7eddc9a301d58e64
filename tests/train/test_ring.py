from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from forebay.train.prefetch import BufferRing


def make_ring(max_free: int = 8) -> BufferRing:
    return BufferRing(max_free=max_free, least_bytes=0)


def test_a_dropped_tensor_lends_its_memory_to_the_next() -> None:
    ring = make_ring()
    first = ring.take("x", (4, 100), dtype=torch.float32)
    address = first.data_ptr()
    del first
    second = ring.take("x", (3, 50), dtype=torch.float32)
    assert second.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (0,), (2, 0)])
def test_tensors_are_contiguous_writable_and_their_storage_is_theirs_alone(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = make_ring().take("x", shape, dtype=dtype)
    tensor.fill_(3)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert (tensor == 3).all()
    assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize  # torch.save keeps no more than this


VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda t: t,
    "slice": lambda t: t[1:2],
    "row": lambda t: t[0],
    "transpose": lambda t: t.T,
    "view": lambda t: t.view(-1),
    "flat slice of a slice": lambda t: t[1:].view(-1)[3:5],
    "other dtype": lambda t: t.view(torch.int32),
    "expand": lambda t: t[:1].expand(7, -1),
    "unbind": lambda t: t.unbind(0)[1],
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: t.numpy()[1:, 2:],
    "numpy of a slice": lambda t: t[1:, 2:].numpy(),
    "memoryview": lambda t: t.numpy().data,
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(t),
    "dlpack to numpy": lambda t: np.from_dlpack(t),
    "as_strided": lambda t: t.as_strided((2,), (1,)),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "TensorDict": lambda t: TensorDict({"x": t}, batch_size=[t.shape[0]]),
    "row of a TensorDict": lambda t: TensorDict({"x": t}, batch_size=[t.shape[0]])[1],
    "nested in lists": lambda t: [{"a": (t[0],)}],
    "graph": lambda t: (torch.ones(5, requires_grad=True) * t).sum(),
    "graph over a view": lambda t: (torch.ones(5, requires_grad=True) * t[1]).exp(),
    "closure": lambda t: lambda: t,
    "hook": lambda t: _with_hook(t),
}


def _with_hook(t: torch.Tensor) -> torch.Tensor:
    leaf = torch.zeros(3, 5, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda gradient: gradient + t)
    return product


@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_not_lent_again_while_anything_sees_it(name: str) -> None:
    ring = make_ring()
    tensor = ring.take("x", (3, 5), dtype=torch.float32)
    tensor.fill_(7)
    address = tensor.data_ptr()
    kept = VIEWS[name](tensor)
    del tensor
    others = [ring.take("x", (3, 5), dtype=torch.float32).fill_(-1) for _ in range(5)]
    assert address not in [other.data_ptr() for other in others]
    del others, kept  # in this order: the buffer returned last is lent first
    assert ring.take("x", (3, 5), dtype=torch.float32).data_ptr() == address


def test_refilling_before_backward_does_not_change_the_gradient() -> None:
    ring = make_ring()
    weight = torch.ones(5, requires_grad=True)
    losses = []
    for value in range(4):
        batch = ring.take("x", (3, 5), dtype=torch.float32).fill_(value)
        losses.append((weight * batch).sum())  # backward will read the batch
        del batch
    for value, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.tolist() == [3.0 * value] * 5


def test_fields_come_back_one_by_one() -> None:
    ring = make_ring()
    features, labels = ring.take("features", (4,), dtype=torch.float32), ring.take("labels", (4,), dtype=torch.int64)
    kept, freed = labels.data_ptr(), features.data_ptr()
    del features
    assert ring.take("features", (4,), dtype=torch.float32).data_ptr() == freed
    assert ring.take("labels", (4,), dtype=torch.int64).data_ptr() != kept


def test_no_more_than_max_free_buffers_are_kept() -> None:
    ring = make_ring(max_free=2)
    tensors = [ring.take("x", (1 << 20,), dtype=torch.uint8) for _ in range(6)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    assert len(addresses) == 6
    del tensors
    # Both kept ones are lent first; what went back to the system may come from there again, so only the count counts.
    shelf = ring._shelves["x"]
    assert len(shelf.free) == 2
    again = [ring.take("x", (1 << 20,), dtype=torch.uint8) for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    assert len(shelf.free) == 0


def test_buffers_grow_to_the_largest_batch_and_then_stay() -> None:
    ring = make_ring()
    for size in (10, 1_000, 20):
        ring.take("x", (size,), dtype=torch.uint8).fill_(0)
    large = ring.take("x", (1_000,), dtype=torch.uint8)
    address = large.data_ptr()
    del large
    addresses = {ring.take("x", (size,), dtype=torch.uint8).data_ptr() for size in (1, 1_000, 500, 1_200)}
    assert addresses == {address}


def test_a_loan_outlives_its_ring() -> None:
    ring = make_ring()
    tensor = ring.take("x", (1_000,), dtype=torch.int64).fill_(5)
    del ring
    gc.collect()
    noise = [np.full(8_000, 255, dtype=np.uint8) for _ in range(20)]
    assert (tensor == 5).all()
    assert len(noise) == 20


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["keep", "drop"]), st.integers(1, 200)), min_size=1, max_size=60
    )
)
def test_living_tensors_never_share_memory(actions: list[tuple[int, str, int]]) -> None:
    ring = make_ring(max_free=3)
    held: dict[int, tuple[torch.Tensor, int]] = {}
    for value, (slot, action, size) in enumerate(actions):
        if action == "drop":
            held.pop(slot, None)
        else:
            tensor = ring.take("x", (size,), dtype=torch.int64).fill_(value)
            held[slot] = (tensor[size // 2 :], value)  # only a view stays
        for view, expected in held.values():
            assert (view == expected).all()


def test_threads_share_a_ring() -> None:
    ring = make_ring(max_free=3)
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(300):
            tensor = ring.take("x", (64 + i % 7,), dtype=torch.int64).fill_(number)
            view = tensor[::2]
            del tensor
            if not (view == number).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_comes_back_from_a_reference_cycle() -> None:
    ring = make_ring()
    tensor = ring.take("x", (10,), dtype=torch.float32)
    address = tensor.data_ptr()
    cycle: list[object] = [tensor]
    cycle.append(cycle)
    del tensor, cycle
    gc.collect()
    assert ring.take("x", (10,), dtype=torch.float32).data_ptr() == address


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 5_000_000])
def test_tensors_begin_at_a_cache_line(size: int) -> None:
    ring = make_ring()
    kept = [ring.take("x", (size + number,), dtype=torch.uint8) for number in range(4)]
    assert [tensor.data_ptr() % 64 for tensor in kept] == [0] * 4
    for number, tensor in enumerate(kept):
        tensor.fill_(number)
    assert [set(tensor[:: max(1, size // 7)].tolist()) for tensor in kept] == [{0}, {1}, {2}, {3}]
