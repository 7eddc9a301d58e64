"""The sets of `[[train.eval]]`, opened and checked against the model before the first step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.config.plan import MixtureConfig, PackConfig
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.train import EvalConfig
from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError, ManifestError
from forebay.plan.in_order import in_order
from forebay.plan.make import plan_of
from forebay.plan.pack.overlong import in_pieces
from forebay.steps.recipe import load_config
from forebay.store.selection import first_samples
from forebay.store.source import SampleSource, SourceUnion, parts_of
from forebay.train.collate.device_features import constants_seen
from forebay.train.collate.packed import PackShapes
from forebay.train.evaluation.rates import jiwer_module, languages_of
from forebay.train.loader import Loader
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import check_config, check_constants
from forebay.train.select import loader_settings, open_by_config, pack_collator, select, where_it_lies
from forebay.visible import printable

_logger = logging.getLogger(__name__)
_MANY_TOKENS = 1024
"""More than anybody says in 30 s."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A set that is ready to be evaluated."""

    settings: EvalConfig
    loader: Loader
    """This rank's batches and their ids, in the order of the cache; every rank has as many."""
    writes: bool
    """Whether the model writes texts for the samples: they are speech."""
    languages: Sequence[str]
    """The language of every sample, "" where none is known."""


def open_sets(
    config: Config, *, facts: ModelFacts, rank: int, num_ranks: int, trained: Mapping[str, Any] | None = None
) -> list[EvalSet]:
    """Returns the sets of a config for one rank, each of which the model can take.

    trained: constants of the training data, where there is training.

    Raises CacheMismatchError for a set of other features or another tokenizer than the model's, or of other classes
    than the training data's, with both values;
    ConfigError for a set without samples, of speech and text alone together, or where `generate_max_tokens` is more
    than the model has positions for; MissingExtraError without jiwer.
    """
    sets = [
        _opened(config, entry, facts=facts, rank=rank, num_ranks=num_ranks, trained=trained or {})
        for entry in config.train.eval
    ]
    if any(each.writes for each in sets):
        jiwer_module()
    return sets


def _opened(
    config: Config, entry: EvalConfig, *, facts: ModelFacts, rank: int, num_ranks: int, trained: Mapping[str, Any]
) -> EvalSet:
    limit, room = entry.generate_max_tokens, facts.max_positions
    if limit is not None and room is not None and limit > room:
        raise ConfigError(
            f"{_name(entry)}: generate_max_tokens is {limit}, the model in {facts.folder} has {room} positions; "
            f"set it to {room} or less"
        )
    planned_by, source = _source(config, entry, facts)
    writes = _writes(entry, source)
    if writes and not facts.writes:
        writes = False
        _logger.info(
            "%s: a %s is evaluated by its loss; forebay has texts of models of a family (%s), by CTC, and of speech "
            "seq2seq models that need nothing but the clip",
            *(_name(entry), facts.model_class, ", ".join(FAMILIES)),
        )
    if writes and facts.blank_id is None and limit is None and (room is None or room > _MANY_TOKENS):
        _logger.warning(
            "%s: a model that has gone astray may write %s tokens for each sample; set generate_max_tokens",
            *(_name(entry), "any number of" if room is None else room),
        )
    for part in parts_of(source):
        _check_classes(entry, part.constants, trained)
        check_constants(facts, constants_seen(planned_by, part.constants))
    _check_tokenizer(config, entry, source)
    return EvalSet(
        settings=entry,
        loader=_loader(config, planned_by, source, rank=rank, num_ranks=num_ranks),
        writes=writes,
        languages=languages_of(source) if writes else (),
    )


