"""Batches of speech synthesis: from LJSpeech's layout and from a table of speakers, into a model that learns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import FastSpeech2ConformerConfig, FastSpeech2ConformerModel, VitsConfig, VitsModel

import forebay
from forebay.config import Config
from forebay.errors import ConfigError
from forebay.steps.audio.mel import Mel
from forebay.store.cache import open_cache
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.audio.clips import recordings
from tests.steps.text.characters import BLANK, character_tokenizer

CONFIG = Path(__file__).parents[2] / "configs" / "tts_ljspeech.toml"
Batch = dict[str, torch.Tensor]
LANGUAGES = ["ru", "en", "it", "es"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """configs/tts_ljspeech.toml, built."""
    root = tmp_path_factory.mktemp("caches")
    found = forebay.load_config(
        CONFIG, overrides=[f'run.cache_root="{root}"', "run.num_workers=1", "loader.num_threads=1"]
    )
    build_here(found)
    return found


def batches(config: Config) -> list[Batch]:
    loader = make_loader(config)
    loader.set_epoch(0)
    return [dict(batch) for batch in loader]


def test_a_batch_holds_what_models_of_speech_synthesis_take(config: Config) -> None:
    found = batches(config)
    assert sum(len(batch["mel"]) for batch in found) == 34
    for batch in found:
        assert {name: values.dtype for name, values in batch.items()} == {
            **dict.fromkeys(("mel", "energy", "pitch"), torch.float32),
            **dict.fromkeys(("mel_lengths", "input_ids", "input_lengths"), torch.int64),
        }
        rows, frames, bins = batch["mel"].shape
        assert bins == 80
        assert batch["energy"].shape == batch["pitch"].shape == (rows, frames)
        assert frames == batch["mel_lengths"].max()
        assert batch["input_ids"].shape == (rows, int(batch["input_lengths"].max()))
        behind = torch.arange(frames) >= batch["mel_lengths"][:, None]
        for name in ("mel", "energy", "pitch"):
            assert not batch[name][behind].any()
        assert (batch["energy"][~behind] > 0).all()
        assert (batch["pitch"][~behind] > 0).float().mean() > 0.2


def test_stored_frames_are_those_of_the_recording(config: Config) -> None:
    import soxr

    (folder,) = Path(config.cache_root).glob("words-tts-*")
    cache = open_cache(folder)
    assert cache.samples["text"].to_pylist()[1] == "is"  # the normalised column
    for index in (0, 17):
        samples, rate = soundfile.read(
            CONFIG.parent / "../demo/ljspeech" / cache.samples["source"][index].as_py(), dtype="float32"
        )
        clip = soxr.resample(samples, rate, 22_050)
        want = Mel.of(preset="hifigan").compute([clip])[0]["mel"]
        np.testing.assert_allclose(cache.read(index)["mel"], want, atol=1e-4)


def test_half_precision_batches_are_the_same_values_rounded(config: Config) -> None:
    whole = batches(config)[0]
    half = batches(forebay.load_config(CONFIG, overrides=_of(config, 'loader.dtype="bfloat16"')))[0]
    assert half["mel"].dtype == half["pitch"].dtype == torch.bfloat16
    torch.testing.assert_close(half["mel"], whole["mel"].bfloat16(), rtol=0, atol=0)
    assert half["mel_lengths"].tolist() == whole["mel_lengths"].tolist()


def _of(config: Config, *overrides: str) -> list[str]:
    return [f'run.cache_root="{config.cache_root}"', "run.num_workers=1", "loader.num_threads=1", *overrides]


def fastspeech2_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns a batch under the names of transformers' FastSpeech2ConformerModel; docs/text.md shows this function.

    Durations come from an aligner; here all symbols of a text last as long, and pitch and energy are their means.
    """
    lengths, frames = batch["input_lengths"], batch["mel_lengths"]
    symbol = torch.arange(batch["input_ids"].shape[1])
    is_there = symbol < lengths[:, None]
    ends = (symbol + 1) * frames[:, None] // lengths[:, None]
    durations = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1])) * is_there
    rows = torch.arange(batch["mel"].shape[1])
    labels = batch["mel"].masked_fill((rows >= frames[:, None])[..., None], -100)
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": is_there.long(),
        "spectrogram_labels": labels,
        "duration_labels": durations,
    }
    for name, scale in (("pitch", 500.0), ("energy", 200.0)):
        sums = torch.nn.functional.pad(batch[name].cumsum(1), (1, 0))
        means = torch.diff(sums.gather(1, ends.clamp(max=sums.shape[1] - 1)), dim=1, prepend=sums[:, :1])
        inputs[f"{name}_labels"] = ((means * is_there) / durations.clamp(min=1) / scale)[..., None]
    return inputs


