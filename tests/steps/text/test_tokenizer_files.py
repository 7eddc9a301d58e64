"""A tokenizer by its files alone against transformers' own, of the demo's folders and of folders with odd files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.text import vocabulary
from forebay.steps.text.line import _WHISPER_CODES, whisper_code
from forebay.steps.text.tokenizer_files import OpenTokenizer, is_plain, plain_tokenizer
from forebay.steps.text.vocabulary import Vocabulary, load_tokenizer
from tests.processes import ROOT
from tests.steps.text.test_tokenizers import KINDS, NAMED, TEXTS, mixed

DEMO = ROOT / "demo"
PLAIN = ("speech/model", "speech/qwen3_asr_model", "text/model", "vision/model", "ljspeech/symbols")
ODD = ("Qwen2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", "BertTokenizer", "Mine")
TYPES = ("", "whisper", "qwen2", "qwen3_vl", "bert", "llama", "siglip2", "qwen3_5", "pixtral", "nobody_s")
TOKEN = st.sampled_from(["<|endoftext|>", "<|im_end|>", "<new>", "the", "<|en|>", None, ""])


def by_transformers(folder: Path) -> OpenTokenizer:
    return OpenTokenizer.of(load_tokenizer(folder))


def facts(found: OpenTokenizer, *, texts: list[str]) -> dict[str, Any]:
    """Everything that a vocabulary takes of a tokenizer, and ids of texts, control tokens among them."""
    document = json.loads(found.backend.to_str())
    found.backend.no_truncation()
    found.backend.no_padding()
    try:
        ids = [one.ids for one in found.backend.encode_batch(texts, add_special_tokens=False)]
    except Exception as err:
        return {"refuses": str(err)}  # a table without the unknown token that its model names
    return {
        "named": dict(found.named),
        "special": found.special,
        "template": found.chat_template,
        "added": found.added,
        "tokens": document["added_tokens"],
        "vocab": found.backend.get_vocab(),
        "ids": ids,
        "texts": [found.backend.decode(each, skip_special_tokens=False) for each in ids],
        "named ids": {name: found.id_of(name) for name in found.named},
    }


@pytest.mark.parametrize("name", PLAIN)
def test_a_demo_tokenizer_is_the_one_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = DEMO / name, mixed(TEXTS)
    found = plain_tokenizer(folder)
    assert found is not None
    assert is_plain(folder)
    texts += [f"a{token} b {token}" for token in found.added]
    assert facts(found, texts=texts) == facts(by_transformers(folder), texts=texts)
    alone = Vocabulary(folder, digest=tokenizer_digest(folder))
    monkeypatch.setattr(vocabulary, "plain_tokenizer", lambda _: None)
    other = Vocabulary(folder, digest=tokenizer_digest(folder))
    assert alone.control_ids == other.control_ids
    assert (alone.size, alone.eos_token_id, alone.pad_token_id) == (other.size, other.eos_token_id, other.pad_token_id)
    for text in texts:
        answers: list[Any] = []
        for each in (alone, other):
            try:
                answers.append(each.encode(text, sample_id=""))
            except Exception as err:
                answers.append(str(err))
        assert answers[0] == answers[1]


def test_a_tokenizer_that_its_class_makes_is_left_to_transformers() -> None:
    assert plain_tokenizer(DEMO / "vision" / "gemma3_model") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(
    *("gpt2", "llama3", "ignore_merges", "lower", "qwen", "metaspace", "prefix space", "unigram", "clip", "gemma"),
    *("wordpiece", "added", "stored truncation", "dropout"),
)
def test_a_trained_tokenizer_is_the_one_of_transformers(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}))
    found = plain_tokenizer(tmp_path)
    assert (found is None) == (kind in ("dropout", "stored truncation"))
    if found is not None:
        texts = mixed(TEXTS)
        assert facts(found, texts=texts) == facts(by_transformers(tmp_path), texts=texts)


Edit = Callable[[dict[str, Any], dict[str, Any], Path], None]
"""Changes tokenizer_config.json, tokenizer.json, and the folder."""


def setting(name: str, value: Any) -> Edit:
    def edit(config: dict[str, Any], _document: dict[str, Any], _folder: Path) -> None:
        config[name] = value

    return edit


def without(name: str) -> Edit:
    return lambda config, _document, _folder: config.pop(name, None)


def beside(name: str, content: Any) -> Edit:
    def edit(_config: dict[str, Any], _document: dict[str, Any], folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return edit


def flag(place: int, name: str, value: Any) -> Edit:
    def edit(_config: dict[str, Any], document: dict[str, Any], _folder: Path) -> None:
        document["added_tokens"][place % len(document["added_tokens"])][name] = value

    return edit


def listed(*, special: bool) -> Edit:
    def edit(config: dict[str, Any], document: dict[str, Any], _folder: Path) -> None:
        entries = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in document["added_tokens"]}
        config["added_tokens_decoder"] = {i: {**e, "special": e["special"] and special} for i, e in entries.items()}

    return edit


def part(name: str, value: Any) -> Edit:
    def edit(_config: dict[str, Any], document: dict[str, Any], _folder: Path) -> None:
        where, _, key = name.partition(".")
        if key and document[where] is not None:
            document[where][key] = value
        elif not key:
            document[where] = value

    return edit


NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "audio_token")
EDITS: Mapping[str, st.SearchStrategy[Edit]] = {
    "token": st.builds(setting, st.sampled_from(NAMES), TOKEN),
    "no setting": st.builds(without, st.sampled_from([*NAMES, "tokenizer_class", "backend", "extra_special_tokens"])),
    "class": st.builds(setting, st.just("tokenizer_class"), st.sampled_from(ODD)),
    "model": st.builds(lambda t: beside("config.json", {"model_type": t}), st.sampled_from(TYPES)),
    "setting": st.one_of(
        st.builds(setting, st.sampled_from(["add_prefix_space", "split_special_tokens"]), st.booleans()),
        st.builds(setting, st.sampled_from(["do_lower_case", "errors", "legacy"]), st.just("replace")),
        st.builds(setting, st.just("chat_template"), st.sampled_from(["{{ x }}", [{"name": "a", "template": "b"}]])),
        st.builds(
            setting,
            st.sampled_from(["extra_special_tokens", "additional_special_tokens"]),
            st.sampled_from([[], ["<|im_end|>"], ["<new>"], {"a_token": "<|im_end|>"}, None]),
        ),
    ),
    "flag": st.builds(
        flag,
        st.integers(0, 9),
        st.sampled_from(["special", "normalized", "lstrip", "rstrip", "single_word"]),
        st.booleans(),
    ),
    "id": st.builds(flag, st.integers(0, 9), st.just("id"), st.integers(690, 720)),
    "decoder": st.builds(lambda special: listed(special=special), st.booleans()),
    "document": st.one_of(
        st.builds(part, st.just("normalizer"), st.sampled_from([None, {"type": "NFC"}, {"type": "Lowercase"}])),
        st.builds(part, st.just("model.ignore_merges"), st.booleans()),
        st.builds(part, st.just("model.unk_token"), st.sampled_from([None, "the"])),
        st.builds(part, st.just("model.end_of_word_suffix"), st.sampled_from([None, ""])),
        st.builds(part, st.just("pre_tokenizer.add_prefix_space"), st.booleans()),
    ),
    "file": st.one_of(
        st.builds(
            beside,
            st.just("special_tokens_map.json"),
            st.sampled_from([{}, {"eos_token": "<|im_end|>"}, {"eos_token": {"content": "<|endoftext|>"}}, []]),
        ),
        st.builds(
            beside, st.just("added_tokens.json"), st.sampled_from([{}, {"<|im_end|>": 700}, {"<new>": 9000}, "no"])
        ),
        st.builds(beside, st.just("chat_template.jinja"), st.just("{{ messages }}")),
        st.builds(beside, st.just("additional_chat_templates/other.jinja"), st.just("{{ y }}")),
    ),
}


@given(st.sampled_from(PLAIN), st.lists(st.sampled_from([*EDITS]).flatmap(EDITS.__getitem__), min_size=1, max_size=3))
def test_whatever_the_files_say_it_is_that_of_transformers_or_left_to_it(name: str, edits: list[Edit]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(DEMO / name, folder, dirs_exist_ok=True)
        config, document = (json.loads((folder / f).read_text()) for f in ("tokenizer_config.json", "tokenizer.json"))
        for edit in edits:
            edit(config, document, folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(document))
        found = plain_tokenizer(folder)
        event("left to transformers" if found is None else "by its files")
        if found is None:
            return
        texts = [*TEXTS[:40], *(f"a {token}b" for token in found.added)]
        assert facts(found, texts=texts) == facts(by_transformers(folder), texts=texts)


def test_a_folder_that_nothing_loads_is_refused_by_transformers(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "speech" / "model" / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert plain_tokenizer(tmp_path) is None
    with pytest.raises(ConfigError, match="transformers cannot load"):
        Vocabulary(tmp_path, digest=tokenizer_digest(tmp_path))


def test_texts_are_written_without_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from forebay.config.pretrained_folder import tokenizer_digest\n"
        "from forebay.steps.text.plain import Whisper\n"
        "folder = Path('demo/speech/model'); step = Whisper(tokenizer=tokenizer_digest(folder))\n"
        "step.opened(folder, merge_size=None)\n"
        "print(*sorted({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    )
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout == "\n"


def test_whisper_s_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    wanted = {code: code for code in LANGUAGES} | TO_LANGUAGE_CODE
    assert wanted == _WHISPER_CODES
    assert [whisper_code(word) for word in ("EN", "en-US", "Haitian Creole", "xx")] == ["en", "en", "ht", None]
