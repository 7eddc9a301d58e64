"""A processor as a model's folder means it: tokenizer, image processor and chat template in one class of transformers.

The class is made of the parts that are asked for, without those of videos, which need torchvision and more. What the
class hands to its image processor beside an image, or makes of clips, is found without a tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.steps.image.processor.processor_call import pil_processor
from forebay.store.image.image_settings import processor_document
from forebay.store.layout import Group

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Where a folder may name the class of its processor, the first that does so counts."""
_KINDS: Mapping[Group, str] = {"audio": "clips", "image": "images"}
_PARTS: Mapping[Group, str] = {"audio": "feature extractor", "image": "image processor"}


def processor_class(folder: Path) -> type[Any] | None:
    """Returns the class of a folder's whole processor; None where the folder names none.

    A folder names it by `processor_class` in one of its files, or by the `model_type` of config.json.
    Raises ConfigError for `auto_map` (code of the folder) and for a class that transformers lacks or cannot import.
    """
    named = _named(folder)
    return None if named is None else _class_of_name(named, folder)


def image_options(folder: Path) -> dict[str, Any]:
    """Returns what a folder's whole processor tells its image processor beside the images; empty where there is none.

    A bare image processor would make other values: InternVL's cuts tiles only when it is told so.
    """
    try:
        cls = processor_class(folder)
    except ConfigError:  # images alone can be stored without their whole processor
        return {}
    if cls is None or "image_processor" not in cls.get_attributes():
        return {}
    processor: Any = object.__new__(cls)  # it was never given its parts
    found = _Told()
    vars(processor).update(_settings(cls, folder), image_processor=found, image_token=None)
    told = dict(processor._merge_kwargs()["images_kwargs"])
    # A class that has a call of its own may need more than options here; then those of the class are all.
    with contextlib.suppress(Exception):
        processor._process_images([_Told.image()], **told)
    if found.options is not None:
        told = found.options
    # What it returns beside pixels is for the whole processor alone.
    return {name: value for name, value in told.items() if not name.startswith("return_")}


SOUND: tuple[str, ...] = ("feature_extractor", "audio_processor")
"""The names that classes have for their part for sound; the first that a class has is it."""


def audio_part(folder: Path, extractor: Any) -> Any:
    """Returns the whole processor of a folder as far as clips need it; None where the folder names none of clips.

    It has no tokenizer, so what it would write in the place of a clip is empty.
    """
    cls = processor_class(folder)
    name = None if cls is None else next((name for name in SOUND if name in cls.get_attributes()), None)
    if cls is None or name is None or "tokenizer" not in cls.get_attributes():
        return None
    processor: Any = object.__new__(cls)
    tokens = {"image_token": None, "audio_token": "", "replace_audio_token": lambda *_, **__: ""}
    vars(processor).update(_settings(cls, folder), **{name: extractor}, **tokens)
    return processor


@contextlib.contextmanager
def named_by(setting: str) -> Iterator[None]:
    """Errors about a folder name the setting that names it."""
    try:
        yield
    except ConfigError as err:
        raise ConfigError(str(err).replace("vision.processor", setting), code=err.code) from err


def image_processor_of(folder: Path) -> Any:
    """Returns the image processor of a folder, by its PIL class, with what the folder's whole processor tells it.

    Raises ConfigError as `pil_processor` and `processor_class` do.
    """
    path, document = processor_document(folder)
    return pil_processor(path, {**document, **image_options(folder)})


def sound_extractor_of(folder: Path) -> Any:
    """Returns the feature extractor of a folder. Raises ConfigError as `ExtractorFolder.read` does."""
    from forebay.steps.audio.extractor.extractor_call import load_extractor
    from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder

    return load_extractor(ExtractorFolder.read(folder))


def whole_processor(folder: Path, *, tokenizer: Any, tokenizer_folder: Path, parts: Mapping[Group, Any]) -> Any:
    """Returns the whole processor of a folder, made of these parts; its settings and template are the folders'.

    The chat template is that of `tokenizer_folder`, which is in the key by content. parts: an image processor, a
    feature extractor, or both.
    Raises ConfigError where the folder names no class, or the class cannot be made of these parts.
    """
    cls = processor_class(folder)
    has = set() if cls is None else set(cls.get_attributes())
    named = {"image": ("image_processor",), "audio": SOUND}
    found = {group: next((name for name in named[group] if name in has), None) for group in parts}
    if cls is None or None in found.values():
        what = next((_KINDS[group] for group, name in found.items() if name is None), "images")
        raise ConfigError(
            f"vision.processor: {folder} names no processor_class of {what} ({', '.join(_FILES)}) and no model_type of "
            f"one, so nothing says how its {what} stand in conversations; point it at the model's own folder",
            code="FB126",
        )
    _refuse_audio_tokenizer(folder)
    _refuse_audio_tokenizer(tokenizer_folder)
    parts = {"tokenizer": tokenizer, **{str(name): parts[group] for group, name in found.items()}}
    try:
        made = from_folder(_without_video(cls, parts), folder)
    except ImportError as err:
        raise ConfigError(
            f"vision.processor: {cls.__name__} of {folder} needs a package that is not installed: "
            f"{str(err).strip():.200}; install it, or point vision.processor at another folder",
            code="FB126",
        ) from err
    except Exception as err:  # not our work: strangers' settings given to a class of transformers
        raise ConfigError(
            f"vision.processor: {cls.__name__} of {folder} cannot be made of the folder's tokenizer and "
            f'{" and ".join(_PARTS[group] for group in found)}: {err!r:.300}; set vision.images = "patches" for a '
            "Qwen-VL, else point vision.processor at the model's own folder",
            code="FB126",
        ) from err
    made.chat_template = _template(cls, tokenizer_folder) or tokenizer.chat_template or made.chat_template
    return made


def _refuse_audio_tokenizer(folder: Path) -> None:
    """Raises ConfigError where transformers would load a model that a folder names."""
    if "audio_tokenizer" in _document(folder / _FILES[0]) or (folder / "audio_tokenizer_config.json").exists():
        raise ConfigError(
            f"vision.processor: {folder} names an audio tokenizer, a model that its processor would load; "
            "take audio_tokenizer out of a copy of the folder",
            code="FB126",
        )


def _without_video(cls: type[Any], parts: Mapping[str, Any]) -> Any:
    """Returns the class as one that takes these parts, and a stand-in for every other one."""

    def taken(_: type[Any], *__: Any, **___: Any) -> list[Any]:
        return [parts.get(name, _Absent(name)) for name in made.get_attributes()]

    def checked(self: Any, name: str, argument: Any) -> Any:
        return (
            type(argument)
            if isinstance(argument, _Absent)
            else cls.check_argument_for_proper_class(self, name, argument)
        )

    def named(_: Any) -> str:  # transformers writes what it made to its log, and a stand-in has no JSON
        return cls.__name__

    members = {
        "_get_arguments_from_pretrained": classmethod(taken),
        "check_argument_for_proper_class": checked,
        "__repr__": named,
    }
    made: Any = type(cls.__name__, (cls,), {**members, "__init__": cls.__init__, "__module__": cls.__module__})
    return made


class _Absent:
    """Stands where a part would: it has no settings, and nothing can be made of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"vision.processor: the processor asks for its {self._name}, which forebay leaves out; point it at a "
            'folder whose processor needs none, or store images alone: [text] prompt = "none"',
            code="FB126",
        )


class _Told:
    """An image processor that keeps what it is told."""

    def __init__(self) -> None:
        self.options: dict[str, Any] | None = None

    @staticmethod
    def image() -> Any:
        from PIL import Image

        return Image.new("RGB", (32, 32))

    def __call__(self, *_: Any, **options: Any) -> Any:
        self.options = options
        raise LookupError("asked for the options alone")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _named(folder: Path) -> str | None:
    found = None
    for name in _FILES:
        document = _document(folder / name)
        nested = document.get("image_processor")
        for part in (document, nested if isinstance(nested, dict) else {}):
            if "auto_map" in part:
                raise ConfigError(
                    f"vision.processor: {folder / name} has auto_map, code of the folder, which forebay does not run; "
                    "use a folder whose classes are transformers' own",
                    code="FB126",
                )
            value = part.get("processor_class")
            found = found or (value if isinstance(value, str) else None)
    return found or _of_model_type(_document(folder / "config.json").get("model_type"))


def _of_model_type(model_type: object) -> str | None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    found = PROCESSOR_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    return found if isinstance(found, str) else None


def _class_of_name(name: str, folder: Path) -> type[Any]:
    from transformers import ProcessorMixin
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kinds = [kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name]
    for module in dict.fromkeys(map(model_type_to_module_name, kinds)):
        try:
            found = getattr(_processing_module(module), name, None)
        except ModuleNotFoundError as err:
            if err.name is not None and err.name.startswith("transformers."):
                continue
            raise ConfigError(
                f"vision.processor: {name}, which {folder} names, needs {err.name}, which is not installed; install "
                "it, or point vision.processor at another folder",
                code="FB126",
            ) from err
        if isinstance(found, type) and issubclass(found, ProcessorMixin):
            return found
    raise ConfigError(
        f"vision.processor: {folder} names the processor {name!r:.80}, which the installed transformers does not have; "
        "upgrade transformers, or correct processor_class",
        code="FB126",
    )


def _processing_module(module: str) -> Any:
    """Returns the module of a model's processor.

    Not by `transformers.NAME`: that is a stand-in where torchvision is missing, which images do not need. A module that
    takes a function from its image processor by torchvision takes it from the one by Pillow, which has it too.
    """
    name = f"transformers.models.{module}.processing_{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as err:
        if err.name != "torchvision":
            raise
        images = f"transformers.models.{module}.image_processing_"
        try:
            sys.modules[f"{images}{module}"] = importlib.import_module(f"{images}pil_{module}")
            return importlib.import_module(name)
        except (ModuleNotFoundError, ImportError):
            raise err from None
        finally:
            sys.modules.pop(f"{images}{module}", None)


def _settings(cls: type[Any], folder: Path) -> dict[str, Any]:
    """Returns the numbers and words that the class would be given: its defaults, then what the folder says."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    given = _document(folder / _FILES[0])
    return found | {name: given[name] for name in found if isinstance(given.get(name), (int, float, str))}


def _template(cls: type[Any], folder: Path) -> Any:
    """Returns the chat template in files of its own of a folder, as transformers reads it for a processor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        document, _ = cls.get_processor_dict(str(folder), local_files_only=True)
    return document.get("chat_template")


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise ConfigError(f"vision.processor: cannot read {path}: {err.strerror}", code="FB107") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path} is no JSON: {err}; save the processor again") from err
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; save the processor again", code="FB107")
    return found
