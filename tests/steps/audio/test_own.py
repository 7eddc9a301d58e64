"""Features that code of the user makes: identity without running it, and every promise once it runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import Config
from forebay.errors import BuildError, ConfigError, DecodeError
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.audio.own_step import ASKER, Own, written_facts
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import open_cache
from forebay.train import make_loader
from forebay.train.collate.collator import Collator
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here

MODEL = Path(__file__).resolve().parents[3] / "demo" / "speech" / "model"

BANDS = '''\
import os
import numpy as np

with open(os.path.join(os.path.dirname(__file__), "imported.txt"), "a") as file:
    file.write(f"{os.getpid()}\\n")


class Bands:
    """Power in bands, by hops of 160 samples."""

    version = 3
    files = ["weights.npy"]

    def __init__(self, bands: int = 4, *, scales: list = (1.0,), sample_rate_hz: int):
        self.bands, self.scale, self.rate = bands, scales[0], sample_rate_hz
        self.weights = np.load(os.path.join(os.path.dirname(__file__), "weights.npy"))

    @property
    def fields(self):
        return {
            "input_features": {"dtype": "float32", "shape": [self.bands, None], "pad": -1.5},
            "attention_mask": {"mask_of": "input_features"},
            "peak": {"dtype": "float32", "shape": []},
        }

    def num_frames(self, num_samples):
        return num_samples // 160

    def compute(self, clip):
        clip[:] *= 1  # its own copy
        frames = clip[: len(clip) // 160 * 160].reshape(-1, 160) * self.scale * self.weights[0]
        power = np.abs(np.fft.rfft(frames, axis=1))[:, : self.bands].astype(np.float32)
        return {"input_features": power.T, "peak": np.float32(np.abs(clip).max()).reshape(())}
'''


def own_config(
    corpus: Corpus, *overrides: str, source: str = BANDS, audio: str = "bands = 5", run_: str = ""
) -> Config:
    """Writes a step beside a corpus and a config that names it; returns the config."""
    corpus.config()
    (corpus.folder / "steps").mkdir(exist_ok=True)
    (corpus.folder / "steps" / "my.py").write_text(source)
    np.save(corpus.folder / "steps" / "weights.npy", np.array([2.0]))
    text = (corpus.folder / "config.toml").read_text()
    text = text.replace('"waveform"', f'"steps/my.py:Bands"\n{audio}') + (run_ or "allow_code = true\n")
    (corpus.folder / "own.toml").write_text(text)
    return load_config(corpus.folder / "own.toml", overrides=overrides)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def own_of(folder: Path, source: str, **settings: Any) -> Own:
    (folder / "my.py").write_text(source)
    if "weights.npy" in source:
        np.save(folder / "weights.npy", np.array([2.0]))
    return Own.of("my.py:Bands", settings, folder=folder, allow_code=True, rate_hz=16_000)


def body(compute: str, *, num_frames: str = "return n // 160", head: str = "") -> str:
    """A class of one field of [n, 2] whose `compute` has one line."""
    return (
        f"import os, random, sys, time\nimport numpy as np\nseen = []\n{head}\nclass Bands:\n    version = 1\n"
        '    fields = {"x": {"shape": [None, 2]}}\n'
        f"    def num_frames(self, n):\n        {num_frames}\n"
        "    def right(self, clip):\n        return np.full((len(clip) // 160, 2), clip.sum(), np.float32)\n"
        f"    def compute(self, clip):\n        {compute}\n"
    )


RIGHT = 'return {"x": self.right(clip)}'


def batches(config: Config) -> list[dict[str, torch.Tensor]]:
    loader = make_loader(config)
    loader.set_epoch(0)
    return [{name: value.clone() for name, value in batch.items()} for batch in loader]


def test_a_step_of_the_user_goes_all_the_way(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = own_config(corpus)
    report = build_here(config)
    assert (report.num_samples, report.failed) == (17, {})
    cache = open_cache(report.cache)
    assert cache.constants["features"] == "declared"
    for index in range(len(cache)):
        clip = corpus.audio[cache.sample_id(index)].astype(np.float32) / np.float32(32768)
        wanted = np.abs(np.fft.rfft(clip[: len(clip) // 160 * 160].reshape(-1, 160) * np.float64(2), axis=1))[:, :5]
        np.testing.assert_array_equal(cache.read(index)["input_features"], wanted.astype(np.float32))
        assert cache.lengths["num_frames"][index] == len(clip) // 160
        assert cache.read(index)["peak"] == np.abs(clip).max()
    cached = batches(config)
    assert cached[0]["input_features"].shape[:2] == (4, 5)
    assert cached[0]["attention_mask"].dtype == torch.int64
    live = batches(load_config(corpus.folder / "own.toml", overrides=['loader.cache="off"']))
    for mine, theirs in zip(cached, live, strict=True):
        assert mine.keys() == theirs.keys() == {"input_features", "attention_mask", "peak"}
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # Without the file the cache is read: it says itself what its batches are.
    shutil.rmtree(corpus.folder / "steps")
    assert run_json(capsys, "inspect", report.cache)["num_samples"] == 17
    cache = open_cache(report.cache)
    batch = Collator(cache, dtype=torch.float32)([cache.read(0)])
    assert batch["input_features"].shape[1] == 5


def test_nothing_but_a_build_imports_the_step(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config, path = own_config(corpus), corpus.folder / "own.toml"
    ran = corpus.folder / "steps" / "imported.txt"
    assert run(capsys, "key", path, "--explain")[0] == 0
    assert run(capsys, "inspect", path)[0] != 0  # there is no cache
    recipe = recipe_of(config)
    assert pickle.loads(pickle.dumps(recipe)).key == recipe.key  # noqa: S301 - as a task travels
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))  # noqa: S301
    assert not ran.exists()
    report = build_here(config)
    runs = ran.read_text()
    commands = [["key", path, "--explain"], ["inspect", path], ["inspect", path, "--sample", "a0"]]
    commands += [["cache", name, "--cache-root", corpus.root] for name in ("ls", "du")]
    assert [run(capsys, *command)[0] for command in commands] == [0] * len(commands)
    assert build_here(config).already_sealed
    assert len(batches(config)) == 5
    run(capsys, "cache", "rm", "--cache-root", corpus.root, Path(report.cache).name)
    assert ran.read_text() == runs


@pytest.mark.wide
def test_lint_does_not_import_the_step(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    own_config(corpus)
    assert run(capsys, "lint", corpus.folder / "own.toml", "--workers", 1)[0] == 0
    assert not (corpus.folder / "steps" / "imported.txt").exists()


@pytest.mark.wide
def test_workers_import_it_once_each_and_give_the_same_bytes(corpus: Corpus) -> None:
    here = build_here(own_config(corpus))
    ran = corpus.folder / "steps" / "imported.txt"
    ran.unlink()
    workers = build(own_config(corpus, 'run.cache_root="other"'), Options(progress=False))
    assert shard_bytes(Path(here.cache)) == shard_bytes(Path(workers.cache))
    pids = ran.read_text().split()
    assert len({*pids}) == len(pids) >= 3  # two processes of the probe, and workers; this one has it already


def test_an_edit_of_anything_that_counts_moves_the_key(corpus: Corpus) -> None:
    def key(**how: Any) -> str:
        return recipe_of(own_config(corpus, **how)).key

    first = key()
    assert key() == first
    others = {
        key(audio="bands = 6"),
        key(audio="bands = 5\nscales = [2.0]"),
        key(audio='bands = 5\ndtype = "float16"'),
        key(source=BANDS + "# more\n"),
        key(source=BANDS.replace("version = 3", "version = 4")),
        key(audio="bands = 5\nsample_rate_hz = 8000"),
    }
    own_config(corpus)
    np.save(corpus.folder / "steps" / "weights.npy", np.array([3.0]))
    others.add(recipe_of(load_config(corpus.folder / "own.toml")).key)
    assert len(others | {first}) == 8
    (corpus.folder / "elsewhere").mkdir()
    (corpus.folder / "steps").rename(corpus.folder / "elsewhere" / "steps")
    np.save(corpus.folder / "elsewhere" / "steps" / "weights.npy", np.array([2.0]))
    text = (corpus.folder / "own.toml").read_text().replace("steps/my.py", "elsewhere/steps/my.py")
    (corpus.folder / "own.toml").write_text(text)
    assert recipe_of(load_config(corpus.folder / "own.toml")).key == first


@pytest.mark.parametrize("line", ["[plan.x]", "allow_code = false\n"])
def test_without_leave_in_the_file_nothing_is_done(corpus: Corpus, line: str) -> None:
    with pytest.raises(
        ConfigError, match=r'audio\.features has "steps/my\.py:Bands", which is code.*allow_code = true'
    ):
        own_config(corpus, run_=line.replace("[plan.x]", "\n"))
    with pytest.raises(ConfigError, match=r"run\.allow_code is what the config's own file says"):
        load_config(corpus.folder / "own.toml", overrides=["run.allow_code=true"])
    with pytest.raises(ConfigError, match="which is code"):
        Own.of("steps/my.py:Bands", {}, folder=corpus.folder, allow_code=False, rate_hz=16_000)
    assert not (corpus.folder / "steps" / "imported.txt").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/tmp/my.py:Bands", r"leads out of the config's folder"),
        ("../my.py:Bands", r"leads out of the config's folder"),
        ("https://host/my.py:Bands", r"names no file beside the config"),
        ("os:getcwd", r'is no "file\.py:class"'),
        ("link.py:Bands", r"link\.py is a link"),
        ("linked/my.py:Bands", r"linked is a link"),
        ("pipe.py:Bands", r"pipe\.py is no regular file"),
        ("missing.py:Bands", r"cannot read .*missing\.py"),
    ],
)
def test_what_is_no_file_beside_the_config_is_refused(corpus: Corpus, spec: str, message: str) -> None:
    own_config(corpus)
    (corpus.folder / "link.py").symlink_to(corpus.folder / "steps" / "my.py")
    (corpus.folder / "linked").symlink_to(corpus.folder / "steps")
    os.mkfifo(corpus.folder / "pipe.py")
    path = corpus.folder / "own.toml"
    path.write_text(path.read_text().replace("steps/my.py:Bands", spec))
    with pytest.raises(ConfigError, match=message):
        recipe_of(load_config(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Bands:\n  pass\n  x = (\n", r"my\.py, line \d: .*never closed"),
        ("class Other: pass", r"my\.py has no class Bands; its classes: Other"),
        (body(RIGHT).replace("version = 1", "pass"), r"needs a version: write version = 1"),
        (body(RIGHT).replace("version = 1", "version = 1 + 1"), r"line 6: version and files are read without running"),
        (body(RIGHT).replace("version = 1", 'version = 1\n    files = ["../x"]'), r'my\.py lists "\.\./x"'),
        (body(RIGHT).replace("version = 1", 'version = 1\n    files = ["no.npy"]'), r"cannot read .*no\.npy"),
        (body(RIGHT).replace("version = 1", "version = 1\n    files = 3"), r"lists its files as they are written"),
        ("(" * 100_000, r"my\.py"),
    ],
)
def test_what_cannot_be_read_without_running_it_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        own_of(tmp_path, source)
    assert caught.value.code == "FB128"


PIECES = st.sampled_from(
    [
        "class Bands:",
        "\n ",
        "\n",
        "version",
        "files",
        " = ",
        "1",
        "[",
        "]",
        "'x'",
        "(",
        ")",
        "-",
        "\\d",
        "lambda: ",
        "\0",
        "\t",
        ":",
        "if 1:",
    ]
)


@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=40).map(lambda parts: "".join(parts).encode())))
def test_a_file_of_anything_is_read_or_refused(content: bytes) -> None:
    version, files = 0, list[str]()
    with contextlib.suppress(ConfigError):
        version, files = written_facts(content, Path("my.py"), "Bands", ASKER)
    assert isinstance(version, int)
    assert isinstance(files, list)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (body(RIGHT, head="import no_such_module"), r"my\.py: importing it raised ModuleNotFoundError.*line 4"),
        (body(RIGHT).replace("compute", "computes"), r"has no method compute"),
        (body(RIGHT).replace('{"shape": [None, 2]}', '{"shape": [None, None]}'), r"x has 2 axes that grow"),
        (body(RIGHT).replace('{"x": {"shape": [None, 2]}}', "{}"), r"its fields: wanted a dict"),
        (body(RIGHT).replace('"shape": [None, 2]', '"shape": [None, 2], "dtype": "text"'), r"the dtype of a field"),
        (body(RIGHT).replace('"x": {"shape"', '"sample_id": {"shape"'), r"'sample_id'.*wanted a new name"),
        (body(RIGHT).replace("fields =", "other ="), r"its fields: wanted a dict"),
        (
            body(RIGHT).replace('{"x": {"shape": [None, 2]}}', '{"x": {"shape": [4], "length": 9}}'),
            r"its fields: x has the shape \[4\] and length = 9: that is of an axis that grows, written as None",
        ),
        (
            body(RIGHT).replace('"shape": [None, 2]', '"shape": [None, 2], "multiple": 0'),
            r"its fields: 'x': wanted the multiple of a field, got 0",
        ),
        (body(RIGHT) + "    @property\n    def fields(self): return 1 / 0\n", r"its fields raised ZeroDivisionError"),
        (body(RIGHT) + "    def __init__(self): raise KeyError('x')", r"cannot be made of its settings.*KeyError"),
        (body(RIGHT) + "Bands.version = 2", r"version and files are \(1, \(\)\) as they are written, and \(2, \(\)\)"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_built(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own_of(tmp_path, source).batch_form()


def test_what_the_probe_finds_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    for source, message in (
        (body("return 1 / 0"), r"raised for each of 4 probe clips, for the first .*ZeroDivisionError"),
        (body("os._exit(9)"), r"exit status 9"),
        (body(RIGHT, head="import beside"), r"ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            own_of(tmp_path, source).check_code()


@pytest.mark.parametrize(
    ("compute", "head", "name"),
    [
        (RIGHT, "other = np.load(os.path.dirname(__file__) + '/other.npy')", "other.npy"),
        (f"open(os.path.dirname(__file__) + '/data/config.txt', 'rb').read(); {RIGHT}", "", "config.txt"),
        (f"import beside_it; {RIGHT}", "sys.path.append(os.path.dirname(__file__))", "beside_it.py"),
    ],
    ids=["opened at import", "opened for a clip", "imported"],
)
@pytest.mark.few("imported", "opened for a clip")
def test_a_file_beside_the_config_that_the_class_does_not_list_is_refused(
    tmp_path: Path, compute: str, head: str, name: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.txt").write_text("3")
    (tmp_path / "beside_it.py").write_text("x = 1\n")
    np.save(tmp_path / "other.npy", np.ones(3))
    own = own_of(tmp_path, body(compute, head=head))
    with pytest.raises(ConfigError, match=rf"my.py:.* reads .*{name}, which it does not list") as caught:
        own.check_code()
    assert caught.value.code == "FB143"


def test_settings_that_the_class_does_not_take_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'band'; it takes bands, scales"):
        own_of(tmp_path, BANDS, band=3).batch_form()


NEVER_TWICE = {
    "chance": 'return {"x": self.right(clip) + np.float32(random.random())}',
    "memory": 'seen.append(1); return {"x": self.right(clip) + np.float32(len(seen))}',
    "set": 'return {"x": self.right(clip) + np.float32(hash("a") % 1000)}',
    "process": 'return {"x": self.right(clip) + np.float32(os.getpid() % 97)}',
}


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(NEVER_TWICE[name], marks=[pytest.mark.wide] if name in ("chance", "process") else [])
        for name in NEVER_TWICE
    ],
    ids=NEVER_TWICE,
)
def test_what_gives_other_values_for_the_same_clip_is_refused(tmp_path: Path, compute: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.py:Bands is not deterministic: for probe clip \d it gave .*no clock"):
        own_of(tmp_path, body(compute)).check_code()


DIFFERENT: dict[str, tuple[str, str]] = {
    "dtype": (
        "return {'x': self.right(clip).astype('f8')}",
        r"returned x as float64 \[\d+, 2\], declared float32 \[n, 2\]",
    ),
    "shape": ("return {'x': self.right(clip)[:, :1]}", r"returned x as float32 \[\d+, 1\], declared float32 \[n, 2\]"),
    "names": ("return {'y': self.right(clip)}", r"returned \['y'\], declared a dict of \['x'\]"),
    "list": ("return {'x': self.right(clip).tolist()}", r"returned list as x, declared an array float32 \[n, 2\]"),
    "none": ("return None", r"returned NoneType, declared a dict"),
    "frames": ("return {'x': self.right(clip)[1:]}", r"returned \d+ frames of x for a clip of \d+ samples, num_frames"),
}


@pytest.mark.parametrize(("compute", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_not_as_declared_stops_the_build_with_both(tmp_path: Path, compute: str, message: str) -> None:
    own = own_of(tmp_path, body(compute))
    with pytest.raises(BuildError, match=message):
        own.compute([np.ones(1600, np.float32)])
    if "None" in compute:
        with pytest.raises(BuildError, match=message):
            own.check_code()


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves two processes."""
    monkeypatch.setattr(Own, "check_code", lambda _: None)


