"""The record of a case. A leaf is a line of text; floats that are computed stand behind " ~ ", to be compared."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forebay
from forebay.errors import ForebayError
from tests.preprocess.here_pool import build_here  # `forebay.preprocess.build`, without a process of its own

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., Any]
"""Runs `forebay ARGUMENTS --json` and returns its document."""

MOVES = {
    *("key", "recipe_key", "folder", "rejected", "recipe", "constants", "groups", "group", "probe", "made_with"),
    *("format_version", "size_bytes", "rows_per_shard", "made_of", "shard_spread"),
    *("bytes_per_hour", "bytes_per_pack", "float32_bytes_per_pack", "bytes_per_image", "float32_bytes_per_image"),
}
"""Of `inspect --json`: what keys, folders and the cut of shards say, which may move."""
NO_FIELDS = {"image_rows"}
"""Of the fields that it lists: how a row names its items on disk."""
NO_COLUMNS = {"shard", "shard_row"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """data: writes the raw files into a folder. loads: what batches are made with, over `config`.

    others: configs that are built first, by the names of their files. exact: no float is of a transform, a product of
    matrices or a resampler, so all bits are pinned.
    """

    data: Callable[[Path], object]
    config: Mapping[str, Any]
    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exact: bool = False


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sections with others on top; `"="` in a section: the section anew; None: the field is gone."""
    made = dict(base)
    for name, value in over.items():
        if isinstance(value, Mapping):
            old = {} if "=" in value else made.get(name, {})
            made[name] = merged(old, {key: part for key, part in value.items() if key != "="})
        elif value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def toml(value: Any) -> str:
    """Returns a value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml(part)}" for name, part in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def written(path: Path, config: Mapping[str, Any]) -> Path:
    """Writes a config."""
    run = {"cache_root": "caches", "num_workers": 1, "max_failed_share": 1.0}
    document = merged({"name": "golden", "loader": {"num_threads": 0, "seed": 5}, "run": run}, config)
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in document.items()), encoding="utf-8")
    return path


def pin(case: Case, folder: Path, command: Command, *, exact: bool = False) -> dict[str, Any]:
    """Returns what a case comes to. exact: all bits, which differ between families of CPUs."""
    case.data(folder)
    for name, config in case.others.items():
        _built(written(folder / f"{name}.toml", config))
    path = written(folder / "case.toml", case.config)
    bits = exact or case.exact
    report = _built(path)
    cache = forebay.open_cache(report.cache)
    found: dict[str, Any] = {"report": _report(report), "samples": _samples(cache, exact=bits)}
    found["table"] = {name: _column(values) for name, values in _columns(cache)}
    found["lengths"] = {name: _ints(values.tolist()) for name, values in cache.lengths.items()}
    rejected = (Path(report.cache) / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    found["rejected"] = sorted(" | ".join(_rejection(json.loads(line))) for line in rejected)
    for name, over in {"": {}, **case.loads}.items():
        if "plan" in merged(case.config, over):
            other = path if not name else written(folder / f"case.{name}.toml", merged(case.config, over))
            found[f"load {name}".strip()] = _load(other, merged(case.config, over), exact=bits, whole=not name)
    facts = command("inspect", path)
    found["inspect"] = _facts({**facts, "plans": None})
    found["plans"] = sorted(_plan_facts(plan) for plan in facts["plans"])
    cleaned: dict[str, Any] = _cleaned(found, folder)
    return cleaned


def _built(path: Path) -> forebay.preprocess.BuildReport:
    return build_here(forebay.load_config(path))


def _report(report: forebay.preprocess.BuildReport) -> dict[str, Any]:
    names = ("num_samples", "excluded", "failed", "longer", "unused_fields", "plan")
    return {name: _line(getattr(report, name)) for name in names}


def _rejection(row: dict[str, Any]) -> list[str]:
    first = [str(row.pop(name)) for name in ("sample_id", "kind", "reason", "message")]
    return [*first, *(f"{name}={value}" for name, value in row.items())]


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _ints(values: Sequence[Any]) -> str:
    text = " ".join(map(str, values))
    return text if len(text) <= 120 else f"{len(values)} values, {_digest(text)}"


def _digest(*parts: str | bytes) -> str:
    made = hashlib.blake2b(digest_size=4)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        made.update(b"%d:" % len(data) + data)
    return made.hexdigest()


def _columns(cache: forebay.Cache) -> Iterator[tuple[str, list[Any]]]:
    for name in sorted(cache.column_names):
        if name not in NO_COLUMNS and name not in cache.lengths:
            yield name, cache.table([name])[name].to_pylist()


def _column(values: list[Any]) -> str:
    if any(isinstance(value, float) for value in values):
        return "floats" + _near([math.nan if value is None else value for value in values][:16])
    text = " | ".join(map(_line, values))
    return text if len(text) <= 200 else " ".join(_digest(_line(value)) for value in values)


def _near(values: Sequence[float]) -> str:
    return " ~ " + " ".join(f"{value:.6g}" for value in values)


@dataclass(frozen=True)
class _Value:
    """A tensor: what it is, its bits, and some of its values where it is of floats."""

    kind: str
    bits: bytes
    values: np.ndarray[Any, Any] | None

    @classmethod
    def of(cls, value: Any) -> _Value:
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            return cls(type(value).__name__, repr(value).encode(), None)
        held = torch.as_tensor(np.array(value)) if not isinstance(value, torch.Tensor) else value
        bits = held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        kind = f"{str(held.dtype).removeprefix('torch.')}{list(held.shape)}".replace(" ", "")
        return cls(kind, bits, held.double().reshape(-1).numpy() if held.is_floating_point() else None)

    def digest(self, *, exact: bool) -> str:
        """The digest: if floats are not exact, only of their shape; a single integer is its own digest."""
        if self.kind.startswith("int") and self.kind.endswith("[1]"):
            return str(int.from_bytes(self.bits, "little", signed=True))
        return _digest(self.kind, self.bits if exact or self.values is None else b"")

    def line(self, *, exact: bool) -> str:
        """The kind of the value, and its digest or 4 of its values."""
        if exact or self.values is None:
            return f"{self.kind} {_digest(self.bits)}"
        return self.kind + _near(_some(self.values, 4))


def _some(values: np.ndarray[Any, Any], count: int) -> list[float]:
    """Returns values at places that spread over all of them."""
    return [float(values[(2 * n + 1) * len(values) // (2 * count)]) for n in range(count)] if len(values) else []


def _samples(cache: forebay.Cache, *, exact: bool) -> dict[str, str]:
    """Returns a line a field: digests in the order of the samples, and values of the first 16."""
    found: dict[str, list[str]] = {}
    near: dict[str, list[float]] = {}
    for index in range(len(cache)):
        for name, value in cache.read(index).items():
            parts = [_Value.of(part) for part in (value if isinstance(value, tuple) else (value,))]
            found.setdefault(name, []).append("+".join(part.digest(exact=exact) for part in parts) or "-")
            for part in parts:
                if part.values is not None and not exact and len(part.values):
                    near.setdefault(name, []).append(float(part.values[7919 * (index + 1) % len(part.values)]))
    return {name: " ".join(found[name]) + (_near(near[name][:16]) if name in near else "") for name in sorted(found)}


def _load(path: Path, document: Mapping[str, Any], *, exact: bool, whole: bool) -> dict[str, Any]:
    """Returns the plan and the batches of a config: two epochs on 1 rank and on 3; without a cache one epoch on 1."""
    live = document.get("loader", {}).get("cache") == "off"
    try:
        config = forebay.load_config(path)
        report = None if live else _built(path)
        found: dict[str, Any] = {}
        for world in (1,) if live else (1, 3):
            for rank in range(world):
                loader = forebay.train.make_loader(config, with_ids=True, dp_rank=rank, dp_world_size=world)
                if not rank and world == 1:
                    found["plan"] = _plan(loader.plan, report)
                for epoch in range(1 if live else 2):
                    found |= _epoch(loader, f"{world}.{rank} epoch {epoch}", exact=exact, whole=whole)
        if whole:
            columns = ("sample_id", "text", *document["source"].get("keep_columns", ()))
            loader = forebay.train.make_loader(config, shuffle=False, with_columns=columns, dp_rank=0, dp_world_size=1)
            found |= _epoch(loader, "in order", exact=exact, whole=False)
        return found
    except ForebayError as err:
        return {"raises": f"{err.code} {err}"}


def _plan(plan: forebay.plan.Plan, report: forebay.preprocess.BuildReport | None) -> dict[str, str]:
    found = {"is": f"{plan.described()}; lockstep {plan.lockstep}, tail {plan.tail}, grad_accs {plan.grad_accs}"}
    for seed, epoch in ((5, 0), (5, 1), (6, 0)):
        order = plan.order(seed, epoch)
        rows = [f"{order.bucket(at)}: {order.batch(at).tolist()}" for at in range(len(order))]
        found[f"order of {seed}, {epoch}"] = f"{len(rows)} batches, {_digest(*rows)}"
    folder = None if report is None else report.plan_folder
    for file in sorted(Path(folder).glob("*.npy")) if folder else []:
        array = np.load(file)
        found[file.stem] = f"{array.dtype}{list(array.shape)} " + _ints(array.reshape(-1).tolist())
    return found


def _epoch(loader: forebay.train.Loader, name: str, *, exact: bool, whole: bool) -> dict[str, Any]:
    """Returns a digest a batch, and of the first batches of the first epoch each field too."""
    lines, seen = [], {}
    for number, (batch, ids) in enumerate(loader):  # of a loader with columns: these by their names
        fields = getattr(batch, "fields", batch)
        values = {key: _Value.of(fields[key]) for key in sorted(fields)}
        parts = [f"{key} {value.digest(exact=exact)}" for key, value in values.items()]
        lines.append(_digest(f"{loader.weight} {ids} {loader.indices}", *parts))
        if number < (3 if whole else 1):
            seen[f"batch {number}"] = {"ids": f"{loader.weight}: {_ints(ids)}"} | {
                key: value.line(exact=exact) for key, value in values.items()
            }
    return {name: " ".join(lines), **(seen if name == "1.0 epoch 0" else {})}


def _facts(document: Any) -> Any:
    """Returns what `inspect --json` says, without what may move; a table of numbers and words is one line."""
    if isinstance(document, Mapping):
        found = {k: _facts(part) for k, part in document.items() if k not in MOVES | NO_FIELDS}
        if any(isinstance(part, (Mapping, list)) for part in found.values()):
            return found
        return "(" + ", ".join(f"{name} {found[name]}" for name in sorted(found)) + ")"
    if isinstance(document, list):
        if any(isinstance(part, (Mapping, list)) for part in document):
            return sorted((_facts(part) for part in document), key=_line)
        return f"[{_ints([_facts(part) for part in document])}]"
    return f"{document:.6g}" if isinstance(document, float) else _line(document)


def _plan_facts(plan: dict[str, Any]) -> str:
    """Returns the settings of a plan, and a digest of all that is told of it."""
    return f"{_facts(plan['settings'])}: {_digest(str(_facts(plan)))}"


def _cleaned(value: Any, folder: Path) -> Any:
    """Returns the same without the places of this machine."""
    if isinstance(value, Mapping):
        return {name: _cleaned(part, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [_cleaned(part, folder) for part in value]
    text = str(value).replace(str(folder), "DIR").replace(str(ROOT), "ROOT")
    return re.sub(r"(DIR/caches/[\w.-]+?-)[0-9a-f]{16}", r"\1KEY", text)


def differences(wanted: Any, got: Any, place: str = "") -> Iterator[str]:
    """Yields what differs, by its place; floats may differ by 2 thousandths."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        for name in {**wanted, **got}:
            if name not in wanted or name not in got:
                yield f"{place}/{name}: {'is new' if name in got else 'is gone'}"
            else:
                yield from differences(wanted[name], got[name], f"{place}/{name}")
    elif isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        for number, pair in enumerate(zip(wanted, got, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif wanted != got and not (isinstance(wanted, str) and isinstance(got, str) and _are_near(wanted, got)):
        left, right = str(wanted), str(got)
        at = next((n for n, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), 0)
        shown = slice(max(0, at - 60), at + 200)
        yield f"{place}, from {shown.start}:\n  wanted {left[shown]}\n  got    {right[shown]}"


def _are_near(wanted: str, got: str) -> bool:
    (head, _, left), (other, _, right) = wanted.partition(" ~ "), got.partition(" ~ ")
    if head != other or not left or len(left.split()) != len(right.split()):
        return False
    return bool(
        np.allclose(list(map(float, left.split())), list(map(float, right.split())), 2e-3, 2e-3, equal_nan=True)
    )
