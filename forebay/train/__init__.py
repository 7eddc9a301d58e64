"""A cache, or raw data, becomes batches: loader, data sets, collation, models, the reference loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.train.collate.collator import Collator as Collator
    from forebay.train.collate.context_cut import context_places as context_places
    from forebay.train.collate.context_cut import cut_for_context as cut_for_context
    from forebay.train.collate.packed import PackCollator as PackCollator
    from forebay.train.collate.patches import PatchBatch as PatchBatch
    from forebay.train.collate.patches import to_model_inputs as to_model_inputs
    from forebay.train.collate.patches import weight_of as weight_of
    from forebay.train.dataset import CachedVLDataset as CachedVLDataset
    from forebay.train.dataset import PlanSampler as PlanSampler
    from forebay.train.dataset import SampleDataset as SampleDataset
    from forebay.train.dataset import build_vl_dataloader as build_vl_dataloader
    from forebay.train.loader import Loader as Loader
    from forebay.train.loader import LoaderSettings as LoaderSettings
    from forebay.train.models.generic import num_targets as num_targets
    from forebay.train.models.model_folder import load_model as load_model
    from forebay.train.select import make_loader as make_loader

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "collate.collator": "Collator",
        "collate.context_cut": "context_places cut_for_context",
        "collate.packed": "PackCollator",
        "collate.patches": "PatchBatch to_model_inputs weight_of",
        "dataset": "CachedVLDataset PlanSampler SampleDataset build_vl_dataloader",
        "loader": "Loader LoaderSettings",
        "models.model_folder": "load_model",
        "models.generic": "num_targets",
        "select": "make_loader",
    },
)