@pytest.mark.usefixtures("trusted")
def test_a_clip_that_raises_costs_itself(corpus: Corpus) -> None:
    compute = 'if len(clip) == 1600: raise KeyError("no")\n        if len(clip) == 4800: clip[0] = np.nan\n        '
    source = body(compute + RIGHT)
    config = own_config(corpus, "run.max_failed_share=1.0", source=source, audio="")
    short = sum(len(clip) == 1600 for clip in corpus.audio.values())
    long = sum(len(clip) == 4800 for clip in corpus.audio.values())
    report = build_here(config)
    assert report.failed == {"not_finite": long, "step_failed": short}
    assert report.num_samples == 17 - short - long


@pytest.mark.usefixtures("trusted")
def test_a_build_that_stops_names_the_sample(corpus: Corpus) -> None:
    source = body("if len(clip) == 4800: return {'x': np.zeros(3)}\n        " + RIGHT)
    with pytest.raises(BuildError, match=r"^sample \S+: .*returned x as float64 \[3\]") as caught:
        build_here(own_config(corpus, source=source, audio=""))
    assert caught.value.code == "FB128"
    sample = str(caught.value).removeprefix("sample ").partition(":")[0]
    assert len(corpus.audio[sample]) == 4800


@pytest.mark.usefixtures("trusted")
def test_a_build_goes_on_where_it_was_interrupted(corpus: Corpus) -> None:
    stop = "if len(clip) == 4800 and os.path.exists(__file__ + '.stop'): raise KeyboardInterrupt\n        "
    config = own_config(corpus, source=body(stop + RIGHT), audio="")
    (corpus.folder / "steps" / "my.py.stop").touch()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        build_here(config)
    (corpus.folder / "steps" / "my.py.stop").unlink()
    report = build_here(config)
    assert report.shards_kept > 0
    other = load_config(corpus.folder / "own.toml", overrides=['run.cache_root="other"'])
    assert shard_bytes(Path(report.cache)) == shard_bytes(Path(build_here(other).cache))


