from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import ManifestError
from tests.rows.helpers import audio, ids, read, rejected


def write_corpus(folder: Path, metadata: str, **clips: bytes) -> Path:
    (folder / "wavs").mkdir(parents=True)
    for name, data in clips.items():
        (folder / "wavs" / name.replace("__", ".")).write_bytes(data)
    (folder / "metadata.csv").write_text(metadata, encoding="utf-8")
    return folder


def test_normalised_text_goes_before_text(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "lj",
        'LJ-1|Mr. "A" is 5|Mister "A" is five\nLJ-2|only text|\nLJ-3|two columns\n',
        **{"LJ-1__wav": audio(160, kind="WAV"), "LJ-2__flac": audio(320), "LJ-3__wav": audio(480, kind="WAV")},
    )
    for entry in (corpus, corpus / "metadata.csv"):
        manifest = read("ljspeech", entry, root=tmp_path)
        rows = manifest.rows.select(["sample_id", "text", "duration_s", "group"]).to_pylist()
        assert [tuple(row.values()) for row in rows] == [
            ("LJ-1", 'Mister "A" is five', 0.01, 0),
            ("LJ-2", "only text", 0.02, 0),
            ("LJ-3", "two columns", 0.03, 0),
        ]
        assert [f.name for f in manifest.files] == ["metadata.csv", "wavs/LJ-1.wav", "wavs/LJ-2.flac", "wavs/LJ-3.wav"]


def test_a_missing_recording_fails_its_row(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "lj", "a|x|x\nb|y|y\nb|z|z\n", b__wav=audio(kind="WAV"))
    manifest = read("ljspeech", corpus, root=tmp_path)
    assert ids(manifest) == ["b"]
    assert rejected(manifest) == [("a", "failed", "missing_file"), ("b", "failed", "duplicate_id")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("a|x|x\nb\n", r"metadata\.csv, line 2: 1 columns, wanted id\|text\|normalised text"),
        ("a|x|y|z\n", "line 1: 4 columns"),
        ("|x|y\n", "line 1: column id is ''"),
        ("\n\n", r"metadata\.csv: no rows"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, metadata: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read("ljspeech", write_corpus(tmp_path / "lj", metadata), root=tmp_path)


def test_a_corpus_without_wavs_or_in_another_encoding_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "lj", "a|x|x\n")
    (corpus / "metadata.csv").write_bytes("a|\xe9\xe8|x\n".encode("latin-1"))
    with pytest.raises(ManifestError, match="line 1: is not UTF-8"):
        read("ljspeech", corpus, root=tmp_path)
    (corpus / "wavs").rmdir()
    with pytest.raises(ManifestError, match=r"cannot read folder .*wavs"):
        read("ljspeech", corpus, root=tmp_path)
