"""Prompts against transformers, on the demo transcripts; properties on any text."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile as sf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast, WhisperTokenizerFast
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.pretrained import from_folder
from forebay.steps.table import made, steps_named
from forebay.steps.text.line import is_unseen, qwen3_asr_name, whisper_code
from forebay.steps.text.qwen3_asr_prompt import num_audio_tokens
from forebay.steps.text.transcript import TextEncoder, Transcript
from tests.strategies import transcripts

SPEECH = Path(__file__).resolve().parents[3] / "demo" / "speech"


WHISPER = SPEECH / "model"


QWEN3_ASR = SPEECH / "qwen3_asr_model"


FOLDERS = {"whisper": WHISPER, "qwen3_asr": QWEN3_ASR, "plain": WHISPER}


ROWS: list[dict[str, Any]] = pq.read_table(SPEECH / "train.parquet").to_pylist()


PROMPTS = ["whisper", "qwen3_asr", "plain"]


@cache
def encoder(prompt: str, **settings_: Any) -> TextEncoder:
    folder = FOLDERS[prompt]
    return step_of(prompt, folder, **settings_).opened(folder)


def step_of(prompt: str, folder: Path, **settings_: Any) -> Transcript:
    step = made(cast(type[Transcript], steps_named("text", prompt)[0]), settings_, tokenizer=tokenizer_digest(folder))
    assert isinstance(step, Transcript)
    return step


def ids_of(coder: TextEncoder, text: str, language: str | None = "en", prompt: str | None = None) -> list[int]:
    ids: list[int] = coder.encode(text, language, prompt, sample_id="s")["input_ids"].tolist()
    return ids


def clean(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def whisper_reference(language: str | None) -> Any:
    tokenizer = from_folder(WhisperTokenizerFast, WHISPER)
    tokenizer.set_prefix_tokens(language=language, task="transcribe")
    return tokenizer


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_demo_transcript_comes_back(prompt: str) -> None:
    coder = encoder(prompt)
    for row in ROWS:
        fields = coder.encode(row["transcript"], row["language"], "Asterisk, Digium", sample_id=row["sample_id"])
        assert coder.decode(fields["input_ids"]) == clean(row["transcript"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_fields_are_the_specified_ones(prompt: str) -> None:
    fields = encoder(prompt).encode("Hello.", "en", None, sample_id="s")
    specs = {spec.name: spec for spec in step_of(prompt, FOLDERS[prompt]).fields()}
    assert list(fields) == list(specs)
    assert all(array.dtype == specs[name].numpy_dtype and array.ndim == 1 for name, array in fields.items())
    assert all(spec.group == "text" and spec.shape == () for spec in specs.values())
    assert all(len(array) == 1 for name, array in fields.items() if name != "input_ids")


# --- Whisper


def test_whisper_sequences_are_the_tokenizer_s_own() -> None:
    references = {language: whisper_reference(language) for language in {row["language"] for row in ROWS}}
    for row in ROWS:
        wanted = references[row["language"]](clean(row["transcript"])).input_ids
        fields = encoder("whisper").encode(row["transcript"], row["language"], None, sample_id=row["sample_id"])
        assert fields["input_ids"].tolist() == wanted
        assert fields["prefix_len"].tolist() == [4]


def test_whisper_without_language_has_no_tag() -> None:
    wanted = whisper_reference(None)("Hello.").input_ids
    assert ids_of(encoder("whisper"), "Hello.", None) == wanted
    assert ids_of(encoder("whisper"), "Hello.", "  ") == wanted
    assert ids_of(encoder("whisper", language_tag_mode="none"), "Hello.", "en") == wanted
    assert encoder("whisper").encode("Hello.", None, None, sample_id="s")["prefix_len"].tolist() == [3]


def test_whisper_prompt_stands_before_and_is_prefix() -> None:
    tokenizer = whisper_reference("en")
    before = tokenizer.get_prompt_ids("Asterisk, Digium", return_tensors="np").tolist()
    fields = encoder("whisper").encode("Hello.", "en", " Asterisk,  Digium ", sample_id="s")
    assert fields["input_ids"].tolist() == before + tokenizer("Hello.").input_ids
    assert fields["prefix_len"].tolist() == [len(before) + 4]


def test_whisper_tags_every_language_that_transformers_names() -> None:
    tokenizer = whisper_reference(None)
    for code, name in LANGUAGES.items():
        tag = tokenizer.convert_tokens_to_ids(f"<|{code}|>")
        for written in (code, code.upper(), name, name.title()):
            assert ids_of(encoder("whisper"), "x", written)[1] == tag


def test_whisper_unknown_language_is_counted() -> None:
    with pytest.raises(TextError, match="s: language 'Klingon' has no tag") as caught:
        ids_of(encoder("whisper"), "Hello.", "Klingon")
    assert caught.value.reason == "unknown_language"


# --- Qwen3-ASR


@pytest.fixture(scope="module")
def processor() -> Any:
    return from_folder(AutoProcessor, QWEN3_ASR)


@pytest.fixture(scope="module")
def clips() -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(SPEECH.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in (m for m in tar if m.name.endswith(".flac")):
                file = tar.extractfile(member)
                assert file is not None
                found[member.name.removesuffix(".flac")] = sf.read(io.BytesIO(file.read()), dtype="float32")[0]
    return found


def expand(fields: dict[str, np.ndarray], num_frames: int) -> tuple[list[int], int]:
    """Ids and prefix length after the placeholder became as many as the clip needs: what the loader does."""
    at = int(fields["audio_index"][0])
    ids = fields["input_ids"].tolist()
    more = num_audio_tokens(num_frames)
    return ids[:at] + [ids[at]] * more + ids[at + 1 :], int(fields["prefix_len"][0]) + more - 1


@pytest.mark.parametrize("prompt", [None, "Asterisk, Digium"])
@pytest.mark.few("None")
def test_qwen3_asr_sequences_are_the_processor_s_own(
    processor: Any, clips: dict[str, np.ndarray], prompt: str | None
) -> None:
    newline = processor.tokenizer("\n").input_ids
    for row in ROWS:
        fields = encoder("qwen3_asr").encode(row["transcript"], row["language"], prompt, sample_id=row["sample_id"])
        audio = {"type": "audio", "audio": clips[row["sample_id"]]}
        name = LANGUAGE_CODE_TO_NAME[row["language"]]
        answer = f"language {name}<asr_text>{clean(row['transcript'])}"
        messages = [
            {"role": "system", "content": [{"type": "text", "text": prompt or ""}]},
            {"role": "user", "content": [audio]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        wanted = processor.apply_chat_template(messages, tokenize=True, return_dict=True, sampling_rate=16_000)
        ids, prefix_len = expand(fields, int(wanted["input_features_mask"].sum()))
        assert ids + newline == wanted["input_ids"][0].tolist()
        asked = processor.apply_transcription_request(
            audio=clips[row["sample_id"]], language=name, prompt=prompt, sampling_rate=16_000
        )["input_ids"][0].tolist()
        assert ids[: len(asked)] == asked
        header = processor.tokenizer(f"language {name}<asr_text>").input_ids
        assert ids[:prefix_len] + header == asked


@pytest.mark.parametrize("language", [None, "", "xx", "Klingon"])
def test_qwen3_asr_language_without_name_is_none(processor: Any, language: str | None) -> None:
    fields = encoder("qwen3_asr").encode("Hello.", language, None, sample_id="s")
    target = processor.tokenizer.decode(fields["input_ids"][int(fields["prefix_len"][0]) :])
    assert target == "language None<asr_text>Hello.<|im_end|>"


def test_qwen3_asr_mode_none_never_names_a_language(processor: Any) -> None:
    ids = ids_of(encoder("qwen3_asr", language_tag_mode="none"), "Hello.", "en")
    assert processor.tokenizer.decode(ids).endswith("assistant\nlanguage None<asr_text>Hello.<|im_end|>")


def test_qwen3_asr_knows_the_languages_that_transformers_knows() -> None:
    for code, name in LANGUAGE_CODE_TO_NAME.items():
        assert {qwen3_asr_name(written) for written in (code, code.upper(), name, name.lower())} == {name}
    assert qwen3_asr_name("sw") is None


@pytest.mark.parametrize("mode", ["auto", "always", "none"])
def test_text_that_carries_its_language_keeps_it(processor: Any, mode: str) -> None:
    coder = encoder("qwen3_asr", language_tag_mode=mode)
    ids = ids_of(coder, "language Hindi<asr_text>Namaste  <asr_text> again", None)
    target = processor.tokenizer.decode(ids).partition("assistant\n")[2]
    assert target == "language Hindi<asr_text>Namaste <asr_text> again<|im_end|>"
    assert ids.count(processor.tokenizer.convert_tokens_to_ids("<asr_text>")) == 1
    assert coder.decode(ids) == "Namaste <asr_text> again"


def test_full_width_brackets_carry_no_language(processor: Any) -> None:
    text = "language English\uff1casr_text\uff1eHello"
    assert encoder("qwen3_asr").decode(ids_of(encoder("qwen3_asr"), text)) == "language English<asr_text>Hello"


def test_qwen3_asr_must_name_a_language_where_the_config_says_always() -> None:
    with pytest.raises(TextError, match="no name for language 'Klingon'") as caught:
        ids_of(encoder("qwen3_asr", language_tag_mode="always"), "Hello.", "Klingon")
    assert caught.value.reason == "unknown_language"


# --- every prompt


@pytest.mark.parametrize("prompt", PROMPTS)
@given(text=transcripts(), hint=transcripts())
def test_what_was_transcribed_never_becomes_a_control_token(prompt: str, text: str, hint: str) -> None:
    coder = encoder(prompt)
    if prompt == "qwen3_asr" and "<asr_text>" in text:
        text = text.replace("language ", "")  # what carries a language has its own tests
    if is_unseen(clean(text)):
        with pytest.raises(TextError, match="empty after normalisation"):
            ids_of(coder, text, "en", hint)
        return
    fields = coder.encode(text, "en", hint, sample_id="s")
    ids, bare = fields["input_ids"].tolist(), ids_of(coder, "x")
    added = set(coder.vocabulary.tokenizer.get_added_vocab().values())
    control = [i for i in ids if i in added]
    before = [coder.vocabulary.find("<|startofprev|>")] if prompt == "whisper" and clean(hint) else []
    assert control == before + [i for i in bare if i in added]
    assert coder.decode(ids) == clean(text)
    assert len(ids) > int(fields["prefix_len"][0])


@given(text=transcripts())
def test_unnormalised_text_comes_back_as_it_was(text: str) -> None:
    coder = encoder("whisper", normalize="none")
    if not is_unseen(text):
        assert coder.decode(ids_of(coder, text)) == text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "text", ["", " \t\n", "\u3000", "\u200b", "\ufeff", " \u2060\u200c\u200d\u00ad\u200e ", "\ufe0f", "\u3164"]
)
def test_empty_text_is_counted(prompt: str, text: str) -> None:
    for normalize in ("nfkc", "none"):
        with pytest.raises(TextError, match="s: the transcript is empty") as caught:
            ids_of(encoder(prompt, normalize=normalize), text)
        assert caught.value.reason == "empty_text"


@pytest.mark.parametrize("text", ["क्\u200dष", "می\u200cخواهم", "\u0600", "👩\u200d👧", "a\u200bb"])
def test_joiners_inside_of_a_text_stay(text: str) -> None:
    coder = encoder("plain")
    assert coder.decode(ids_of(coder, text)) == text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("text", "message"), [("a\0b", "NUL at character 1"), ("ab\ud800", r"U\+D800 at character 2")])
def test_text_that_is_no_text_is_counted(prompt: str, text: str, message: str) -> None:
    for bad in ((text, None), ("fine", text)):
        with pytest.raises(TextError, match=f"s: text has a .*{message}") as caught:
            ids_of(encoder(prompt), bad[0], "en", bad[1])
        assert caught.value.reason == "bad_text"
        if prompt == "plain":
            return


@pytest.mark.parametrize("prompt", PROMPTS)
def test_missing_language_is_counted_where_it_must_be_there(prompt: str) -> None:
    with pytest.raises(TextError, match=r'text\.language_tag_mode = "always"') as caught:
        ids_of(encoder(prompt, language_tag_mode="always"), "Hello.", None)
    assert caught.value.reason == "missing_language"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_label_limit_is_exact(prompt: str) -> None:
    fields = encoder(prompt).encode("Hello there.", "en", None, sample_id="s")
    given_len = 1 if prompt == "whisper" else int(fields["prefix_len"][0])
    num_labels = len(fields["input_ids"]) - given_len
    assert ids_of(encoder(prompt, max_label_tokens=num_labels), "Hello there.") == fields["input_ids"].tolist()
    message = f"s: {num_labels} label tokens, text.max_label_tokens is {num_labels - 1}"
    with pytest.raises(TextError, match=message) as caught:
        ids_of(encoder(prompt, max_label_tokens=num_labels - 1), "Hello there.")
    assert caught.value.reason == "label_too_long"


@pytest.mark.parametrize(
    ("written", "code"),
    [("en", "en"), ("EN", "en"), ("en-US", "en"), ("zh_Hant", "zh"), (" English ", "en"), ("haw", "haw")],
)
def test_languages_are_read_as_manifests_write_them(written: str, code: str) -> None:
    assert whisper_code(written) == code
    assert whisper_code("xx-" + written.strip()) is None


@given(values=st.lists(st.just(-100), max_size=3))
def test_decode_leaves_masked_labels_out(values: list[int]) -> None:
    ids = encoder("whisper").encode("Hello.", "en", None, sample_id="s")["input_ids"]
    assert encoder("whisper").decode([*ids.tolist(), *values]) == "Hello."


def test_constants_are_what_the_models_configurations_say() -> None:
    whisper = json.loads((WHISPER / "config.json").read_bytes())
    assert encoder("whisper").constants == {"prompt": "whisper"} | {
        name: whisper[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")
    }
    qwen = json.loads((QWEN3_ASR / "config.json").read_bytes())
    constants = encoder("qwen3_asr").constants
    assert constants["vocab_size"] == qwen["text_config"]["vocab_size"]
    assert constants["audio_token_id"] == qwen["audio_token_id"]
    assert constants["pad_token_id"] == qwen["pad_token_id"]
    assert constants["eos_token_id"] in qwen["eos_token_id"]


# --- folders that will not do


def test_files_that_changed_since_the_key_was_made_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(WHISPER, tmp_path / "model")
    step = step_of("plain", folder)
    (folder / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes() + b"\n")
    with pytest.raises(ConfigError, match=f"the recipe was made with {step.tokenizer[:16]}"):
        step.opened(folder)


def test_prompt_of_another_model_names_the_missing_token() -> None:
    with pytest.raises(ConfigError, match=r'"whisper" needs the token <\|startofprev\|>'):
        step_of("whisper", QWEN3_ASR).opened(QWEN3_ASR)
    with pytest.raises(ConfigError, match=r'"qwen3_asr" needs the token <\|audio_pad\|>'):
        step_of("qwen3_asr", WHISPER).opened(WHISPER)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "needs a chat template"),
        ("{{ messages[0].content[0].text }}", r"<\|audio_pad\|> 0 times"),
        ("<|audio_pad|>", "shows the system text 0 times"),
        ("{{ raise_exception('no') }}", "needs a chat template"),
    ],
)
def test_chat_template_without_prompt_or_audio_is_refused(tmp_path: Path, template: str | None, message: str) -> None:
    folder = shutil.copytree(QWEN3_ASR, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message):
        step_of("qwen3_asr", folder).opened(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"1", b"\xff\xfe", b'{"model": 1}', b'{"added_tokens": [], "model": {}}']
)
def test_broken_tokenizer_file_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    folder = shutil.copytree(WHISPER, tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"text\.tokenizer: transformers cannot load .*model"):
        step_of("plain", folder).opened(folder)


def test_tokenizer_whose_words_are_its_control_tokens_refuses_such_text(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    coder = step_of("plain", tmp_path).opened(tmp_path)
    assert ids_of(coder, "hello world") == [1, 2]
    assert coder.constants == {"prompt": "plain", "vocab_size": 3}
    with pytest.raises(TextError, match="s: the tokenizer reads <s> in the text as a control token") as caught:
        ids_of(coder, "hello <s>")
    assert caught.value.reason == "bad_text"
