"""A model on a new tokenizer: rows of shared tokens stay, the others begin like the rows that the model has.

Only the vocabulary moves. Every other weight stays as it is, and so does every other size of the configuration:
Whisper's decoder positions (`max_target_positions`) and its encoder's do not depend on the tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, ForebayError
from forebay.pretrained import from_folder
from forebay.steps.table import steps_named
from forebay.store.files import folder_aside, sweep
from forebay.terminal import CommandReport
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.warm_start.ids import IdMover, Moves, missing_message
from forebay.train.warm_start.tokenizer import NewTokenizer, check_loaded, is_byte_level, read_tokenizer
from forebay.visible import an, from_here

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "normalizer.json", "chat_template.json", "chat_template.jinja"),
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_OF_EITHER = ("normalizer.json", "chat_template.json", "chat_template.jinja")
"""What the new tokenizer may have, and else keeps of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartReport(CommandReport):
    """The document of `forebay warm-start --json`; its fields are an interface."""

    copied: int
    """Tokens that both vocabularies have: their rows are the old ones, bit for bit. `copied` + `drawn` = `new_size`."""
    drawn: int
    """New tokens: their rows come from the normal distribution of the old rows."""
    dropped: int
    """Old tokens that the new vocabulary lacks. `copied` + `dropped` are the tokens of the old tokenizer."""
    old_size: int
    """Rows of the old embedding; those behind the old tokenizer's last id have no token and count nowhere else."""
    new_size: int
    """Rows of the new embedding: the tokens of the new tokenizer."""
    ids_dropped: int
    """Entries of `suppress_tokens`, `lang_to_id` and the like whose tokens the new vocabulary lacks."""
    out: str
    """The new folder."""

    def lines(self) -> list[str]:
        """Returns what `forebay warm-start` prints."""
        return [
            f"{self.old_size} -> {self.new_size} tokens: {self.copied} copied, {self.drawn} drawn, {self.dropped} "
            "dropped",
            f"{self.ids_dropped} ids of suppressed tokens, languages and tasks dropped",
            f"model and tokenizer in {from_here(self.out)}",
        ]


def warm_start(model: Path, *, tokenizer: Path, out: Path, seed: int = 0) -> WarmStartReport:
    """Returns the report on `out`, which then holds the model with the other tokenizer; all three are folders.

    `out` is a folder like any model's: weights, config.json, generation_config.json, the new tokenizer, and the model's
    feature extractor or processor. Name it in `train.model` and in `text.tokenizer`.

    Rows of tokens that both vocabularies have, by their strings, are copied bit for bit. The other rows are drawn from
    the normal distribution of the old tokens' rows (see `Spread`), input and output embedding each from its own where
    they are not tied. A row that is drawn is a function of (seed, token). Rows of an old embedding that is larger than
    its tokenizer are padding that no text has ever used: they are left out of the mean and of the new model.

    Every token id in the configurations moves with its token.

    Raises ConfigError: a folder that cannot be used, an `out` that holds something, a tokenizer with gaps or merges of
    another form, a token that the model needs and the tokenizer lacks. Raises ForebayError, which names the tensor,
    where a weight is not finite before or after. `out` is complete or absent.
    """
    _check_folders(model, out)
    new, facts = read_tokenizer(tokenizer), model_facts(model)
    if facts.own_loss is not None:
        raise ConfigError(
            f"{model} is {an(facts.model_class)}, and a warm start knows the prompts of {', '.join(FAMILIES)} alone; "
            "name one of these, or give your model the new tokenizer by resize_token_embeddings",
            code="FB108",
        )
    loaded = load_model(model, seed=seed, dtype="auto")
    _check_finite(loaded, f"of {model}", "load the model again from where it came from")
    old = _old_tokenizer(model)
    old_size = loaded.get_input_embeddings().weight.shape[0]
    old_ids = {token: i for token, i in old.get_vocab().items() if i < old_size}
    ids_dropped = _move_ids(loaded, old_ids, new)
    moves = moves_of(old_ids, new, same_alphabet=_is_byte_level(old) == new.byte_level)
    _move_rows(loaded, moves, seed=seed)
    _check_finite(loaded, "after the warm start", "try another --seed, or a model whose weights are float32")
    sweep(out.parent)
    with folder_aside(out) as aside:
        loaded.config.save_pretrained(aside)  # transformers takes a tokenizer's class from it
        _copy_files(model, tokenizer, aside, new)
        check_loaded(new, aside)
        _check_prompt(facts, aside, new)
        _save(loaded, aside, out)
    return WarmStartReport(
        copied=len(moves.copied),
        drawn=len(moves.drawn),
        dropped=len(old_ids) - len(moves.copied),
        old_size=old_size,
        new_size=moves.size,
        ids_dropped=ids_dropped,
        out=str(out),
    )


def _check_folders(model: Path, out: Path) -> None:
    if model.is_dir() and not any((model / name).is_file() for name in _WEIGHTS):
        raise ConfigError(
            f"{model} has no weights ({' or '.join(_WEIGHTS)}), and a warm start keeps weights; name a folder that "
            "save_pretrained has written, or a checkpoint of forebay train"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out} is there and not an empty folder; name a new folder, or remove that one", code="FB115"
        )


