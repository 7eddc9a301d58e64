"""Faults planted in the demo's recordings: those are found, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import soxr

from forebay.inspect.checks.limits import Limits
from forebay.store.cache import open_cache
from tests.inspect.checks.planted import RATE_HZ, Planted, encoded, found, linted, of_check, one
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here


def test_the_clean_recordings_have_no_finding(planted: Planted) -> None:
    report = linted(planted.config())
    assert found(report) == set()
    assert [each.num_samples for each in report.sets] == [52]
    assert report.sets[0].left_out == {}


def test_every_fault_of_sound_is_found_and_nothing_else(planted: Planted) -> None:
    p = planted
    p.put("en_digits_oh", np.zeros_like(p.samples("en_digits_oh")))
    hum = np.full_like(p.samples("es_digits_day-1"), 300)  # an offset is no sound
    p.put("es_digits_day-1", hum)
    spoken = p.samples("en_demo-abouttotry")
    spoken[RATE_HZ:] = 0
    p.put("en_demo-abouttotry", spoken)
    loud = (p.samples("ru_vm-options").astype(np.int32) * 40).clip(-32768, 32767).astype(np.int16)
    p.put("ru_vm-options", loud)
    some = p.samples("it_demo-nogo")
    some[::200] = 32767
    p.put("it_demo-nogo", some)
    low = soxr.resample(p.samples("fr_transfer"), RATE_HZ, 8_000)
    p.put("fr_transfer", low, rate_hz=8_000)
    p.put("fr_hours", soxr.resample(soxr.resample(p.samples("fr_hours"), RATE_HZ, 7_000), 7_000, RATE_HZ))
    p.put("en_vm-mismatch", p.samples("en_vm-mismatch"), rate_hz=44_100)
    p.put("es_vm-nomore", p.samples("es_vm-nomore"), rate_hz=8_000)
    p.rows["it_vm-deleted"]["duration_s"] = 0.5
    report = linted(p.config())
    assert found(report) == {
        ("silent", "en_digits_oh"),
        ("silent", "es_digits_day-1"),
        ("mostly_silent", "en_demo-abouttotry"),
        ("clipping", "ru_vm-options"),
        ("some_clipping", "it_demo-nogo"),
        ("low_rate", "fr_transfer"),
        ("narrow_band", "fr_hours"),
        ("duration_mismatch", "en_vm-mismatch"),
        ("wrong_rate", "en_vm-mismatch"),
        ("low_rate", "es_vm-nomore"),
        ("wrong_rate", "es_vm-nomore"),
        ("longer_than_stated", "it_vm-deleted"),
    }
    rates = {each.sample_id: (each.value, each.limit) for each in of_check(report, "wrong_rate")}
    assert rates == {"en_vm-mismatch": (44_100, 16_000), "es_vm-nomore": (8_000, 16_000)}
    silent = next(of_check(report, "silent"))
    assert (silent.severity, silent.limit, silent.source) == ("error", -55.0, "train.tar")


def test_every_file_that_a_build_refuses_is_found_under_the_build_s_reason(planted: Planted) -> None:
    p = planted
    p.data["en_digits_oh"] = b""
    p.data["es_digits_day-1"] = b"no sound at all, only words"
    flac = p.data["en_demo-abouttotry"]
    p.data["en_demo-abouttotry"] = flac[: len(flac) // 2]
    ogg = encoded(p.samples("ru_vm-options"), form="OGG")
    p.data["ru_vm-options"] = ogg[: len(ogg) // 2]
    wav = encoded(p.samples("it_demo-nogo"), form="WAV")
    p.data["it_demo-nogo"] = wav[: len(wav) // 2]
    p.rows["fr_transfer"]["duration_s"] = 60.0
    report = linted(p.config("source.max_duration_s=30.0"))
    assert found(report) == {
        ("empty_file", "en_digits_oh"),
        ("unknown_format", "es_digits_day-1"),
        ("corrupt_audio", "en_demo-abouttotry"),
        ("truncated_audio", "ru_vm-options"),
        ("header_mismatch", "it_demo-nogo"),
        ("duration_mismatch", "fr_transfer"),
    }
    assert {each.severity for each in report.findings} == {"error"}


def test_reasons_are_those_of_the_build(planted: Planted) -> None:
    planted.keep("en_digits_oh", "es_digits_day-1", "en_demo-thanks", "fr_transfer")
    planted.data["en_digits_oh"] = planted.data["en_digits_oh"][:400]
    planted.rows["fr_transfer"]["duration_s"] = 60.0
    planted.rows["es_digits_day-1"]["transcript"] = ""
    config = planted.config(text=True)
    report = linted(config)
    cache = open_cache(build_here(config).cache)
    refused = {(row["reason"], row["sample_id"]) for row in json_lines(cache.folder / "rejected.jsonl")}
    assert len(refused) == 3
    assert found(report) == refused
    severities = {each.check: each.severity for each in report.findings}
    assert severities["empty_text"] == "warning"
    assert severities["duration_mismatch"] == "error"


def test_every_fault_of_text_is_found_and_nothing_else(planted: Planted) -> None:
    texts = {
        "en_demo-thanks": "Спасибо, что попробовали",
        "ru_demo-nomatch": "К сожалению, this is not a match, не найдено",
        "it_demo-nomatch": "Sono spiacente, non c'è соrrispondenza",
        "fr_hours": "Le numéro composé n'est pas en service, veuillez vérifier votre liste",
        "es_queue-periodic-announce": "Sí",
        "en_removed": "",
        "es_digits_day-1": "speaker\t0.0\tdía uno",
        "en_digits_oh": "0 1: O",
        "fr_privacy-prompt": "entrez votre numéro entrez votre numéro entrez votre numéro entrez votre numéro",
    }
    for name, text in texts.items():
        planted.rows[name]["transcript"] = text
    report = linted(planted.config())
    assert found(report) == {
        ("wrong_script", "en_demo-thanks"),
        ("mixed_scripts", "ru_demo-nomatch"),
        ("mixed_word", "it_demo-nomatch"),
        ("too_many_chars", "fr_hours"),
        ("too_few_chars", "es_queue-periodic-announce"),
        ("empty_text", "en_removed"),
        ("looping_text", "fr_privacy-prompt"),
        ("annotation_text", "es_digits_day-1"),
    }
    wrong = next(of_check(report, "wrong_script"))
    assert (wrong.value, wrong.limit) == (1.0, 0.5)
    assert "en is written in latin" in wrong.message


def test_a_text_that_many_samples_have_is_found(planted: Planted) -> None:
    names = [name for name in planted.rows if planted.rows[name]["duration_s"] > 4][:5]
    for name in names:
        planted.rows[name]["transcript"] = "Thanks for watching!"
        planted.rows[name]["language"] = "en"
    assert found(linted(planted.config())) == set()
    report = linted(planted.config(), limits=Limits(repeated_texts=5))
    assert found(report) == {("repeated_text", name) for name in names}


def test_an_outlier_of_its_language_is_found(planted: Planted) -> None:
    for name in planted.rows:
        if planted.rows[name]["language"] == "en":
            seconds = planted.rows[name]["duration_s"]
            planted.rows[name]["transcript"] = ("abcde " * 100)[: int(seconds * 12)]
    planted.rows["en_demo-thanks"]["transcript"] = "abcde"
    limits = Limits(outlier_min_clips=5, loops=1_000, min_chars_per_s=0.1)
    report = linted(planted.config(), limits=limits)
    assert found(report) == {("chars_outlier", "en_demo-thanks")}
    assert "the median of en is" in one(report).message


@pytest.mark.parametrize("form", ["FLAC", "WAV"])
def test_the_same_recording_under_two_ids_is_found(planted: Planted, form: str) -> None:
    data = encoded(planted.samples("en_demo-thanks"), form=form)
    planted.add("again", "en_demo-thanks", data=data)
    finding = one(linted(planted.config()))
    assert (finding.check, finding.severity, finding.sample_id) == ("duplicate", "warning", "again")
    assert finding.other == "en_demo-thanks"


def test_the_same_recording_with_two_texts_is_an_error_of_both(planted: Planted) -> None:
    planted.add("again", "en_demo-thanks", transcript="Something else that takes about as long to be said.")
    planted.add("third", "en_demo-thanks")
    report = linted(planted.config())
    assert found(report) == {("contradiction", name) for name in ("again", "en_demo-thanks", "third")}
    others = {each.sample_id: each.other for each in report.findings}
    assert others == {"en_demo-thanks": "again", "again": "en_demo-thanks", "third": "again"}


def test_silent_clips_are_no_duplicates_of_each_other(planted: Planted) -> None:
    for name in ("en_demo-thanks", "es_demo-thanks"):
        planted.put(name, np.zeros(16_000 * 5, np.int16))
        planted.rows[name]["duration_s"] = 5.0
    assert found(linted(planted.config())) == {("silent", "en_demo-thanks"), ("silent", "es_demo-thanks")}


def test_an_offset_is_found(planted: Planted) -> None:
    for name, offset in (("en_digits_oh", 0.012), ("es_digits_day-1", -0.05), ("fr_hours", 0.008)):
        planted.put(name, (planted.samples(name) // 2 + round(offset * 32768)).astype(np.int16))
    report = linted(planted.config())
    assert found(report) == {("dc_offset", "en_digits_oh"), ("dc_offset", "es_digits_day-1")}


def torchaudio_kernel(samples: np.ndarray) -> np.ndarray:
    """Twice the rate as torchaudio makes it by default: a Hann window of 6 zero crossings, rolloff 0.99."""
    times = np.arange(-14, 15) / 2 * 0.99
    window = np.cos(np.clip(times, -6, 6) * np.pi / 12) ** 2
    spread = np.zeros(2 * len(samples))
    spread[::2] = samples
    return np.convolve(spread, np.sinc(times) * window * 0.99, "same")


@pytest.mark.parametrize("way", ["soxr", "quiet", "torchaudio"])
@pytest.mark.few("soxr")
def test_telephone_sound_that_was_upsampled_is_found_and_no_recording_of_the_demo(planted: Planted, way: str) -> None:
    """Every clip of the demo but those too short to tell, after 8 kHz: quiet ones too, where the rest is rounding."""
    assert not [each for each in linted(planted.config()).findings if each.check == "narrow_band"]
    for name in planted.rows:
        low = soxr.resample(planted.samples(name) / (16 if way == "quiet" else 1), RATE_HZ, 8_000)
        high = torchaudio_kernel(low) if way == "torchaudio" else soxr.resample(low, 8_000, RATE_HZ)
        planted.put(name, np.clip(np.round(high), -32768, 32767).astype(np.int16))
    narrow = {each.sample_id for each in linted(planted.config()).findings if each.check == "narrow_band"}
    silent = {each.sample_id for each in linted(planted.config()).findings if each.check == "silent"}
    assert narrow | silent == set(planted.rows)
    assert len(silent) < 3
