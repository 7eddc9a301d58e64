"""Makes demo/speech/ from Debian's Asterisk prompts: three tar shards of FLAC, a parquet and a TSV manifest.

python demo/make_speech.py FOLDER_WITH_DEBS    (see demo/README.md for the ten packages; needs dpkg-deb and ffmpeg)
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import re
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf

SAMPLE_RATE_HZ = 16_000
NUM_SHARDS = 3
HERE = Path(__file__).resolve().parent
VOICES = {
    "en": "en_US_f_Allison",
    "es": "es_MX_f_Allison",
    "fr": "fr_CA_f_June",
    "it": "it_IT_m_Carlo",
    "ru": "ru_RU_f_IvrvoiceRU",
}
# Chosen by hand for an even spread of durations; transcripts with markup, sound descriptions or known slips left out.
PROMPTS = {
    "en": """digits/oh digits/mon-3 removed digits/17 conf-locked conf-userswilljoin agent-pass vm-mismatch demo-thanks
             demo-abouttotry priv-callee-options""",
    "es": """letters/a digits/day-1 auth-thankyou vm-nomore tt-monkeysintro confbridge-menu-exit-in conf-now-recording
             tt-weasels demo-thanks queue-periodic-announce""",
    "fr": """digits/mon-7 hours digits/50 im-sorry conf-hasleft tt-monkeysintro transfer privacy-prompt ss-noservice
             digits/h-4""",
    "it": """vm-youhave digits/day-4 digits/h-12 followme/no-recording vm-deleted conf-extended conf-leaderhasleft
             demo-nomatch priv-introsaved demo-nogo""",
    "ru": """vm-from digits/16 digits/day-0 tt-monkeysintro dir-welcome cannot-complete-as-dialed demo-nomatch
             privacy-unident queue-youarenext de-activated vm-options""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One prompt: mono int16 samples at 16 kHz, and what is known of it."""

    sample_id: str
    language: str
    transcript: str
    source: str
    waveform: np.ndarray

    @property
    def duration_s(self) -> float:
        return len(self.waveform) / SAMPLE_RATE_HZ


def unpack(debs: Path, language: str, target: Path) -> str:
    """Unpacks the two packages of a language and returns the version of the recordings."""
    stem = f"asterisk-core-sounds-{language}"
    for pattern in (f"{stem}_*.deb", f"{stem}-g722_*.deb"):
        found = sorted(debs.glob(pattern))
        if len(found) != 1:
            raise SystemExit(f"{debs} holds {len(found)} files {pattern}, wanted one; see demo/README.md")
        subprocess.run(["dpkg-deb", "-x", str(found[0]), str(target)], check=True)
    return found[0].name.split("_")[1]


def read_transcripts(root: Path, language: str) -> dict[str, str]:
    """Returns each chosen prompt's transcript, from the list in the package; two texts for one prompt are an error."""
    path = root / f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    chosen = PROMPTS[language].split()
    transcripts: dict[str, str] = {}
    for line in gzip.decompress(path.read_bytes()).decode("utf-8-sig").splitlines():
        name, colon, text = line.partition(":")
        if not colon or name.strip() not in chosen:
            continue
        if transcripts.setdefault(name.strip(), text.strip()) != text.strip():
            raise SystemExit(f"{path}: two transcripts for {name}")
    return transcripts


def decode_g722(path: Path) -> np.ndarray:
    """Returns int16 samples at 16 kHz. G.722 gives two samples a byte and its decoder is exact in integers."""
    command = ["ffmpeg", "-v", "error", "-f", "g722", "-i", str(path), "-f", "s16le", "-ac", "1", "-"]
    waveform = np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, "<i2")
    if len(waveform) != 2 * path.stat().st_size:
        raise SystemExit(f"{path}: {len(waveform)} samples from {path.stat().st_size} bytes, wanted two a byte")
    return waveform