def test_a_clip_of_more_than_a_batch_has_costs_itself(tmp_path: Path) -> None:
    own = own_of(tmp_path, body(RIGHT).replace("[None, 2]}", '[None, 2], "length": 10}'))
    assert own.compute([np.ones(1600, np.float32)])[0]["x"].shape == (10, 2)
    with pytest.raises(DecodeError, match="made 11 frames of x, and a batch has 10") as caught:
        own.compute([np.ones(1760, np.float32)])
    assert caught.value.reason == "step_failed"


def test_a_clip_without_a_frame_is_too_short(tmp_path: Path) -> None:
    own = own_of(tmp_path, body(RIGHT))
    assert own.compute([np.ones(160, np.float32)])[0]["x"].shape == (1, 2)
    with pytest.raises(DecodeError, match="makes no frame of x of a clip of 159 samples") as caught:
        own.compute([np.ones(159, np.float32)])
    assert caught.value.reason == "too_short"


def test_values_beyond_float16_fail_and_others_are_stored_in_it(tmp_path: Path) -> None:
    own = own_of(tmp_path, body('return {"x": self.right(clip)}'), dtype="float16")
    [made] = own.compute([np.full(1600, 0.5, np.float32)])
    assert (made["x"].dtype.name, made["x"].shape) == ("float16", (10, 2))
    with pytest.raises(DecodeError, match=r"set audio\.dtype") as caught:
        own.compute([np.full(160_000, 1.0, np.float32)])
    assert caught.value.reason == "not_finite"


