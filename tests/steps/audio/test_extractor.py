"""`features = "extractor"`: what is stored and what batches are, against the extractors' own batches."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from forebay import cli
from forebay.config import Config
from forebay.errors import ConfigError, DecodeError
from forebay.preprocess.listing import explain
from forebay.steps.audio.declared import form_of
from forebay.steps.audio.extractor.extractor_call import OpenExtractor, load_extractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_step
from forebay.steps.audio.extractor.extractor_probe import Dtype, noise, probed
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.audio.extractor.promise import LengthRule, collated, length_rule
from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.w2v_bert import W2vBert
from forebay.steps.form import BatchForm, Promise
from forebay.steps.recipe import recipe_of
from forebay.steps.step import AudioStep, Stored
from forebay.steps.table import made
from forebay.store.cache import open_cache
from forebay.train.collate.collator import Collator
from forebay.train.uncached.uncached_source import UncachedSource
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here

EXACT = ("DacFeatureExtractor", "EncodecFeatureExtractor", "LasrFeatureExtractor", "SpeechT5FeatureExtractor")
OTHERS = {"ParakeetFeatureExtractor": "within", "Wav2Vec2FeatureExtractor": "alone"}


def probe_extractor(
    extractor: Any, *, dtype: Dtype = "float32", leave_out: tuple[str, ...] = ()
) -> tuple[BatchForm, Promise]:
    """Returns the form of an extractor, or of that of a folder, and what it promises."""
    called = ""
    if isinstance(extractor, Path):
        folder = ExtractorFolder.read(extractor)
        extractor, called = load_extractor(folder), folder.processor_class
    form = probed(OpenExtractor.of(extractor, processor_class=called, leave_out=leave_out), dtype=dtype).form
    return form, form.promise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of saved extractors, by the names of their classes."""
    root = tmp_path_factory.mktemp("extractors")
    for name in (*EXACT, *OTHERS, "WhisperFeatureExtractor", "UnivNetFeatureExtractor"):
        getattr(transformers, name)().save_pretrained(root / name)
    return root


def opened(folder: Path, name: str, **options: Any) -> OpenExtractor:
    extractor = getattr(transformers, name).from_pretrained(folder / name)
    return OpenExtractor.of(extractor, **options)


