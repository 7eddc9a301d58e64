"""The samples of a source as a tensordict that reads each of them when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol, overload

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

_READ_ONLY = (
    "the samples of a cache are read and not written; take copies first: td[i] is one, and td[i:j].clone() are several"
)


class Readable(Protocol):
    """A source that samples are read of."""

    def arrays(self, index: int) -> dict[str, Any]:
        """Returns the tensor fields of one sample as arrays."""


class Members(Sequence[TensorDict]):
    """Samples as tensordicts, each read when it is asked for; nothing is kept."""

    def __init__(self, source: Readable, places: Sequence[int]) -> None:
        """places: the indices of the samples in the source."""
        self.source, self.places = source, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TensorDict: ...
    @overload
    def __getitem__(self, index: slice) -> Members: ...
    def __getitem__(self, index: int | slice) -> TensorDict | Members:
        if isinstance(index, slice):
            return Members(self.source, self.places[index])
        arrays = self.source.arrays(self.places[index])
        return TensorDict({name: torch.from_numpy(value.copy()) for name, value in arrays.items()}, batch_size=[])

    def field(self, name: str) -> Iterator[TensorDict]:
        """Yields one field of each sample; the bytes of the others are not copied."""
        for place in self.places:
            yield TensorDict({name: torch.from_numpy(self.source.arrays(place)[name].copy())}, batch_size=[])


class SamplesTensorDict(LazyStackedTensorDict):  # type: ignore[misc]  # tensordict has no types
    """The samples of a source, stacked lazily: `td[3]` reads sample 3 and nothing else.

    A plain LazyStackedTensorDict holds its members. This one holds none: each time that a sample is asked for, it is
    read anew, and what is handed out is a copy.

    - `len(td)`, `td.batch_size`, `td.keys()` and `repr(td)` read no sample, or at most one.
    - `td[3]` is a TensorDict. `td[2:5]`, `td[[1, 4]]` are plain LazyStackedTensorDicts of samples that are read then.
    - Iteration reads sample by sample.
    - `td["input_ids"]` reads that field of every sample and stacks them. Where samples differ in length, as most do,
      it raises an error that says so; `td.get("input_ids", as_nested_tensor=True)`, `as_padded_tensor=True` or
      `as_list=True` take them as they are.
    - Writing raises RuntimeError.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a plain stack where tensordict makes a new one of this class of tensordicts that it has changed."""
        is_stack = not args or isinstance(args[0], TensorDictBase)
        return LazyStackedTensorDict(*args, **kwargs) if is_stack else super().__new__(cls)

    def __init__(self, source: Readable, places: Sequence[int]) -> None:
        """places: the indices of the samples in the source."""
        super().__init__(batch_size=[])
        self._fields: list[str] | None = None
        self.tensordicts = Members(source, places)
        self._batch_size = torch.Size([len(places)])

    def __repr__(self) -> str:
        members = self.tensordicts
        return f"SamplesTensorDict({', '.join(self._key_list())}; batch_size=[{len(members)}], of {members.source!r})"

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(self.tensordicts)

    def __reduce__(self) -> Any:
        return SamplesTensorDict, (self.tensordicts.source, self.tensordicts.places)

    @property
    def device(self) -> None:
        """None: samples are read to the host, and a device was asked for by nobody."""
        return None

    @property
    def names(self) -> list[None]:
        """No name for the one dimension."""
        return [None]

    @property
    def is_locked(self) -> bool:
        """False: what is taken of the samples may be changed."""
        return False

    def _has_names(self) -> bool:
        return False

    def _key_list(self) -> list[str]:
        if self._fields is None:
            members = self.tensordicts
            self._fields = list(members[0].keys()) if len(members) else []
        return self._fields

    def _maybe_get_list(self, key: str) -> list[torch.Tensor] | None:
        if key not in self._key_list():
            return None
        return [each[key] for each in self.tensordicts.field(key)]

    def _get_str(self, key: str, default: Any = None, **form: Any) -> Any:
        if key not in self._key_list():
            return super()._get_str(key, default, **form)
        return LazyStackedTensorDict(*self.tensordicts.field(key))._get_str(key, default, **form)

    def _clone(self, recurse: bool = True) -> LazyStackedTensorDict:  # noqa: FBT001, FBT002  tensordict's own
        return LazyStackedTensorDict(*self.tensordicts) if recurse else SamplesTensorDict(*self.__reduce__()[1])

    @property
    def _reads_return_copies(self) -> bool:
        return True

    def _storage_is_read_only(self) -> bool:
        return True

    def lock_(self, *_: Any, **__: Any) -> SamplesTensorDict:
        """Returns the samples as they are: nobody can write to them."""
        return self


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(_READ_ONLY)


_WRITING = {name for name in dir(LazyStackedTensorDict) if name.endswith("_") and not name.startswith("_")} - {"lock_"}
_WRITING |= {"append", "insert", "extend", "pop", "popitem", "clear", "setdefault", "update", "set", "set_non_tensor"}
_WRITING |= {"__setitem__", "__delitem__", "_set_str", "_set_tuple", "_set_at_str", "_set_at_tuple", "_set_device"}
for _name in _WRITING:
    setattr(SamplesTensorDict, _name, _refuse)
