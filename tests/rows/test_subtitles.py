"""Subtitles beside recordings: cues are segments, and what is wrong of them costs one cue, or one file, with a line."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from praatio.utilities import textgrid_io

from forebay import load_config
from forebay.cli import main
from forebay.config import SourceConfig
from forebay.rows.readers.subtitles import _cues_of
from forebay.store.cache import Cache, open_cache
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here
from tests.rows.test_speech_sets import require_same_uncached

RATE_HZ, SECONDS = 8_000, 10
Times = list[tuple[int, int, str]]
WORDS = st.text(st.sampled_from("abcé 7हि\"'&.,-"), max_size=12).map(lambda text: " ".join(f"w{text}".split()))


def read_one(name: str) -> list[Any]:
    """The cues of a small file."""
    path = Path(__file__).parent / name
    source = SourceConfig(kind="subtitles", manifest=".")
    texts = {".srt": "1\n00:00:01,000 --> 00:00:02,000\nx\n", ".TextGrid": "{}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.rows.readers.subtitles._decoded", lambda _: texts[path.suffix])
        return _cues_of(path, 1, "a.wav", source)


def clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{rest:03d}"


def srt(cues: Times, end: str = "\n") -> str:
    lines = [f"{n}\n{clock(a, ',')} --> {clock(b, ',')}\n{text}\n" for n, (a, b, text) in enumerate(cues, 1)]
    return "\n".join(lines).replace("\n", end)


def vtt(cues: Times) -> str:
    said = [(a, b, text.replace("&", "&amp;")) for a, b, text in cues]
    return "WEBVTT\n\nNOTE a note\n\n" + "\n".join(f"{clock(a, '.')} --> {clock(b, '.')}\n{t}\n" for a, b, t in said)


def grid(cues: Times, *, seconds: float = SECONDS, form: Any = "long_textgrid", name: str = "words") -> str:
    entries = [(a / 1000, b / 1000, text) for a, b, text in cues]
    tier = {"class": "IntervalTier", "name": name, "xmin": 0, "xmax": seconds, "entries": entries}
    points = {"class": "TextTier", "name": "marks", "xmin": 0, "xmax": seconds, "entries": [(0.6, "!"), (7.5, "?")]}
    return str(
        textgrid_io.getTextgridAsStr(
            {"xmin": 0, "xmax": seconds, "tiers": [tier, points]}, form, includeBlankSpaces=True
        )
    )


@given(data=st.data(), form=st.sampled_from(["srt", "crlf", "vtt", "TextGrid", "short"]))
def test_cues_are_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str) -> None:
    times = sorted(data.draw(st.sets(st.integers(0, 1000 * SECONDS), min_size=2, max_size=8)))
    cues = [(a, b, data.draw(WORDS)) for a, b in itertools.pairwise(times)]
    written = {
        "srt": lambda: srt(cues),
        "crlf": lambda: "\ufeff" + srt(cues, "\r\n"),
        "vtt": lambda: vtt(cues),
        "TextGrid": lambda: grid(cues),
        "short": lambda: grid(cues, form="short_textgrid"),
    }[form]()
    folder = tmp_path_factory.mktemp("cues")
    path = folder / f"a.{form}".replace("crlf", "srt").replace("short", "TextGrid")
    path.write_bytes(written.encode("utf-16" if form == "TextGrid" else "utf-8"))
    found = _cues_of(path, 1, str(folder / "none.wav"), SourceConfig(kind="subtitles", manifest="."))
    assert [(round(1000 * c.start_s), round(1000 * c.end_s), c.text, c.problem) for c in found] == [
        (*cue, None) for cue in cues
    ]


WHOLE = grid([(0, 5000, "x"), (5000, 10_000, "y")])
PIECES = [
    "-->",
    " --> ",
    "\n",
    "\n\n",
    "00:00:01,000",
    "00:02.000",
    "1",
    "a",
    "<i",
    "</v>",
    "NOTE",
    "\ud800",
    "-",
    "{\\",
]
PIECES += [
    "item [",
    "intervals [1]:",
    'class = "IntervalTier"',
    "xmin = 0",
    "xmax = 9",
    'text = "x"',
    'name = "n"',
    "{}",
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), form=st.sampled_from(["srt", "vtt", "TextGrid"]))
def test_whatever_a_file_holds_is_cues_or_a_reason(pieces: list[str], form: str) -> None:
    text = {"vtt": "WEBVTT\n\n", "TextGrid": WHOLE[:120]}.get(form, "") + "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.rows.readers.subtitles._decoded", lambda _: text)
        found = _cues_of(Path(f"a.{form}"), 1, "none.wav", SourceConfig(kind="subtitles", manifest="."))
    assert found
    for cue in found:
        assert (cue.problem is None) == (bool(cue.text) and 0 <= cue.start_s < cue.end_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "data/deep").mkdir(parents=True)
    for name in ("a", "b", "deep/c", "lone"):
        samples = (rng.normal(size=SECONDS * RATE_HZ) * 3000).astype(np.int16)
        soundfile.write(tmp_path / f"data/{name}.flac", samples, RATE_HZ)
    return tmp_path


def built(folder: Path, keep: str = '["speaker"]', tier: str = "text") -> Cache:
    (folder / "c.toml").write_text(
        f'name = "s"\n[source]\nkind = "subtitles"\nmanifest = "data"\nkeep_columns = {keep}\n'
        f'[source.columns]\ntext = "{tier}"\n[audio]\nfeatures = "waveform"\nsample_rate_hz = 8000\n'
        "[plan]\nbatch_size = 2\n"
        '[run]\ncache_root = "caches"\nmax_failed_share = 0.99\n'
    )
    return open_cache(build_here(load_config(folder / "c.toml")).cache)


def rows_of(cache: Cache) -> dict[str, dict[str, Any]]:
    rows = cache.table(["sample_id", "text", "language", "speaker", "start_s", "end_s", "recording"]).to_pylist()
    return {row["sample_id"]: {**row, "at": index} for index, row in enumerate(rows)}


def test_subtitles_of_three_forms_are_segments_with_speakers_and_languages(folder: Path) -> None:
    (folder / "data/a.en.srt").write_text(srt([(1000, 2000, "<i>One</i> <font color=red>two</font>\n1984")]))
    (folder / "data/a.de.vtt").write_text(vtt([(1500, 2500, "<v Anna>Eins</v>"), (3000, 4000, "<v A>x</v> <v B>y")]))
    (folder / "data/deep/c.TextGrid").write_text(grid([(500, 1500, "hello"), (7000, 8000, "bye")]))
    (folder / "data/nobody.srt").write_text(srt([(0, 1000, "x")]))
    cache = built(folder, keep='["speaker", "marks"]')
    require_same_uncached(cache, folder / "c.toml")
    rows = rows_of(cache)
    assert {name: (row["text"], row["language"], row["speaker"]) for name, row in rows.items()} == {
        "a.en_0001000_0002000": ("One two 1984", "en", None),
        "a.de_0001500_0002500": ("Eins", "de", "Anna"),
        "a.de_0003000_0004000": ("x y", "de", None),
        "b_0000000": ("", "", None),
        "deep/c_0000500_0001500": ("hello", "", "words"),
        "deep/c_0007000_0008000": ("bye", "", "words"),
        "lone_0000000": ("", "", None),
    }
    assert [mark for mark in cache.table(["marks"])["marks"].to_pylist() if mark] == ["!", "?"]
    assert cache.metadata["unused_fields"] == {"(subtitles without a recording)": 1}
    for row in rows.values():
        whole, _ = soundfile.read(folder / "data" / row["recording"], dtype="int16")
        part = whole[round(row["start_s"] * RATE_HZ) : round(row["end_s"] * RATE_HZ)]
        assert np.array_equal(cache.read(row["at"])["waveform"], part)


BAD = [
    ("00:00:03,000 --> 00:00:0x,000\nx", "bad_cue", "line 6: '00:00:03,000 --> 00:00:0x,000' has no times"),
    ("00:00:03,000 --> 00:00:02,000\nx", "bad_segment", "line 6: the cue is from 3 s to 2 s"),
    ("00:00:03,000 --> 00:00:03,000\nx", "bad_segment", "line 6: the cue is from 3 s to 3 s"),
    ("00:00:00,500 --> 00:00:01,000\nx", "cue_out_of_order", "line 6: the cue begins at 0.5 s, and the one above"),
    ("00:00:03,000 --> 00:00:04,000\n", "empty_cue", "line 6: the cue has no text"),
    ("00:00:03,000 --> 00:00:04,000\n<i> </i>", "empty_cue", "line 6: the cue has no text"),
    ("00:00:03,000 --> 00:00:04,000\n<div>x</div>", "unknown_markup", "line 6: the cue has '<div>'"),
    ("00:00:03,000 --> 00:00:04,000\n\xfc", "bad_text", "line 6: the cue is not UTF-8"),
    ("00:00:11,000 --> 00:00:12,000\nx", "segment_past_end", "has 10.00 s, and a row is from 11.00 s"),
    ("00:00:09,000 --> 00:00:12,000\nx", "duration_mismatch", "1.00 s of audio, its manifest says 3.00 s"),
    ("00:00:01,000 --> 00:00:02,000\nx", "duplicate_id", "occurs before"),
    ("00:00:03,00", "good", ""),  # a file that is cut in the text of a cue
]


@pytest.mark.parametrize(("cue", "reason", "message"), BAD)
def test_a_bad_cue_costs_itself_with_its_line(folder: Path, cue: str, reason: str, message: str) -> None:
    good, last = srt([(1000, 2000, "good")]), "3\n00:00:05,000 --> 00:00:06,000\nlast"
    both = (f"2\n{cue}", last) if cue[:8] < "00:00:05" else (last, f"4\n{cue}")
    (folder / "data/a.srt").write_text("\n\n".join([good.strip(), *both]), encoding="latin-1")
    cache = built(folder)
    texts = [row["text"] for row in rows_of(cache).values() if row["text"]]
    if reason == "good":
        assert texts == [f"good 2 {cue}", "last"]
        return
    assert texts == ["good", "last"]
    (line,) = json_lines(cache.folder / "rejected.jsonl")
    assert (line["reason"], message in line["message"]) == (reason, True), line


def test_lost_text_of_a_vtt_is_named(folder: Path) -> None:
    (folder / "data/a.vtt").write_text(vtt([(1000, 2000, "one\n\nlost"), (3000, 4000, "two\n\nNOTE fine")]))
    cache = built(folder)
    (line,) = json_lines(cache.folder / "rejected.jsonl")
    assert (line["reason"], "belongs to no cue" in line["message"]) == ("bad_cue", True)


def test_times_under_times_are_two_cues(folder: Path) -> None:
    (folder / "data/a.srt").write_text("\n00:00:01,000 --> 00:00:02,000\n00:00:03,000 --> 00:00:04,000\nx\n")
    cache = built(folder)
    (line,) = json_lines(cache.folder / "rejected.jsonl")
    assert (line["reason"], [row["text"] for row in rows_of(cache).values() if row["text"]]) == ("empty_cue", ["x"])


FILES = [
    ("a.TextGrid", WHOLE[: WHOLE.index("item [2]") - 150], "bad_subtitles", "is no TextGrid that can be read"),
    ("a.TextGrid", WHOLE[: WHOLE.index("intervals [2]")], "bad_subtitles", "ends at 5 s of 10 s: the file is cut"),
    ("a.TextGrid", WHOLE.replace("xmax = 5 ", "xmax = 0 "), "bad_subtitles", "an interval is from 0 s to 0 s"),
    ("a.TextGrid", WHOLE.replace("xmin = 5 ", "xmin = -5 "), "bad_subtitles", "it has times before zero"),
    ("a.TextGrid", "", "bad_subtitles", "is no TextGrid that can be read"),
    ("a.TextGrid", grid([(0, 5000, "x")], seconds=12), "length_mismatch", "is of 12.00 s, and a.flac has 10.00 s"),
    ("a.TextGrid", WHOLE.replace('"marks"', '"words"'), "bad_subtitles", "two tiers have one name"),
    ("a.vtt", "00:01.000 --> 00:02.000\nx", "bad_subtitles", "wanted WEBVTT"),
    ("a.srt", "some text", "bad_subtitles", "has no line with -->"),
    ("a.srt", "\ufeff\n", "bad_subtitles", "holds nothing that is said"),
    ("a.vtt", "WEBVTT\n\nNOTE nothing", "bad_subtitles", "holds nothing that is said"),
    ("a.TextGrid", WHOLE.replace('"!"', '"\xfc"'), "bad_text", "is not UTF-8"),
    ("a.TextGrid", grid([]), "bad_subtitles", "holds nothing that is said"),
]


@pytest.mark.parametrize(("name", "text", "reason", "message"), FILES)
def test_a_bad_file_costs_its_recording(folder: Path, name: str, text: str, reason: str, message: str) -> None:
    (folder / "data" / name).write_bytes(text.encode("latin-1" if reason == "bad_text" else "utf-8"))
    cache = built(folder)
    (line,) = json_lines(cache.folder / "rejected.jsonl")
    assert (line["reason"], message in line["message"]) == (reason, True), line
    assert len(cache) == 3


def test_names_of_subtitles_may_have_the_ending_of_the_recording_and_any_case(folder: Path) -> None:
    for name in ("a.flac.srt", "b.EN-us.SRT", "deep/c.wav.Vtt", "lone.notes.srt"):
        form = vtt if name.endswith("Vtt") else srt
        (folder / "data" / name).write_text(form([(0, 1000, name)]))
    rows = rows_of(built(folder))
    assert {row["text"]: row["language"] for row in rows.values()} == {
        "a.flac.srt": "",
        "b.EN-us.SRT": "EN-us",
        "deep/c.wav.Vtt": "",
        "": "",
    }


def test_tiers_are_named_by_a_pattern(folder: Path) -> None:
    tiers = [("anna - words", [(0.0, 2.0, "a")]), ("ben - words", [(1.0, 10.0, "b")]), ("phones", [(0.0, 10.0, "x")])]
    made = [{"class": "IntervalTier", "name": n, "xmin": 0, "xmax": 10, "entries": e} for n, e in tiers]
    text = textgrid_io.getTextgridAsStr(
        {"xmin": 0, "xmax": 10, "tiers": made}, "long_textgrid", includeBlankSpaces=True
    )
    (folder / "data/a.TextGrid").write_text(text)
    cache = built(folder)
    (line,) = json_lines(cache.folder / "rejected.jsonl")
    assert line["reason"] == "no_such_tier"
    assert "there are 'anna - words', 'ben - words', 'phones'" in line["message"]
    rows = [row for row in rows_of(built(folder, tier="* - words")).values() if row["text"]]
    assert [(row["text"], row["speaker"]) for row in rows] == [("a", "anna - words"), ("b", "ben - words")]
    assert math.isclose(rows[1]["start_s"], 1.0)


def test_init_recognises_a_folder_with_subtitles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.en", "b", "deep/c"):
        (folder / f"data/{name}.srt").write_text(srt([(500, 2500, "one"), (3000, 4000, "two")]))
    (folder / "data/b.txt").write_text("whole")
    assert main(["init", str(folder / "data"), "--out", str(folder / "made.toml"), "--yes"]) == 0
    assert "7 segments" in capsys.readouterr().out
    cache = open_cache(build_here(load_config(folder / "made.toml")).cache)
    assert sorted(cache.table(["text"])["text"].to_pylist()) == ["", "one", "one", "one", "two", "two", "two"]
