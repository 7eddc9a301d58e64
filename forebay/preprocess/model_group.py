"""A group that a frozen model makes: of what another group prepares of an item, the outputs that a config keeps.

The model is given batches. They are a function of the shard: its items in windows, by length within a window, so that
a shard that is made again has the same bytes on the same kind of machine.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa

from forebay.config.data import CaptionsConfig
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.tree import AudioConfig, Config, VisionConfig
from forebay.errors import ConfigError
from forebay.preprocess.audio_group import AudioItems
from forebay.preprocess.clip_group import audio_items_of
from forebay.preprocess.cropped_images import CroppedForm, CroppedImages
from forebay.preprocess.device_process import Model, model_at_hand
from forebay.preprocess.group import Coder, ItemGroup, Items, Read, Values, values_digest
from forebay.preprocess.image_form import ArrayForm, DecodedForm
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.model_inputs import (
    PairInputs,
    TextInputs,
    batches_by_length,
    caption_counts,
    own_rows,
    require_variants,
    too_large,
    varied_fields,
)
from forebay.preprocess.probes import in_words, promise_of, sample_of
from forebay.preprocess.workspace import Failure
from forebay.rows.manifest import Manifest
from forebay.spans import FEATURES, span
from forebay.steps.audio.audio_section import AudioGroup
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder
from forebay.steps.audio.own_class import RESERVED
from forebay.steps.form import BatchForm, Promise
from forebay.steps.image.image_section import ImageGroup
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.model.model_step import ModelStep, at_samples
from forebay.steps.step import MODEL, Stored
from forebay.store.image.codec import Codec
from forebay.store.image.stored_items import StoredFields, shape_name
from forebay.store.key import digest
from forebay.store.layout import CHOICES, SIDES, Array, Constants, FieldSpec, Group, variant_name
from forebay.store.shard import Shard
from forebay.store.source_files import SourceFile

if TYPE_CHECKING:
    from forebay.steps.model.open_model import OpenModel
    from forebay.steps.model.own_model import OwnModel

_WINDOW = 16
"""Batches whose samples are sorted by length together: more would hold more prepared samples in memory."""
Prepares = ItemGroup | TextInputs | PairInputs
"""What prepares items for a model."""
Declared = tuple[BatchForm, tuple[FieldSpec, ...]]
"""How outputs lie on disk and in a batch, and those that are columns of the row table."""


@dataclass(frozen=True, slots=True)
class ModelItems:
    """The outputs of a model for the items of a group: an `ItemGroup`. base: prepares them.

    known: form and columns as JSON, where a worker found them; empty: they are found here. tells: if prompts are told
    of its items. A number of an item is a column of the row table; all else stands in batches.
    """

    name: Group
    step: ModelStep
    base: Prepares
    known: str = ""
    tells: bool = False
    codec: ClassVar[str | None] = None
    merge_size: ClassVar[int | None] = None
    read_values: ClassVar[frozenset[str]] = frozenset()

    @property
    def unit(self) -> str:
        return self.base.unit

    @property
    def lists(self) -> str | None:
        return self.base.lists

    @property
    def column(self) -> str:
        return self.base.column

    @property
    def max_sample_bytes(self) -> int:
        return self.base.max_sample_bytes

    @property
    def length_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}{side}" for side in SIDES) if self._has_shapes else (f"num_{self.name}",)

    @property
    def cropped(self) -> CroppedForm | None:
        """How images are cropped for an autoencoder; None of other models."""
        return self.base.form if isinstance(self.base, CroppedImages) else None

    @property
    def _has_shapes(self) -> bool:
        """Whether a sample has one latent, of one of several shapes."""
        return self.step.target is not None and self.step.target.shapes is not None

    @property
    def decoded_name(self) -> str:
        return self.name

    @property
    def form(self) -> BatchForm:
        """How the outputs lie on disk and in a batch."""
        return self._declared[0]

    @property
    def grows(self) -> bool:
        """Whether outputs differ in length; a model of columns alone has none."""
        return bool(self.form.stored and self.form.main.grows)

    @property
    def _declared(self) -> Declared:
        return _read(self.known) if self.known else _probed(self)[0]

    def items(self, manifest: Manifest) -> Items:
        return self.base.items(manifest)

    def checked(self, manifest: Manifest) -> Manifest:
        if isinstance(self.base, TextInputs):
            return self.base.checked(manifest)
        return manifest if self.cropped is None else self.cropped.of_manifest(manifest)

    @property
    def captions(self) -> CaptionsConfig | None:
        """The settings by which a row has several texts, of which a batch has one; None of other models."""
        if isinstance(self.base, ModelItems):
            return self.base.captions
        return self.base.choices if isinstance(self.base, TextInputs) else None

    def under(self, codec: Codec) -> Self:  # noqa: ARG002  there is one way
        return self

    def measured(self, constants: Mapping[str, Any]) -> Self:
        known = json.dumps({name: constants.get(name) for name in ("form", "columns")})
        base = self.base.measured(constants["taken"]) if isinstance(self.base, ModelItems) else self.base
        return replace(self, known=known, base=base)

    def _described(self) -> dict[str, Any]:
        """Returns what `measured` reads of constants."""
        form, columns = self._declared
        found = {"form": form.to_json(), "columns": {spec.name: spec.dtype for spec in columns}}
        taken = {"taken": self.base._described()} if isinstance(self.base, ModelItems) else {}
        return {name: value for name, value in (found | taken).items() if value}

    def fields(self) -> tuple[FieldSpec, ...]:
        hashes = () if self.lists is None else (FieldSpec(name=self._hash, dtype="str", role="table"),)
        form, columns = self._declared
        return (*form.specs(), *varied_fields(form, self.step.variants), *columns, *hashes)

    @property
    def _hash(self) -> str:
        """The field by which equal items are found."""
        return f"{self.name}_hash"

    def lengths(self, shard: Shard) -> Array:
        form, columns = self._declared
        if not self._has_shapes:
            return shard.lengths(form.main.on_disk if form.stored else columns[0].name)[None]
        values, offsets = shard.column(shape_name(form.main.on_disk))
        present, sides = np.diff(offsets) > 0, np.zeros((2, shard.entry.rows), np.int64)
        sides[:, present] = values.reshape(-1, 3)[:, 1:].T
        return sides

    def prepared_by(self) -> list[dict[str, Any]]:
        """Returns the identities of the steps that prepare its items: where a clip is cut, how it is decoded."""
        if isinstance(self.base, ModelItems):
            return [self.base.step.identity(), *self.base.prepared_by()]
        steps = getattr(self.base, "steps", None)
        return [] if steps is None else [step.identity() for step in steps.steps]

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        return self.base.content(items, hashes)

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        return self.base.task_rows(items, files)

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        made = self._samples(rows, read)
        if self.lists is None:
            return made
        return ({self._hash: found, **values} for found, values in zip(rows["hash"].to_pylist(), made, strict=True))

    def _samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        model, size = model_at_hand(self.step), 0
        window: list[tuple[int, Values]] = []
        names = rows["sample_id"].to_pylist()
        for values in enumerate(self.prepared(model, self.base.samples(rows, read))):
            window.append(values)
            size += "failure" not in values[1]
            if size * len(self.step.views) >= _WINDOW * model.batch_size:
                yield from self._made(model, window, names)
                window, size = [], 0
        yield from self._made(model, window, names)

    def prepared(self, model: Model, items: Iterator[Values]) -> Iterator[Values]:
        """Yields what a model is given of the items that the base made: a class of the user prepares them itself.

        An item of which the model has no step fails.
        """
        if self.step.is_code:
            taken = map(self.base._taken, items) if isinstance(self.base, ModelItems) else items
            return map(cast("OwnModel", model).prepared, taken)
        least = self.step.least_rows()
        return items if least == 1 else (self._long_enough(values, least) for values in items)

    def _taken(self, values: Values) -> Values:
        """Returns what a later model is given of an item: the arrays of its fields, as they are stored."""
        if "failure" in values:
            return values
        form, columns = self._declared
        arrays = {each.name: each.array(values) for each in form.stored}
        return {"taken": arrays | {spec.name: values[spec.name] for spec in columns}}

    def _long_enough(self, values: Values, least: int) -> Values:
        count = least if "failure" in values else len(values[prepared_form(cast(Hashable, self.base)).main.on_disk])
        if count >= least:
            return values
        message = f"model.{self.name}: {count} audio samples, and a frame takes {least}: raise min_duration_s"
        return {"failure": "too_short", "message": message}

    def _made(self, model: Model, rows: Sequence[tuple[int, Values]], names: Sequence[str]) -> Iterator[Values]:
        """Yields the outputs for prepared items, in their order; a failure is handed on. names: of all rows."""
        window = [values for _, values in rows]
        good = [place for place, values in enumerate(window) if "failure" not in values]
        named = [(rows[place][0], names[rows[place][0]]) for place in good]
        views = self.step.views
        flat = self._outputs(model, [window[place] for place in good], named, views=[*views.values()])
        made = {place: flat[n * len(views) :][: len(views)] for n, place in enumerate(good)}
        forms = {each.name: each for each in self.form.stored}
        for place, values in enumerate(window):
            if place not in made:
                yield {name: values[name] for name in ("failure", "message")}
            elif why := next(filter(None, (too_large(each, forms) for each in made[place])), None):
                yield {"failure": "not_finite", "message": f"model.{self.name}: {why}"}
            else:
                yield self._stored(dict(zip(views, made[place], strict=True)))

    def _stored(self, made: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
        """Returns the fields of an item. made: its outputs, by the names of variants."""
        form, columns = self._declared
        found: dict[str, Any] = {spec.name: made[""][spec.name].astype(spec.dtype) for spec in columns}
        for (name, outputs), field in itertools.product(made.items(), form.stored):
            values = field.stored(outputs[field.name])
            found |= {variant_name(key, name): values[key] for key in (values if not name else [field.on_disk])}
        return found

    def _outputs(
        self,
        model: Model,
        prepared: Sequence[Values],
        named: Sequence[tuple[int, str]] = (),
        batch_size: int = 0,
        *,
        views: Sequence[tuple[str, bool]] = (("", False),),
    ) -> list[dict[str, Array]]:
        """Returns the outputs for prepared items, which are given to the model by length, a batch at a time.

        A class of the user is given them in their order. named: row and name of each, for messages. batch_size: of a
        batch; 0: that of the model. views: of each item, see `ModelStep.views`; their outputs stand side by side.
        """
        size = batch_size or model.batch_size
        if self.step.is_code:
            own = cast("OwnModel", model)
            parts = (slice(start, start + size) for start in range(0, len(prepared), size))
            return [one for part in parts for one in self._of_class(own, prepared[part], named[part])]
        if not prepared:
            return []
        import torch  # not at import: most builds have no model

        from forebay.steps.batch import collate_fields, fresh

        form = prepared_form(cast(Hashable, self.base))
        columns = form.columns([self._sample(values, *view) for values in prepared for view in views])
        named = [each for each in named for _ in views]
        rows = [sum(map(len, arrays)) for arrays in columns[form.main.name]]
        shapes = [[array.shape for array in arrays] for arrays in columns[form.main.name]]
        found: dict[int, dict[str, Array]] = {}
        for places in batches_by_length(shapes, size, are_alike=form.main.pad is None):
            part = {name: [arrays[place] for place in places] for name, arrays in columns.items()}
            batch = collate_fields(form, part, dtype=torch.float32, allocate=fresh, are_rows=True)
            with span(FEATURES), at_samples(self.step, [named[place] for place in places] if named else ()):
                outputs = cast("OpenModel", model).made(batch, own_rows(form, batch, [rows[place] for place in places]))
            found |= zip(places, outputs, strict=True)
        return [found[place] for place in range(len(rows))]

    def _of_class(self, model: OwnModel, prepared: Sequence[Values], named: Any) -> list[dict[str, Array]]:
        with span(FEATURES), at_samples(self.step, named):
            return model.made(prepared)

    def _sample(self, values: Values, window: str = "", is_flipped: bool = False) -> Mapping[str, Any]:  # noqa: FBT001, FBT002
        """Returns a prepared item as its form has it."""
        if self.base.lists is None:
            return values
        pixels = prepared_form(cast(Hashable, self.base)).pixels.name
        sample = self.base.joined({}, [{**values, pixels: values[variant_name(pixels, window)]} if window else values])
        if is_flipped:
            sample[pixels] = tuple(np.ascontiguousarray(array[..., ::-1]) for array in sample[pixels])
        return sample

    def told(self, items: pa.Table) -> list[Any]:
        return [None] * len(items)

    def probe_told(self, place: int) -> Any:  # noqa: ARG002  prompts are told of the items, not of outputs
        return None

    def listed_lengths(self, items: pa.Table, files: Sequence[SourceFile]) -> dict[str, Array]:  # noqa: ARG002
        if self.cropped is None or not self._has_shapes:
            return {}
        return dict(zip(self.length_names, self.cropped.sides(items, self.step.factor()), strict=True))

    def check(self, values: Mapping[str, Any], row: pa.Table) -> None:
        """Takes all that could be made: the base group of a config says what is left out."""

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.lists is None:
            return {**items[0], **sample}
        return StoredFields((*self.form.specs(), *varied_fields(self.form, self.step.variants))).sample(sample, items)

    def decoded(self, data: bytes, *, sample_id: str) -> Any:
        raise NotImplementedError(f"{self.name} is made by a model, and plain data sets have what was decoded")

    def constants(self) -> dict[str, Any]:
        """Returns the form, and what a probe finds: how far an output for an item alone is from that in a batch."""
        return {
            "features": MODEL,
            "takes": self.step.takes,
            "is_listed": self.lists is not None,
            **self._described(),
            **({"variants": self.step.variants} if self.step.variants else {}),
            **({} if self.captions is None else {CHOICES: {"has_empty": self.captions.empty}}),
            **self.step.facts(),
            **_probed(self)[1],
        }

    def probe(self) -> str:
        # Numerics of devices differ and stay within the promise: they are no part of keys.
        form, columns = self._declared
        return values_digest([{"form": digest(form.to_json()), "columns": ",".join(map(str, columns))}])

    def estimate_bytes(self, items: pa.Table) -> int:
        form, views = self.form, len(self.step.views)
        if self.cropped is not None:
            places = int(np.prod(self.cropped.sides(items, self.step.factor()), axis=0).sum())
            return views * places * sum((f.shape[0] or 1) * np.dtype(f.stored_dtype).itemsize for f in form.stored)
        size = sum(int(np.prod([n or 1 for n in f.shape])) * np.dtype(f.stored_dtype).itemsize for f in form.stored)
        return views * size * len(items) * (_STEPS_GUESSED if self.grows else 1)

    def refused(self, lengths: Mapping[str, Array], rows: pa.Table, why: Coder) -> Array:  # noqa: ARG002
        return np.zeros(len(rows), np.int32)

    def refusals(self, lengths: Mapping[str, Array], rows: pa.Table, codes: Array, why: Coder) -> tuple[Failure, ...]:  # noqa: ARG002
        return ()

    def summary(self, lengths: Mapping[str, Array], rows: pa.Table, items: Items, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        if self.captions is not None:
            return {f"{self.name}_captions": caption_counts(rows, items, keep, self.captions)}
        return {} if self.cropped is None else {f"{self.name}_targets": self.cropped.summary(items.table)}

    def probed(self) -> Iterator[Values]:
        model = model_at_hand(self.step)
        prepared = [*self.prepared(model, self.base.probed())]
        yield from self._made(model, [*enumerate(prepared)], ["a built-in input"] * len(prepared))


_STEPS_GUESSED = 100
"""Of an output that grows, where nothing says how long it is."""


def model_items_of(config: Config, group: Any) -> ModelItems:
    """Returns the group of a section: its base prepares items as the model's own folder says."""
    of_images = [model.name for model in config.model if "image" in model.taken]
    stores_none = config.vision is not None and config.vision.images == "none"
    tells = stores_none and group.name in of_images[:1]
    return ModelItems(group.name, group.step, _base_of(config, group.step), tells=tells)