def check_transcript(clip: Clip) -> None:
    """Stops where a transcript cannot be what is spoken: markup, or a speaking rate that no voice here has."""
    if not clip.transcript or re.search(r"[\[\]()<>*#]|\.\.\.|\w:", clip.transcript):
        raise SystemExit(f"{clip.sample_id}: transcript {clip.transcript!r} is not plain speech")
    loud = np.flatnonzero(np.abs(clip.waveform.astype(np.int32)) > 300)
    spoken_s = (loud[-1] - loud[0]) / SAMPLE_RATE_HZ
    rate = len(clip.transcript) / spoken_s
    if clip.duration_s > 1.5 and not 7 < rate < 22:
        raise SystemExit(f"{clip.sample_id}: {rate:.1f} characters a second, wanted 7 to 22")


def read_clips(debs: Path) -> list[Clip]:
    """Returns the chosen clips, languages interleaved so that every shard has all of them."""
    by_language: list[list[Clip]] = []
    for language, voice in VOICES.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            version = unpack(debs, language, root)
            transcripts = read_transcripts(root, language)
            clips = [
                Clip(
                    sample_id=f"{language}_{name.replace('/', '_')}",
                    language=language,
                    transcript=transcripts[name],
                    source=f"asterisk-core-sounds-{language}-g722 {version} {voice}/{name}.g722",
                    waveform=decode_g722(root / f"usr/share/asterisk/sounds/{voice}/{name}.g722"),
                )
                for name in PROMPTS[language].split()
            ]
        for clip in clips:
            check_transcript(clip)
        by_language.append(clips)
    longest = max(len(clips) for clips in by_language)
    return [clips[i] for i in range(longest) for clips in by_language if i < len(clips)]


def encode_flac(waveform: np.ndarray) -> bytes:
    """Returns the 16-bit mono FLAC of a waveform, at the highest compression."""
    file = io.BytesIO()
    sf.write(file, waveform, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16", compression_level=1.0)
    return file.getvalue()


def write_shard(path: Path, clips: list[Clip]) -> None:
    """Writes `{id}.flac` and `{id}.json` of every clip. Owner, mode and time are fixed: same clips, same bytes."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for clip in clips:
            described = {
                "id": clip.sample_id,
                "language": clip.language,
                "duration": clip.duration_s,
                "transcription": clip.transcript,
                "source": clip.source,
            }
            encoded = json.dumps(described, ensure_ascii=False, indent=1).encode("utf-8")
            for name, data in (
                (f"{clip.sample_id}.flac", encode_flac(clip.waveform)),
                (f"{clip.sample_id}.json", encoded),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the manifests."""

    tar_path: str
    tar_member_name: str
    transcript: str
    language: str
    duration_s: float
    sample_id: str


def write_manifests(folder: Path, rows: list[Row]) -> None:
    """Writes train.parquet (a `tar` source) and train.tsv (a `filelist` source) of the same rows."""
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows]), folder / "train.parquet")
    with open(folder / "train.tsv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows((row.tar_path, row.sample_id, row.language, repr(row.duration_s)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", type=Path, help="folder with the ten .deb files")
    parser.add_argument("--out", type=Path, default=HERE / "speech")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clips = read_clips(args.debs)
    rows: list[Row] = []
    for shard in range(NUM_SHARDS):
        part = clips[shard::NUM_SHARDS]
        name = f"train-{shard:05d}.tar"
        write_shard(args.out / name, part)
        rows += [
            Row(
                tar_path=name,
                tar_member_name=f"{clip.sample_id}.flac",
                transcript=clip.transcript,
                language=clip.language,
                duration_s=clip.duration_s,
                sample_id=clip.sample_id,
            )
            for clip in part
        ]
    write_manifests(args.out, rows)
    print(f"{len(rows)} clips, {sum(row.duration_s for row in rows):.1f} s, in {args.out}")


if __name__ == "__main__":
    main()
