"""The groups of a config as a build makes them: a row of a listing is a sample with items of any group.

Nothing here asks what items are: a group is asked for its fields, keys, values and lengths by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.preprocess.clip_group import audio_items_of
from forebay.preprocess.group import Cut, ItemGroup, Items, Read, Values, cut_rows, narrow, with_group
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.model_group import ModelItems, model_items_of
from forebay.preprocess.text_group import NAMES, TOLD, TextItems
from forebay.rows.columns_aside import drop_pages
from forebay.rows.kept_columns import column_of, fields_of
from forebay.rows.manifest import Manifest
from forebay.rows.media_reader import MediaReader, sparse_files
from forebay.rows.segments import cut_recordings, recordings_of, segment_columns
from forebay.rows.source_table import SourceFiles
from forebay.steps.recipe import Recipe
from forebay.store.image.codec import Codec
from forebay.store.key import digest
from forebay.store.layout import FORMAT_VERSION, TEXT, Array, Constants, FieldSpec, Group
from forebay.store.source_files import SourceFile, StoredSources

GROUPS: Mapping[Group, Callable[[Config, Any], ItemGroup]] = {"audio": audio_items_of, "image": ImageItems.of}
"""What makes the items of a group, by the group's name in a recipe."""
TEXT_SHARD_ROWS = 8
"""How many times `layout.rows_per_shard` a shard of texts without items holds; part of where shards begin."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a config. Picklable and hashable: a worker keeps what it loaded for them.

    items: of recordings, images, ...; text: in which a row is a sample. kept: fields of `source.keep_columns`.
    """

    recipe: Recipe
    items: tuple[ItemGroup, ...]
    text: TextItems
    kept: tuple[FieldSpec, ...] = ()

    @classmethod
    def of(cls, config: Config, recipe: Recipe) -> Self:
        """Returns the groups of a config whose recipe is known. Raises ConfigError where its files cannot be used."""
        items = tuple(
            GROUPS.get(group.name, model_items_of)(config, group) for group in recipe.groups if group.name != TEXT
        )
        listed = [group.lists for group in items if group.lists is not None and group.tells]
        merge_size = next((group.merge_size for group in items if group.merge_size is not None), None)
        return cls(recipe, items, TextItems.of(config, recipe.text, listed=listed, merge_size=merge_size))

    @property
    def names(self) -> tuple[Group, ...]:
        """The names of the groups, text last."""
        return (*(group.name for group in self.items), TEXT)

    def item_group(self, name: Group) -> ItemGroup:
        """Returns a group of items."""
        return next(group for group in self.items if group.name == name)

    @property
    def unit(self) -> str:
        """The word for what is counted while a build runs: items, or texts if there are no items."""
        return self.items[0].unit if self.items else self.text.unit

    @property
    def counted(self) -> Group:
        """The group whose rows are counted while a build runs: what takes the time, a model above all."""
        models = [group.name for group in self.items if isinstance(group, ModelItems)]
        return next(iter(models), self.items[0].name if self.items else TEXT)

    @property
    def codec(self) -> str | None:
        """How items are stored, where there are several ways of it."""
        return next((group.codec for group in self.items if group.codec is not None), None)

    @property
    def read_values(self) -> frozenset[str]:
        """Tensor fields whose values `read_rows` reads; of others it reads how many each row has."""
        return frozenset[str]().union(*(group.read_values for group in self.items))

    @property
    def length_names(self) -> tuple[str, ...]:
        """The names of the rows of `lengths.npy`: each row's own items, its tokens, and the sums of what it lists."""
        own = [name for group in self.items if group.lists is None for name in group.length_names]
        listed = [name for group in self.items if group.lists is not None for name in group.length_names]
        return (*own, "num_tokens", *listed)

    def checked(self, manifest: Manifest) -> Manifest:
        """Returns a manifest with what the groups know of items, without rows whose items they refuse."""
        for group in self.items:
            manifest = group.checked(manifest)
        return manifest

    def keeping(self, rows: pa.Table) -> Self:
        """Returns the groups whose samples have the kept columns of a listing's rows, and what these rows decide."""
        step = self.text.steps.step.of_rows(rows, partial(_different, rows))
        # What rows decide is in keys of shards and in no recipe.
        return replace(self, text=self.text.with_step(step), kept=fields_of(rows))

    def under(self, codec: Codec) -> Self:
        """Returns the groups whose items are stored by a codec: "raw" is how samples are made on the fly."""
        return replace(self, items=tuple(group.under(codec) for group in self.items))

    def measured(self, constants: Constants) -> Self:
        """Returns the groups that know their constants: what a worker found need not be found again."""
        items = tuple(group.measured(constants.of(group.name)) for group in self.items)
        return replace(self, items=items, text=self.text.measured(constants.of(TEXT)))

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns every field, text last, without the `failure` field that shards add. Raises ConfigError."""
        found = [spec for group in self.items for spec in with_group(group.fields(), group.name)]
        found += with_group((*self.text.fields(), *self.kept), TEXT)
        names = [spec.name for spec in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            made_by = " beside ".join(type(step).__name__ for group in self.recipe.groups[:-1] for step in group.steps)
            raise ConfigError(
                f"{made_by} gives {twice[0]!r}, and the text or a kept column of the samples has that name "
                "too; leave the column out of source.keep_columns, or choose another text.prompt",
                code="FB125",
            )
        return tuple(found)

    def items_of(self, manifest: Manifest) -> dict[Group, Items]:
        """Returns the items of every group, as they are stored."""
        return {group.name: group.items(manifest) for group in self.items}

    def shard_rows(self, rows_per_shard: int) -> int:
        """Returns how many rows a shard holds at most; tokens are small. rows_per_shard: `layout.rows_per_shard`."""
        return rows_per_shard if self.items else rows_per_shard * TEXT_SHARD_ROWS

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        """Yields every shard of every group with its key; no group's cut depends on another group's settings.

        A key is made of the group's steps, its probe, and for each row what its values are made of: of an item the
        bytes by content, of a text its columns, the source's name, and what prompts are told of the items it lists.
        """
        made = {**self.recipe.by_name, TEXT: self.text.steps}
        steps = {name: [step.identity() for step in group.steps] for name, group in made.items()}
        for of_model in self.items:
            if isinstance(of_model, ModelItems):
                steps[of_model.name] += of_model.prepared_by()
        names, hashes = listing.files.each_name(), listing.files.each_hash()
        size = self.shard_rows(rows_per_shard)
        for group in self.items:
            items = listing.items[group.name]
            for index, (start, stop) in enumerate(_shards(items.table, items.group, rows_per_shard=size)):
                content = group.content(items.table.slice(start, stop - start), hashes)
                key = _key(group.name, steps, probe, content)
                drop_pages()
                yield Cut(group=group.name, index=index, start=start, stop=stop, key=key)
        groups = listing.rows["group"].to_numpy()
        for index, (start, stop) in enumerate(_shards(listing.rows, groups, rows_per_shard=size)):
            content = self.text.content(self._text_rows(listing, start, stop), names)
            drop_pages()
            yield Cut(group=TEXT, index=index, start=start, stop=stop, key=_key(TEXT, steps, probe, content))

    def task_rows(self, listing: Listing, cut: Cut) -> tuple[SourceFiles, pa.Table]:
        """Returns the rows of one shard, one an element of it, and the files that they use."""
        if cut.group == TEXT:
            rows = self.text.task_rows(self._text_rows(listing, cut.start, cut.stop))
        else:
            items = listing.items[cut.group].table.slice(cut.start, cut.rows)
            rows = self.item_group(cut.group).task_rows(items, listing.files)
        return narrow(rows, listing.files)

    def text_rows(self, listing: Listing, start: int, stop: int) -> pa.Table:
        """Returns rows [start, stop) as the text group makes them."""
        return self.text.task_rows(self._text_rows(listing, start, stop))

    def _text_rows(self, listing: Listing, start: int, stop: int) -> pa.Table:
        """Returns rows of the listing with what prompts are told of the items that they list, and their names."""
        rows = listing.rows.slice(start, stop - start)
        if not self.text.listed:
            return rows
        told: list[list[Any]] = [[] for _ in range(len(rows))]
        named: list[dict[str, list[str]]] = [{} for _ in range(len(rows))]
        for group in self.items:
            if group.lists is None or not group.tells:
                continue
            items = listing.items[group.name]
            offsets, places = items.of_rows(start, stop)
            used, inverse = np.unique(places, return_inverse=True)
            part = items.table.take(pa.array(used))
            values = group.told(part)
            names = group.task_rows(part, listing.files)["sample_id"].to_pylist()
            for row, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
                own = inverse[first:last].tolist()
                told[row] += [values[place] for place in own]
                named[row][group.lists] = [names[place] for place in own]
        rows = rows.append_column(TOLD, pa.array(map(json.dumps, told), pa.large_string()))
        return rows.append_column(NAMES, pa.array(map(json.dumps, named), pa.large_string()))

    def samples(
        self, group: Group, rows: pa.Table, files: Sequence[SourceFile], read: Callable[[ItemGroup], Read]
    ) -> Iterator[Values]:
        """Yields the fields of every row of a task, in order. read: gives what reads the items of a group."""
        if group == TEXT:
            return self.text.samples(rows, SourceFiles.of(files).all_names)
        found = self.item_group(group)
        return found.samples(rows, read(found))

    def used_by(self, listing: Listing, cut: Cut, position: int) -> tuple[str, list[str]]:
        """Returns what to call a row of a task, and the ids of the samples that need that row."""
        place, ids = cut.start + position, listing.rows["sample_id"]
        items = listing.items.get(cut.group)
        if items is None or items.offsets is None:
            name = ids[place].as_py()
            return f"sample {name!r}", [name]
        group = self.item_group(cut.group)
        name = group.task_rows(items.table.slice(place, 1), listing.files)["sample_id"][0].as_py()
        owners = np.unique(np.searchsorted(items.offsets, np.flatnonzero(items.places == place), side="right") - 1)
        return f"{group.unit} {name!r}", ids.take(pa.array(owners)).to_pylist()

    def constants(self) -> Constants:
        """Returns what collating needs and is equal for all samples: kinds, rates, token ids, tables."""
        return Constants({name: self.constants_of(name) for name in self.names})

    def constants_of(self, group: Group) -> dict[str, Any]:
        """Returns the constants of one group; those of texts say where there are no items, and no prompt."""
        if group != TEXT:
            return self.item_group(group).constants()
        return {**({} if self.items else {"features": "none"}), "prompt": None, **self.text.constants()}

    def probe(self, group: Group) -> str:
        """Returns the xxh3-128 of what a group's steps give for small built-in inputs."""
        if group != TEXT:
            return self.item_group(group).probe()
        listed = [found for found in self.items if found.lists is not None and found.tells]
        return self.text.probe({found.name: [found.probe_told(place) for place in range(2)] for found in listed})

    def estimate_bytes(self, listing: Listing, tried: Mapping[Group, float] | None = None) -> int:
        """Returns the expected size of the cache in bytes, from what the listing knows.

        tried: bytes an item, of groups that some items were made of.
        """
        of_items = 0
        for group in self.items:
            table, size = listing.items[group.name].table, (tried or {}).get(group.name)
            of_items += group.estimate_bytes(table) if size is None else round(size * len(table))
        return of_items + self.text.estimate_bytes(listing.rows) + _OVERHEAD_BYTES * len(listing.rows)


