"""Samples that code of the user yields: listed once, read from what was written down, and in the key by content."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import Config
from forebay.config.data import SourceConfig
from forebay.errors import CacheNotFoundError, ConfigError, ManifestError
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.rows.readers.python_inputs import list_inputs
from forebay.rows.readers.python_run import InputError, _line, _named, wav
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import open_cache
from forebay.store.inputs import _most
from forebay.store.remote.raw.raw_sources import localized
from forebay.store.source_files import SourceFile
from forebay.train import make_loader
from forebay.train.select import select
from tests.commands import run, run_json
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO
from tests.rows.helpers import read_manifest
from tests.rows.pictures import read_conversations, write_picture

LINES = st.lists(
    st.dictionaries(
        st.sampled_from(["id", "media", "offset", "size", "text", "xxh3_128", "speaker"]),
        st.one_of(
            st.none(),
            st.integers(-3, 99),
            st.sampled_from(["00000.media", "../../etc/passwd", "x", ""]),
            st.lists(st.integers()),
        ),
    ),
    max_size=3,
)


@given(LINES, st.binary(max_size=9))
def test_a_list_of_anything_is_read_or_refused(lines: list[dict[str, object]], more: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + more)
        files: Sequence[SourceFile] = ()
        with contextlib.suppress(ManifestError):
            files = read_manifest(SourceConfig(kind="python", manifest=str(path))).files
        assert {file.path.parent for file in files} <= {Path(folder)}


_VISION = f'[vision]\nprocessor = "{DEMO}/model"\n[text]\nprompt = "label"\n'

CLIPS = """\
import os
import numpy as np

def note():
    with open(os.path.join(os.path.dirname(__file__), "ran.txt"), "a") as file:
        file.write(f"{os.getpid()}\\n")

note()

class Clips:
    def __iter__(self):
        made = np.random.default_rng(3)
        for number in range(9):
            clip = made.integers(-9000, 9000, 1600 * (number + 2)).astype(np.int16)
            if number % 2:
                clip = clip.astype(np.float32) / np.float32(32768)
            yield {
                "id": f"clip{number}", "audio": clip, "sample_rate_hz": 16_000, "text": f"text {number}",
                "language": "en", "speaker": number % 3, "more": None if number else 1,
            }