def written(folder: Path, document: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(json.dumps(document))
    return folder


def step_of(folder: Path, *, rate_hz: int = 16_000, **values: Any) -> AudioStep:
    return Extractor.of({"extractor": str(folder), **values}, folder=folder.parent, rate_hz=rate_hz)


def config_of(tmp_path: Path, extractor: Path, *more: str) -> Config:
    corpus = speech_corpus(tmp_path)
    return corpus.config('audio.features="extractor"', f'audio.extractor="{extractor}"', *more)


@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_batches_are_as_the_promise_says(folder: Path, name: str) -> None:
    form, promise = probe_extractor(folder / name)
    assert (form.made_by, promise.kind) == (name, OTHERS.get(name, "exact"))
    extractor = opened(folder, name)
    rng = np.random.default_rng(7)
    clips = [(rng.standard_normal(n) * 0.1).astype(np.float32) for n in (9001, 25_113, 14_400)]
    ours, theirs = collated(form, [extractor.alone(clip) for clip in clips]), extractor.batch(clips)
    if promise.kind == "alone":
        assert not np.array_equal(ours["input_values"], theirs["input_values"])
        ours, theirs = collated(form, [extractor.alone(clips[0])]), extractor.batch(clips[:1])
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (values.dtype, values.shape), key
        counted = theirs["attention_mask"] == 1 if promise.why.startswith("where attention_mask") else ...
        np.testing.assert_allclose(ours[key][counted], values[counted], rtol=0, atol=promise.limit)


def test_forms_that_are_found(folder: Path) -> None:
    forms = {name: {f.name: f for f in probe_extractor(folder / name)[0].fields} for name in (*EXACT, *OTHERS)}
    assert forms["SpeechT5FeatureExtractor"]["attention_mask"].mask_of == "input_values"
    assert forms["LasrFeatureExtractor"]["attention_mask"].dtype == "bool"
    dac = forms["DacFeatureExtractor"]
    assert (dac["input_values"].shape, dac["padding_mask"].mask_of) == ((1, None), None)  # zeros stand in it already
    assert (dac["padding_mask"].dtype, dac["padding_mask"].stored_dtype) == ("int32", "uint8")
    assert forms["ParakeetFeatureExtractor"]["input_features"].shape == (None, 80)
    assert [f.stored_dtype for f in probe_extractor(folder / "DacFeatureExtractor", dtype="float16")[0].fields] == [
        "uint8",
        "float16",
    ]


def test_left_padding_and_multiples_are_found() -> None:
    extractor = transformers.SpeechT5FeatureExtractor(padding_side="left", padding_value=-3.0)
    form, promise = probe_extractor(extractor)
    [values, mask] = form.fields
    assert (values.side, values.pad, mask.mask_of, promise.kind) == ("left", -3.0, "input_values", "exact")
    batch = collated(form, [{"input_values": np.ones(n, np.float32)} for n in (2, 3)])
    assert batch["input_values"].tolist() == [[-3, 1, 1], [1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


@given(lengths=st.lists(st.integers(400, 12_000), min_size=1, max_size=4))
def test_a_batch_is_the_extractors_own_at_any_lengths(lengths: list[int]) -> None:
    clips = [noise(n, seed=i) for i, n in enumerate(lengths)]
    theirs = _GEMMA.batch(clips)
    ours = collated(_FORM, [_GEMMA.alone(clip) for clip in clips])
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values)


_GEMMA = OpenExtractor.of(transformers.Gemma4UnifiedAudioFeatureExtractor())
_FORM = probe_extractor(_GEMMA.extractor)[0]


@given(
    step=st.integers(1, 9),
    hop=st.integers(1, 700),
    shift=st.integers(-300, 2000),
    least=st.sampled_from([0, 0, 3]),
)
def test_a_rule_of_lengths_is_found_or_none(step: int, hop: int, shift: int, least: int) -> None:
    wanted = LengthRule(step, shift, hop, least * step)
    samples = np.array([6436, 11_697, 18_448, 30_547, 39_794])
    frames = wanted.frames(samples)
    found = length_rule(
        [(int(n), int(f)) for n, f in zip(samples, frames, strict=True)],
        lambda n: int(wanted.frames(np.array(n))),
        check=(800, 3207, 48_000),
    )
    if found is not None:
        several = np.arange(800, 48_000, 379)
        assert (found.frames(several) == wanted.frames(several)).all()
    else:
        assert hop > 1


def test_frames_of_clips_are_counted_as_they_are_stored(folder: Path) -> None:
    step = step_of(folder / "ParakeetFeatureExtractor")
    clips = [noise(n, seed=n) for n in (900, 4001, 20_000)]
    lengths = [len(fields["input_features"]) for fields in step.compute(clips)]
    assert step.num_frames(np.array([900, 4001, 20_000])).tolist() == lengths
    assert step.num_frames(np.array([0])).tolist() == [0]
    stored = [sum(values.nbytes for values in fields.values()) for fields in step.compute(clips)]
    assert step.size_bytes(np.array([900, 4001, 20_000])) == pytest.approx(sum(stored), rel=0.02)


def test_a_clip_depends_on_no_other(folder: Path) -> None:
    step = step_of(folder / "ParakeetFeatureExtractor")
    clips = [noise(n, seed=n) for n in (9000, 4001)]
    for one, other in zip(step.compute(clips), (step.compute([clip])[0] for clip in clips), strict=True):
        assert one.keys() == other.keys() == {spec.name for spec in step.fields()}
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_a_step_that_was_sent_brings_its_probe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(folder / "DacFeatureExtractor")
    assert isinstance(step, Extractor)
    form, sent = step.batch_form(), pickle.dumps(step)
    monkeypatch.setattr("forebay.steps.audio.extractor.extractor_step.PROBES", {})
    monkeypatch.setattr(
        "forebay.steps.audio.extractor.extractor_step.probed", lambda *_, **__: pytest.fail("probed again")
    )
    received = pickle.loads(sent)  # noqa: S301
    assert received == step
    assert received.batch_form().to_json() == form.to_json()


def test_cached_equals_uncached(tmp_path: Path, folder: Path) -> None:
    config = config_of(tmp_path, folder / "ParakeetFeatureExtractor")
    cached = open_cache(build_here(config).cache)
    online = UncachedSource(config)
    assert cached.constants == online.constants
    assert cached.constants["features"] == "declared"
    form = form_of(Stored("cache", cached.constants, cached.fields), "form")
    assert form.made_by == "ParakeetFeatureExtractor"
    for index in range(len(cached)):
        wanted, made_now = cached.read(index), online.read(index)
        assert wanted.keys() == made_now.keys()
        assert all(wanted[name].tobytes() == made_now[name].tobytes() for name in wanted)
    np.testing.assert_array_equal(cached.lengths["num_frames"], online.lengths["num_frames"])


def test_batches_of_a_cache_are_the_extractors_own(tmp_path: Path, folder: Path) -> None:
    config = config_of(tmp_path, folder / "LasrFeatureExtractor")
    cache = open_cache(build_here(config).cache)
    ours = Collator(cache)([cache.read(index) for index in (0, 3, 7)])
    audio = speech_corpus(tmp_path).audio
    ids = cache.samples["sample_id"].to_pylist()
    clips = [audio[ids[index]] / np.float32(32768) for index in (0, 3, 7)]
    assert len({len(clip) for clip in clips}) > 1
    theirs = opened(folder, "LasrFeatureExtractor").batch(clips)
    assert ours.keys() == theirs.keys()
    np.testing.assert_array_equal(ours["attention_mask"].numpy(), theirs["attention_mask"])
    counted = theirs["attention_mask"]
    np.testing.assert_array_equal(ours["input_features"].numpy()[counted], theirs["input_features"][counted])


def test_the_promise_is_said(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, folder / "LasrFeatureExtractor")
    named = f'audio.extractor="{folder}/LasrFeatureExtractor"'
    cache = build_here(config).cache
    assert explain(config, may_hash=True)["promises"] == {
        "audio": "exact where attention_mask is 1, by LasrFeatureExtractor"
    }
    assert cli.main(["key", config.path, "--explain", "--set", 'audio.features="extractor"', "--set", named]) == 0
    assert "batches:    audio: exact where attention_mask is 1" in capsys.readouterr().out
    assert cli.main(["inspect", str(cache)]) == 0
    assert "batches     audio: exact where attention_mask is 1, by LasrFeatureExtractor" in capsys.readouterr().out


def test_the_signals_for_which_a_promise_does_not_hold_are_said(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, folder / "ParakeetFeatureExtractor")
    cache = build_here(config).cache
    said = re.compile(
        r"within \de-06.* but 0\.\d+ was seen in digital silence, constants, steady tones, squares and noise"
    )
    assert said.match(explain(config, may_hash=True)["promises"]["audio"])
    named = f'audio.extractor="{folder}/ParakeetFeatureExtractor"'
    for command in (
        ["key", str(config.path), "--explain", "--set", 'audio.features="extractor"', "--set", named],
        ["inspect", str(cache)],
    ):
        assert cli.main(command) == 0
        assert said.search(" ".join(capsys.readouterr().out.split()))


def test_what_differs_beside_others_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forebay"):
        step_of(folder / "Wav2Vec2FeatureExtractor").check_code()
    assert "each clip is stored as Wav2Vec2FeatureExtractor makes it alone" in caplog.text
    assert "other values in input_values (by up to " in caplog.text
    assert "docs/vision.md says what that means" in caplog.text


# The key


def test_the_key_moves_with_the_content_and_not_with_the_path(tmp_path: Path, folder: Path) -> None:
    document = json.loads((folder / "DacFeatureExtractor" / "preprocessor_config.json").read_text())
    keys = {}
    for name, more in (("a", {}), ("b", {}), ("c", {"hop_length": 320})):
        place = written(tmp_path / name, {**document, **more})
        keys[name] = recipe_of(config_of(tmp_path, place)).key
    assert keys["a"] == keys["b"] != keys["c"]
    for setting in ('audio.dtype="float16"', 'audio.leave_out=["padding_mask"]'):
        assert recipe_of(config_of(tmp_path, tmp_path / "a", setting)).key not in keys.values()


def test_the_key_needs_no_transformers(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.steps.audio.extractor.extractor_step.load_extractor", lambda _: pytest.fail("loaded"))
    config = config_of(tmp_path, folder / "DacFeatureExtractor")
    document = recipe_of(config).document["audio"]
    assert document["features"] == "extractor"
    assert document["kind"] == "DacFeatureExtractor"
    assert "extractor" not in document


def test_paths_are_relative_to_the_config(tmp_path: Path, folder: Path) -> None:
    written(tmp_path / "fx", json.loads((folder / "DacFeatureExtractor" / "preprocessor_config.json").read_text()))
    config = speech_corpus(tmp_path).config('audio.features="extractor"', 'audio.extractor="fx"')
    audio = recipe_of(config).audio
    assert audio is not None
    assert isinstance(audio.features, Extractor)
    assert audio.features.extractor == str(tmp_path / "fx")


# Steps of ours


def test_a_step_of_ours_is_used_where_it_makes_the_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, AudioStep] = {}
    for name in ("WhisperFeatureExtractor", "Qwen3ASRFeatureExtractor", "SeamlessM4TFeatureExtractor"):
        getattr(transformers, name)().save_pretrained(tmp_path / name)
        with caplog.at_level(logging.INFO, logger="forebay"):
            found[name] = step_of(tmp_path / name)
        assert f"is a {name}; features = " in caplog.text
    assert list(found.values()) == [LogMel(n_mels=80, dtype="float32"), Qwen3Asr(dtype="float32"), W2vBert()]
    place = tmp_path / "WhisperFeatureExtractor"
    key = recipe_of(config_of(tmp_path, place)).key
    config = speech_corpus(tmp_path).config('audio.features="log_mel"', 'audio.dtype="float32"')
    assert key == recipe_of(config).key


@pytest.mark.parametrize(
    "more",
    [
        {"feature_size": 96},
        {"chunk_length": 10},
        {"dither": 0.1},
        {"padding_value": 1.0},
        {"processor_class": "VoxtralProcessor"},
        {"model_input_names": ["x"]},
    ],
)
def test_other_settings_go_the_way_of_the_extractor(tmp_path: Path, more: dict[str, Any]) -> None:
    document = transformers.WhisperFeatureExtractor().to_dict()
    plain, other = written(tmp_path / "plain", document), written(tmp_path / "other", {**document, **more})
    assert native_step(ExtractorFolder.read(plain), dtype="float16") == LogMel(n_mels=80, dtype="float16")
    assert native_step(ExtractorFolder.read(other), dtype="float16") is None


# Bad input


def test_folders_that_are_refused(tmp_path: Path) -> None:
    whisper = transformers.WhisperFeatureExtractor().to_dict()
    cases = {
        "is not a folder": None,
        "holds no feature extractor": {},
        "auto_map, which names code of its own": {**whisper, "auto_map": {"AutoFeatureExtractor": "x.Y"}},
        r"an image processor alone \(ViTImageProcessor\)": {"image_processor_type": "ViTImageProcessor"},
    }
    for number, (match, document) in enumerate(cases.items()):
        place = tmp_path / str(number)
        if document:
            written(place, document)
        elif document is not None:
            place.mkdir()
        with pytest.raises(ConfigError, match=match):
            step_of(place)
    (written(tmp_path / "j", {}) / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="it is no JSON"):
        step_of(tmp_path / "j")
    with pytest.raises(ConfigError, match="wanted an object"):
        step_of(written(tmp_path / "n", {"feature_extractor": 3}, "processor_config.json"))


def probed_form(place: Path, **values: Any) -> BatchForm:
    step = step_of(place, **values)
    assert isinstance(step, Extractor)
    return step.batch_form()


def test_classes_that_do_not_load(tmp_path: Path) -> None:
    place = written(tmp_path / "a", {"feature_extractor_type": "WisperFeatureExtractor", "sampling_rate": 16_000})
    with pytest.raises(
        ConfigError,
        match=r"\.json: feature_extractor_type is .* does not have; did you mean WhisperFeatureExtractor\?\Z",
    ):
        probed_form(place)
    place = written(tmp_path / "b", {"feature_extractor_type": "MusicgenMelodyFeatureExtractor"})
    with pytest.raises(ConfigError, match="needs the package torchaudio, which is not installed"):
        probed_form(place)
    place = written(tmp_path / "c", {"feature_extractor_type": "DacFeatureExtractor", "sampling_rate": "fast"})
    with pytest.raises(ConfigError, match="has the sampling_rate 'fast', wanted an integer"):
        probed_form(place)
    place = written(tmp_path / "e", {"feature_extractor_type": "FooFeatureExtractor"})
    with pytest.raises(ConfigError, match="does not have; take a folder whose class it has"):
        probed_form(place)
    place = written(tmp_path / "d", {"sampling_rate": 16_000})
    with pytest.raises(ConfigError, match="names no feature_extractor_type"):
        probed_form(place)


def test_a_class_that_only_config_json_says(tmp_path: Path) -> None:
    place = written(tmp_path / "w", {"sampling_rate": 16_000, "do_normalize": False})
    written(place, {"model_type": "wav2vec2"}, "config.json")
    assert probed_form(place).made_by == "Wav2Vec2FeatureExtractor"


def test_another_sample_rate_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"at 24000 Hz; sample_rate_hz is 16000: set audio.sample_rate_hz = 24000"):
        step_of(folder / "EncodecFeatureExtractor")
    place = written(tmp_path / "e", {"feature_extractor_type": "EncodecFeatureExtractor"})  # its class says the rate
    with pytest.raises(ConfigError, match="EncodecFeatureExtractor is defined at 24000 Hz"):
        probed_form(place)


def test_outputs_that_cannot_be_stored(tmp_path: Path) -> None:
    transformers.CohereAsrFeatureExtractor().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'gives audio_chunk_index, .*audio.leave_out = \["audio_chunk_index"\]'):
        probed_form(tmp_path)
    form = probed_form(tmp_path, leave_out=["audio_chunk_index"])
    assert [field.name for field in form.fields] == ["input_features", "attention_mask"]
    with pytest.raises(ConfigError, match="leave_out names 'chunks', and CohereAsrFeatureExtractor gives input_feat"):
        probed_form(tmp_path, leave_out=["audio_chunk_index", "chunks"])
    with pytest.raises(ConfigError, match="leave_out names all that CohereAsrFeatureExtractor gives"):
        probed_form(tmp_path, leave_out=["audio_chunk_index", "attention_mask", "input_features"])


