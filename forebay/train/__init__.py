"""From a cache, or from raw data, to batches: loader, data sets, collation, models, the reference loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.train.collate.collator import Collator
    from forebay.train.collate.packed import PackCollator
    from forebay.train.collate.patches import PatchBatch, to_model_inputs
    from forebay.train.dataset import PlanSampler, SampleDataset
    from forebay.train.loader import Loader, LoaderSettings
    from forebay.train.models.folder import load_model
    from forebay.train.select import make_loader
    from forebay.train.vl_dataset import CachedVLDataset, build_vl_dataloader

__all__ = [
    "CachedVLDataset",
    "Collator",
    "Loader",
    "LoaderSettings",
    "PackCollator",
    "PatchBatch",
    "PlanSampler",
    "SampleDataset",
    "build_vl_dataloader",
    "load_model",
    "make_loader",
    "to_model_inputs",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "CachedVLDataset": "forebay.train.vl_dataset",
        "Collator": "forebay.train.collate.collator",
        "Loader": "forebay.train.loader",
        "LoaderSettings": "forebay.train.loader",
        "PackCollator": "forebay.train.collate.packed",
        "PatchBatch": "forebay.train.collate.patches",
        "PlanSampler": "forebay.train.dataset",
        "SampleDataset": "forebay.train.dataset",
        "build_vl_dataloader": "forebay.train.vl_dataset",
        "load_model": "forebay.train.models.folder",
        "make_loader": "forebay.train.select",
        "to_model_inputs": "forebay.train.collate.patches",
    },
)