def test_what_a_class_returns_twice_is_not_overwritten(tmp_path: Path) -> None:
    source = body('self.out[:] = clip[0]; return {"x": self.out}') + "    out = np.zeros((10, 2), np.float32)\n"
    first, second = own_of(tmp_path, source).compute([np.full(1600, 0.5, np.float32), np.full(1600, 0.25, np.float32)])
    assert (first["x"][0, 0], second["x"][0, 0]) == (0.5, 0.25)


@pytest.mark.parametrize("name", ["my.py", "weights.npy"])
def test_a_file_that_changes_behind_its_key_is_not_run(tmp_path: Path, name: str) -> None:
    own = own_of(tmp_path, BANDS + f"# {name}\n")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"#\n")
    with pytest.raises(ConfigError, match=rf"{name} has changed: its sha256 was \w{{16}} and is \w{{16}}"):
        own.batch_form()
    assert not (tmp_path / "imported.txt").exists()


@pytest.mark.usefixtures("trusted")
def test_a_field_that_samples_have_anyway_is_refused(corpus: Corpus) -> None:
    source = BANDS.replace('"peak"', '"waveform"')
    with pytest.raises(ConfigError, match=r"Bands makes a field 'waveform', and samples have one"):
        build_here(own_config(corpus, source=source, audio="keep_waveform = true"))


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(("name", "prompt"), [("labels", "plain"), ("decoder_input_ids", "whisper")])
def test_a_field_that_batches_have_of_the_text_is_refused(corpus: Corpus, name: str, prompt: str) -> None:
    source = BANDS.replace('"attention_mask"', f'"{name}"')
    text = (f'text.tokenizer="{MODEL}"', f'text.prompt="{prompt}"')
    config = own_config(corpus, *text, source=source, audio="")
    with pytest.raises(ConfigError, match=f"makes a field '{name}', and a batch has the {name} of .* \"{prompt}\""):
        build_here(config)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Installs a package of a step, as a wheel leaves it, and says where; each time with this source."""
    import base64
    import hashlib

    site = tmp_path / "site"
    for name in ("my_steps", "my_steps.bands"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))

    def install(source: str) -> Path:
        shutil.rmtree(site, ignore_errors=True)
        files = {
            "my_steps/__init__.py": "",
            "my_steps/bands.py": source.replace('files = ["weights.npy"]', "files = []"),
            "my_steps-1.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-steps\nVersion: 1.5\n",
            "my_steps-1.5.dist-info/entry_points.txt": "[forebay.steps]\nbands = my_steps.bands:Bands\n",
        }
        record = ""
        for name, text in files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
            found = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            record += f"{name},sha256={found},{len(text)}\n"
        np.save(site / "my_steps" / "weights.npy", np.array([2.0]))
        (site / "my_steps-1.5.dist-info" / "RECORD").write_text(record + "my_steps-1.5.dist-info/RECORD,,\n")
        return site

    return install


def entry_config(corpus: Corpus, **how: Any) -> Config:
    own_config(corpus, **how)
    path = corpus.folder / "own.toml"
    path.write_text(path.read_text().replace("steps/my.py:Bands", "bands"))
    return load_config(path)


def test_an_installed_step_is_looked_up_and_not_imported(
    corpus: Corpus, installed: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = installed(BANDS) / "my_steps" / "imported.txt"
    config, path = entry_config(corpus), corpus.folder / "own.toml"
    first = recipe_of(config)
    assert run(capsys, "key", path, "--explain")[0] == 0
    assert not ran.exists()
    assert first.document["audio"]["made_by"] == "my_steps.bands:Bands"
    report = build_here(config)
    metadata = json.loads((Path(report.cache) / "metadata.json").read_text())
    assert metadata["made_with"]["my-steps"] == "1.5"
    runs = ran.read_text()
    assert build_here(config).already_sealed
    assert len(batches(config)) == 5
    assert ran.read_text() == runs
    installed(BANDS + "# more\n")
    assert recipe_of(config).key != first.key
    path.write_text(path.read_text().replace("allow_code = true\n", ""))
    with pytest.raises(ConfigError, match=r'audio\.features has "bands", which is code'):
        load_config(path)


def test_an_edited_package_is_not_run_and_an_editable_one_is_read(
    corpus: Corpus, installed: Callable[[str], Path]
) -> None:
    site = installed(BANDS.replace("imported.txt", "../imported.txt"))
    module = site / "my_steps" / "bands.py"
    module.write_text(module.read_text() + "# edited\n")
    with pytest.raises(ConfigError, match=r"my_steps/bands\.py was changed after it was installed"):
        recipe_of(entry_config(corpus)).check()
    record = site / "my_steps-1.5.dist-info" / "RECORD"
    record.write_text("my_steps-1.5.dist-info/RECORD,,\n")
    edited = recipe_of(entry_config(corpus))
    edited.check()
    module.write_text(module.read_text() + "# again\n")
    assert recipe_of(entry_config(corpus)).key != edited.key


def test_a_name_that_nobody_has_is_no_step(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r'audio\.features: unknown step "bands".* "file\.py:Class"'):
        entry_config(corpus)
