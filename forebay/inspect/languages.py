"""What was detected of the languages of a cache, and where that is not what its manifest says."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.steps.text.language.script import code_of
from forebay.store.cache import Cache
from forebay.store.layout import Array

logger = logging.getLogger(__name__)

_IDS = 3


def detection_facts(cache: Cache) -> dict[str, Any] | None:
    """Returns what `text.language = "detect"` found; None where it was not asked, or would have to be downloaded.

    languages: `language`, `samples` and mean `confidence` of each detected one, the most frequent first. unsaid:
    samples that keep the manifest's language, since nothing was said or asked. unknown: samples without any language.
    num_disagreements: samples of which manifest and detection say different languages. disagreements: `manifest`,
    `detected`, `samples` and some `ids` of each pair; `nb` and `no`, or `English` and `en`, are one language.
    """
    if cache.mirror is not None or "language_detected" not in cache.column_names:
        return None
    try:
        return _facts(cache)
    except CacheError as err:
        logger.warning("the detected languages of %s are not counted: %s", cache.place, err)
        return None


def _facts(cache: Cache) -> dict[str, Any] | None:
    detected, stated = cache.categories("language_detected"), cache.categories("language_manifest")
    if detected is None or stated is None:  # a cache made of caches, of which some said nothing
        return None
    (names, codes), (manifest_names, manifest_codes) = detected, stated
    confidence = cache.table(["language_confidence"])["language_confidence"].fill_null(0.0).to_numpy()
    counts = np.bincount(codes, minlength=len(names))
    sums = np.bincount(codes, weights=confidence, minlength=len(names))
    nothing, none_stated = _are(names, codes), _are(manifest_names, manifest_codes)
    pairs = _disagreements(cache, names, codes, manifest_names, manifest_codes)
    return {
        "languages": [
            {"language": names[i], "samples": int(counts[i]), "confidence": round(float(sums[i] / counts[i]), 4)}
            for i in sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))
            if names[i]
        ],
        "unsaid": int((nothing & ~none_stated).sum()),
        "unknown": int((nothing & none_stated).sum()),
        "num_disagreements": sum(pair["samples"] for pair in pairs),
        "disagreements": pairs,
    }


def _are(names: list[str], codes: Array) -> Array:
    """Returns which samples have no language, bool [num_samples]."""
    return np.asarray(codes == names.index("")) if "" in names else np.zeros(len(codes), bool)


def _disagreements(
    cache: Cache, names: list[str], codes: Array, manifest_names: list[str], manifest_codes: Array
) -> list[dict[str, Any]]:
    both = manifest_codes.astype(np.int64) * len(names) + codes
    found = []
    for pair, count in zip(*np.unique(both, return_counts=True), strict=True):
        manifest, detected = manifest_names[pair // len(names)], names[pair % len(names)]
        if manifest and detected and code_of(manifest) != code_of(detected):
            ids = [cache.sample_id(int(i)) for i in np.flatnonzero(both == pair)[:_IDS]]
            found.append({"manifest": manifest, "detected": detected, "samples": int(count), "ids": ids})
    return sorted(found, key=lambda entry: (-entry["samples"], entry["manifest"], entry["detected"]))
