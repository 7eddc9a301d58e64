"""Images and conversations made into samples on the fly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from forebay.config import Config
from forebay.errors import ManifestError, SampleError
from forebay.preprocess.sources import Manifest, MediaReader
from forebay.preprocess.vision.headers import conversation_rows, media_rows
from forebay.preprocess.vision.modality import VisionLine
from forebay.preprocess.vision.samples import MEDIA_ROWS
from forebay.steps.recipe import VisionRecipe, recipe_of
from forebay.store.image.codec import FIELDS
from forebay.store.image.stored import StoredImages
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec
from forebay.store.row_table import sorted_categories, strings_digest
from forebay.train.uncached.listing import conversations
from forebay.train.uncached.speech import compare_probe
from forebay.train.uncached.substitutes import MAX_SUBSTITUTES, Substitutes


class UncachedVisionSource:
    """Decodes, resizes and tokenises a sample whenever it is asked for. Threads may share it.

    fields, lengths, constants: as of a cache with codec "raw". A sample that turns out to be bad is replaced by the next
    one that is good and no longer, so that it fits where the bad one stood, and counted in `failed`.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples, reads every image's header and tokenises every conversation, unless that was kept.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        recipe = recipe_of(config)
        if not isinstance(recipe, VisionRecipe):
            raise TypeError("a config without [vision] is read by UncachedSource")
        self._line = VisionLine.of(config, recipe).with_codec("raw")
        found = conversations(config, self._line, recipe_key=recipe.key)
        if not len(found.rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used ({dict(found.failed)}); "
                f"run: forebay preprocess {config.path}"
            )
        self._rows, self.not_listed = found.rows, found.failed
        self._manifest = Manifest(files=found.files, rows=found.rows, images=found.images)
        self._names = [file.name for file in found.files]
        self._media = MediaReader(
            found.files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            audio_column=config.source.image_column,
            as_listed=True,
        )
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in self._line.fields()}
        self.constants = self._line.constants()
        step = recipe.patches
        self._images = StoredImages(MEDIA_ROWS, "raw", self._line.settings, step.max_pixels, step.alpha)
        self.tokenizer = recipe.chat.tokenizer
        self.recipe_key = recipe.key
        self.key = digest({"uncached": recipe.key, "rows": found.rows["sample_id"].to_pylist()})
        self.lengths = {name: found.rows[name].to_numpy() for name in self._line.length_names}
        self._substitutes = Substitutes()
        compare_probe(self._line, stored_probe)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def failed(self) -> Counter[str]:
        """Bad samples met so far, by reason."""
        return self._substitutes.failed

    def read(self, index: int) -> dict[str, Any]:
        """Returns one sample, read-only, as `Cache.read` does. Raises SampleError where a hundred samples are bad."""
        return self._substitutes.first_good(self._make, islice(self._candidates(index), MAX_SUBSTITUTES))

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of `source`, sorted, and which one each sample has; see `Cache`."""
        return sorted_categories(self._names, self._rows["group"].to_numpy()) if name == "source" else None

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample."""
        return str(self._rows["sample_id"][index].as_py())

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order."""
        return strings_digest(self._rows["sample_id"])

    def _candidates(self, index: int) -> Iterator[int]:
        """The sample itself, then those behind it, around the end, that need no more room."""
        yield index
        tokens, patches = self.lengths["num_tokens"], self.lengths["num_patches"]
        for step in range(1, len(self)):
            other = (index + step) % len(self)
            if tokens[other] <= tokens[index] and patches[other] <= patches[index]:
                yield other

    def _make(self, index: int) -> dict[str, Any]:
        row = self._rows.slice(index, 1)
        text = self._good(next(iter(self._line.text_samples(conversation_rows(self._manifest, row), self._names))))
        made = [self._good(values) for values in self._line.media_samples(media_rows(self._manifest, row), self._media)]
        used = text[MEDIA_ROWS].tolist()
        return self._images.sample({n: text[n] for n in ("input_ids", "label_mask")}, [made[place] for place in used])

    def _good(self, values: dict[str, Any]) -> dict[str, Any]:
        if "failure" in values:
            raise SampleError(values["failure"], values["message"])
        for name in (FIELDS["raw"], "input_ids", "label_mask"):
            if name in values:
                values[name].flags.writeable = False
        return values