def _base_of(config: Config, step: ModelStep) -> Prepares:
    earlier = next((ModelStep.of(model, config) for model in config.model if model.name == step.takes), None)
    if earlier is not None:
        return ModelItems(earlier.label, earlier, _base_of(config, earlier))
    if step.is_code:
        return _decoded(config, step)
    texts, is_first = None, step.takes != "text" or step.gives_scores
    if "text" in step.takes:
        texts = TextInputs(step.folder, tokenizer_digest(Path(step.folder)), config.source.captions, is_first)
    if texts is not None and step.takes == "text":
        return texts
    if step.takes == "audio":
        rate_hz = _rate_hz(step)
        audio = AudioConfig(features="extractor", sample_rate_hz=rate_hz, settings={"extractor": step.folder})
        config = replace(config, audio=audio, vision=None, text=None, model=())
        found = AudioGroup.of(config)
        assert found is not None
        return audio_items_of(config, found)
    if step.family().factor is not None and step.target is not None:
        return CroppedImages.given(config, step.target, step.label)
    vision = VisionConfig(processor=step.folder, images="processor")
    config = replace(config, audio=None, vision=vision, text=None, model=())
    images = ImageGroup.of(config)
    assert images is not None
    of_images = ImageItems.of(config, images)
    return of_images if texts is None else PairInputs(of_images, texts)


