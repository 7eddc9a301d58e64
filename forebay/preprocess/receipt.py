"""What is kept of a finished shard beside it until the cache is sealed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from forebay.store.files import write_bytes
from forebay.store.seal import is_whole
from forebay.store.shard import ShardEntry
from forebay.store.shard_table import entry_from_json, entry_to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A sample that a step refused: counted by reason, listed, never the end of a build."""

    sample_id: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a finished shard is, kept as `<key>.json` beside it."""

    entry: ShardEntry
    failures: tuple[Failure, ...]


def load_receipt(path: Path, key: str) -> Receipt | None:
    """Returns the receipt of a shard that is on disk and whole, else None: a name and a size prove nothing after a crash."""
    receipt = read_receipt(path, key)
    return receipt if receipt is not None and is_whole(path, receipt.entry) else None


def read_receipt(path: Path, key: str) -> Receipt | None:
    """Returns the receipt beside a shard of this key, None where there is none; the shard is not looked at."""
    try:
        document = json.loads(path.with_suffix(".json").read_bytes())
        entry = entry_from_json(document["entry"])
        failures = tuple(Failure(**failure) for failure in document["failures"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Receipt(entry=entry, failures=failures) if entry.key == key else None


def save_receipt(path: Path, receipt: Receipt) -> None:
    """Keeps the receipt beside its shard."""
    document = {"entry": entry_to_json(receipt.entry), "failures": [asdict(failure) for failure in receipt.failures]}
    write_bytes(path.with_suffix(".json"), json.dumps(document).encode("ascii"))