def test_a_small_fastspeech2_learns_from_the_batches(config: Config) -> None:
    cache = open_cache(next(Path(config.cache_root).glob("words-tts-*")))
    small: dict[str, Any] = {
        **{f"{part}_layers": 1 for part in ("encoder", "decoder", "duration_predictor", "pitch_predictor")},
        **{f"{part}_linear_units": 32 for part in ("encoder", "decoder")},
        **{f"{part}_num_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_channels": 16 for part in ("duration_predictor", "pitch_predictor", "energy_predictor")},
        **{"energy_predictor_layers": 1, "speech_decoder_postnet_layers": 1, "speech_decoder_postnet_units": 16},
    }
    torch.manual_seed(0)
    model = FastSpeech2ConformerModel(
        FastSpeech2ConformerConfig(
            hidden_size=32, vocab_size=cache.constants["vocab_size"], num_mel_bins=cache.constants["n_mels"], **small
        )
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs = [fastspeech2_inputs(batch) for batch in batches(config)]
    assert all((each["duration_labels"].sum(1) > 0).all() for each in inputs)
    losses = []
    for _ in range(4):
        for each in inputs:
            loss = model(**each).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:3])


def test_vits_takes_ids_mask_and_speaker(config: Config) -> None:
    batch = batches(config)[0]
    torch.manual_seed(0)
    model = VitsModel(
        VitsConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=16,
            flow_size=16,
            spectrogram_bins=513,
            upsample_initial_channel=16,
            prior_encoder_num_flows=1,
            prior_encoder_num_wavenet_layers=1,
            duration_predictor_num_flows=1,
            duration_predictor_filter_channels=16,
            wavenet_dilation_rate=1,
        )
    ).eval()
    mask = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    with torch.no_grad():
        sound = model(input_ids=batch["input_ids"][:2], attention_mask=mask[:2].long()).waveform
    assert sound.shape[0] == 2
    assert torch.isfinite(sound).all()


def table(folder: Path) -> dict[str, Any]:
    """A CSV of recordings with their speakers and languages, one speaker an integer, and a config of it."""
    rows = []
    for number, (language, clip) in enumerate(recordings()[:12]):
        soundfile.write(folder / f"{number}.wav", clip[:16_000], 16_000)
        rows.append(
            {"audio": f"{number}.wav", "text": "a b", "language": language, "who": ("ann", "bob", 7)[number % 3]}
        )
    rows[5]["who"] = ""
    with open(folder / "clips.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["audio", "text", "language", "who"])
        writer.writeheader()
        writer.writerows(rows)
    return {
        "name": "speakers",
        "source": {"kind": "table", "manifest": str(folder / "clips.csv"), "keep_columns": ["who"]},
        "audio": {"features": "mel", "sample_rate_hz": 16_000, "n_fft": 512, "hop_length": 160, "energy": True},
        "text": {
            "tokenizer": str(character_tokenizer(folder / "symbols", ["ab "])),
            "prompt": "tts",
            "blank_token": BLANK,
            "speaker_column": "who",
            "language_codes": LANGUAGES,
        },
        "plan": {"kind": "bucket", "batch_size": 4, "k": 1, "lockstep": 1},
        "loader": {"num_threads": 1},
        "run": {"cache_root": str(folder / "caches"), "num_workers": 1, "max_failed_share": 1.0},
    }


def test_speakers_and_languages_of_columns_are_ids(tmp_path: Path) -> None:
    settings = table(tmp_path)
    with pytest.raises(ConfigError, match=r"column who holds 3: put this under \[text\]") as caught:
        build_here(forebay.load_config(settings))
    assert caught.value.args[0].splitlines()[-1] == '  speakers = ["7", "ann", "bob"]'
    settings["text"]["speakers"] = ["7", "bob"]
    config = forebay.load_config(settings)
    report = build_here(config)
    assert report.failed == {"unknown_speaker": 4, "unknown_language": 2}
    found = batches(config)
    names = {"mel", "energy", "mel_lengths", "input_ids", "input_lengths", "speaker_ids", "language_ids"}
    assert all(set(batch) == names for batch in found)
    uncached = batches(forebay.load_config({**settings, "loader": {"num_threads": 1, "cache": "off"}}))
    for one, other in zip(found, uncached, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in names)
    cache = open_cache(Path(report.cache))
    for index in range(len(cache)):
        row, sample = cache.samples.slice(index, 1).to_pylist()[0], cache.read(index)
        assert sample["speaker_id"].tolist() == [["7", "bob"].index(str(row["who"]))]
        assert sample["language_id"].tolist() == [LANGUAGES.index(row["language"])]


def test_words_of_the_demo_are_as_small_as_promised() -> None:
    folder = CONFIG.parents[1] / "demo" / "ljspeech"
    lines = (folder / "metadata.csv").read_text().splitlines()
    assert {f"{line.split('|')[0]}.flac" for line in lines} == {path.name for path in (folder / "wavs").iterdir()}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 300_000
    symbols = json.loads((folder / "symbols" / "tokenizer.json").read_text())["model"]["vocab"]
    assert {letter for line in lines for letter in line.split("|")[2]} <= set(symbols)
