"""Makes demo/text/ from Debian's gnome-user-docs: sentences in twelve languages, who wrote them, and a tokenizer.

python demo/make_text.py FOLDER_WITH_DEB    (see demo/README.md for the package; needs dpkg-deb)
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from make_models import train_bpe
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

HERE = Path(__file__).resolve().parent
PER_LANGUAGE = 200
NUM_TEXT_TOKENS = 1200
FOLDERS = {
    "de": "de", "en": "C", "es": "es", "fa": "fa", "fr": "fr", "ja": "ja", "ko": "ko", "mr": "mr", "pt": "pt_BR",
    "ru": "ru", "uk": "uk", "zh": "zh_CN",
}  # fmt: skip
"""Folders of the package by the language of their pages."""
WITHOUT_LANGUAGE = 4
"""One row in so many does not say its language."""

MALLARD = "{http://projectmallard.org/1.0/}"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=。)")
DENSE = frozenset({"ja", "ko", "zh"})
"""Languages in whose scripts a character says more, so that sentences are shorter."""

LICENCE = """\
# Licences of the demo texts

The sentences of `sentences.jsonl` are not under forebay's own licence. They are from the help pages of GNOME
(gnome-user-docs 43.0, <https://gitlab.gnome.org/GNOME/gnome-user-docs>), as Debian packages them (`gnome-user-docs`
{version}). Copyright: Shaun McCance and the authors, editors and translators below. Licence of all of them:
CC-BY-SA-3.0, <https://creativecommons.org/licenses/by-sa/3.0/>.

**Changes made.** {count} sentences were selected, {per_language} a language, without their markup. Their words and
marks are unchanged. The vocabulary of `model/tokenizer.json` was trained on them. What forebay changed is offered under
the same licence.

The works are provided as is, without warranties of any kind; see the licence. No author endorses forebay.

Authors and editors (en) and translators, as the pages name them:

"""


@dataclass
class Pages:
    """The pages of a language: its sentences, each once, and who is named in them."""

    sentences: dict[str, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


def plain(element: ET.Element) -> str:
    return re.sub(r"\s+", " ", "".join(element.itertext())).strip()


def names(credit: str) -> list[str]:
    """Returns the people of a credit, without their addresses and years."""
    return [re.split(r" <|, \d", part)[0].strip() for part in credit.split(";")]


def paragraphs(root: ET.Element) -> Iterator[str]:
    """Yields the paragraphs of a page; what stands in its `info` is about the page and is left out."""
    for info in root.iter(f"{MALLARD}info"):
        info.clear()
    yield from (plain(paragraph) for paragraph in root.iter(f"{MALLARD}p"))


def read_pages(folder: Path, language: str, untranslated: set[str]) -> Pages:
    """Returns the pages of a folder without the paragraphs in `untranslated`."""
    pages = Pages()
    for path in sorted(folder.rglob("*.page")):
        root = ET.parse(path).getroot()
        translators = language != "en"
        for credit in root.iter(f"{MALLARD}credit"):
            if translators == ("translator" in credit.get("type", "")):
                pages.names.update(name for element in credit.iter(f"{MALLARD}name") for name in names(plain(element)))
        for paragraph in paragraphs(root):
            if paragraph not in untranslated:
                pages.sentences.update(dict.fromkeys(filter(fits(language), SENTENCE_END.split(paragraph))))
    return pages


def fits(language: str) -> Callable[[str], bool]:
    """Returns what says whether a piece is a sentence of the usual length, and not an address or a path."""
    low, high = (8, 48) if language in DENSE else (20, 80)
    return lambda piece: low <= len(piece) <= high and piece[-1] in ".!?。" and not re.search(r"[/<>_=]", piece)


def chosen(sentences: list[str]) -> list[str]:
    """Returns PER_LANGUAGE of them, spread evenly over the pages."""
    if len(sentences) < PER_LANGUAGE:
        raise SystemExit(f"{len(sentences)} sentences, wanted {PER_LANGUAGE}; is it gnome-user-docs 43.0-2?")
    return [sentences[i * len(sentences) // PER_LANGUAGE] for i in range(PER_LANGUAGE)]


def write_rows(path: Path, by_language: dict[str, list[str]]) -> None:
    """Writes the sentences, languages interleaved; an id begins with its sentence's language."""
    rows = []
    for i in range(PER_LANGUAGE):
        for language, sentences in by_language.items():
            row = {"id": f"{language}-{i:03d}", "text": sentences[i], "language": language}
            if len(rows) % WITHOUT_LANGUAGE == i % WITHOUT_LANGUAGE:
                del row["language"]
            rows.append(row)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, texts: list[str]) -> None:
    """Writes the tokenizer: a byte-level BPE, for which no character is unknown."""
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    vocab, merges = train_bpe(
        texts,
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        vocab_size=NUM_TEXT_TOKENS,
    )
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", type=Path, help="folder with the .deb file")
    parser.add_argument("--out", type=Path, default=HERE / "text")
    args = parser.parse_args()
    found = sorted(args.debs.glob("gnome-user-docs_*.deb"))
    if len(found) != 1:
        raise SystemExit(f"{args.debs} holds {len(found)} files gnome-user-docs_*.deb, wanted one; see demo/README.md")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", str(found[0]), unpacked], check=True)
        root = Path(unpacked) / "usr/share/help"
        english = {p for path in sorted((root / "C").rglob("*.page")) for p in paragraphs(ET.parse(path).getroot())}
        pages = {
            language: read_pages(root / folder, language, set() if language == "en" else english)
            for language, folder in FOLDERS.items()
        }
    by_language = {language: chosen(list(its.sentences)) for language, its in pages.items()}
    write_rows(args.out / "sentences.jsonl", by_language)
    licence = LICENCE.format(
        version=found[0].name.split("_")[1], count=len(FOLDERS) * PER_LANGUAGE, per_language=PER_LANGUAGE
    )
    people = "\n".join(
        f"- {language}: {', '.join(sorted(its.names)) or 'the pages name nobody'}" for language, its in pages.items()
    )
    (args.out / "LICENSES.md").write_text(f"{licence}{people}\n", encoding="utf-8")
    make_model(args.out / "model", [text for texts in by_language.values() for text in texts])
    print(f"{len(FOLDERS) * PER_LANGUAGE} sentences in {len(FOLDERS)} languages, in {args.out}")


if __name__ == "__main__":
    main()