def _decoded(config: Config, step: ModelStep) -> Prepares:
    """Returns what decodes items for a class of the user; with `size` images are cropped to their targets."""
    if step.target is not None:
        return CroppedImages.given(config, step.target, step.label)
    pixels = Processed(processor="")
    images = ImageItems(ImageGroup(step=pixels, folder=""), DecodedForm(pixels, "raw"), config.source.columns.image)
    texts = TextInputs("", "", config.source.captions, is_first=step.takes != "text")
    others: dict[str, Prepares] = {"text": texts, "image": images}
    if step.takes != "audio":
        return others.get(step.takes) or PairInputs(images, texts)
    audio = AudioConfig(features="waveform", sample_rate_hz=json.loads(step.args).get("sample_rate_hz", 16_000))
    found = AudioGroup.of(replace(config, audio=audio, vision=None, text=None, model=()))
    assert found is not None
    return audio_items_of(config, found)


def _rate_hz(step: ModelStep) -> int:
    rate_hz = ExtractorFolder.read(Path(step.folder)).document.get("sampling_rate", 16_000)
    if type(rate_hz) is not int:
        raise ConfigError(f"model.{step.label}: {step.folder} has the sampling_rate {rate_hz!r}, wanted an integer")
    return rate_hz


@functools.lru_cache(maxsize=8)
def _read(known: str) -> Declared:
    document = json.loads(known)
    return BatchForm.from_json(document["form"]), _columns(document["columns"] or {})


def _columns(dtypes: Mapping[str, str]) -> tuple[FieldSpec, ...]:
    if taken := [name for name in dtypes if name in {*RESERVED, "duration_s"} or name.startswith("num_")]:
        raise ConfigError(
            f"a model's number is called {taken[0]!r}, which is a column of all rows; rename it", code="FB147"
        )
    return tuple(FieldSpec(name=name, dtype=dtype, role="table") for name, dtype in dtypes.items())


@functools.lru_cache(maxsize=8)
def prepared_form(base: Any) -> BatchForm:
    """Returns the form in which a model is given what a group prepares."""
    if isinstance(base, TextInputs):
        return base.form
    if isinstance(base, PairInputs):
        parts = [prepared_form(part) for part in (base.images, base.texts)]
        return replace(parts[0], fields=tuple(field for part in parts for field in part.fields))
    if isinstance(base, CroppedImages):
        return base.form.form
    if isinstance(base, ImageItems):
        assert isinstance(base.form, ArrayForm)
        return base.form.form
    assert isinstance(base, AudioItems)
    fields = {spec.name: replace(spec, group=base.name) for spec in base.fields()}
    stored = Stored(MODEL, Constants({base.name: base.constants()}), fields, base.name)
    return base.steps.features.batch(stored)


@functools.lru_cache(maxsize=4)
def _probed(group: ModelItems) -> tuple[Declared, dict[str, Any]]:
    """Returns the form of a model's outputs, and how an item alone, again and in a batch differ.

    That in words, in numbers, some of the values themselves, and the machine that gave them.
    """
    model = model_at_hand(group.step)
    probed = [*group.prepared(model, group.base.probed())]
    prepared = [values for values in probed if "failure" not in values]
    if not prepared:
        raise ConfigError(f"model.{group.name}: no built-in {group.unit} can be prepared: {probed[0]['message']}")
    alone, again = ([group._outputs(model, [one])[0] for one in prepared] for _ in range(2))
    together = group._outputs(model, prepared)
    fields, numbers = model.declared(alone[0])
    if group.step.variants:
        require_variants(group.step, prepared_form(cast(Hashable, group.base)).pixels, fields)
    form = BatchForm(made_by=model.made_by, fields=fields, promise=Promise(kind="exact"))
    promise = promise_of(alone, again, together)
    return (form, _columns(numbers)), {
        "model": f"{in_words(promise)} in batches of {model.batch_size}",
        "promise": promise,
        "sample": sample_of(alone),
        "made_with": model.machine,
    }