"""


def body(lines: str) -> str:
    head = "import itertools, os, random\nimport numpy as np\n\ndef Clips():\n    one = np.ones(1600, np.int16)\n"
    return f"{head}{lines}\n"


def sample(**fields: str) -> str:
    values = {"id": '"a"', "audio": "one", "sample_rate_hz": "16000", **fields}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


def config_of(folder: Path, *overrides: str, source: str = CLIPS, more: str = "", allow: str = "true") -> Config:
    (folder / "inputs.py").write_text(source)
    (folder / "own.toml").write_text(
        f'name = "own"\n[source]\nkind = "python"\nmanifest = "inputs.py:Clips"\n{more}\n'
        '[audio]\nfeatures = "waveform"\n'
        "[layout]\nrows_per_shard = 4\n[plan]\nbatch_size = 2\nedges_s = [2]\n"
        f'[run]\ncache_root = "caches"\nnum_workers = 1\nallow_code = {allow}\n'
    )
    return load_config(folder / "own.toml", overrides=overrides)


def values(cache: Any) -> dict[str, np.ndarray]:
    return {cache.sample_id(index): cache.read(index)["waveform"] for index in range(len(cache))}


def test_what_an_iterator_yields_goes_all_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, path, ran = (
        config_of(tmp_path, more='keep_columns = ["speaker"]'),
        tmp_path / "own.toml",
        tmp_path / "ran.txt",
    )
    code, _, err = run(capsys, "key", path)
    assert code != 0
    assert "are not listed yet, and nothing else runs it; run: forebay preprocess" in err
    assert run(capsys, "lint", path)[0] != 0
    assert run(capsys, "inspect", path)[0] != 0
    assert not ran.exists()
    report = build_here(config)
    assert (report.num_samples, report.failed) == (9, {})
    runs = ran.read_text()
    assert len(set(runs.split())) == 2  # the listing, and its second look
    cache = open_cache(report.cache)
    assert cache.samples["speaker"].to_pylist() == [number % 3 for number in range(9)]
    assert cache.samples["text"].to_pylist() == [f"text {number}" for number in range(9)]
    made = np.random.default_rng(3)
    for number in range(9):
        wanted = made.integers(-9000, 9000, 1600 * (number + 2)).astype(np.int16)
        np.testing.assert_array_equal(cache.read(number)["waveform"], wanted)
    assert run_json(capsys, "key", path)["key"] == report.key
    assert build_here(config).already_sealed
    live = make_loader(load_config(path, overrides=['loader.cache="off"']))
    kept = make_loader(config)
    live.set_epoch(0)
    kept.set_epoch(0)
    for mine, theirs in zip(kept, live, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert ran.read_text() == runs


@pytest.mark.wide
def test_prune_leaves_the_samples_that_a_cache_is_found_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    report, root = build_here(config), tmp_path / "caches"
    prune = ("cache", "prune", root, "--inputs", "--yes", "--force")
    (found,) = run_json(capsys, *prune)["items"]
    name = Path(report.cache).name
    assert (found["did"], found["reason"].startswith(f"{name} is found by it;")) == ("stays", True)
    assert run_json(capsys, "key", tmp_path / "own.toml")["cache"] == report.cache
    assert run(capsys, "cache", "rm", root / name, "--yes", "--force")[0] == 0
    (found,) = run_json(capsys, *prune)["items"]
    assert (found["did"], found["reason"]) == ("gone", "no cache here was made of it; the next build runs the iterator")


def test_the_key_is_of_what_was_yielded(tmp_path: Path) -> None:
    first = build_here(config_of(tmp_path))
    again = build_here(config_of(tmp_path, source=CLIPS + "# the same samples\n"))
    assert again.already_sealed
    assert again.key == first.key
    other = build_here(config_of(tmp_path, source=CLIPS.replace("text {number}", "texts {number}")))
    assert other.key != first.key
    assert other.shards_linked >= 3  # the sound is the same, and so is its place
    # Code that was edited and has not run may yield anything; where there is no code, the newest cache is read.
    config = config_of(tmp_path, 'loader.cache="require"', source=CLIPS + "# edited\n")
    with pytest.raises(CacheNotFoundError, match=r"the samples of \S+inputs\.py:Clips are not listed: it was edited"):
        make_loader(config)
    shutil.rmtree(tmp_path / "caches" / "inputs")
    (tmp_path / "inputs.py").unlink()
    assert len(make_loader(config).source) == 9


def test_max_samples_stops_it(tmp_path: Path) -> None:
    endless = body(f"    for n in itertools.count():\n        yield {sample(id='str(n)')}")
    assert build_here(config_of(tmp_path, source=endless, more="max_samples = 5")).num_samples == 5


def test_another_listing_is_named_and_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = body(
        "    with open(os.path.join(os.path.dirname(__file__), 'many.txt')) as file:\n        many = int(file.read())\n"
        f"    for n in range(many):\n        yield {sample(id='str(n)')}"
    )
    (tmp_path / "many.txt").write_text("3")
    config = config_of(tmp_path, source=source)
    assert build_here(config).num_samples == 3
    (tmp_path / "many.txt").write_text("4")
    assert build_here(config).already_sealed
    assert build_here(config, rebuild=True).num_samples == 4
    assert "yields other samples than when it was listed before: sample 3 was none and is '3', xxh3-128" in caplog.text
    assert [path.name for path in (tmp_path / "caches" / "inputs").iterdir() if "tmp" in path.name] == []


def test_without_leave_in_the_file_nothing_is_done(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'source\.manifest has "inputs\.py:Clips", which is code.*allow_code = true'):
        config_of(tmp_path, allow="false")
    with pytest.raises(ConfigError, match=r"run\.allow_code is what the config's own file says"):
        load_config(tmp_path / "own.toml", overrides=["run.allow_code=true"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("../inputs.py:Clips", r"leads out of the config's folder"),
        ("/etc/inputs.py:Clips", r"leads out of the config's folder"),
        ("https://host/inputs.py:Clips", r"names no file beside the config"),
        ("inputs.txt", r'is no "file\.py:class"'),
        ("link.py:Clips", r"link\.py is a link"),
        ("missing.py:Clips", r"cannot read .*missing\.py"),
    ],
)
def test_what_is_no_file_beside_the_config_is_refused(tmp_path: Path, spec: str, message: str) -> None:
    config_of(tmp_path)
    (tmp_path / "link.py").symlink_to(tmp_path / "inputs.py")
    path = tmp_path / "own.toml"
    path.write_text(path.read_text().replace("inputs.py:Clips", spec))
    with pytest.raises(ConfigError, match=message):
        build_here(load_config(path))
    assert not (tmp_path / "ran.txt").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("    return 3", r"calling it gives int, wanted what can be iterated over"),
        ("    return np.load('no')", r"it raised FileNotFoundError.*'no' \(line 6\) instead of sample 0"),
        (f"    yield {sample()}\n    1 / 0", r"it raised ZeroDivisionError.*\(line 7\) instead of sample 1"),
        (f"    yield {sample(id='7')}", r"sample 0 has the id 7, wanted a text"),
        (f"    yield {sample(audio='[1, 2]')}", r"sample 0, 'a': audio is list, wanted encoded bytes"),
        (f"    yield {sample(audio='one.reshape(2, -1)')}", r"audio is int16 \[2, 800\]"),
        (f"    yield {sample(audio='one.astype(float)')}", r"audio is float64 \[1600\]"),
        (f"    yield {sample(sample_rate_hz='None')}", r"sample_rate_hz is None, wanted an integer"),
        (f"    yield {sample(text='one')}", r"not JSON serializable; wanted texts and numbers"),
        (f"    yield {sample(size='1')}", r"has a field size, which the list has itself"),
        ("    yield from ()", r"inputs\.py:Clips: it yielded no sample"),
        ("    yield 'x'", r"sample 0 is str, wanted a dict"),
        (f"    yield {sample(id='str(random.random())')}", r"is not deterministic: as sample 0 it yielded .*and then"),
        (f"    yield from ({sample(id='n')} for n in {{'p', 'q', 'r', 's', 't'}})", r"is not deterministic"),
        (f"    yield {sample(text='3')}", r"line 1: field text is .*3.*wanted a string"),
    ],
)
def test_what_is_no_sample_stops_the_listing_and_is_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises((ConfigError, ManifestError), match=message) as caught:
        build_here(config_of(tmp_path, source=body(lines)))
    assert caught.value.code == "FB129"


def test_a_sample_that_cannot_be_heard_costs_itself(tmp_path: Path) -> None:
    lines = f"    yield {sample()}\n    yield {sample(id='str(2)', audio='bytes(99)')}"
    report = build_here(config_of(tmp_path, "run.max_failed_share=1.0", source=body(lines)))
    assert report.num_samples == 1
    assert sum(report.failed.values()) == 1


IMAGES = """\
import pathlib

