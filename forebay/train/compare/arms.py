"""The arms of a comparison: the config's own way, and the ways that it is held against."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.audio_section import audio_step_of
from forebay.steps.image.image_section import image_step_of
from forebay.steps.table import is_own
from forebay.train.select import as_stored

OWN = "config"
"""What tables call the config's own way: its cache and its plan."""

PARTS = ("uncached", "unbucketed", "hf")

_OF_PACKS = ("uncached",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train on the samples of a block."""

    name: str
    is_uncached: bool = False
    """Samples are made on the fly, by the steps of the config."""
    is_unbucketed: bool = False
    """Batches are of random samples: as many batches as the config's plan has, of equal size."""
    is_plain: bool = False
    """transformers' Trainer, a DataLoader with workers, the reference extractor or processor in the collator, random
    batches."""

    def config(self, config: Config, *, folder: str) -> Config:
        """Returns the config that this arm trains by. It keeps nothing of what it learns.

        folder: instead of `train.output_dir`, where a run of the config may have checkpoints.
        """
        quiet: dict[str, Any] = {"output_dir": folder, "eval": (), "save_best": None, "trackers": ()}
        train = dataclasses.replace(config.train, **quiet)
        loader = dataclasses.replace(config.loader, cache="off" if self.is_uncached else "require")
        return as_stored(dataclasses.replace(config, loader=loader, train=train))


def arms_of(names: str, config: Config) -> list[Arm]:
    """Returns the config's own arm and those of a list such as `uncached,unbucketed+uncached,hf`, each once.

    Raises ConfigError for a name that is none, with the nearest and the list, and for arms that the config's samples
    cannot have.
    """
    arms = [Arm(name=OWN)]
    for name in filter(None, (part.strip() for part in names.split(","))):
        arm = _arm(name)
        _require_possible(arm, config)
        if arm not in arms:
            arms.append(arm)
    if len(arms) == 1:
        raise ConfigError(f"--against names no arm; give one or more of {', '.join(PARTS)}, separated by commas")
    return arms


def _arm(name: str) -> Arm:
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1)
            raise ConfigError(
                f"--against names {part!r}, wanted {', '.join(PARTS)}, or two of them as uncached+unbucketed"
                + (f"; the nearest is {near[0]!r}" if near else "")
            )
    if "hf" in parts and len(set(parts)) > 1:
        raise ConfigError(f"--against names {name!r}, but hf reads raw data in random batches anyway; name hf alone")
    kept = [part for part in PARTS if part in parts]
    return Arm(
        name="+".join(kept),
        is_uncached="uncached" in kept,
        is_unbucketed="unbucketed" in kept,
        is_plain="hf" in kept,
    )


def _require_possible(arm: Arm, config: Config) -> None:
    if config.plan is not None and config.plan.kind == "pack" and arm.name not in _OF_PACKS:
        raise ConfigError(
            f"--against names {arm.name}, but {config.path} makes packs, whose samples have no length of a batch; "
            f"for packs give --against {', '.join(_OF_PACKS)}"
        )
    if (arm.is_plain or arm.is_unbucketed) and config.mixture.source:
        raise ConfigError(
            f"--against names {arm.name}, but {config.path} reads several sources by [[mixture.source]], which have no "
            "random batches in common; give --against uncached, or compare a config of one source"
        )
    if arm.is_plain:
        _require_of_transformers(config)
    if arm.is_uncached and any(entry.cache is not None for entry in config.mixture.source):
        raise ConfigError(
            f"--against names {arm.name}, but {config.path} names the folder of a cache in [[mixture.source]]; name "
            "the source's config there, which says where its raw data is"
        )


def _require_of_transformers(config: Config) -> None:
    if config.audio is not None and is_own(config.audio.features):
        raise ConfigError(
            f"--against names hf, but audio.features of {config.path} is {config.audio.features}, which no extractor "
            "of transformers makes; give --against uncached,unbucketed"
        )
    audio, image = audio_step_of(config), image_step_of(config)
    if image is not None and not image.is_of_transformers:
        raise ConfigError(
            f"--against names hf, but {config.path} stores patches, and that way is one of recordings and of images as "
            "their processor gives them; give --against uncached,unbucketed"
        )
    if image is None and (audio is None or not audio.reads_sound):
        raise ConfigError(
            f"--against names hf, but {config.path} has no sound for an extractor; give --against uncached,unbucketed"
        )
