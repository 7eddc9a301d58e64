"""Where the shards of a cache of images begin and end, and what each is named by; shared by both modalities of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.preprocess.cut import Cut, columns_digest, kept_document
from forebay.preprocess.modality import Listing
from forebay.preprocess.vision.headers import RowImages, image_names, images_of
from forebay.steps.recipe import ImagesRecipe, VisionRecipe
from forebay.store.image.codec import Codec
from forebay.store.key import digest
from forebay.store.layout import GROUPS, Array, Group, format_of


def cut_images(groups: Array, image_groups: Array, *, rows_per_shard: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of every shard: up to `rows_per_shard` rows of one source file.

    groups: int [rows], the file that each row is cut by. image_groups: int [rows]; consecutive rows of one number share
    images and stay together, so that these are stored once, unless they are more than `rows_per_shard`.
    """
    if not len(groups):
        return []
    changes = np.diff(groups) != 0
    files = [*(np.flatnonzero(changes) + 1).tolist(), len(groups)]
    borders = np.append(np.flatnonzero(changes | (np.diff(image_groups) != 0)) + 1, len(groups))
    cuts, start = [], 0
    for end in files:
        while start < end:
            furthest = min(start + rows_per_shard, end)
            border = int(borders[np.searchsorted(borders, furthest, side="right") - 1]) if furthest >= borders[0] else 0
            stop = border if border > start else furthest
            cuts.append((start, stop))
            start = stop
    return cuts


def name_image_cuts(
    recipe: VisionRecipe | ImagesRecipe,
    listing: Listing,
    *,
    codec: Codec,
    of_text: Callable[[pa.Table], Mapping[str, Sequence[Array]]],
    probe: Mapping[Group, str],
    rows_per_shard: int,
) -> Iterator[Cut]:
    """Yields every shard with its keys.

    A media key is made of the steps, the probe, the codec and the different images by the bytes that they are decoded
    from, whatever files hold them; a text key of the steps, the probe, and the rows' texts, names of images, places of
    images, and source names. of_text: gives what texts depend on of the images they use, beside these, by name.
    """
    rows = listing.rows
    groups = rows["group"].to_numpy()
    cuts = cut_images(groups, rows["image_group"].to_numpy(), rows_per_shard=rows_per_shard)
    for index, (start, stop) in enumerate(cuts):
        part = rows.slice(start, stop - start)
        images = RowImages.of(part)
        used = images_of(listing.manifest).take(pa.array(images.used))
        media = {
            "format_version": format_of(GROUPS),
            "group": "media",
            "steps": [step.identity() for step in recipe.media_steps],
            "probe": probe["media"],
            "codec": codec,
            "images": columns_digest(used.select(["hash"]), np.zeros(0, np.int64)),
        }
        files, places = np.unique(groups[start:stop], return_inverse=True)
        text: dict[str, Any] = {
            "format_version": format_of(GROUPS),
            "group": "text",
            "steps": [step.identity() for step in recipe.text_steps],
            "probe": probe["text"],
            "files": [listing.files[i].name for i in files.tolist()],
            "rows": columns_digest(part.select(["sample_id", "text"]), places),
            "images": image_names(listing.manifest, images.used),
            **{name: _digest(*values) for name, values in of_text(used).items()},
            "image_rows": _digest(images.offsets, images.rows),
        }
        text |= kept_document(part)
        keys: dict[Group, str] = {"media": digest(media), "text": digest(text)}
        yield Cut(index=index, start=start, stop=stop, num_media=len(images.used), keys=keys)


def _digest(*arrays: Array) -> str:
    state = xxhash.xxh3_128()
    for array in arrays:
        state.update(np.ascontiguousarray(array, np.int64).tobytes())
    return state.hexdigest()
