"""Windows of segments: every segment once and whole, tokens as the model's own tokenizer writes them, shares by ids."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AddedToken, WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizerFast

from forebay import load_config
from forebay.cli import main
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.inspect.checks.lint import LintOptions, Target, lint
from forebay.pretrained import from_folder
from forebay.rows.manifest import SPAN, Manifest, row_table
from forebay.rows.segments import segmented
from forebay.rows.windows import SPOKEN, WindowRules, windowed
from forebay.steps.text.plain import Whisper
from forebay.store.cache import Cache, open_cache
from forebay.store.source_files import SourceFile
from forebay.train import make_loader
from tests.init.layouts import WHISPER
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here
from tests.rows.test_speech_sets import require_same_uncached

LENGTH, TICK_S = 100, 0.02
RATE_HZ, SECONDS = 8_000, 24


def listed(
    segments: Sequence[tuple[int, int]],
    rules: WindowRules,
    languages: Sequence[str] | None = None,
    until: float = np.nan,
) -> list[dict[str, Any]]:
    """The windows of segments of one recording, in ticks of 20 ms. until: where it ends."""
    count = len(segments)
    start, end = (np.array([each[at] for each in segments], np.float64) * TICK_S for at in (0, 1))
    bounds = {
        name: pa.array(values) for name, values in (("start_s", start), ("end_s", end), ("channel", start * np.nan))
    }
    columns = {
        **{"sample_id": [f"s{at}" for at in range(count)], "text": [f"t{at}" for at in range(count)]},
        "language": languages or ["en"] * count,
        **{"group": np.zeros(count, np.int32), "file": np.zeros(count, np.int32)},
        **{SPAN + name: pa.chunked_array([column]) for name, column in bounds.items()},
    }
    rows = row_table(columns, num_rows=count)
    manifest = Manifest(files=[SourceFile(name="t", path=Path("t"), entry=0, listed=True)], rows=rows)
    made = windowed(
        segmented(manifest), LENGTH * TICK_S, rules, until_s=lambda rows: np.full(len(rows), until * TICK_S)
    )
    found: list[dict[str, Any]] = made.rows.to_pylist()
    for row in found:
        row.update(start=round(row["start_s"] / TICK_S), end=round(row["end_s"] / TICK_S))
        row["spoken"] = json.loads(row[SPOKEN])
    return found


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 250) | st.integers(0, 9), st.integers(1, 110), st.sampled_from(["en", "en", "fr"])),
        min_size=1,
        max_size=12,
    ),
    timestamps=st.booleans(),
    behind=st.integers(-200, 350) | st.none(),
)
@example(  # a segment begins where a window ends, but for the rounding of sums
    steps=[(gap, length, "en") for gap, length in ((0, 1), (0, 1), (248, 110), (250, 51), (49, 1), (99, 1))],
    timestamps=True,
    behind=None,
)
def test_windows_hold_every_segment_once_and_whole(
    steps: list[tuple[int, int, str]],
    timestamps: bool,  # noqa: FBT001
    behind: int | None,
) -> None:
    segments, at, languages = [], 0, [language for *_, language in steps]
    for gap, length, _ in steps:
        segments.append((at + gap, at + gap + length))
        at += gap + length
    good = [n for n, (start, end) in enumerate(segments) if end - start <= LENGTH]
    found = listed(
        segments,
        WindowRules(timestamps=timestamps, no_speech=1.0),
        languages,
        until=np.nan if behind is None else at + behind,
    )
    speech = [row for row in found if row["text"]]
    held = [[int(text[1:]) for text in row["text"].split()] for row in speech]
    assert [n for numbers in held for n in numbers] == good
    for row, numbers in zip(speech, held, strict=True):
        assert row["sample_id"] == f"s{numbers[0]}+{len(numbers)}"
        assert {languages[n] for n in numbers} == {row["language"]}
        whole = [each for each in row["spoken"] if len(each) > 1]
        last = row["spoken"][-1] if len(whole) < len(row["spoken"]) else []
        assert [each[:2] for each in whole] == [[tick - row["start"] for tick in segments[n]] for n in numbers]
        assert [row["text"][each[2] : each[3]] for each in whole] == [f"t{n}" for n in numbers]
        assert 0 < row["duration_s"] <= LENGTH * TICK_S
        assert row["duration_s"] == pytest.approx(row["end_s"] - row["start_s"])
        others = [n for n in range(len(segments)) if n not in numbers]
        inside = [n for n in others if segments[n][0] < row["end"] and segments[n][1] > row["start"]]
        assert inside == ([numbers[-1] + 1] if last else [])
        following = [n for n in good if n > numbers[-1]]
        if last:
            assert timestamps
            assert row["end"] - row["start"] == LENGTH
            assert last == [segments[following[0]][0] - row["start"]]
        elif following and following[0] == numbers[-1] + 1 and languages[following[0]] == row["language"]:
            assert segments[following[0]][1] > row["start"] + LENGTH  # what would fit is in it
    for row in (row for row in found if not row["text"]):
        assert (row["end"] - row["start"], row["spoken"]) == (LENGTH, [])
        assert not [n for n, (start, end) in enumerate(segments) if start < row["end"] and end > row["start"]]
    ends = [row for row in found if "-end" in row["sample_id"]]
    assert [row["sample_id"] for row in ends] == [f"s{good[-1]}-end{n}" for n in range(1, len(ends) + 1)]
    assert [row["start"] for row in ends] == [at + LENGTH * n for n in range(len(ends))]
    assert len(ends) == (max(behind or 0, 0) // LENGTH if good else 0)
    order = [(row["start"], row["end"]) for row in found]
    assert order == sorted(order)
    if not timestamps:
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(order))


def test_shares_are_of_ids_and_larger_ones_hold_smaller_ones() -> None:
    segments = [(1000 * n, 1000 * n + 60) for n in range(40)] + [(40_000 + 90 * n, 40_060 + 90 * n) for n in range(39)]
    found = {
        share: [
            (row["sample_id"], row["prompt"])
            for row in listed(segments, WindowRules(previous_text=share, no_speech=share))
        ]
        for share in (0.0, 0.3, 0.6, 1.0)
    }
    silent = {share: {name for name, _ in rows if "-" in name} for share, rows in found.items()}
    earlier = {share: {name for name, prompt in rows if prompt} for share, rows in found.items()}
    assert len(silent[1.0]) == 40 * 9
    for names, most in ((silent, 40 * 9), (earlier, 38)):
        assert not names[0.0]
        assert names[0.3] < names[0.6] < names[1.0]
        assert 0.15 * most < len(names[0.3]) < 0.45 * most


def test_a_start_that_no_recording_has_fills_no_memory() -> None:
    found = listed([(0, 50), (10**15, 10**15 + 50)], WindowRules(no_speech=1.0))
    assert len(found) == 10_002
    assert [row["text"] for row in listed([(10**15, 10**15 + 50)], WindowRules())] == ["t0"]
    assert len(listed([(0, 50)], WindowRules(no_speech=1.0), until=1e15)) == 10_001
    assert len(listed([(0, 50)], WindowRules(), until=1e15)) == 1


def test_overlapping_segments_never_write_a_time_that_goes_back() -> None:
    (row,) = listed([(0, 50), (20, 40), (45, 90)], WindowRules(timestamps=True))
    assert [each[:2] for each in row["spoken"]] == [[0, 50], [50, 50], [50, 90]]


SEGMENTS: list[tuple[str, float, float, int, str, str, str]] = [
    ("a.flac", 0.5, 1.25, 0, "en", "anna", "One, two."),
    ("a.flac", 1.5, 2.5, 0, "en", "anna", "three\nfour"),
    ("a.flac", 2.75, 4.5, 0, "en", "anna", "five six"),
    ("a.flac", 4.75, 5.5, 0, "en", "ben", "seven <|0.00|>"),
    ("a.flac", 5.75, 6.5, 0, "fr", "ben", "huit neuf"),
    ("a.flac", 0.25, 1.0, 1, "en", "anna", "another channel"),
    ("a.flac", 18.0, 18.5, 1, "en", "anna", "far behind"),
    ("a.flac", 19.0, 22.5, 1, "en", "anna", "too long"),
    ("a.flac", 22.5, 23.0, 1, "en", "anna", "at last"),
    ("b.flac", 1.0, 2.0, 0, "en", "anna", "ten"),
]
TOKENS = {"new": "<|nospeech|>", "old": "<|nocaptions|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    for name, channels in (("a", 2), ("b", 1)):
        noise = np.random.default_rng(channels).integers(-3000, 3000, (SECONDS * RATE_HZ, channels))
        soundfile.write(folder / f"{name}.flac", noise.astype(np.int16), RATE_HZ)
    for form, token in TOKENS.items():
        tokenizer = from_folder(WhisperTokenizerFast, WHISPER)
        times = [AddedToken(f"<|{step * TICK_S:.2f}|>", normalized=False, special=False) for step in range(1501)]
        assert tokenizer.add_tokens(times) == 1501
        tokenizer.save_pretrained(folder / form)
        for path in (folder / form).glob("tokenizer*.json"):
            path.write_text(path.read_text().replace("<|nospeech|>", token))
        for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
            shutil.copy(WHISPER / name, folder / form)
        config = json.loads((folder / form / "config.json").read_text())
        (folder / form / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer)}))
    return folder


def write(folder: Path, name: str, text: str, *, form: str = "new", window_s: str = "window_s = 3.0\n") -> Path:
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["audio", "start", "end", "line", "language", "speaker", "text"])
        writer.writerows(SEGMENTS)
    (folder / f"{name}.toml").write_text(
        f'name = "{name}"\n[source]\nkind = "table"\nmanifest = "{name}.csv"\nkeep_columns = ["speaker"]\n{window_s}'
        '[source.columns]\nstart = "start"\nend = "end"\nchannel = "line"\n'
        '[audio]\nfeatures = "waveform"\nsample_rate_hz = 8000\n'
        f'[text]\ntokenizer = "{form}"\nprompt = "whisper"\n{text}'
        "[plan]\nbatch_size = 2\nedges_s = [3.0]\n"
        '[run]\ncache_root = "caches"\nmax_failed_share = 0.5\n'
    )
    return folder / f"{name}.toml"


def built(path: Path) -> Cache:
    cache = open_cache(build_here(load_config(path)).cache)
    require_same_uncached(cache, path)
    return cache


def rows_of(cache: Cache) -> list[dict[str, Any]]:
    names = ["sample_id", "start_s", "end_s", "channel", "recording", "language", "speaker", "prompt", "text"]
    return [{**row, "at": at} for at, row in enumerate(cache.table(names).to_pylist())]


def spoken_in(row: Mapping[str, Any]) -> str:
    """The segments that lie in a window, as Whisper writes them."""
    found = ""
    for recording, start, end, channel, language, speaker, text in SEGMENTS:
        of_row = (row["recording"], row["channel"], row["language"], row["speaker"])
        if (recording, channel, language, speaker) == of_row and row["start_s"] <= start and end <= row["end_s"]:
            stamps = [f"<|{round((at - row['start_s']) / TICK_S) * TICK_S:.2f}|>" for at in (start, end)]
            found += f"{stamps[0]} {' '.join(text.split())}{stamps[1]}"
    return found


@pytest.mark.parametrize("form", TOKENS)
def test_tokens_are_those_of_the_models_own_tokenizer(folder: Path, form: str) -> None:
    path = write(folder, f"all_{form}", "timestamps = true\nno_speech = 1.0\nprevious_text = 1.0\n", form=form)
    cache = built(path)
    tokenizer = from_folder(WhisperTokenizerFast, folder / form)
    processor = WhisperProcessor(WhisperFeatureExtractor(), tokenizer)
    rows = rows_of(cache)
    assert cache.metadata["failed"] == {"segment_too_long": 1}
    starts = {row["sample_id"]: (row["start_s"], row["end_s"]) for row in rows}
    assert starts == {
        "a_0000250_0001000_ch1+1": (0.0, 3.0),
        **{f"a_0018000_0018500_ch1-{n}": (3.0 * n, 3.0 * n + 3) for n in range(1, 6)},
        "a_0018000_0018500_ch1+1": (18.0, 19.0),
        "a_0022500_0023000_ch1+1": (22.5, 23.0),
        "a_0000500_0001250_ch0+2": (0.0, 3.0),
        "a_0002750_0004500_ch0+1": (2.75, 4.75),
        "a_0004750_0005500_ch0+1": (4.75, 5.75),
        "a_0005750_0006500_ch0+1": (5.75, 6.5),
        **{f"a_0005750_0006500_ch0-end{n}": (3.5 + 3 * n, 6.5 + 3 * n) for n in range(1, 6)},
        "b_0001000_0002000_ch0+1": (0.0, 2.0),
        **{f"b_0001000_0002000_ch0-end{n}": (3.0 * n - 1, 3.0 * n + 2) for n in range(1, 8)},
    }
    whole, _ = soundfile.read(folder / "a.flac", dtype="int16")
    for row in rows:
        ids, prefix = (cache.read(row["at"])[name].tolist() for name in ("input_ids", "prefix_len"))
        before = tokenizer.get_prompt_ids(" ".join(row["prompt"].split())).tolist() if row["prompt"] else []
        if not row["text"]:
            wanted = ["<|startoftranscript|>", TOKENS[form], "<|endoftext|>"]
            assert ids == tokenizer.convert_tokens_to_ids(wanted)
            assert (prefix, row["language"]) == ([1], "")
            continue
        more = "<|2.76|>" if row["sample_id"] == "a_0000500_0001250_ch0+2" else ""  # 2.75 s of it begin there
        tokenizer.set_prefix_tokens(language=row["language"], task="transcribe", predict_timestamps=True)
        text = spoken_in(row) + more
        if "<|0.00|>" not in row["text"]:
            assert ids == before + tokenizer(text).input_ids == before + processor(text=text).input_ids
        assert prefix == [len(before) + 3]
        if row["recording"] == "a.flac":
            part = whole[round(row["start_s"] * RATE_HZ) : round(row["end_s"] * RATE_HZ), row["channel"]]
            assert np.array_equal(cache.read(row["at"])["waveform"], part)
    prompts = {row["sample_id"]: row["prompt"] for row in rows if row["prompt"]}
    assert prompts == {"a_0002750_0004500_ch0+1": "One, two. three\nfour"}
    (first,) = (row for row in rows if row["sample_id"] == "a_0000500_0001250_ch0+2")
    decoded = tokenizer.decode(cache.read(first["at"])["input_ids"], decode_with_timestamps=True)
    assert decoded.endswith("<|0.50|> One, two.<|1.24|><|1.50|> three four<|2.50|><|2.76|><|endoftext|>")
    (first,) = (row for row in rows if "seven" in row["text"])
    ids, zero = cache.read(first["at"])["input_ids"].tolist(), tokenizer.convert_tokens_to_ids("<|0.00|>")
    assert ids.count(zero) == 1  # what somebody wrote is no token
    assert tokenizer.decode(ids, decode_with_timestamps=True).endswith("<|0.00|> seven <|0.00|><|0.76|><|endoftext|>")


def test_batches_learn_the_window_and_not_the_text_before(folder: Path) -> None:
    path = write(folder, "batches", "timestamps = true\nprevious_text = 1.0\n")
    cache = built(path)
    (row,) = (row for row in rows_of(cache) if row["prompt"])
    learnt = cache.read(row["at"])["input_ids"][int(cache.read(row["at"])["prefix_len"][0]) :].tolist()
    labels = [each for batch in make_loader(load_config(path)) for each in batch["labels"].tolist()]
    assert learnt in [[label for label in each if label != -100] for each in labels]
    off = load_config(path, overrides=['loader.cache="off"'])
    for one, other in zip(make_loader(off), make_loader(load_config(path)), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_lint_knows_that_windows_overlap_and_that_silence_is_meant(folder: Path) -> None:
    noise, _ = soundfile.read(folder / "a.flac", dtype="int16")
    noise[4 * RATE_HZ : 18 * RATE_HZ, 1] = 0
    soundfile.write(folder / "quiet.flac", noise, RATE_HZ)
    path = write(folder, "quiet", "timestamps = true\nno_speech = 1.0\n")
    table = path.with_suffix(".csv")
    table.write_text(table.read_text().replace("a.flac", "quiet.flac"))
    for is_cached in (False, True):
        report = lint([Target(config=load_config(path))], (), LintOptions(progress=False))
        assert [each.is_raw for each in report.sets] == [not is_cached]
        assert {"silent", "empty_text", "overlap", "mostly_silent"}.isdisjoint(each.check for each in report.findings)
        assert not is_cached or len(built(path)) == 25
        built(path)


def test_behind_a_recording_of_no_known_end_there_is_no_silence(folder: Path) -> None:
    path = write(folder, "gone", "no_speech = 1.0\n")
    table = path.with_suffix(".csv")
    table.write_text(table.read_text().replace("b.flac", "gone.flac"))
    cache = built(path)
    assert cache.metadata["failed"] == {"segment_too_long": 1, "missing_file": 1}
    ends = [row["sample_id"] for row in rows_of(cache) if "-end" in row["sample_id"]]
    assert ends == [f"a_0005750_0006500_ch0-end{n}" for n in range(1, 6)]


def test_without_timestamps_the_sound_ends_where_the_next_segment_begins(folder: Path) -> None:
    cache = built(write(folder, "plain", ""))
    tokenizer = from_folder(WhisperTokenizerFast, folder / "new")
    rows = {row["sample_id"]: row for row in rows_of(cache)}
    row = rows["a_0000500_0001250_ch0+2"]
    assert (row["start_s"], row["end_s"]) == (0.0, 2.75)
    tokenizer.set_prefix_tokens(language="fr", task="transcribe", predict_timestamps=False)
    at = rows["a_0005750_0006500_ch0+1"]["at"]
    assert cache.read(at)["input_ids"].tolist() == tokenizer("huit neuf").input_ids
    assert not [name for name in rows if "-" in name]


def test_an_earlier_text_is_cut_to_what_whisper_goes_on_from(folder: Path) -> None:
    step = Whisper(tokenizer=tokenizer_digest(folder / "new"), timestamps=True)
    encoder = step.opened(folder / "new")
    earlier = " ".join(f"word{n}" for n in range(400))
    (made,) = encoder.encode_batch(["hi"], ["en"], [earlier], sample_ids=["s"], spoken=[[[0, 40, 0, 2]]])
    assert not isinstance(made, Exception)
    ids = made.fields["input_ids"].tolist()
    tokenizer = from_folder(WhisperTokenizerFast, folder / "new")
    assert ids[1:224] == tokenizer.get_prompt_ids(earlier).tolist()[-223:]
    assert made.fields["prefix_len"].tolist() == [224 + 3]
    assert encoder.decode(ids).strip() == "hi"


def test_a_window_of_which_nothing_is_left_is_no_silence(folder: Path) -> None:
    step = Whisper(tokenizer=tokenizer_digest(folder / "new"), timestamps=True, no_speech=1.0)
    encoder = step.opened(folder / "new")
    spoken: list[list[list[int]]] = [[[0, 40, 0, 1]], [[0, 40, 0, 1], [60]], [], [[0, 40, 0, 1], [50, 90, 2, 4]]]
    texts = ["\u200b", "\u200b", "", "\u200b hi"]
    made = encoder.encode_batch(texts, [None] * 4, [None] * 4, sample_ids=list("abcd"), spoken=spoken)
    assert [each.reason for each in made if isinstance(each, TextError)] == ["empty_text", "empty_text"]
    tokenizer = from_folder(WhisperTokenizerFast, folder / "new")
    ids = [each.fields["input_ids"] for each in made if not isinstance(each, TextError)]
    assert [tokenizer.decode(each, decode_with_timestamps=True) for each in ids] == [
        "<|startoftranscript|><|nospeech|><|endoftext|>",
        "<|startoftranscript|><|transcribe|><|1.00|> hi<|1.80|><|endoftext|>",
    ]


def test_token_ids_are_not_joined(folder: Path) -> None:
    path = write(folder, "ids", "")
    path.write_text(
        path.read_text()
        .replace('"whisper"', '"given"')
        .replace("[source.columns]", '[source.columns]\nlabels = "text"')
    )
    with pytest.raises(ConfigError, match=r'source\.window_s joins texts, and prompt = "given" takes token ids'):
        load_config(path)


BAD = [
    ("window_s = 3.0\n", "timestamps = true\n", str(WHISPER), "needs the token <|0.00|>"),
    ("", "timestamps = true\n", "new", "text.timestamps is of windows, and there is no source.window_s"),
    ("", "no_speech = 0.5\n", "new", "text.no_speech is of windows"),
    ("window_s = 31.0\n", "timestamps = true\n", "new", "source.window_s is 31, and text.timestamps go to 30 s"),
    ("window_s = 0.5\n", "", "new", "window_s is 0.5, wanted 1 or more seconds"),
    ("window_s = 3.0\n", "previous_text = 1.5\n", "new", "previous_text is 1.5, wanted a share from 0 to 1"),
]


MOVED = [
    ("[audio]\n", "[audio]\nspeeds = [0.9, 1.0]\n", r"audio\.speeds"),
    ("[plan]\n", "[loader]\ncrop_s = 2.0\n[plan]\n", r"loader\.crop_s"),
    ("[source]\n", '[source]\noverlong = "clip"\nmax_duration_s = 2.0\n', r'source\.overlong = "clip"'),
    ("[plan]\n", '[[augment]]\nkind = "speed"\nfactors = [0.9]\n[plan]\n', r'\[\[augment\]\] kind = "speed"'),
]


@pytest.mark.parametrize(("old", "new", "name"), MOVED)
def test_what_moves_the_sound_is_not_for_timestamps(folder: Path, old: str, new: str, name: str) -> None:
    path = write(folder, "moved", "timestamps = true\n")
    kind = "waveform" if "crop" in name else "mel"
    text = path.read_text().replace('features = "waveform"', f'features = "{kind}"')
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=rf"text\.timestamps are of the sound as it is, and {name}"):
        load_config(path)


@pytest.mark.parametrize(("window_s", "text", "form", "message"), BAD)
def test_what_does_not_go_together_is_a_config_error(
    folder: Path, window_s: str, text: str, form: str, message: str
) -> None:
    path = write(folder, "bad", text, form=form, window_s=window_s)
    with pytest.raises(ConfigError) as err:
        build_here(load_config(path))
    assert message in str(err.value)


def test_windows_need_segments(folder: Path) -> None:
    path = write(folder, "none", "")
    path.write_text(path.read_text().replace('[source.columns]\nstart = "start"\nend = "end"\nchannel = "line"\n', ""))
    with pytest.raises(ConfigError, match=r"window_s is 3\.0, .* rows that are segments: kind subtitles"):
        load_config(path)


def test_a_cue_that_fails_is_no_silence_of_a_window(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(folder / "b.flac", tmp_path / "data")
    cues = [(0, 1, "one"), (1, 2, "<blink>lost</blink>"), (2, 3, "three"), (3, 4, "four")]
    text = "".join(f"{n}\n00:00:0{a},000 --> 00:00:0{b},000\n{said}\n\n" for n, (a, b, said) in enumerate(cues))
    (tmp_path / "data/b.srt").write_text(text)
    path = write(tmp_path, "lost", "", form=str(folder / "new"), window_s="window_s = 10\n")
    head, _, rest = path.read_text().partition("[source.columns]")
    source = head.replace('kind = "table"\nmanifest = "lost.csv"', 'kind = "subtitles"\nmanifest = "data"')
    path.write_text(source + rest[rest.index("[audio]") :])
    cache = built(path)
    assert [(row["start_s"], row["end_s"], row["text"]) for row in rows_of(cache)] == [
        (0.0, 1.0, "one"),
        (2.0, 4.0, "three four"),
    ]
    assert [line["reason"] for line in json_lines(cache.folder / "rejected.jsonl")] == ["unknown_markup"]


def test_an_evaluation_writes_with_timestamps_and_scores_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder, "eval", "timestamps = true\n")
    text = path.read_text().replace('features = "waveform"\nsample_rate_hz = 8000', 'features = "log_mel"')
    path.write_text(
        f'{text}[train]\nmodel = "new"\ninit = "random"\nmax_steps = 1\noutput_dir = "runs"\n'
        '[[train.eval]]\nname = "all"\nconfig = "eval.toml"\ngenerate_max_tokens = 4\n'
    )
    build_here(load_config(path))
    for command in ("train", "eval"):
        assert main([command, str(path)]) == 0, capsys.readouterr().err
    (line,) = json_lines(next((folder / "runs").rglob("eval.jsonl")))
    assert line["num_samples"] == 8
    assert line["wer"] is not None
    assert line["languages"]["fr"]["samples"] == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Step 1: all WER")