@pytest.mark.parametrize(
    ("extractor", "output"),
    [
        (transformers.UnivNetFeatureExtractor(), "noise_sequence"),
        (transformers.WhisperFeatureExtractor(dither=0.1, chunk_length=5), "input_features"),
    ],
)
def test_values_that_are_drawn_are_refused(extractor: Any, output: str) -> None:
    with pytest.raises(ConfigError, match=f"gives {output}, other values when it is asked again for the same clip"):
        probe_extractor(extractor)


class Odd(transformers.SpeechT5FeatureExtractor):  # type: ignore[misc]
    """Raises for a clip of 5000 samples, makes NaN of one of 6000, two rows of one of 7000, random ones of 30,000."""

    failing = 0

    def __call__(self, audio: Any, **options: Any) -> Any:
        made_now = super().__call__(audio, **options)
        if len(audio) == 1:
            samples, values = len(audio[0]), made_now["input_values"]
            if samples in (5000, self.failing):
                raise IndexError("of no use")
            if samples == 6000:
                values[:] = np.nan
            if samples == 7000:
                made_now["input_values"] = np.concatenate([values, values])
            if samples == 30_000:
                made_now["input_values"] = values + np.random.rand()
            if samples == 9000:
                made_now["attention_mask"][:, -1] = 0
            if samples == 9001:
                made_now["input_values"] = values * 1e6
            if samples == 9002:
                made_now["input_values"] = values[:, None]
        return made_now


