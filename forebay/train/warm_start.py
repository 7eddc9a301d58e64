"""A model on a new tokenizer: rows of shared tokens stay, the others begin like the rows that the model has.

Only the vocabulary moves. Every other weight stays as it is, and so does every other size of the configuration:
Whisper's decoder positions (`max_target_positions`) and its encoder's do not depend on the tokenizer. The tokenizer's
folder is read first: what its tokenizer.json says, and what of it cannot be used.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.pretrained_folder import hub_advice, tokenizer_digest
from forebay.errors import ConfigError, ForebayError
from forebay.pretrained import from_folder
from forebay.steps.table import steps_named
from forebay.store.files import folder_aside, sweep
from forebay.terminal import CommandReport
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.vocabulary_ids import IdMover, Moves, missing_message
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
    new, facts = read_tokenizer(tokenizer), _facts_of(model)
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


def _facts_of(model: Path) -> ModelFacts:
    facts = model_facts(model)
    if facts.own_loss is not None:
        raise ConfigError(
            f"{model} is {an(facts.model_class)}, and a warm start knows the prompts of {', '.join(FAMILIES)} alone; "
            "name one of these, or give your model the new tokenizer by resize_token_embeddings",
            code="FB108",
        )
    return facts


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


FILE = "tokenizer.json"
_KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_AGAIN = "load it in the program that made it and save it again: Tokenizer.from_file(...).save(...) of `tokenizers`"
_PROBES = (
    "The quick brown fox, 1234 times.",
    " naïve café — ¿qué tal? ",
    "नमस्ते दुनिया 你好 Привет\n\n\tx = {y: [1, 2]}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokenizer:
    """The contents of a tokenizer folder, read without transformers."""

    folder: Path
    ids: Mapping[str, int]
    """Token to id, added tokens among them: 0 to the largest, without a gap and without two tokens of one id."""
    added: frozenset[str]
    """Tokens that stand beside the model's own: control tokens and the like."""
    byte_level: bool
    """Whether the model's own tokens spell bytes (GPT-2's alphabet), not characters."""


def read_tokenizer(folder: Path) -> NewTokenizer:
    """Returns the tokenizer of a folder.

    Raises ConfigError, which names the file and what is wrong, where there is no tokenizer.json, where its ids have
    gaps, where its model is of a kind that `tokenizers` does not have, or where its merges are of another form than the
    one that `tokenizers` writes: transformers meets these with a bare TypeError, or reads other tokens from them.
    """
    path = folder / FILE
    document = _document(path)
    model = document["model"]
    if model.get("type") is not None and model["type"] not in _KINDS:
        raise ConfigError(f"--tokenizer: {path} has a model of type {model['type']!r}, wanted {', '.join(_KINDS)}")
    if "merges" in model or model.get("type") == "BPE":
        _check_merges(path, model)
    loaded, added = _loaded_ids(path), {entry["content"]: entry["id"] for entry in document.get("added_tokens") or ()}
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {row[0]: i for i, row in enumerate(model["vocab"])}
    ids = {**vocab, **added}
    _check_gaps(path, ids)
    for token, number in ids.items():
        if (found := loaded.get(token)) != number:
            says = "none" if found is None else f"the id {found}"  # none: an added token that is empty
            raise ConfigError(
                f"--tokenizer: {path} gives {json.dumps(token)} the id {number}, and `tokenizers` {says}; {_AGAIN}"
            )
    return NewTokenizer(folder=folder, ids=ids, added=frozenset(added), byte_level=is_byte_level(document))


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as err:
        raise ConfigError(
            f"--tokenizer: cannot read {path} ({err.strerror}); name a folder with the fast form of a tokenizer: "
            f"tokenizer.save_pretrained({str(path.parent)!r}){hub_advice(path.parent, 'tokenizer')}"
        ) from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"--tokenizer: {path} is not JSON: {err}") from err
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ConfigError(f"--tokenizer: {path} has no `model`; it is not a file that `tokenizers` has written")
    return document


