"""The data set and collators of Qwen's `qwen-vl-finetune`, over caches: what its trainer takes, decoded once.

The shapes are those of `qwenvl/data/data_processor.py` (QwenLM/Qwen3-VL, Apache 2.0, as of 2026). For its tokens and
labels set `learn_through = "newline"` and `strip_text = true` under `[text]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from forebay.config import PackConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.plan.make import plan_of
from forebay.steps.batch import IGNORED
from forebay.steps.image.qwen2_vl import GRIDS
from forebay.steps.recipe import AnyConfig, as_config
from forebay.store.layout import Ints
from forebay.train.collate.packed import PackCollator
from forebay.train.select import select

__all__ = ["CachedSupervisedDataset", "FlattenedCollator", "PaddedCollator", "make_supervised_data_module"]
Item = dict[str, Any]


class CachedSupervisedDataset(Dataset[Item]):
    """The place of `LazySupervisedDataset`: an item is a sample, or under `data_packing` a pack of the config's plan.

    An item has `input_ids` and `labels` int64 [1, n], `position_ids` int64 [3, 1, n], `attention_mask`, a list of the
    tokens of each sample, and with images `pixel_values` float32 [patches, w] and `image_grid_thw` int64 [k, 3]. The
    Trainer shuffles and shares items among ranks, as it does with the original.
    """

    def __init__(self, processor: Any, data_args: Any) -> None:
        """data_args: `dataset_use` is a forebay config, or its path; `data_packing`, `min_pixels` and `max_pixels` as
        of the original. Raises CacheMismatchError where the samples were made for another tokenizer, or for other
        pixel limits, and ConfigError for a config without packs of images, or with what is drawn by epochs.
        """
        config: AnyConfig = data_args.dataset_use
        config = as_config(config)
        if not isinstance(config.plan, PackConfig):
            raise ConfigError(f'{config.path}: qwen-vl-finetune needs [vision], prompt = "chat" and plan.kind = "pack"')
        if config.augment or (config.vision and config.vision.settings.get("crops")):
            raise ConfigError(
                f"{config.path}: [[augment]] and vision.crops are drawn by epochs, of which a data set of "
                "qwen-vl-finetune is told none; leave them out, or train with forebay.train.make_loader"
            )
        self.source = select(config)
        self._collator = PackCollator(self.source)
        _require(self.source.constants, processor, data_args, name=self.source.place)
        self._items: list[Ints] = list(np.arange(len(self.source))[:, None])
        if data_args.data_packing:
            plan = plan_of(config, self.source, keep=self.source.slots is not None).plan
            self._items = plan.order(config.loader.seed, 0).batches(range(plan.num_batches))

    def __len__(self) -> int:
        return len(self._items)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each item, exactly; the original guesses."""
        tokens = self.source.lengths["num_tokens"]
        return [int(tokens[item].sum()) for item in self._items]

    def __getitem__(self, index: int) -> Item:
        samples = [self.source.read(place) for place in self._items[index].tolist()]
        made, sizes = self._collator(samples), [len(sample["input_ids"]) for sample in samples]
        num_images = sum(len(sample[GRIDS]) for sample in samples)
        # A pack without images has one of padding behind its tokens; the original has none.
        item = {name: made[name][:, : sum(sizes)] for name in ("input_ids", "labels")}
        item |= {"position_ids": made["position_ids"][1:, :, : sum(sizes)], "attention_mask": sizes}
        return item | ({name: made[name] for name in ("pixel_values", GRIDS)} if num_images else {})


def _require(constants: Mapping[str, Any], processor: Any, data_args: Any, *, name: str) -> None:
    found = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    pairs = [("image_token_id", constants.get("image_token_id"), found)]
    limits = constants.get("image") or {}
    pairs += [(side, limits.get(side), getattr(data_args, side)) for side in ("min_pixels", "max_pixels")]
    for what, own, given in pairs:
        if own != given:
            raise CacheMismatchError(
                f"{name}: {what} is {own} in the samples and {given} in the arguments; give the arguments that, or "
                "change preprocessor_config.json in the folder of vision.processor and run: forebay preprocess CONFIG"
            )


class FlattenedCollator:
    """Makes one row of all items, whose `attention_mask` says where samples begin, int32 [samples + 1].

    That is `FlattenedDataCollatorForSupervisedDataset`, for the attention that qwen-vl-finetune puts into its models.
    """

    def __call__(self, items: Sequence[Item]) -> Item:
        """Returns the batch."""
        sizes = [size for item in items for size in item["attention_mask"]]
        batch = {name: torch.cat([item[name] for item in items], dim=1) for name in ("input_ids", "labels")}
        batch["attention_mask"] = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
        batch["position_ids"] = torch.cat([item["position_ids"] for item in items], dim=2)
        return batch | _images(items)


class PaddedCollator:
    """Makes a row an item, padded at the right: `DataCollatorForSupervisedDataset`, which cuts what is too long."""

    def __init__(self, tokenizer: Any) -> None:
        self._pad, self._most = tokenizer.pad_token_id, tokenizer.model_max_length

    def __call__(self, items: Sequence[Item]) -> Item:
        """Returns the batch. Raises ConfigError for an item longer than the tokenizer's `model_max_length`."""
        if (longest := max(item["input_ids"].shape[1] for item in items)) > self._most:
            raise ConfigError(
                f"an item has {longest} tokens, model_max_length is {self._most}, and nothing is cut here; raise it, "
                'or set plan.seq_len so and plan.overlong = "truncate"'
            )
        pads = {"input_ids": self._pad, "labels": IGNORED}
        batch = {
            name: pad_sequence([item[name][0] for item in items], batch_first=True, padding_value=pad)
            for name, pad in pads.items()
        }
        places = [item["position_ids"].permute(2, 0, 1)[:, :, 0] for item in items]
        batch["attention_mask"] = batch["input_ids"].ne(self._pad)
        batch["position_ids"] = pad_sequence(places, padding_value=1).permute(2, 1, 0)
        return batch | _images(items)


def _images(items: Sequence[Item]) -> Item:
    shown = [item for item in items if GRIDS in item]
    names = ("pixel_values", GRIDS)
    found: Item = {name: torch.cat([item[name] for item in shown]) if shown else None for name in names}
    return found | dict.fromkeys(("pixel_values_videos", "video_grid_thw"))


def make_supervised_data_module(processor: Any, data_args: Any) -> dict[str, Any]:
    """Returns what qwen-vl-finetune gives its Trainer, in the place of its function of this name."""
    is_flat = data_args.data_flatten or data_args.data_packing
    return {
        "train_dataset": CachedSupervisedDataset(processor, data_args),
        "eval_dataset": None,
        "data_collator": FlattenedCollator() if is_flat else PaddedCollator(processor.tokenizer),
    }