def test_clips_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(odd(tmp_path, monkeypatch), dtype="float16")
    for samples, reason, match in (
        (5000, "extractor_failed", "Odd raises for 5000 samples: IndexError: of no use"),
        (6000, "not_finite", "makes NaN or infinity in input_values"),
        (7000, "extractor_failed", "cuts long clips into pieces"),
        (9000, "extractor_failed", "marks padding in attention_mask"),
        (9001, "not_finite", r'which float16 does not hold; set audio.dtype = "float32"'),
        (9002, "extractor_failed", "gives another form than in the probe"),
    ):
        with pytest.raises(DecodeError, match=match) as caught:
            step.compute([noise(samples, seed=1)])
        assert caught.value.reason == reason
    with pytest.raises(ConfigError, match="other values when it is asked again"):
        step.compute([noise(30_000, seed=1)])
    assert len(step.compute([noise(4999, seed=1)])) == 1


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:Degrees of freedom")
def test_a_clip_without_a_frame_is_too_short(tmp_path: Path) -> None:
    transformers.Speech2TextFeatureExtractor().save_pretrained(tmp_path / "s2t")
    step = step_of(tmp_path / "s2t")
    with pytest.raises(DecodeError, match=r"makes no frame of input_features of a clip of 399 samples") as caught:
        step.compute([noise(399, seed=1)])  # its first frame needs 400 samples
    assert caught.value.reason == "too_short"
    assert len(step.compute([noise(560, seed=1)])[0]["input_features"]) == 2