def _check_merges(path: Path, model: Mapping[str, Any]) -> None:
    merges, vocab = model.get("merges"), model.get("vocab")
    if not isinstance(merges, list) or not isinstance(vocab, dict):
        raise ConfigError(
            f"--tokenizer: {path} has merges of type {type(merges).__name__} and a vocabulary of type "
            f"{type(vocab).__name__}, wanted a list and a dict; {_AGAIN}"
        )
    as_text = bool(merges) and isinstance(merges[0], str)
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if as_text and isinstance(merge, str) else merge
        is_pair = isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts)
        if not is_pair or (as_text and not isinstance(merge, str)):
            raise ConfigError(
                f"--tokenizer: {path}: merge {number} is {json.dumps(merge)[:80]}, wanted two tokens, as a list for "
                f'all merges (["a", "b"]) or as a text for all ("a b"); {_AGAIN}'
            )
        prefix = model.get("continuing_subword_prefix") or ""
        for token in (*parts, parts[0] + parts[1].removeprefix(prefix)):
            if token not in vocab:
                raise ConfigError(
                    f"--tokenizer: {path}: merge {number} is {json.dumps(merge)[:80]}, and {json.dumps(token)[:80]} is "
                    f"not in the vocabulary of {len(vocab)} tokens; {_AGAIN}"
                )


def _loaded_ids(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        ids: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as err:  # not our work: tokenizers raises bare Exception for a file that it cannot read
        raise ConfigError(f"--tokenizer: `tokenizers` cannot load {path}: {err}; {_AGAIN}") from err
    if not ids:
        raise ConfigError(f"--tokenizer: {path} has no tokens")
    return ids


def _check_gaps(path: Path, ids: Mapping[str, int]) -> None:
    size, by_id = max(ids.values()) + 1, sorted(ids.items(), key=lambda item: item[::-1])
    for (token, number), (other, next_number) in itertools.pairwise(by_id):
        if number == next_number:
            raise ConfigError(
                f"--tokenizer: {path}: the tokens {json.dumps(token)} and {json.dumps(other)} both have id {number}; "
                "give each token its own id"
            )
    used = set(ids.values())
    if len(used) != size:
        first = next(number for number in range(size) if number not in used)
        raise ConfigError(
            f"--tokenizer: {path} has gaps: {len(used)} ids and a largest id of {size - 1}; the first id without a "
            f"token is {first}; number the tokens from 0 without a gap, or add tokens for those ids"
        )


def is_byte_level(document: Mapping[str, Any]) -> bool:
    """Returns whether the tokens of a tokenizer.json spell bytes."""
    parts = [document.get("pre_tokenizer"), document.get("decoder")]
    return '"ByteLevel"' in json.dumps(parts)


def check_loaded(new: NewTokenizer, beside_model: Path) -> None:
    """Returns where transformers reads the same tokenizer in its own folder and in the model's, as `tokenizers` does.

    transformers chooses the class of a tokenizer by its folder's config.json where tokenizer_config.json names none,
    and a class may add tokens and split text in its own way. Raises ConfigError with both values.
    """
    for folder in (new.folder, beside_model):
        try:
            loaded = from_folder(_auto_tokenizer(), folder)
        except Exception as err:  # not our work, see `_loaded_ids`
            raise ConfigError(f"--tokenizer: transformers cannot load {new.folder}: {err!r}; {_AGAIN}") from err
        name, found = type(loaded).__name__, dict(loaded.get_vocab())
        if found != new.ids:
            token = min(set(found.items()) ^ set(new.ids.items()))[0]
            raise ConfigError(
                f"--tokenizer: {new.folder / FILE} has {new.ids.get(token)} as id of {json.dumps(token)}, and "
                f"transformers' {name} has {found.get(token)}; add the token to the file, or name another "
                "tokenizer_class in its tokenizer_config.json"
            )
        read = [loaded(text, add_special_tokens=False)["input_ids"] for text in _PROBES]
        if folder == new.folder:
            alone, alone_name = read, name
    if read != alone:
        raise ConfigError(
            f"--tokenizer: transformers' {name} splits text in other tokens than its {alone_name}, which it takes for "
            f'{new.folder}; set "tokenizer_class": "{alone_name}" in {new.folder}/tokenizer_config.json'
        )


def _auto_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer
