"""Models of the Hugging Face Hub that a config names, brought into the cache of the Hub's client.

`forebay preprocess` and `forebay fetch` call this, and nothing else in forebay asks the Hub. Only data is fetched:
JSON, plain text, templates, sentencepiece and safetensors; no code, and nothing that is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forebay.config.pretrained_folder import HubModel, is_whole, model_of, model_place
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.store.files import write_bytes
from forebay.terminal import CommandReport, Progress
from forebay.visible import human_bytes

logger = logging.getLogger(__name__)
_DATA = (".json", ".txt", ".jinja", ".model", ".spm")
"""Suffixes of a tokenizer's, a processor's and a model's documents; the last two are sentencepiece."""
_WEIGHTS = ".safetensors"
_ONE_OF_SEVERAL = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedModel:
    """A model that was fetched, or was there. folder: of its snapshot. size_bytes: of the files that were asked for."""

    model: str
    folder: str
    files: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchModelsReport(CommandReport):
    """The document of `forebay fetch MODEL|CONFIG --json`; its fields are an interface."""

    models: tuple[FetchedModel, ...]

    def lines(self) -> list[str]:
        """Returns a line for each model."""
        shown = [f"{m.model}: {m.files} files, {human_bytes(m.size_bytes)}, in {m.folder}" for m in self.models]
        return shown or ["nothing to fetch: no model of the Hub is named that is not here"]


def fetch_models(config: Config) -> FetchModelsReport:
    """Brings every model of the Hub that a config names and that is not whole on this machine.

    Raises ConfigError, naming the setting, if the Hub does not give it, or if this process is no rank 0.
    """
    fetched = []
    for setting, folder, with_weights in _named(config):
        model = model_of(folder)
        if model is None or (is_whole(folder) and (not with_weights or _has_weights(folder) or model.listed()[1])):
            continue
        if int(os.environ.get("RANK") or 0):
            raise ConfigError(f"{setting}: rank 0 alone fetches {model}; first: forebay fetch {model}", code="FB145")
        try:
            fetched.append(fetch_model(model, with_weights=with_weights))
        except ConfigError as err:
            raise ConfigError(f"{setting}: {err}", code="FB145") from err
        if with_weights and not _has_weights(folder):
            logger.warning(
                "%s: %s has no safetensors, and forebay fetches no weights that would be unpickled: its samples can be "
                'built, and train.init = "random" begins without weights',
                setting,
                model,
            )
    return FetchModelsReport(models=tuple(fetched))


def fetch_model(model: HubModel, *, with_weights: bool) -> FetchedModel:
    """Brings the files of one commit into the client's cache; files that are there stay.

    with_weights: safetensors too, if it has them. Raises ConfigError if the Hub does not give them.
    """
    from huggingface_hub import hf_hub_download

    sizes = _wanted(_info(model.name, model.commit), with_weights=with_weights)
    names, had_weights = model.listed()
    # Listed before they come: whoever reads meanwhile, or after a kill, sees that files are missing.
    model.list_path.parent.mkdir(parents=True, exist_ok=True)
    document = {"files": sorted({*names, *sizes}), "weights": with_weights or had_weights}
    write_bytes(model.list_path, json.dumps(document).encode())
    with Progress(sum(sizes.values()), desc=f"fetching {model.name}", unit="B") as shown, _refusals(str(model)):
        for name, size in sizes.items():
            hf_hub_download(model.name, name, revision=model.commit)
            shown.update(size)
    return FetchedModel(model=str(model), folder=str(model.folder), files=len(sizes), size_bytes=sum(sizes.values()))


def commit_of(name: str, revision: str | None) -> HubModel:
    """Returns the commit that a branch or a tag of the Hub, or the default branch, is now; raises ConfigError."""
    return HubModel(name, str(_info(name, revision).sha))


def _named(config: Config) -> Iterator[tuple[str, Path, bool]]:
    """Yields setting, folder and whether weights are wanted, of all models that a config names."""
    if config.text is not None and config.text.tokenizer:
        yield "text.tokenizer", Path(config.text.tokenizer), False
    if config.vision is not None:
        yield "vision.processor", Path(config.vision.processor), False
    if config.audio is not None and (extractor := config.audio.settings.get("extractor")):
        yield "audio.extractor", Path(model_place(str(extractor), Path(config.path).parent)), False
    for model in config.model:
        yield f"model.{model.name}.folder", Path(model.folder), True
    if config.train is not None and config.train.model:
        yield "train.model", Path(config.train.model), config.train.init == "pretrained"


def _has_weights(folder: Path) -> bool:
    return any(folder.glob(f"*{_WEIGHTS}"))


def _info(name: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi

    said = name if revision is None else f"{name}@{revision}"
    with _refusals(said):
        return HfApi().model_info(name, revision=revision, files_metadata=True)


@contextlib.contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Makes what the client raises a ConfigError that names the model."""
    try:
        yield
    except Exception as err:  # the client raises its own errors, and those of whichever HTTP library its version has
        why = str(err).strip().partition("\n")[0] or type(err).__name__
        raise ConfigError(
            f"{model} does not come from the Hub: {why}; its folder may also be copied here and named by its path",
            code="FB145",
        ) from err


def _wanted(info: Any, *, with_weights: bool) -> dict[str, int]:
    """Returns the files to fetch and their bytes: documents, and weights once, in the form that transformers reads."""
    sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
    names = [PurePosixPath(name) for name in sizes]
    top = [name for name in names if len(name.parts) == 1]
    templates = [name for name in names if name.parts[:-1] == ("additional_chat_templates",)]
    wanted = [name for name in (*top, *templates) if name.suffix in _DATA]
    if with_weights:
        wanted += _weights([name for name in top if name.suffix == _WEIGHTS])
    return {str(name): sizes[str(name)] for name in wanted}


def _weights(found: Sequence[PurePosixPath]) -> Sequence[PurePosixPath]:
    """Returns the weights that transformers reads; repositories hold others beside them, of other dtypes or tools."""
    whole = [name for name in found if name.name == "model.safetensors"]
    return whole or [name for name in found if _ONE_OF_SEVERAL.fullmatch(name.name)] or found