def test_silence_is_named_and_numpy_says_nothing(tmp_path: Path) -> None:
    transformers.Speech2TextFeatureExtractor().save_pretrained(tmp_path / "s2t")
    step = step_of(tmp_path / "s2t")
    with pytest.raises(DecodeError, match=r"NaN or infinity in input_features of a clip of 8000 samples") as caught:
        step.compute([np.zeros(8000, np.float32)])
    assert caught.value.reason == "not_finite"


def test_a_failing_clip_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, odd(tmp_path / "odd", monkeypatch), "run.max_failed_share=0.5")
    lengths = [len(audio) for audio in speech_corpus(tmp_path).audio.values()]
    monkeypatch.setattr(Odd, "failing", min(lengths))
    report = build_here(config)
    assert report.failed == {"extractor_failed": lengths.count(min(lengths))}
    rejected = (Path(report.cache) / "rejected.jsonl").read_text()
    assert rejected.count('"reason": "extractor_failed"') == lengths.count(min(lengths))


def odd(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose extractor is an `Odd`."""
    document = transformers.SpeechT5FeatureExtractor().to_dict()
    monkeypatch.setattr("transformers.SpeechT5FeatureExtractor", Odd)
    return written(place, {**document, "of": str(place)})


def test_a_field_that_samples_have_already_is_refused(tmp_path: Path, folder: Path) -> None:
    step = step_of(folder / "DacFeatureExtractor")
    assert isinstance(step, Extractor)
    config = config_of(tmp_path, folder / "DacFeatureExtractor")
    recipe = recipe_of(config)
    recipe.source["keep_columns"] = ["padding_mask"]
    with pytest.raises(ConfigError, match="makes a field 'padding_mask', and samples have one of that name already"):
        recipe.check()


def test_the_folder_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='features = "extractor" needs extractor = "FOLDER"'):
        speech_corpus(tmp_path).config('audio.features="extractor"')
    assert made(Extractor, {"extractor": "x", "leave_out": ["b", "a"]}, digest="", kind="", rate_hz=1).leave_out == (
        "a",
        "b",
    )


@pytest.mark.parametrize("url", ["https://huggingface.co/org/model", "s3://bucket/model"])
def test_a_url_is_no_folder(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"audio\.extractor: {url} is a URL, and this is read from this machine"):
        Extractor.of({"extractor": url}, folder=tmp_path, rate_hz=16_000)
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"audio\.extractor: .*/m holds no feature extractor"):
        Extractor.of({"extractor": f"file://{tmp_path}/m"}, folder=Path("/"), rate_hz=16_000)


@pytest.mark.parametrize("name", ["ParakeetFeatureExtractor", "CohereAsrFeatureExtractor"])
def test_a_promise_says_for_which_signals_it_does_not_hold(name: str) -> None:
    """Their normalisation divides by next to nothing there: 0.16 for a promise of 1e-05."""
    extractor = getattr(transformers, name)()
    leave_out = ("audio_chunk_index",) if name.startswith("Cohere") else ()
    _, promise = probe_extractor(extractor, leave_out=leave_out)
    assert re.fullmatch(
        r"within (?:\de-06|1e-05) but 0\.\d+ was seen in digital silence, constants, steady tones, squares and noise "
        r"of a few steps",
        str(promise),
    )
