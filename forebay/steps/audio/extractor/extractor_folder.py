"""The facts that a folder states of its feature extractor, read without transformers.

Extractors of transformers whose values a step of ours makes: found by a folder's document alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from forebay.config.pretrained_folder import extractor_digest
from forebay.errors import ConfigError
from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.w2v_bert import W2vBert
from forebay.steps.step import AudioStep
from forebay.visible import an

_NESTED, _PLAIN = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractorFolder:
    """A folder's feature extractor as its files say it. path: of the file that defines it, for messages.

    kind: its class, empty where the file names none. processor_class: of the processor that it is a part of, empty
    where no file names one. model_type: of config.json, by which transformers finds a class that no file names.
    """

    path: Path
    digest: str
    document: Mapping[str, Any]
    kind: str
    processor_class: str
    model_type: str

    def setting(self, name: str, default: Any) -> Any:
        """Returns what the folder says of its whole processor, else a default."""
        return _json(self.path.parent / _NESTED).get(name, default)

    @classmethod
    def read(cls, folder: Path) -> ExtractorFolder:
        """Returns what a folder says. Raises ConfigError where it holds no feature extractor, or names code of its own.

        As transformers 5 reads it: `feature_extractor` of processor_config.json where that is there, else
        preprocessor_config.json.
        """
        digest = extractor_digest(folder)
        nested, plain, config = (_json(folder / name) for name in (_NESTED, _PLAIN, "config.json"))
        own = nested.get("feature_extractor", nested.get("audio_processor"))
        path, document = (folder / _PLAIN, plain) if own is None else (folder / _NESTED, own)
        if not isinstance(document, dict):
            raise refused(
                path, f"its feature extractor is {json.dumps(document)[:80]}, wanted an object; save it again"
            )
        for place, each in ((folder / _NESTED, nested), (folder / _PLAIN, plain), (path, document)):
            if "auto_map" in each:
                raise refused(
                    place,
                    "it has auto_map, which names code of its own; forebay runs no code of a folder: take a folder "
                    "whose class transformers has, or remove auto_map where that class is the right one",
                )
        kind = _name(document.get("feature_extractor_type"))
        image = _name(document.get("image_processor_type")) or _image_kind(nested)
        if not kind and (image or not document):
            raise refused(
                folder,
                f"it defines an image processor alone ({image or 'no settings of a feature extractor'}); point "
                "audio.extractor at the folder of a model of audio; images are for [vision] processor",
            )
        return cls(
            path=path,
            digest=digest,
            document=document,
            kind=kind,
            processor_class=_name(document.get("processor_class")) or _name(nested.get("processor_class")),
            model_type=_name(config.get("model_type")),
        )


def refused(path: Path, why: str) -> ConfigError:
    """Returns the error that a folder or file cannot be `audio.extractor`."""
    return ConfigError(f"audio.extractor: {path}: {why}", code="FB121")


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except OSError as err:
        raise refused(path, f"cannot read it: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise refused(path, f"it is no JSON: {err}; save it again") from err
    if not isinstance(document, dict):
        raise refused(path, "it holds no JSON object; save it again")
    return document


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _image_kind(nested: Mapping[str, Any]) -> str:
    image = nested.get("image_processor")
    return _name(image.get("image_processor_type")) if isinstance(image, dict) else ""


_log = logging.getLogger(__name__)
Dtype = Literal["float16", "float32"]

_NO_SETTINGS = frozenset(
    ("feature_extractor_type", "processor_class", "n_samples", "nb_max_frames", "mel_filters", "transformers_version")
)
"""What a document may hold beside settings: names, and what the class computes anew whatever stands there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Native:
    """A class of transformers with a step of ours, and for which settings and processors that is proved.

    settings: the class's defaults, and the only values but for `feature_size`, which is one of `bins`.
    processors: those that call the extractor as the step's batches have it.
    """

    processors: tuple[str, ...]
    bins: tuple[int, ...]
    settings: Mapping[str, Any]
    step: Callable[[int, Dtype], AudioStep]

    def answers(self, folder: ExtractorFolder) -> int | None:
        """Returns the bins of a folder's frames, None where the step is not proved for its settings."""
        if folder.processor_class not in ("", *self.processors):
            return None
        wanted = {name: value for name, value in folder.document.items() if name not in _NO_SETTINGS}
        settings = {**self.settings, **wanted}
        bins = settings.pop("feature_size")
        rest = {name: value for name, value in self.settings.items() if name != "feature_size"}
        return bins if type(bins) is int and bins in self.bins and settings == rest else None


_LOG_MEL: Mapping[str, Any] = {
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "padding_side": "right",
    "dither": 0.0,
}
_NATIVE = {
    "WhisperFeatureExtractor": _Native(
        processors=("WhisperProcessor",),
        bins=(80, 128),
        settings={**_LOG_MEL, "feature_size": 80, "return_attention_mask": False},
        step=lambda bins, dtype: LogMel(n_mels=128 if bins == 128 else 80, dtype=dtype),
    ),
    "Qwen3ASRFeatureExtractor": _Native(
        processors=("Qwen3ASRProcessor",),
        bins=(128,),
        settings={**_LOG_MEL, "feature_size": 128, "return_attention_mask": True, "n_window": 50, "min_length": 8000},
        step=lambda _, dtype: Qwen3Asr(dtype=dtype),
    ),
    "SeamlessM4TFeatureExtractor": _Native(
        processors=("SeamlessM4TProcessor", "Wav2Vec2BertProcessor"),
        bins=(80,),
        settings={
            "feature_size": 80,
            "num_mel_bins": 80,
            "sampling_rate": 16_000,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": True,
            "stride": 2,
        },
        step=lambda _, dtype: W2vBert(dtype=dtype),
    ),
}


def native_step(folder: ExtractorFolder, *, dtype: Dtype) -> AudioStep | None:
    """Returns the step of ours that makes the values of a folder's extractor; None where none is proved to do so.

    A log line says so once for each folder.
    """
    native = _NATIVE.get(folder.kind)
    bins = None if native is None else native.answers(folder)
    if native is None or bins is None:
        return None
    step = native.step(bins, dtype)
    say(str(folder.path.parent), folder.kind, step.name)
    return step


def native_bins(folder: ExtractorFolder, *, of: str) -> int | None:
    """Returns the bins of a folder's extractor if its settings are those that a processor has it called with.

    of: the processor for which a step of ours is proved. Whether the extractor gives masks counts not: who asks says.
    """
    native = _NATIVE.get(folder.kind)
    if native is None or of not in native.processors:
        return None
    rest = {name: value for name, value in folder.document.items() if name != "return_attention_mask"}
    return native.answers(replace(folder, document=rest, processor_class=of))


@lru_cache(maxsize=256)
def say(folder: str, kind: str, name: str) -> None:
    """Logs once that a step of ours makes the values of a folder's extractor."""
    _log.info(
        'audio.extractor: %s is %s; features = "%s" makes its values, faster, and is used', folder, an(kind), name
    )
