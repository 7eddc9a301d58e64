from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from PIL import Image

from forebay.errors import MissingExtraError
from forebay.inspect.picture import HOP_S, draw, draw_tiles, fonts_for, write_figure
from forebay.inspect.seen_images import Picture
from forebay.store.cache import open_cache
from tests.store_factory import RATE_HZ, TEXTS, Features, make_cache

ROW = {"sample_id": "clip", "language": "en", "text": "Hello"}


@pytest.mark.parametrize(
    "features", ["log_mel", "waveform", *(pytest.param(n, marks=pytest.mark.wide) for n in ("qwen3_asr", "w2v_bert"))]
)
@pytest.mark.few("log_mel")
def test_every_kind_of_features_has_a_picture(tmp_path: Path, features: Features) -> None:
    cache = open_cache(make_cache(tmp_path, features=features, keep_waveform=features == "w2v_bert"))
    for index, text in enumerate(TEXTS):
        row = {"sample_id": f"clip-{index}", "language": "", "text": text}
        write_figure(draw(cache.read(index), row, sample_rate_hz=RATE_HZ), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert image.width == 1440
        assert len(image.convert("L").getcolors() or []) > 10


def test_axes_are_seconds_and_bins(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).normal(size=(250, 80)).astype(np.float16)
    waveform = np.full(40_000, 16_384, np.int16)
    figure = draw({"input_features": frames, "waveform": waveform}, ROW, sample_rate_hz=RATE_HZ)
    wave, image, bar = figure.axes
    assert list(image.images[0].get_extent()) == [0.0, 250 * HOP_S, 0.0, 80.0]
    assert np.array_equal(np.asarray(image.images[0].get_array()), frames.T.astype(np.float32))
    assert (image.get_xlabel(), image.get_ylabel(), bar.get_ylabel()) == ("time (s)", "mel bin", "log-mel")
    assert image.images[0].origin == "lower"
    assert wave.get_xlim()[1] == pytest.approx(2.5)
    # Half of full scale.
    assert wave.dataLim.y1 == pytest.approx(0.5)
    assert figure.get_suptitle() == "clip · en\nHello"


def test_mel_frames_stand_where_their_hop_says() -> None:
    frames = np.random.default_rng(0).normal(size=(250, 80)).astype(np.float32)
    figure = draw({"mel": frames, "pitch": frames[:, 0]}, ROW, sample_rate_hz=22_050, hop_s=256 / 22_050)
    image, bar = figure.axes
    assert list(image.images[0].get_extent()) == [0.0, 250 * 256 / 22_050, 0.0, 80.0]
    assert bar.get_ylabel() == "mel"


def test_a_click_in_a_long_waveform_is_not_lost(tmp_path: Path) -> None:
    waveform = np.zeros(2_000_000, np.int16)
    waveform[1_234_567] = -32_768
    figure = draw({"waveform": waveform}, ROW, sample_rate_hz=RATE_HZ)
    assert figure.axes[0].dataLim.y0 == pytest.approx(-1.0)


@pytest.mark.parametrize("name", ["input_features", "waveform"])
def test_a_sample_of_no_length_has_a_picture_that_says_so(tmp_path: Path, name: str) -> None:
    empty = np.zeros((0, 80), np.float16) if name == "input_features" else np.zeros(0, np.int16)
    figure = draw({name: empty}, ROW, sample_rate_hz=RATE_HZ)
    assert figure.axes[0].texts[0].get_text().startswith("no ")
    figure.savefig(io.BytesIO())


def test_a_transcript_is_text_whatever_is_in_it(tmp_path: Path) -> None:
    row = {"sample_id": "a_b^{c}", "language": "en", "text": "$5 and $\\frac{$ \x1b[2J " + "word " * 200}
    frames = np.zeros((10, 80), np.float32)
    figure = draw({"fbanks": frames}, row, sample_rate_hz=RATE_HZ)
    figure.savefig(io.BytesIO())
    head, *lines = figure.get_suptitle().split("\n")
    assert head == "a_b^{c} · en"
    assert lines[0].startswith("$5 and $\\frac{$ \\x1b[2J word")
    assert len(lines) == 4
    assert lines[-1].endswith(" ...")


def test_letters_without_a_font_become_replacement_characters() -> None:
    families, text = fonts_for("Привет \U0010fffd")
    assert families[0] == "DejaVu Sans"
    assert text == "Привет \ufffd"
    assert not [name for name in families if name.startswith("Last Resort")]


def test_characters_without_a_font_are_said(caplog: pytest.LogCaptureFixture) -> None:
    fonts_for("a \U000e0041 \U000e0042")
    assert "no font here has 2 of the characters" in caplog.text
    assert "U+E0041 U+E0042" in caplog.text


def test_beside_one_image_nothing_is_white(tmp_path: Path) -> None:
    tile = Picture(pixels=np.zeros((90, 100, 3), np.uint8), mark="", name="a.png", about=("100 x 90",))
    write_figure(draw_tiles([tile], title="sample 0"), tmp_path / "a.png")
    write_figure(draw_tiles([tile], title="sample 0 " * 12), tmp_path / "b.png")
    with Image.open(tmp_path / "a.png") as image, Image.open(tmp_path / "b.png") as wide:
        columns = np.flatnonzero((np.asarray(image.convert("L")) < 128).any(axis=0))
        assert columns[-1] > 0.9 * image.width
        assert wide.width > image.width  # a title is not cut


def test_letters_that_the_first_font_lacks_come_from_one_that_has_them() -> None:
    stix = FT2Font(findfont("STIXGeneral")).get_charmap()
    letter = next(chr(code) for code in stix if code not in FT2Font(findfont("DejaVu Sans")).get_charmap())
    families, text = fonts_for(f"a {letter}")
    assert text == f"a {letter}"
    assert len(families) == 2
    assert ord(letter) in FT2Font(findfont(families[1])).get_charmap()


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(MissingExtraError, match=r"--png needs matplotlib .* pip install 'forebay\[report\]'"):
        draw({}, ROW, sample_rate_hz=RATE_HZ)
