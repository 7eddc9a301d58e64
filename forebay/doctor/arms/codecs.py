"""The arm of codecs: what a pack of this set's images takes to read, and its bytes, under each of the four."""

from __future__ import annotations

import statistics
import time

import numpy as np

from forebay.config.plan import PackConfig
from forebay.doctor.bench import Bench
from forebay.doctor.figures import Codecs, Skip
from forebay.errors import SampleError
from forebay.preprocess.vision.headers import images_of
from forebay.preprocess.vision.modality import Vision
from forebay.preprocess.vision.samples import loaded_steps
from forebay.rows.shared_images import flattened
from forebay.store.image.codec import Codec, decode, encode

_CODECS: tuple[Codec, ...] = ("raw", "zstd", "webp", "source")
_IMAGES = 24


def codecs(bench: Bench, seconds: float) -> Codecs:
    """Returns milliseconds to read a pack and bytes of a sample by codec: of some images, each encoded and decoded."""
    modality, plan = bench.modality, bench.config.plan
    if not isinstance(modality, Vision) or not isinstance(plan, PackConfig):
        raise Skip("only images have codecs")
    picked = bench.picked
    images, rows = images_of(picked), picked.rows
    if not len(images):
        raise Skip("no sample has an image")
    steps = loaded_steps(modality.recipe.patches, modality.processor, modality.settings)
    read_s: dict[Codec, list[float]] = {codec: [] for codec in _CODECS}
    sizes: dict[Codec, list[int]] = {codec: [] for codec in _CODECS}
    ends = time.perf_counter() + seconds
    with bench.reader() as read:
        for place in bench.random.permutation(len(images))[:_IMAGES].tolist():
            row = images.slice(place, 1).to_pylist()[0]
            try:
                data = read(row["file"], row["offset"], row["size"])
                image = steps.make(data, sample_id=str(place))
            except SampleError:
                continue
            for codec in _CODECS:
                _, stored = encode(codec, data=data, pixels=image.pixels, patches=image.patches)
                began = time.perf_counter()
                patches = decode(
                    codec,
                    stored,
                    grid=image.grid,
                    settings=modality.settings,
                    max_pixels=modality.recipe.patches.max_pixels,
                    alpha=modality.recipe.patches.alpha,
                )
                np.ascontiguousarray(patches).sum()  # `raw` is a mapping whose bytes are copied when they are used
                read_s[codec].append(time.perf_counter() - began)
                sizes[codec].append(stored.nbytes)
            if time.perf_counter() > ends:
                break
    if not sizes["raw"]:
        raise Skip("no image could be read")
    offsets, _ = flattened(rows["images"])
    images_a_sample = float(np.diff(offsets).mean())
    tokens = np.asarray(bench.cached.lengths["num_tokens"])
    samples_a_pack = max(plan.seq_len / max(float(tokens.mean()), 1.0), 1.0)
    return Codecs(
        read_ms={
            codec: 1e3 * statistics.fmean(each) * images_a_sample * samples_a_pack for codec, each in read_s.items()
        },
        bytes_a_sample={codec: statistics.fmean(each) * images_a_sample for codec, each in sizes.items()},
        own=modality.codec,
        samples_a_pack=samples_a_pack,
    )
