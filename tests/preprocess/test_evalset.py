"""Evaluation sets: drawn by a key, decoded by our own steps, the same bytes always, and a source of a build at once."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.here_pool import HerePool
from forebay.errors import BuildError, ConfigError
from forebay.preprocess import evaluation_sets as make
from forebay.preprocess.evaluation_sets import EvalsetOptions, EvalsetReport, drawn, make_evalset
from forebay.preprocess.pool import Pool
from forebay.steps.recipe import load_config
from forebay.store.by_hand import pcm16_wav
from forebay.store.cache import open_cache
from forebay.train.evaluation.rates import languages_of
from forebay.train.select import select
from tests.commands import run, run_json
from tests.preprocess.audio_files import encoded
from tests.preprocess.corpus import Corpus, file_bytes, flac, speech_corpus, tone, write_tar
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import photo_corpus

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "speech"
SPEECH = ROOT / "configs" / "demo_speech.toml"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "Pool", HerePool)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Seventeen clips of two languages."""
    (tmp_path / "raw").mkdir()
    return speech_corpus(tmp_path / "raw")


def evalset(config: Any, out: Path, **options: Any) -> EvalsetReport:
    """Makes a set without bars."""
    return make_evalset(config, EvalsetOptions(out=out, progress=False, **options))


def members(path: Path) -> dict[str, bytes]:
    """The members of a tar by name, in their order."""
    with tarfile.open(path) as tar:
        found = {info.name: tar.extractfile(info) for info in tar}
        return {name: file.read() for name, file in found.items() if file is not None}


def documents(out: Path) -> list[dict[str, Any]]:
    """The JSON of every sample."""
    tars = sorted(out.glob("*_eval.tar"))
    return [json.loads(data) for path in tars for name, data in members(path).items() if name.endswith(".json")]


def ids(out: Path) -> list[str]:
    return [document["id"] for document in documents(out)]


def manifest(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "evaluation_manifest.json").read_bytes())
    return document


