"""A change that is a function of the user, in the loader's threads or in processes of its own."""

from __future__ import annotations

import multiprocessing
import signal
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.code import Asker, not_allowed, source_of, spec_problem
from forebay.config.train import AugmentConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.run_code import CodeError, loaded, refusing
from forebay.train.augment.draws import Draws, generator_of


@dataclass(frozen=True, slots=True)
class _Code:
    """The bytes of a file, its path, and the name of a function in it."""

    content: bytes
    path: str
    name: str


class OwnFunction:
    """`function(fields, rng)`: the stored fields of a sample, arrays by name, and a `numpy.random.Generator` -> fields.

    What it returns has the same fields, dtypes and inner shapes; lengths only with `changes_length`. Arrays of the
    cache are read-only.
    """

    def __init__(self, code: _Code, setting: str, *, processes: int, changes_length: bool) -> None:
        """Loads the code here too, so that what is wrong with it is said at once. Raises ConfigError."""
        self._code, self._setting, self._changes_length = code, setting, changes_length
        self._called = f"{setting} ({Path(code.path).name}:{code.name})"
        try:
            self._function = loaded(code.content, code.path, code.name)
        except CodeError as err:
            raise ConfigError(f"{setting}: {code.path}: {err}", code="FB146") from err
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            context = multiprocessing.get_context("forkserver")
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_load, initargs=(code,))
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    @classmethod
    def of(cls, config: Config, settings: AugmentConfig, name: str) -> OwnFunction:
        """Returns the function that a config names; raises ConfigError where it may not, or names none."""
        spec, setting = str(settings.function), f"{config.path}: {name}.function"
        if problem := spec_problem(spec):
            raise ConfigError(f"{setting}: {problem}", code="FB146")
        if not config.run.allow_code:
            raise ConfigError(not_allowed(setting, spec), code="FB146")
        folder, (file, _, function) = Path(config.path).parent, spec.rpartition(":")
        content = source_of(folder / file, folder, Asker(setting, "FB146"))
        code = _Code(content, str(folder / file), function)
        return cls(code, setting, processes=settings.processes or 0, changes_length=bool(settings.changes_length))

    def change(self, samples: Sequence[dict[str, Any]], draws: Draws, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Returns what the function makes of samples. Raises ConfigError, with the sample, where it makes no sample."""
        keys = draws.keys.tolist()
        if self._pool is None:
            found = [_call(self._function, sample, key) for sample, key in zip(samples, keys, strict=True)]
        else:
            # Half of them to a process: several threads ask at once.
            try:
                found = list(self._pool.map(_called, samples, keys, chunksize=max(1, len(samples) // 2)))
            except BrokenProcessPool as err:
                raise ConfigError(
                    f"{self._called}: a process that called it ended; look for its last words above", code="FB146"
                ) from err
        return [
            self._checked(sample, made, sample_id) for sample, made, sample_id in zip(samples, found, ids, strict=True)
        ]

    def _checked(self, sample: Mapping[str, Any], made: Any, sample_id: str) -> dict[str, Any]:
        if isinstance(made, str):
            raise self._refused(sample_id, f"it raised {made}")
        if not isinstance(made, dict) or set(made) != set(sample):
            got = ", ".join(map(str, made)) if isinstance(made, dict) else type(made).__name__
            raise self._refused(sample_id, f"it returned {got or 'no field'}, wanted {', '.join(sample)}")
        for name, before in sample.items():
            olds = before if isinstance(before, tuple) else (before,)
            news = made[name] if isinstance(before, tuple) else (made[name],)
            if not isinstance(news, tuple) or len(news) != len(olds):
                raise self._refused(sample_id, f"{name} is no longer a tuple of {len(olds)} arrays")
            for old, new in zip(olds, news, strict=True):
                if not isinstance(new, np.ndarray) or (new.dtype, new.shape[1:]) != (old.dtype, old.shape[1:]):
                    raise self._refused(
                        sample_id, f"{name} became {_shown(new)}, wanted {old.dtype} of [n, {_inner(old)}]"
                    )
                if len(new) != len(old) and not self._changes_length:
                    raise self._refused(
                        sample_id,
                        f"{name} had {len(old)} rows and has {len(new)}; keep the length, or set changes_length = true",
                    )
        return made

    def _refused(self, sample_id: str, what: str) -> ConfigError:
        return ConfigError(f"{self._called}: sample {sample_id}: {what}", code="FB146")


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _inner(value: np.ndarray[Any, Any]) -> str:
    return ", ".join(map(str, value.shape[1:]))


class _Raised(Exception):  # noqa: N818  it carries a line
    """An exception of the user's code, as one line."""


def _call(function: Any, sample: dict[str, Any], key: int) -> Any:
    """Returns what the function gives; what it raised as a line."""
    try:
        with refusing(_Raised):
            return function(dict(sample), generator_of(key))
    except _Raised as err:
        return str(err)


_FUNCTION: list[Any] = []
"""Of a process of the pool: its function."""


def _load(code: _Code) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides what ends
    _FUNCTION[:] = [loaded(code.content, code.path, code.name)]


def _called(sample: dict[str, Any], key: int) -> Any:
    return _call(_FUNCTION[0], sample, key)