def _source(config: Config, entry: EvalConfig, facts: ModelFacts) -> tuple[Config, SampleSource]:
    """Returns the config whose `[plan]` makes the batches of a set, and the set's samples, at least one."""
    settings = config.loader
    try:
        if entry.cache is not None:
            planned_by = replace(config, mixture=MixtureConfig())
            source: SampleSource = in_pieces(open_by_config(entry.cache, config), config.plan)
        else:
            named = where_it_lies(load_config(str(entry.config)), config)
            reading = {name: getattr(settings, name) for name in ("cache", "verify", "max_open_shards")}
            reading["device_features"] = named.loader.device_features or settings.device_features
            planned_by = replace(named, loader=replace(named.loader, **reading))
            check_config(facts, planned_by)
            source = select(planned_by)
    except ManifestError as err:
        raise ConfigError(f"{_name(entry)}: {err}") from err
    if not len(source):
        raise ConfigError(f"{_name(entry)}: {entry.cache or entry.config} has no sample; name a set that has some")
    return planned_by, first_samples(source, entry.max_samples)


def _writes(entry: EvalConfig, source: SampleSource) -> bool:
    """Returns whether a set is speech, whose samples are counted in seconds."""
    heard = {"sample_rate_hz" in part.constants for part in parts_of(source)}
    if len(heard) > 1:
        raise ConfigError(
            f"{_name(entry)}: it holds speech and text without audio, and only speech has a WER; make it two sets"
        )
    return heard == {True} and source.constants.get("prompt") is not None


def _check_classes(entry: EvalConfig, found: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Raises CacheMismatchError where a number is another class than in training: the model need not have names."""
    own, wanted = found.get("classes"), trained.get("classes")
    if own is None or wanted is None or own == wanted:
        return
    pairs = enumerate(itertools.zip_longest(own, wanted))
    number, here, there = next((number, *pair) for number, pair in pairs if pair[0] != pair[1])
    shown = [
        f"none of {len(names)}" if name is None else repr(printable(name))
        for name, names in ((here, own), (there, wanted))
    ]
    raise CacheMismatchError(
        f"{_name(entry)}: class {number} is {shown[0]} in {entry.cache or entry.config} and {shown[1]} in the training "
        "data; give both configs the same text.classes, then: forebay preprocess CONFIG",
        code="FB404",
    )


def _check_tokenizer(config: Config, entry: EvalConfig, source: SampleSource) -> None:
    if config.text is None or not config.text.tokenizer:
        return
    wanted = tokenizer_digest(Path(config.text.tokenizer))
    for part in parts_of(source):
        if part.tokenizer is not None and part.tokenizer != wanted:
            raise CacheMismatchError(
                f"{_name(entry)}: text.tokenizer is {part.tokenizer[:16]} in {entry.cache or entry.config} and "
                f"{wanted[:16]} in {config.path}: their ids mean different texts; build the set with the tokenizer in "
                f"{config.text.tokenizer}: forebay preprocess CONFIG"
            )


def _loader(config: Config, planned_by: Config, source: SampleSource, *, rank: int, num_ranks: int) -> Loader:
    is_apart = isinstance(source, SourceUnion) and planned_by.mixture.batches == "per_source"
    parts = source.source_of if is_apart and isinstance(source, SourceUnion) else None
    # Evaluation sets are small: to make their plan costs less than to keep it.
    planned = in_order(plan_of(planned_by, source, keep=False), parts=parts, whole=True)
    collator: Any = None
    if isinstance(planned_by.plan, PackConfig):
        # The patches cross over as they are and are expanded on the device.
        shapes = PackShapes.of(planned.plan, planned_by.plan, source.constants)
        collator = pack_collator(replace(config.loader, pixels="uint8"), source, shapes)
    return Loader(
        source,
        planned,
        replace(loader_settings(config), crop_s=None, form="padded", with_ids=True),
        dp_rank=rank,
        dp_world_size=num_ranks,
        collator=collator,
        features=planned_by.loader.device_features if source.constants.get("features") == "waveform" else None,
    )


def _name(entry: EvalConfig) -> str:
    return f'[[train.eval]] "{entry.name}"'
