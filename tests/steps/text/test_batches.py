"""Texts that are tokenised together give what each of them gives alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from forebay.errors import TextError
from forebay.steps.text.symbols import Words
from forebay.steps.text.transcript import Encoded, TextEncoder
from tests.steps.text.test_encoder import FOLDERS, PROMPTS, ROWS, encoder
from tests.strategies import transcripts

PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)

ENGLISH = st.lists(
    st.sampled_from(
        ["it's", "We'LL", "they're", " ", "  ", "   ", "42", "7", "--", ". ", "'", "''s", "a", "The", " of"]
    ),
    max_size=12,
).map("".join)

BAD = st.sampled_from(["", "   ", "a\0b", "\ud800", "\u200b"])

ROWS_OF_TEXT = st.lists(
    st.tuples(
        st.one_of(ENGLISH, PRINTABLE, transcripts(), BAD),
        st.sampled_from([None, "", "en", "hi", "tlh"]),
        st.sampled_from([None, "", "Asterisk, Digium", "hot words", "\0"]),
    ),
    max_size=12,
)


def told(result: Encoded | TextError) -> Any:
    """Returns what there is to compare: values, or reason and message."""
    if isinstance(result, TextError):
        return result.reason, str(result)
    return {name: (values.dtype, values.tolist()) for name, values in result.fields.items()}, result.prepared


def together(coder: TextEncoder, rows: Sequence[tuple[str, Any, Any]], start: int) -> list[Any]:
    texts, languages, prompts = ([row[place] for row in rows] for place in range(3))
    ids = [f"s{start + i}" for i in range(len(rows))]
    return [told(result) for result in coder.encode_batch(texts, languages, prompts, sample_ids=ids)]


@pytest.mark.parametrize("prompt", PROMPTS)
@given(rows=ROWS_OF_TEXT, cuts=st.sets(st.integers(1, 11)), mode=st.sampled_from(["auto", "always"]))
def test_any_cut_of_texts_into_batches_gives_what_each_gives_alone(
    prompt: str, rows: list[tuple[str, Any, Any]], cuts: set[int], mode: str
) -> None:
    coder = encoder(prompt, language_tag_mode=mode)
    borders = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    made = [result for a, b in itertools.pairwise(borders) for result in together(coder, rows[a:b], a)]
    fresh = type(coder)(coder.step, coder.vocabulary)
    assert made == [result for i, row in enumerate(rows) for result in together(fresh, [row], i)]
    plain = coder.vocabulary._plain  # the tokenizer itself, without a table of words
    for (text, _, _), result in zip(rows, made, strict=True):
        if prompt == "plain" and not isinstance(result[0], str):
            ids = result[0]["input_ids"][1]
            assert ids[:-1] == plain.encode(result[1].text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("prompt", ["whisper", "qwen3_asr"])
@given(texts=st.lists(st.one_of(PRINTABLE, ENGLISH, transcripts()), max_size=8))
def test_words_of_a_table_have_the_ids_of_the_tokenizer(prompt: str, texts: list[str]) -> None:
    vocabulary = encoder(prompt).vocabulary
    assert vocabulary._words is not None
    for _ in range(2):  # the second time most words are known
        for text, ids in zip(texts, vocabulary._words.encode(texts), strict=True):
            assert ids is None or ids == vocabulary._plain.encode(text, add_special_tokens=False).ids
            assert ids is None or text.isascii()


def test_english_comes_from_the_table_and_what_is_new_throughout_does_not() -> None:
    words = encoder("whisper").vocabulary._words
    assert words is not None
    table = Words(words._tokenizer, words._cut)
    assert table.encode(["9f3c0a77", "b1e0d2"]) == [None, None]
    english = ["the cat and the dog and the cat"] * 2
    assert table.encode([*english, "der Käse"])[:2] == [words._tokenizer.encode(english[0]).ids] * 2
    assert table.encode(["the cat", "der Käse"])[1] is None


def test_a_full_table_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    words = encoder("whisper").vocabulary._words
    assert words is not None
    table = Words(words._tokenizer, words._cut)
    monkeypatch.setattr("forebay.steps.text.symbols._MOST", 3)
    for text in ("one two " * 5, "three four " * 5, "one two " * 5):
        assert table.encode([text]) == [words._tokenizer.encode(text).ids]
        assert len(table._ids) <= 5


def _document(prompt: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encoder(prompt).vocabulary._plain.to_str())
    return found


@pytest.mark.parametrize(
    ("prompt", "name", "value"),
    [
        ("whisper", "normalizer", {"type": "Lowercase"}),
        ("whisper", "pre_tokenizer", None),
        ("whisper", "pre_tokenizer", {"type": "Whitespace"}),
        ("whisper", "pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}),
        ("qwen3_asr", "pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
    ],
)
def test_another_tokenizer_has_no_table(prompt: str, name: str, value: Any) -> None:
    plain, document = encoder(prompt).vocabulary._plain, _document(prompt)
    assert Words.of(plain, document) is not None
    assert Words.of(plain, {**document, name: value}) is None
    assert Words.of(plain, {**document, "model": {**document["model"], "dropout": 0.1}}) is None


def test_a_tokenizer_that_cuts_otherwise_than_it_says_has_no_table() -> None:
    plain = Tokenizer.from_str(json.dumps(_document("whisper")))
    plain.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain.pre_tokenizer])
    assert Words.of(plain, _document("whisper")) is None


def _unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"▁{a}", -2.0) for a in "abcde"), *((a, -3.0) for a in "▁abcde'")]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    return made


def _word_piece() -> Tokenizer:
    words = ["[UNK]", *"abcde", *(f"##{a}" for a in "abcde"), "'"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


@pytest.mark.parametrize("make", [_unigram, _word_piece])
@given(texts=st.lists(st.one_of(st.text("abcde '", max_size=12), transcripts()), max_size=8))
def test_a_batch_without_offsets_has_the_ids_of_each_text(make: Any, texts: list[str]) -> None:
    tokenizer = make()
    made = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    assert made == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_a_text_that_the_tokenizer_cannot_take_leaves_the_others_as_they_are() -> None:
    vocabulary = encoder("plain").vocabulary
    with vocabulary.together(["the one", "\ud800", "the other"]):
        assert vocabulary.encode("the one", sample_id="s") == vocabulary._plain.encode("the one").ids
        with pytest.raises((TypeError, UnicodeError), match=r"surrogate|TextInputSequence"):
            vocabulary.encode("\ud800", sample_id="s")


def test_what_a_caller_does_to_ids_stays_with_the_caller() -> None:
    vocabulary = encoder("plain").vocabulary
    with vocabulary.together(["the same", "the same"]):
        first = vocabulary.encode("the same", sample_id="a")
        wanted = list(first)
        first.append(-1)
        assert vocabulary.encode("the same", sample_id="b") == wanted


def test_the_demo_transcripts_are_batched_by_every_prompt() -> None:
    for prompt in PROMPTS:
        coder = encoder(prompt)
        rows = [(row["transcript"], row["language"], None) for row in ROWS]
        asked: list[str] = []
        plain = coder.vocabulary._plain

        class Counting:
            def encode(self, text: str, **options: Any) -> Any:
                asked.append(text)  # noqa: B023
                return plain.encode(text, **options)  # noqa: B023

            def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
                return plain.encode_batch_fast(texts, **options)  # noqa: B023

        coder.vocabulary._plain = Counting()
        try:
            assert not [each for each in together(coder, rows, 0) if isinstance(each[0], str)]
        finally:
            coder.vocabulary._plain = plain
        assert asked == [], FOLDERS[prompt]
