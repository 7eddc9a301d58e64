"""The configuration tree, its loader, and the descriptions of the steps. Imports the standard library only."""

from forebay.config.load import load_config, parse_config
from forebay.config.tree import (
    AudioConfig,
    Config,
    LayoutConfig,
    MixtureSource,
    PlanConfig,
    RunConfig,
    SourceConfig,
    TextConfig,
    TrainConfig,
)

__all__ = [
    "AudioConfig",
    "Config",
    "LayoutConfig",
    "MixtureSource",
    "PlanConfig",
    "RunConfig",
    "SourceConfig",
    "TextConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
]