_OVERHEAD_BYTES = 160
"""What a sample costs beside its values: offsets, hashes, id, lengths."""


def _shards(rows: pa.Table, groups: Array, *, rows_per_shard: int) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of every shard of rows: of segments whole recordings, so that each is decoded once."""
    if segment_columns(rows):
        return cut_recordings(recordings_of(rows), groups, rows_per_shard=rows_per_shard)
    return cut_rows(groups, rows_per_shard=rows_per_shard)


def _key(
    group: Group, steps: Mapping[Group, list[dict[str, Any]]], probe: Mapping[Group, str], content: Mapping[str, Any]
) -> str:
    document = {"format_version": FORMAT_VERSION, "group": group, "steps": steps[group], "probe": probe[group]}
    return digest({**document, **content})


def _different(rows: pa.Table, name: str) -> list[str]:
    """Returns the different values of a kept column as texts, sorted."""
    return sorted(str(value) for value in column_of(rows, name).unique().to_pylist() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The start of a build: the rows of the sources, by content. key: the cache's."""

    groups: Groups
    manifest: Manifest
    key: str

    @property
    def recipe(self) -> Recipe:
        """The steps."""
        return self.groups.recipe

    @property
    def rows(self) -> pa.Table:
        """Candidate samples, see `Manifest`."""
        return self.manifest.rows

    @cached_property
    def items(self) -> Mapping[Group, Items]:
        """The items of every group, as they are stored."""
        return self.groups.items_of(self.manifest)

    @property
    def files(self) -> SourceFiles:
        """Every file whose content defines the samples."""
        return SourceFiles.of(self.manifest.files)

    def readers(self, config: Config) -> dict[Group, MediaReader]:
        """Returns what reads the items of each group, as they were when they were listed, for threads to share."""
        sparse = sparse_files(self.rows, self.files) if "size" in self.rows.column_names else frozenset[int]()
        return {
            group.name: MediaReader(
                self.files,
                max_open=config.run.max_open_tars,
                max_bytes=config.source.max_sample_bytes,
                column=group.column,
                as_listed=True,
                sparse=sparse,
            )
            for group in self.groups.items
        }

    def sources(self) -> StoredSources:
        """Returns the files as the sealed cache remembers them."""
        return self.files.stored()
