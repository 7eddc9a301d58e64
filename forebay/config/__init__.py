"""The configuration: one dataclass a section, from one TOML file or dict. Imports the standard library only."""

from forebay.config.data import SourceColumns, SourceConfig
from forebay.config.load import parse_config
from forebay.config.plan import BucketConfig, MixtureConfig, MixtureSource, PackConfig, PlanConfig, WindowConfig
from forebay.config.remote import RemoteConfig
from forebay.config.train import EvalConfig, LoraConfig, RunConfig, TrainConfig
from forebay.config.tree import AudioConfig, Config, FilterConfig, LayoutConfig, LoaderConfig, TextConfig, VisionConfig

__all__ = [
    "AudioConfig",
    "BucketConfig",
    "Config",
    "EvalConfig",
    "FilterConfig",
    "LayoutConfig",
    "LoaderConfig",
    "LoraConfig",
    "MixtureConfig",
    "MixtureSource",
    "PackConfig",
    "PlanConfig",
    "RemoteConfig",
    "RunConfig",
    "SourceColumns",
    "SourceConfig",
    "TextConfig",
    "TrainConfig",
    "VisionConfig",
    "WindowConfig",
    "parse_config",
]
