"""Sets of Kaldi, NeMo and lhotse: the same recordings and segments in each form are the same samples."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from forebay import load_config
from forebay.cli import main
from forebay.errors import BuildError, ManifestError
from forebay.rows.readers import speech_sets
from forebay.store.cache import Cache, open_cache
from forebay.train.select import select
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here

RATE_HZ = 8_000
SEGMENTS = [
    ("u1", "two", 0.5, 1.5, 0, "first words", "en", "anna"),
    ("u2", "two", 1.25, 2.0, 1, "deux mots", "fr", "ben"),
    ("u3", "one", 0.0, 1.0, 0, "third", "en", "anna"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "wavs").mkdir()
    for name, channels in (("one", 1), ("two", 2)):
        samples = (rng.normal(size=(3 * RATE_HZ, channels)) * 3000).astype(np.int16)
        soundfile.write(tmp_path / f"wavs/{name}.flac", samples, RATE_HZ)
    return tmp_path


def kaldi(folder: Path) -> str:
    """One channel a file of two: Kaldi knows channels by recording."""
    files = {
        "wav.scp": "".join(f"{n} wavs/{n[:3]}.flac\n" for n in ("one", "two-A", "two-B")),
        "segments": "".join(
            f"{i} {r if r == 'one' else r + '-' + 'AB'[c]} {s} {e}\n" for i, r, s, e, c, *_ in SEGMENTS
        ),
        "text": "".join(f"{i} {text}\n" for i, *_, text, _, _ in SEGMENTS),
        "utt2spk": "".join(f"{i} {speaker}\n" for i, *_, speaker in SEGMENTS),
        "utt2lang": "".join(f"{i}\t{language}\n" for i, *_, language, _ in SEGMENTS),
        "reco2file_and_channel": "one one A\ntwo-A two A\ntwo-B two B\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return "."


def nemo(folder: Path) -> str:
    """No channels: NeMo has none, so the recordings of two are split."""
    for channel in (0, 1):
        samples, _ = soundfile.read(folder / "wavs/two.flac", dtype="int16")
        soundfile.write(folder / f"wavs/two{channel}.flac", samples[:, channel], RATE_HZ)
    lines = [
        {
            "audio_filepath": f"wavs/{recording if recording == 'one' else f'two{channel}'}.flac",
            "offset": start,
            "duration": end - start,
            "text": text,
            "lang": language,
            "speaker": speaker,
        }
        for _, recording, start, end, channel, text, language, speaker in SEGMENTS
    ]
    (folder / "manifest.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "manifest.json"


def recording_of(name: str) -> dict[str, Any]:
    channels = [0] if name == "one" else [0, 1]
    source = {"type": "file", "channels": channels, "source": f"wavs/{name}.flac"}
    return {"id": name, "sources": [source], "sampling_rate": RATE_HZ, "num_samples": 3 * RATE_HZ, "duration": 3.0}


def cut_of(segment: tuple[Any, ...]) -> dict[str, Any]:
    name, recording, start, end, channel, text, language, speaker = segment
    said = {"id": f"s{name}", "start": 0.0, "text": text, "language": language, "speaker": speaker}
    bounds = {"start": start, "duration": end - start, "channel": channel}
    return {"id": name, **bounds, "supervisions": [said], "recording": recording_of(recording), "type": "MonoCut"}


def lhotse(folder: Path) -> str:
    with gzip.open(folder / "cuts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(cut_of(segment)) + "\n" for segment in SEGMENTS)
    return "cuts.jsonl.gz"


def lhotse_apart(folder: Path) -> str:
    (folder / "recordings.jsonl").write_text("".join(json.dumps(recording_of(n)) + "\n" for n in ("one", "two")))
    with gzip.open(folder / "supervisions.jsonl.gz", "wt") as file:
        for name, recording, start, end, channel, text, language, speaker in SEGMENTS:
            said = {"id": name, "recording_id": recording, "start": start, "duration": end - start, "channel": channel}
            file.write(json.dumps({**said, "text": text, "language": language, "speaker": speaker}) + "\n")
    return "."


FORMS: Mapping[str, Callable[[Path], str]] = {
    "kaldi": kaldi,
    "nemo": nemo,
    "lhotse": lhotse,
    "lhotse apart": lhotse_apart,
}


def built(folder: Path, kind: str, manifest: str, more: str = "", share: float = 0.99) -> Cache:
    (folder / "c.toml").write_text(
        f'name = "set"\n[source]\nkind = "{kind}"\nmanifest = "{manifest}"\nkeep_columns = ["speaker"]\n{more}'
        '[audio]\nfeatures = "waveform"\nsample_rate_hz = 8000\n[plan]\nbatch_size = 2\n'
        f'[run]\ncache_root = "caches"\nmax_failed_share = {share}\n'
    )
    cache = open_cache(build_here(load_config(folder / "c.toml")).cache)
    require_same_uncached(cache, folder / "c.toml")
    return cache


def require_same_uncached(cache: Cache, config: Path) -> None:
    """Fails where the steps give other samples on the fly."""
    online = select(load_config(config, overrides=['loader.cache="off"']))
    assert online.ids_digest() == cache.ids_digest()
    for index in range(len(cache)):
        assert np.array_equal(online.read(index)["waveform"], cache.read(index)["waveform"])


def rows_of(cache: Cache) -> dict[str, dict[str, Any]]:
    names = ["sample_id", "text", "language", "speaker", "start_s", "end_s", "channel", "recording"]
    rows = cache.table(names).to_pylist()
    return {row["text"]: {**row, "waveform": cache.read(index)["waveform"]} for index, row in enumerate(rows)}


@pytest.mark.parametrize("form", FORMS)
def test_a_set_is_its_segments_with_what_is_said_of_them(folder: Path, form: str) -> None:
    found = rows_of(built(folder, form.split()[0], FORMS[form](folder)))
    assert len(found) == 3
    for name, recording, start, end, channel, text, language, speaker in SEGMENTS:
        row = found[text]
        assert (row["language"], row["speaker"], row["start_s"], row["end_s"]) == (language, speaker, start, end)
        assert form == "nemo" or row["sample_id"] == name
        samples, _ = soundfile.read(folder / f"wavs/{recording}.flac", dtype="int16", always_2d=True)
        assert np.array_equal(row["waveform"], samples[round(start * RATE_HZ) : round(end * RATE_HZ), channel])


@pytest.mark.parametrize("form", ["kaldi", "nemo", "lhotse"])
@pytest.mark.few("kaldi")
def test_recordings_may_lie_in_a_folder_of_their_own(folder: Path, form: str) -> None:
    manifest = FORMS[form](folder)
    (folder / "other").mkdir()
    (folder / "wavs").rename(folder / "other" / "wavs")
    assert len(rows_of(built(folder, form, manifest, 'audio_dir = "other"\n'))) == 3


def test_ids_of_nemo_are_those_of_segments_and_whole_recordings_keep_theirs(folder: Path) -> None:
    nemo(folder)
    with open(folder / "manifest.json", "a") as file:
        file.write(json.dumps({"audio_filepath": "wavs/one.flac", "duration": 3.0, "text": "whole", "other": 1}) + "\n")
    cache = built(folder, "nemo", "manifest.json")
    rows = rows_of(cache)
    assert rows["first words"]["sample_id"] == "wavs/two0_0000500_0001500"
    assert rows["whole"]["sample_id"] == "wavs/one_0000000"
    assert len(rows["whole"]["waveform"]) == 3 * RATE_HZ
    assert cache.metadata["unused_fields"] == {"other": 1}


def test_what_cannot_be_read_of_kaldi_is_refused_by_name(folder: Path) -> None:
    kaldi(folder)
    for line, message in (
        ("one sph2pipe -f wav one.sph |\n", r"wav\.scp, line 1 pipes a command: 'sph2pipe"),
        ("one raw.ark:123\n", r"wav\.scp, line 1 names a place in an archive: 'raw\.ark:123'"),
    ):
        (folder / "wav.scp").write_text(line)
        with pytest.raises(ManifestError, match=message):
            built(folder, "kaldi", ".")
    with pytest.raises(ManifestError, match=r"segments, text beside it is not read; name the folder"):
        built(folder, "kaldi", "wav.scp")
    kaldi(folder)
    (folder / "reco2file_and_channel").write_text("one one C\n")
    with pytest.raises(ManifestError, match="line 1: wanted RECORDING FILE A or B"):
        built(folder, "kaldi", ".")


def test_bad_lines_cost_themselves_with_file_and_line(folder: Path) -> None:
    kaldi(folder)
    with open(folder / "segments", "a") as file:
        file.write(
            "u4 one 0\nu5 gone 0 1\nu6 one 2 1\nu1 one 0 1\nu8 one 1 2\nu9 one 2 -1\nu10 one 0 nan\nu11 one 0 -2\n"
        )
    (folder / "text").write_text((folder / "text").read_text() + "u9 to the end\n")
    cache = built(folder, "kaldi", ".")
    lines = {line["sample_id"] + line["reason"]: line for line in json_lines(cache.folder / "rejected.jsonl")}
    wanted = {"u4bad_row", "u10bad_row", "u5missing_file", "u6bad_segment", "u11bad_segment", "u1duplicate_id"}
    assert set(lines) == wanted
    assert "segments, line 4: 3 fields, wanted UTTERANCE RECORDING START END" in lines["u4bad_row"]["message"]
    assert "segments, line 5: recording gone is not in wav.scp" in lines["u5missing_file"]["message"]
    assert len(rows_of(cache)["to the end"]["waveform"]) == RATE_HZ


def test_a_missing_recording_is_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kaldi(folder)
    with open(folder / "segments", "a") as file:
        file.writelines(f"x{number} gone {number} {number + 1}\n" for number in range(5000))
    with open(folder / "wav.scp", "a") as file:
        file.write("lost lost.flac\n")
    with open(folder / "segments", "a") as file:
        file.writelines(f"y{number} lost {number} {number + 1}\n" for number in range(200))
    with pytest.raises(BuildError, match=r"\n  x0 and 4999 more: missing_file: .*, line 4: ") as caught:
        built(folder, "kaldi", ".", share=0.01)
    assert str(caught.value).count(": missing_file: ") <= 2
    cache = built(folder, "kaldi", ".", share=1.0)
    assert (len(cache), cache.metadata["failed"]) == (3, {"missing_file": 5200})
    assert len(json_lines(cache.folder / "rejected.jsonl")) == 5200
    named = [record.getMessage() for record in caplog.records if "left out x" in record.getMessage()]
    assert [line.split(" is not")[0] for line in named] == [
        f"left out x0 and 4999 more, missing_file: {folder / 'segments'}, line 4: recording gone"
    ]
    assert caplog.text.count("left out y0 and 199 more, missing_file") == 1


def test_cuts_that_are_none_of_a_file_are_left_out_each_with_why(folder: Path) -> None:
    good = cut_of(SEGMENTS[0])
    source = {"type": "command", "channels": [0], "source": "cat x"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"type": "MixedCut", "id": "1", "tracks": []}, "is a MixedCut"),
        ({**good, "id": "2", "channel": [0, 1], "type": "MultiCut"}, r"is a MultiCut of channel [0, 1]"),
        ({**good, "id": "3", "recording": None}, "has no recording"),
        ({**good, "id": "4", "recording": {**recording_of("one"), "sources": [source]}}, "has no file of channel 0"),
        ({**good, "id": "5", "recording": {**recording_of("one"), "transforms": [{"name": "Speed"}]}}, "is changed"),
        ({**good, "id": "6", "duration": "long"}, "has no start and duration"),
        ({**good, "id": "7", "duration": math.nan}, "has no start and duration"),
        ({**good, "id": "8", "recording": {"sources": [{"channels": None}, 1]}}, "has no file of channel 0"),
    ]
    lines = [json.dumps(cut) for cut in (good, *(cut for cut, _ in bad))]
    (folder / "cuts.jsonl").write_text("\n".join([*lines, "[1]", '{"id": ', ""]))
    cache = built(folder, "lhotse", "cuts.jsonl")
    assert len(cache) == 1
    found = {line["sample_id"]: line for line in json_lines(cache.folder / "rejected.jsonl")}
    for cut, why in bad:
        line = found[cut["id"]]
        assert line["reason"] == "unsupported_cut"
        assert why in line["message"]
    assert cache.metadata["failed"] == {"bad_row": 2, "unsupported_cut": len(bad)}


@pytest.mark.parametrize(("kept", "more"), [(-20, b""), (10, b"\xff" * 50), (0, b"plain")])
def test_a_gz_that_is_cut_short_or_damaged_stops_the_listing(folder: Path, kept: int, more: bytes) -> None:
    lhotse(folder)
    whole = (folder / "cuts.jsonl.gz").read_bytes()
    (folder / "cuts.jsonl.gz").write_bytes(whole[:kept] + more)
    with pytest.raises(ManifestError, match=r"cuts\.jsonl\.gz: cannot be read to its end"):
        built(folder, "lhotse", "cuts.jsonl.gz")


def test_a_line_without_an_end_fills_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_sets, "_MAX_LINE", 1000)
    with gzip.open(folder / "cuts.jsonl.gz", "wb") as file:
        file.write(b" " * 5000)
    with pytest.raises(ManifestError, match="a line has 1000 bytes or more"):
        built(folder, "lhotse", "cuts.jsonl.gz")


def test_supervisions_without_their_recordings_fail_by_name(folder: Path) -> None:
    lhotse_apart(folder)
    (folder / "recordings.jsonl").write_text(json.dumps(recording_of("one")) + "\n")
    cache = built(folder, "lhotse", ".")
    assert len(cache) == 1
    messages = [line["message"] for line in json_lines(cache.folder / "rejected.jsonl")]
    assert len([m for m in messages if "recording two is in no file of recordings" in m]) == 2


def test_texts_of_a_cut_stand_in_the_order_of_time(folder: Path) -> None:
    cut = cut_of(SEGMENTS[2])
    cut["supervisions"] = [{"start": 0.6, "text": "later"}, {"start": 0.1, "text": "earlier"}, {"start": 0.3}]
    (folder / "cuts.jsonl").write_text(json.dumps(cut) + "\n")
    assert set(rows_of(built(folder, "lhotse", "cuts.jsonl"))) == {"earlier later"}
    assert math.isclose(rows_of(built(folder, "lhotse", "cuts.jsonl"))["earlier later"]["end_s"], 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_init_recognises_a_set(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / FORMS[form](folder)
    config = folder / "made.toml"
    assert main(["init", str(data), "--out", str(config), "--yes"]) == 0, capsys.readouterr().err
    text = config.read_text()
    assert f'kind = "{form.split()[0]}"' in text
    assert "3 segments" in text + capsys.readouterr().out
    cache = open_cache(build_here(load_config(config, overrides=[f"run.cache_root={folder}/made"])).cache)
    assert set(rows_of_texts(cache)) == {text for *_, text, _, _ in SEGMENTS}


def rows_of_texts(cache: Cache) -> list[str]:
    return [str(text) for text in cache.table(["text"])["text"].to_pylist()]