def Clips():
    folder = pathlib.Path(__file__).parent / "pictures"
    for number, path in enumerate(sorted(folder.iterdir())):
        yield {"id": path.stem, "image": path.read_bytes(), "label": "even" if number % 2 == 0 else "odd"}
"""


def test_images_come_from_an_iterator_too(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        write_picture(tmp_path / "pictures" / f"{number}.png", number)
    (tmp_path / "pictures" / "3.png").write_bytes((tmp_path / "pictures" / "0.png").read_bytes())
    config_of(tmp_path, source=IMAGES)
    text = (tmp_path / "own.toml").read_text().replace('[audio]\nfeatures = "waveform"\n', _VISION)
    (tmp_path / "own.toml").write_text(text.replace("[plan]\nbatch_size = 2\nedges_s = [2]\n", ""))
    config = load_config(tmp_path / "own.toml")
    list_inputs(config)
    found = read_conversations(localized(config).source, cache_root=config.cache_root, meaning="labels")
    assert found.rows["sample_id"].to_pylist() == ["0", "3", "1", "2"]  # rows of one image stand together
    names = [found.files[number].name for number in found.items["image"]["file"].to_pylist()]
    contents = [(tmp_path / "pictures" / f"{number}.png").read_bytes() for number in range(3)]
    assert names == [_named(content, "images", "image") for content in contents]
    assert [(found.files[1 + number].path).read_bytes() for number in range(3)] == contents
    assert not _most(load_config(tmp_path / "own.toml", overrides=['source.rows="0:2"', "source.max_samples=1"]))


def test_an_image_that_is_no_bytes_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sample 3, 'a': images has str, wanted encoded bytes"):
        _line({"id": "a", "images": [b"x", "b.png"]}, 3, subjects="vision")
    line, media = _line({"id": "a", "images": [b"x", b"y"], "text": None}, 3, subjects="vision")
    assert line["images"] == [name for name, _ in media]


@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_an_array_is_a_wav_file_of_the_same_values(dtype: str) -> None:
    audio = (np.arange(-50, 51) * (300 if dtype == "int16" else 0.013)).astype(dtype)
    back, rate_hz = soundfile.read(io.BytesIO(wav(audio, 22_050)), dtype=dtype)
    np.testing.assert_array_equal(back, audio)
    assert rate_hz == 22_050


def test_a_list_that_somebody_changed_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    build_here(config)
    [path] = (tmp_path / "caches" / "inputs").glob("*/samples.jsonl")
    first, *rest = path.read_text().splitlines()
    recipe = recipe_of(config)
    changes: list[tuple[str, object]] = [("media", "../x"), ("media", "/etc/passwd"), ("offset", -1)]
    for field, value in [*changes, ("size", 1 << 70), ("size", "9"), ("id", None)]:
        path.write_text("\n".join([json.dumps({**json.loads(first), field: value}), *rest]))
        with pytest.raises(ManifestError, match=rf"samples\.jsonl, line 1: .*{field}"):
            listed(config, Groups.of(config, recipe))


def test_samples_may_be_segments_of_their_recordings(tmp_path: Path) -> None:
    source = """
