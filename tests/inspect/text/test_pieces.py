"""Tokens as pieces, against what their tokenizers decode."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as to_text

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.inspect.text_diff import KINDS, VocabularyPiece, VocabularyPieces
from forebay.steps.text.vocabulary import Vocabulary
from tests.text_corpus import ROOT


def of_folder(name: str) -> tuple[Vocabulary, VocabularyPieces]:
    folder = ROOT / "demo" / name
    vocabulary = Vocabulary(folder, digest=tokenizer_digest(folder))
    return vocabulary, VocabularyPieces(vocabulary)


def of_model(model: Any, *, control: frozenset[int] = frozenset(), decoder: Any = None) -> VocabularyPieces:
    """The pieces of a tokenizer that is made here."""
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    opened = SimpleNamespace(backend=backend)
    vocabulary = SimpleNamespace(open=opened, control_ids=control, size=backend.get_vocab_size())
    return VocabularyPieces(cast(Vocabulary, vocabulary))


@pytest.mark.parametrize("name", ["speech/model", "speech/qwen3_asr_model", "vision/model"])
def test_every_token_of_a_byte_level_vocabulary_is_what_it_decodes_to(name: str) -> None:
    vocabulary, pieces = of_folder(name)
    decoder = to_text.ByteLevel()
    found = set()
    for token, number in vocabulary.tokenizer.get_vocab().items():
        piece = pieces.piece(number)
        found.add(piece.kind)
        assert KINDS[pieces.codes[number]] == piece.kind
        assert (piece.kind == "control") == (number in vocabulary.control_ids)
        if piece.kind == "control":
            assert piece.data.decode() == token
            continue
        text = decoder.decode([token])
        assert (piece.kind == "piece") == ("\ufffd" in text)
        assert piece.data.decode("utf-8", "replace") == text
    assert found == {"text", "control", "piece"}


def test_bytes_of_a_vocabulary_that_falls_back_to_them() -> None:
    vocab = {"<unk>": 0, "<0xE2>": 1, "<0x0A>": 2, "\u2581the": 3, "<0xEG>": 4}
    pieces = of_model(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    assert [pieces.piece(number) for number in range(5)] == [
        VocabularyPiece("unknown", b"<unk>"),
        VocabularyPiece("byte", b"\xe2"),
        VocabularyPiece("byte", b"\n"),
        VocabularyPiece("text", b" the"),
        VocabularyPiece("text", b"<0xEG>"),
    ]
    assert [pieces.piece(number).shown() for number in (0, 1, 2, 3, 99)] == [
        "<unk>",
        "bytes E2",
        '"<LINE FEED>"',
        '" the"',
        '"<id 99>"',
    ]
    assert pieces.codes.tolist() == [2, 3, 3, 0, 0]
    # without the fallback it is a token like others
    plain = of_model(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    assert plain.piece(1).kind == "text"


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (models.Unigram([("a", -1.0), ("<unk>", 0.0)], unk_id=1), 1),
        (models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), 1),
        (models.WordPiece({"a": 0, "##b": 1}, unk_token="[UNK]"), None),
    ],
)
def test_the_unknown_token_is_what_the_model_names(model: Any, unknown: int | None) -> None:
    pieces = of_model(model)
    assert [number for number in range(2) if pieces.piece(number).kind == "unknown"] == (
        [] if unknown is None else [unknown]
    )


def test_a_byte_level_step_is_found_among_others() -> None:
    backend = Tokenizer(models.BPE(vocab={"\u00e2": 0, "\u0120a": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    opened = SimpleNamespace(backend=backend)
    pieces = VocabularyPieces(cast(Vocabulary, SimpleNamespace(open=opened, control_ids=frozenset(), size=2)))
    assert [pieces.piece(number) for number in range(2)] == [
        VocabularyPiece("piece", b"\xe2"),
        VocabularyPiece("text", b" a"),
    ]
    assert json.loads(backend.to_str())["pre_tokenizer"]["type"] == "Sequence"
