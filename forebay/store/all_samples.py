"""Facts about all samples of a cache at once: the row table, single columns of it, and the digest of the ids.

A cache of a store is asked for what its push wrote down beside it, so that no shard is downloaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from forebay.store.layout import TEXT, Array, FieldSpec
from forebay.store.open_shards import CheckedArray, OpenShards, no_such_row
from forebay.store.row_table import SampleColumns, categories, rate_of, row_columns, strings_digest

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay.store.remote.carry.sent_columns import ToldColumns


@dataclass(kw_only=True)
class AllSamples:
    """The samples of a cache in their order.

    key: of the cache. fields: table fields with a row a sample, by name. slots: where each sample lies. shards: of the
    cache.
    """

    key: str
    fields: Mapping[str, FieldSpec]
    slots: CheckedArray
    shards: OpenShards

    def row_columns(
        self, lengths: Mapping[str, Array], *, constants: Mapping[str, Any] | None
    ) -> dict[str, Callable[[], Any]]:
        """Returns what makes each column of the row table. constants: of a cache whose lengths count audio."""
        rate_hz = None if constants is None else rate_of(self.shards.folder, constants, lengths)
        made = row_columns(self._columns(), lengths, rate_hz=rate_hz)
        texts = [name for name, field in self.fields.items() if field.dtype == "str"]
        return made | {name: partial(self._texts, name, made[name]) for name in texts}

    def _texts(self, name: str, make: Callable[[], Any]) -> pa.ChunkedArray:
        """Returns a column of texts: as the store tells it, else as the shards hold it."""
        if self._told is None or name not in self._told.table.column_names:
            return make()
        import pyarrow as pa

        return self._told.table.column(name).cast(pa.large_string())

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a text field, sorted, and which one each sample has; None: no such field."""
        if self._told is not None and (found := self._told.categories(name)) is not None:
            return found
        return categories(self._columns(), name)

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order, all of which are read; the key if there are none."""
        if self._told is not None:
            return self._told.ids_digest
        return strings_digest(self._columns().column("sample_id")) if "sample_id" in self.fields else self.key

    def dump(self) -> bytes:
        """Returns what a store is to tell of all samples at once, see `ToldColumns`."""
        from forebay.store.remote.carry.sent_columns import dump_columns

        names = [name for name, field in self.fields.items() if field.dtype == "str"]
        found = {name: self.categories(name) for name in names if name not in ("sample_id", "text")}
        columns = {name: values for name, values in found.items() if values is not None}
        return dump_columns(self.key, self.ids_digest(), columns)

    @cached_property
    def _told(self) -> ToldColumns | None:
        """The facts that the store tells of all samples at once."""
        mirror = self.shards.files.mirror
        if mirror is None:
            return None
        from forebay.store.remote.carry.sent_columns import told_columns

        return told_columns(mirror, key=self.key, num_samples=len(self.slots.array))

    def _columns(self) -> SampleColumns:
        return SampleColumns(
            fields=self.fields,
            num_shards=self.shards.files.count(TEXT),
            slots=self.slots.whole(),
            shard=self.shards.get,
            no_such_row=lambda index, slot: no_such_row(self.shards.folder, index, slot),
        )