def by_other_libraries(data: bytes) -> np.ndarray[Any, Any]:
    """int16 at 16 kHz of an encoded clip, by soundfile and soxr alone."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1, dtype=np.float32)
    heard = mono if rate == 16_000 else soxr.resample(mono, rate, 16_000, quality="HQ")
    rounded: np.ndarray[Any, Any] = np.clip(np.rint(heard * np.float32(32768)), -32768, 32767).astype(np.int16)
    return rounded


def test_the_demo_recordings_as_other_libraries_hear_them(tmp_path: Path) -> None:
    config = load_config(SPEECH, overrides=[f'run.cache_root="{tmp_path / "caches"}"'])
    report = evalset(config, tmp_path / "out", per_language=4)
    raw = {name: data for number in range(3) for name, data in members(DEMO / f"train-0000{number}.tar").items()}
    names = [f"{language}_eval.tar" for language in ("en", "es", "fr", "it", "ru")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*names, "evaluation_manifest.json", "index.json"]
    )
    for tar in names:
        found = members(tmp_path / "out" / tar)
        assert [Path(name).suffix for name in found] == [".wav", ".json"] * 4
        stems = [Path(name).stem for name in found]
        assert stems == sorted(stems)
        for stem in dict.fromkeys(stems):
            document, beside = json.loads(found[f"{stem}.json"]), json.loads(raw[f"{stem}.json"])
            info = soundfile.info(io.BytesIO(found[f"{stem}.wav"]))
            assert (info.samplerate, info.channels, info.subtype, info.format) == (16_000, 1, "PCM_16", "WAV")
            samples, _ = soundfile.read(io.BytesIO(found[f"{stem}.wav"]), dtype="int16")
            assert np.array_equal(samples, by_other_libraries(raw[f"{stem}.flac"]))
            assert document.pop("source").startswith("train-0000")
            assert document == {
                "id": stem,
                "language": tar[:2],
                "duration": len(samples) / 16_000,
                "transcription": beside["transcription"],
            }
    assert (report.num_samples, report.kept, [each["num_samples"] for each in report.sets]) == (20, 0, [4] * 5)
    assert manifest(tmp_path / "out")["sources"][0]["name"] == "train.parquet"


def test_the_documents_say_where_every_byte_is_and_what_it_is(corpus: Corpus, tmp_path: Path) -> None:
    evalset(corpus.config(), tmp_path / "out", per_language=3)
    out, found = tmp_path / "out", manifest(tmp_path / "out")
    assert found["identity"]["seed"] == 17
    assert found["identity"]["per_language"] == 3
    assert (found["num_samples"], found["index"]["name"]) == (6, "index.json")
    assert [(each["language"], each["name"]) for each in found["files"]] == [(i, f"{i}_eval.tar") for i in ("en", "fr")]
    for each in [*found["files"], found["index"]]:
        data = (out / each["name"]).read_bytes()
        sums = (len(data), xxhash.xxh3_128_hexdigest(data), hashlib.sha256(data).hexdigest())
        assert (each["size_bytes"], each["xxh3_128"], each["sha256"]) == sums
    index = json.loads((out / "index.json").read_bytes())
    for name, tar in index["tars"].items():
        data, wanted = (out / name).read_bytes(), members(out / name)
        assert [member["name"] for member in tar["members"]] == list(wanted)
        for member in tar["members"]:
            part = data[member["offset"] : member["offset"] + member["size"]]
            assert part == wanted[member["name"]]
            assert xxhash.xxh3_128_hexdigest(part) == member["xxh3_128"]
    hours = sum(document["duration"] for document in documents(out)) / 3600
    assert found["hours"] == pytest.approx(hours, rel=1e-12)


def test_the_same_seed_gives_the_same_bytes_and_another_other_samples(corpus: Corpus, tmp_path: Path) -> None:
    sets = [tmp_path / name for name in ("one", "two", "other")]
    for out, seed in zip(sets, (5, 5, 6), strict=True):
        evalset(corpus.config(), out, per_language=3, seed=seed)
    assert file_bytes(sets[0]) == file_bytes(sets[1])
    assert ids(sets[0]) != ids(sets[2])


def test_more_data_takes_a_place_by_its_draw_and_moves_nothing_else(corpus: Corpus, tmp_path: Path) -> None:
    evalset(corpus.config(), tmp_path / "one", per_language=4)
    corpus.add_tar("c.tar", [f"c{i}" for i in range(10)])
    evalset(corpus.config(), tmp_path / "two", per_language=4)
    before, after = set(ids(tmp_path / "one")), set(ids(tmp_path / "two"))
    assert all(sample_id.startswith("c") for sample_id in after - before)
    by_language: dict[Any, list[tuple[int, Any]]] = {
        document["language"]: [] for document in documents(tmp_path / "two")
    }
    for row in corpus.rows:
        draw = xxhash.xxh3_64_intdigest(str(row["sample_id"]).encode(), 17)
        by_language[row["language"]].append((draw, row["sample_id"]))
    assert after == {sample_id for draws in by_language.values() for _, sample_id in sorted(draws)[:4]}


def test_what_cannot_be_used_is_replaced_by_the_next_of_the_draw(corpus: Corpus, tmp_path: Path) -> None:
    evalset(corpus.config(), tmp_path / "whole", per_language=100)
    order = [int(draw.rows[0]) for draw in drawn(rows_of(corpus), seed=17)]
    first = [str(corpus.rows[row]["sample_id"]) for row in order]
    broken = {first[0]: b"no sound", first[1]: b""}
    again = Corpus(corpus.folder)
    again.add_tar("a.tar", [f"a{i}" for i in range(10)], broken=broken)
    again.add_tar("b.tar", [f"b{i}" for i in range(7)], broken=broken)
    again.rows[-1]["transcript"] = "  "
    again.rows[-2]["duration_s"] = 9.0
    again.write_manifest()
    report = evalset(again.config(), tmp_path / "out", per_language=100)
    gone = {*first, "b5", "b6"}
    assert set(ids(tmp_path / "out")) == set(ids(tmp_path / "whole")) - gone
    left = sum((Counter(each["left_out"]) for each in report.sets), Counter())
    assert left == {"unknown_format": 1, "empty_file": 1, "no_text": 1, "duration_mismatch": 1}
    few = evalset(again.config(), tmp_path / "few", per_language=2)
    assert [each["num_samples"] for each in few.sets] == [2, 2]


def rows_of(corpus: Corpus) -> pa.Table:
    """The columns that a draw looks at."""
    return pa.table({name: [row[name] for row in corpus.rows] for name in ("sample_id", "language")})


def test_a_window_of_bad_clips_is_doubled_until_there_are_enough(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {str(corpus.rows[int(draw.rows[-1])]["sample_id"]) for draw in drawn(rows_of(corpus), seed=17)}
    bad = {str(row["sample_id"]): b"no sound" for row in corpus.rows if row["sample_id"] not in good}
    again = Corpus(corpus.folder)
    again.add_tar("a.tar", [f"a{i}" for i in range(10)], broken=bad)
    again.add_tar("b.tar", [f"b{i}" for i in range(7)], broken=bad)
    monkeypatch.setattr(make, "_SPARE", 0)
    report = evalset(again.config(), tmp_path / "out", per_language=1)
    assert set(ids(tmp_path / "out")) == good
    assert sum(each["left_out"]["unknown_format"] for each in report.sets) == 15


def test_a_language_with_too_few_has_all_and_one_with_none_has_no_tar(corpus: Corpus, tmp_path: Path) -> None:
    corpus.rows[0]["language"] = "de"
    corpus.rows[0]["transcript"] = ""
    corpus.write_manifest()
    report = evalset(corpus.config(), tmp_path / "out", per_language=100)
    assert (report.sets[0]["language"], report.sets[0]["name"]) == ("de", None)
    assert report.num_samples == 16
    assert not (tmp_path / "out" / "de_eval.tar").exists()
    lines = list(report.lines())
    assert lines[0].startswith("2 sets: 16 samples, ")
    assert lines[1] == "  de: 0 samples of 100 wanted, 0.00 h; left out: no_text 1; no tar"
    again = evalset(corpus.config(), tmp_path / "out", per_language=100)
    assert (again.kept, again.sets) == (3, report.sets)


def test_no_sample_at_all_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    for row in corpus.rows:
        row["transcript"] = ""
    corpus.write_manifest()
    with pytest.raises(BuildError, match="no sample is left of 17"):
        evalset(corpus.config(), tmp_path / "out")
    assert not (tmp_path / "out" / "evaluation_manifest.json").exists()


def test_equal_recordings_are_taken_once(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    same = flac(tone(1, duration_s=0.3))
    corpus.add_tar("a.tar", ["x", "y", "z"], broken={"x": same, "y": same})
    for row in corpus.rows:
        row.update(language="en", duration_s=None)
    corpus.write_manifest()
    report = evalset(corpus.config(), tmp_path / "out")
    assert (report.num_samples, report.sets[0]["left_out"]) == (2, {"duplicate_audio": 1})


def test_samples_without_a_language_are_a_set_of_their_own(corpus: Corpus, tmp_path: Path) -> None:
    for row, language in zip(corpus.rows, [None, ""], strict=False):
        row["language"] = language
    corpus.write_manifest()
    report = evalset(corpus.config(), tmp_path / "out", per_language=2)
    assert [each["language"] for each in report.sets] == ["en", "fr", None]
    found = members(tmp_path / "out" / "unknown_eval.tar")
    assert [json.loads(found[f"a{i}.json"])["language"] for i in (0, 1)] == [None, None]
    assert "  unknown (no language): 2 samples, 0.00 h" in report.lines()
    corpus.rows[2]["language"] = "unknown"
    corpus.write_manifest()
    with pytest.raises(ConfigError, match="some samples have no language and some have the language 'unknown'"):
        evalset(corpus.config(), tmp_path / "two")


@pytest.mark.parametrize("language", ["../en", "a/b", "a\\b", ".en", "-en", "en ", "en\n", "x" * 101, "100%"])
def test_a_language_that_is_no_name_is_refused(corpus: Corpus, tmp_path: Path, language: str) -> None:
    corpus.rows[0]["language"] = language
    corpus.write_manifest()
    with pytest.raises(ConfigError, match=r"1 samples have the language .*, which cannot be part of a tar's name"):
        evalset(corpus.config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(st.lists(st.text(max_size=8), min_size=1, max_size=4))
def test_no_language_leads_out_of_the_folder(languages: list[str]) -> None:
    table = pa.table({"sample_id": [str(i) for i in range(len(languages))], "language": languages})
    try:
        found = drawn(table, seed=0)
    except ConfigError:
        return
    assert len({draw.tar for draw in found}) == len(found) == len(set(languages))
    for draw in found:
        assert Path(draw.tar).name == draw.tar
        assert re.fullmatch(r"[^./\\-][^/\\\0\n]*", draw.tar)


def test_ids_of_any_form_are_members_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a.b", "../x", "ü", "y" * 300, "a%2Fb"]
    corpus = Corpus(tmp_path)
    corpus.add_tar("a.tar", [str(i) for i in range(6)])
    for row, sample_id in zip(corpus.rows, names, strict=True):
        row.update(sample_id=sample_id, language="en")
    corpus.write_manifest()
    evalset(corpus.config(), tmp_path / "out")
    found = members(tmp_path / "out" / "en_eval.tar")
    assert len(found) == 12
    assert all(re.fullmatch(r"[A-Za-z0-9_%-]+\.(wav|json)", name) for name in found)
    assert [document["id"] for document in documents(tmp_path / "out")] == sorted(names)


CLIPS = {f"clip{i}": tone(i, duration_s=0.2 + i / 10) for i in range(5)}


def write_source(folder: Path, kind: str) -> str:
    """Writes CLIPS as a kind of source and returns the name of its manifest."""
    sounds = {name: flac(samples) for name, samples in CLIPS.items()}
    about = {name: {"id": name, "language": "en", "text": f"text of {name}"} for name in CLIPS}
    if kind == "jsonl":
        for name, data in sounds.items():
            (folder / f"{name}.flac").write_bytes(data)
        rows = [{"audio": f"{name}.flac", **fields} for name, fields in about.items()]
        (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "list.jsonl"
    if kind == "hf":
        audio = [{"bytes": data, "path": None} for data in sounds.values()]
        pq.write_table(
            pa.Table.from_pylist([{"audio": a, **f} for a, f in zip(audio, about.values(), strict=True)]),
            folder / "x.parquet",
        )
        return "x.parquet"
    beside = {f"{name}.json": json.dumps(fields).encode() for name, fields in about.items()}
    write_tar(folder / "x.tar", {**{f"{name}.flac": data for name, data in sounds.items()}, **beside})
    (folder / "list.tsv").write_text("".join(f"x.tar\t{name}\ten\t{len(CLIPS[name]) / 16_000}\n" for name in CLIPS))
    return "list.tsv" if kind == "filelist" else "x.tar"


@pytest.mark.parametrize("kind", ["filelist", "webdataset", "jsonl", "hf"])
def test_every_kind_of_source_gives_the_same_samples(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        f'name = "kinds"\n[source]\nkind = "{kind}"\nmanifest = "{write_source(tmp_path, kind)}"\n'
        '[audio]\nfeatures = "log_mel"\n[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    evalset(load_config(path), tmp_path / "out", per_language=3)
    order = sorted(CLIPS, key=lambda name: xxhash.xxh3_64_intdigest(name.encode(), 17))
    found = members(tmp_path / "out" / "en_eval.tar")
    assert [name for name in found if name.endswith(".wav")] == [f"{name}.wav" for name in sorted(order[:3])]
    for name in order[:3]:
        assert found[f"{name}.wav"] == pcm16_wav(CLIPS[name], 16_000)
        assert json.loads(found[f"{name}.json"])["transcription"] == f"text of {name}"


@pytest.mark.parametrize("kind", ["WAV", "OGG"])
def test_rates_and_channels_are_made_one(tmp_path: Path, kind: str) -> None:
    stereo = np.stack([tone(1, duration_s=0.5), tone(2, duration_s=0.5)], axis=1)
    data = encoded(stereo, 44_100, kind=kind)
    corpus = Corpus(tmp_path)
    corpus.add_tar("a.tar", ["x"], broken={"x": data})
    corpus.rows[0].update(duration_s=None)
    corpus.write_manifest()
    evalset(corpus.config(), tmp_path / "out")
    (tar,) = (tmp_path / "out").glob("*.tar")
    samples, rate = soundfile.read(io.BytesIO(members(tar)["x.wav"]), dtype="int16")
    assert rate == 16_000
    assert np.abs(samples - by_other_libraries(data).astype(np.int32)).max() <= 1


class Stopping(HerePool):
    """A pool whose run is interrupted behind its first task."""

    def run(self, function: Any, tasks: Any) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            yield task, function(task)
            raise KeyboardInterrupt("stop")


def test_an_interrupted_set_goes_on_and_has_the_same_bytes(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evalset(corpus.config(), tmp_path / "whole", per_language=3)
    with monkeypatch.context() as patch:
        patch.setattr(make, "Pool", Stopping)
        with pytest.raises(KeyboardInterrupt, match="stop"):
            evalset(corpus.config(), tmp_path / "out", per_language=3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".evaluation_manifest.json.unfinished",
        "en_eval.tar",
    ]
    before = (tmp_path / "out" / "en_eval.tar").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="per_language is 3 there, 4 is wanted"):
        evalset(corpus.config(), tmp_path / "out", per_language=4)
    report = evalset(corpus.config(), tmp_path / "out", per_language=3)
    assert (report.kept, (tmp_path / "out" / "en_eval.tar").stat().st_mtime_ns) == (1, before)
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "whole")


def test_a_set_that_is_there_is_left_alone_and_another_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    evalset(corpus.config(), tmp_path / "out", per_language=3)
    before = file_bytes(tmp_path / "out")
    assert evalset(corpus.config(), tmp_path / "out", per_language=3).kept == 2
    with pytest.raises(ConfigError, match="seed is 17 there, 18 is wanted; name another folder"):
        evalset(corpus.config(), tmp_path / "out", per_language=3, seed=18)
    corpus.add_tar("c.tar", ["c0"])
    with pytest.raises(ConfigError, match=r"key is .* there, .* is wanted"):
        evalset(corpus.config(), tmp_path / "out", per_language=3)
    assert file_bytes(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="is not empty: it holds"):
        evalset(corpus.config(), corpus.folder, per_language=3)


def test_a_source_that_changes_meanwhile_stops_it(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddling(HerePool):
        def run(self, function: Any, tasks: Any) -> Iterator[tuple[Any, Any]]:
            for task in tasks:
                write_tar(corpus.folder / "a.tar", {"other.flac": b"x"})
                yield task, function(task)

    monkeypatch.setattr(make, "Pool", Meddling)
    with pytest.raises(BuildError, match=r"a.tar changed during the build"):
        evalset(corpus.config(), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_the_set_is_a_source_of_a_build_with_its_texts_and_languages(corpus: Corpus, tmp_path: Path) -> None:
    evalset(corpus.config(), tmp_path / "out", per_language=4)
    path = tmp_path / "eval.toml"
    path.write_text(
        'name = "eval"\n[source]\nkind = "webdataset"\nmanifest = "out"\n[audio]\nfeatures = "waveform"\n'
        f'[text]\ntokenizer = "{DEMO / "model"}"\nprompt = "whisper"\n[plan]\nbatch_size = 2\nedges_s = [1]\n'
        '[run]\ncache_root = "caches"\nnum_workers = 1\n[loader]\ncache = "require"\n'
    )
    report = build_here(load_config(path))
    assert (report.num_samples, report.failed, report.excluded) == (8, {}, {})
    cache, wanted = open_cache(report.cache), documents(tmp_path / "out")
    source = select(load_config(path))
    assert cache.samples["sample_id"].to_pylist() == [each["id"] for each in wanted]
    assert cache.samples["text"].to_pylist() == [each["transcription"] for each in wanted]
    assert languages_of(source) == [each["language"] for each in wanted]
    for index, each in enumerate(wanted):
        assert np.array_equal(cache.read(index)["waveform"], corpus.audio[each["id"]])


def test_what_has_no_recordings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, match="is of images, and an evaluation set is of recordings"):
        evalset(photo_corpus(tmp_path / "photos").config(), tmp_path / "out")
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    path = tmp_path / "texts.toml"
    path.write_text(
        'name = "texts"\n[source]\nkind = "text"\nmanifest = "texts.txt"\n[audio]\nfeatures = "none"\n'
        f'[text]\ntokenizer = "{DEMO / "model"}"\n[run]\ncache_root = "caches"\n'
    )
    with pytest.raises(ConfigError, match="has no recordings"):
        evalset(load_config(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_number_below_one_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--per-language 0: wanted 1 or more"):
        evalset(corpus.config(), tmp_path / "out", per_language=0)
    with pytest.raises(ConfigError, match="--seed -1: wanted 0 to 18446744073709551615"):
        evalset(corpus.config(), tmp_path / "out", seed=-1)


@pytest.mark.wide
def test_worker_processes_give_the_same_bytes_by_the_command(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evalset(corpus.config(), tmp_path / "here", per_language=3)
    monkeypatch.setattr(make, "Pool", Pool)
    arguments = ("evalset", corpus.folder / "config.toml", "--per-language", "3", "--workers", "2", "--no-progress")
    found = run_json(capsys, *arguments, "--out", tmp_path / "out")
    assert (found["num_samples"], found["kept"]) == (6, 0)
    assert file_bytes(tmp_path / "here") == file_bytes(tmp_path / "out")
    code, out, _ = run(capsys, *arguments, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines()[0].startswith("2 sets, 2 of them were there: 6 samples, ")


@pytest.mark.wide
def test_a_sample_that_kills_its_worker_is_named(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "Pool", Pool)
    monkeypatch.setenv("FOREBAY_TEST_CRASH_ON", "3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "crashing_decoder"))
    with pytest.raises(BuildError, match=r'signal SIGSEGV.* at sample .a6. of .*_eval.tar; .*exclude = \["a6"\]'):
        evalset(corpus.config("run.num_workers=1"), tmp_path / "out", per_language=100)
