"""The letters of a Wav2Vec2CTCTokenizer: ids and texts are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.text.vocabulary import Vocabulary

TABLE = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"ABC'"])}


def folder_of(folder: Path, table: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Makes `folder` a saved `Wav2Vec2CTCTokenizer`."""
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_text(json.dumps(table or TABLE))
    transformers.Wav2Vec2CTCTokenizer(str(folder / "table.json"), **settings).save_pretrained(folder)
    (folder / "table.json").unlink()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("letters"))


def opened(folder: Path) -> Vocabulary:
    return Vocabulary(folder, digest=tokenizer_digest(folder))


def test_ids_and_texts_are_those_of_the_tokenizer(folder: Path) -> None:
    own, ours = transformers.AutoTokenizer.from_pretrained(folder), opened(folder)
    assert type(own).__name__ == "Wav2Vec2CTCTokenizer"
    assert (ours.size, ours.pad_token_id, ours.eos_token_id) == (len(own), own.pad_token_id, own.eos_token_id)

    @given(st.text(alphabet="ABC' abe|", min_size=1, max_size=20))
    def compare(text: str) -> None:
        ids = ours.encode(text, sample_id="a")
        assert ids == own(text).input_ids
        wanted = own.decode(ids, group_tokens=False)
        assert ours.decode(ids).strip() == wanted.strip()

    compare()


def test_a_control_token_in_a_text_is_its_letters(folder: Path) -> None:
    assert opened(folder).encode("<pad>", sample_id="a") == [TABLE["<unk>"]] * 5


@pytest.mark.parametrize(
    ("table", "settings", "why"),
    [
        (None, {"do_lower_case": True}, "makes capitals of letters"),
        ({"en": TABLE}, {"target_lang": "en"}, "has letters by language"),
        ({**TABLE, "CH": 9}, {}, r"has tokens of several letters \(CH\)"),
    ],
)
def test_what_is_more_than_letters_is_refused(
    table: dict[str, Any] | None, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"Wav2Vec2CTCTokenizer in .* {why}.*forebay symbols"):
        opened(folder_of(tmp_path / "other", table, **settings))