import io
import numpy as np
import soundfile

def Clips():
    for number in range(2):
        file = io.BytesIO()
        noise = np.random.default_rng(number).integers(-3000, 3000, (32_000, 2)).astype(np.int16)
        soundfile.write(file, noise, 16_000, format="FLAC")
        for start, end, channel in ((0.5, 1.0, 0), (0.75, 1.5, 1), (1.25, None, None), (1.0, 0.5, 0)):
            yield {
                "id": f"{number} {start}", "audio": file.getvalue(), "from": start, "to": end, "line": channel,
                "text": "x", "speaker": "s"
            }
"""
    columns = "\n[source.columns]\nstart = 'from'\nend = 'to'\nchannel = 'line'\n"
    config = config_of(tmp_path, "run.max_failed_share=0.5", "audio.dtype=float32", source=source, more=columns)
    list_inputs(config)
    cache = open_cache(build_here(config).cache)
    assert cache.metadata["failed"] == {"bad_segment": 2}
    (media,) = (tmp_path / "caches").rglob("*.media")
    found: dict[str, Any] = {}
    for number in range(2):
        noise = np.random.default_rng(number).integers(-3000, 3000, (32_000, 2)).astype(np.int16) / 32768
        found |= {f"{number} 0.5": noise[8_000:16_000, 0], f"{number} 0.75": noise[12_000:24_000, 1]}
        found[f"{number} 1.25"] = noise[20_000:].mean(1)
    assert media.stat().st_size < 3 * 4 * 32_000
    online = select(
        load_config(config.path, overrides=['loader.cache="off"', "run.max_failed_share=0.5", "audio.dtype=float32"])
    )
    for index in range(len(cache)):
        waveform = cache.read(index)["waveform"]
        np.testing.assert_allclose(waveform, found.pop(cache.sample_id(index)), atol=1e-6)
        np.testing.assert_array_equal(online.read(index)["waveform"], waveform)
    assert not found
