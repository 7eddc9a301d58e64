"""Makes demo/ljspeech/ from Debian's Asterisk prompts: words of one English voice in the layout of LJSpeech.

python demo/make_ljspeech.py FOLDER_WITH_DEBS    (the two English packages of demo/README.md; needs dpkg-deb and ffmpeg)

The lowest four of 16 bits are zero, which halves the files: 66 dB are enough for a demo of mel spectrograms.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
from make_speech import HERE, VOICES, decode_g722, encode_flac, unpack
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPTS = """digits/oh is digits/h-10 your vm-Work digits/h-8 digits/10 digits/h-3 minute digits/8 with digits/h-12
             digits/mon-4 digits/today digits/h-5 vm-press added phonetic/g_p digits/h-1 vm-from digits/2 calling
             digits/h-6 second phonetic/e_p vm-for phonetic/p_p digits/h-11 vm-Urgent hello phonetic/l_p digits/h-4
             digits/12 digits/4"""
"""Short words with a transcript of their own."""

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BLANK = "<blank>"


def read_texts(root: Path) -> dict[str, str]:
    """Returns each chosen prompt's transcript, from the list in the package."""
    path = root / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    lines = gzip.decompress(path.read_bytes()).decode("utf-8-sig").splitlines()
    found = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    return {name: found[name] for name in PROMPTS.split()}


def spoken(text: str) -> str:
    """Returns what is said, the third column of LJSpeech: small letters without punctuation."""
    return text.lower().strip(".")


def write_symbols(folder: Path) -> None:
    """Writes a tokenizer of single letters, the space and the apostrophe behind five special tokens."""
    symbols = [*SPECIAL.values(), BLANK, " ", "'", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=[BLANK], **SPECIAL)
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", type=Path, help="folder with the two English .deb files")
    parser.add_argument("--out", type=Path, default=HERE / "ljspeech")
    args = parser.parse_args()
    (args.out / "wavs").mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(args.debs, "en", root)
        for name, text in read_texts(root).items():
            sample_id = f"en_{name.replace('/', '_')}"
            waveform = decode_g722(root / f"usr/share/asterisk/sounds/{VOICES['en']}/{name}.g722")
            (args.out / "wavs" / f"{sample_id}.flac").write_bytes(encode_flac(waveform & np.int16(-16)))
            lines.append(f"{sample_id}|{text}|{spoken(text)}\n")
    (args.out / "metadata.csv").write_text("".join(lines), encoding="utf-8")
    write_symbols(args.out / "symbols")
    print(f"{len(lines)} clips in {args.out}")


if __name__ == "__main__":
    main()
