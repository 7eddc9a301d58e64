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
    VisionConfig,
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
    "VisionConfig",
    "load_config",
    "parse_config",
]