def _check_finite(model: Any, when: str, advice: str) -> None:
    for name, tensor in model.state_dict().items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise ForebayError(f"{name} {when} has {bad} of {tensor.numel()} values that are NaN or infinite; {advice}")


def _old_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer_digest(model)  # transformers makes an empty tokenizer of a folder that holds none
        return from_folder(AutoTokenizer, model)
    except Exception as err:  # not our work: tokenizers raises bare Exception for a file that it cannot read
        raise ConfigError(
            f"{model}: transformers cannot load its tokenizer ({err!r}); rows are copied by token, so put the "
            "tokenizer that the model was trained with there"
        ) from err


def _is_byte_level(tokenizer: Any) -> bool:
    return is_byte_level(json.loads(tokenizer.backend_tokenizer.to_str()))


def _move_ids(model: Any, old_ids: Mapping[str, int], new: NewTokenizer) -> int:
    """Returns how many ids of lists and maps were dropped; all others are now those of the new vocabulary."""
    mover = IdMover(old_tokens={i: token for token, i in old_ids.items()}, new_ids=new.ids)
    mover.move_config(model.config)
    if model.generation_config is not None:
        mover.move_generation(model.generation_config)
    if mover.missing:
        raise ConfigError(missing_message(mover.missing, new.folder))
    return mover.num_dropped


def moves_of(old_ids: Mapping[str, int], new: NewTokenizer, *, same_alphabet: bool) -> Moves:
    """Returns where rows come from.

    same_alphabet: whether both vocabularies spell bytes, or both characters. Where they differ, `é` is a byte in one
    and a letter in the other, so of the models' own tokens only those of ASCII are shared.
    """

    def is_shared(token: str) -> bool:
        return token in old_ids and (same_alphabet or token in new.added or token.isascii())

    tokens = sorted(new.ids, key=new.ids.__getitem__)
    return Moves(
        size=len(tokens),
        copied={new.ids[token]: old_ids[token] for token in tokens if is_shared(token)},
        drawn={new.ids[token]: token for token in tokens if not is_shared(token)},
        named=sorted(old_ids.values()),
    )


def _move_rows(model: Any, moves: Moves, *, seed: int) -> None:
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = outputs.weight is inputs.weight
    made = {"input": moves.apply(inputs.weight.detach(), seed=seed, name="input")}
    if not is_tied:
        made["output"] = moves.apply(outputs.weight.detach(), seed=seed, name="output")
    inputs.weight = torch.nn.Parameter(made["input"])
    outputs.weight = inputs.weight if is_tied else torch.nn.Parameter(made["output"])
    inputs.num_embeddings = outputs.out_features = moves.size


def _save(model: Any, aside: Path, out: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(aside)
    except (OSError, RuntimeError, SafetensorError) as err:
        raise ForebayError(
            f"cannot write the weights of {out}: {err}; make room and run the command again", code="FB703"
        ) from err


def _copy_files(model: Path, tokenizer: Path, target: Path, new: NewTokenizer) -> None:
    """Makes `target` hold the new tokenizer's files, and of the model what a processor needs beside them."""
    for names, source in ((_TOKENIZER, tokenizer), (_PROCESSOR, model), (_OF_EITHER, model)):
        for name in names:
            if (source / name).is_file() and not (target / name).exists():
                shutil.copyfile(source / name, target / name)
    templates = next(f for f in (tokenizer, model) if f == model or (f / "additional_chat_templates").is_dir())
    if (templates / "additional_chat_templates").is_dir():
        shutil.copytree(templates / "additional_chat_templates", target / "additional_chat_templates")
    _complete_tokenizer_config(model / "tokenizer_config.json", target / "tokenizer_config.json", new)


def _complete_tokenizer_config(old: Path, path: Path, new: NewTokenizer) -> None:
    """Adds the names of special tokens (`audio_token`, `eos_token`, ...) that only the model's file gives."""
    was, now = _read_object(old), _read_object(path)
    added = {name: was[name] for name in was.keys() - now.keys() if name.endswith("_token") and was[name] in new.added}
    if added or not path.exists():
        path.write_text(json.dumps(now | dict(sorted(added.items())), indent=2, ensure_ascii=False), encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"cannot read {path}: {err}") from err
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return document


def _check_prompt(facts: ModelFacts, folder: Path, new: NewTokenizer) -> None:
    """Returns where the model's prompt can be written with the tokenizer in `folder`, else raises ConfigError."""
    prompt = facts.constants["prompt"]
    step: Any = steps_named("text", prompt)[0]
    try:
        opened = step(tokenizer=tokenizer_digest(folder)).opened(folder, merge_size=facts.constants.get("merge_size"))
        assert opened.constants
    except ConfigError as err:
        raise ConfigError(f"--tokenizer: {err}".replace(str(folder), str(new.folder))) from err
