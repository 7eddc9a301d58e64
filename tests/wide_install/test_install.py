"""The wheel, installed on each Python of this machine with each extra, by pip: it runs, and the extra is there."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from forebay.version import __version__
from tests.inspect.checks.planted import Planted
from tests.processes import ROOT
from tests.test_extras import MISSING, NOT_OF_USERS, extras
from tests.wide_install.environments import (
    VERSIONS,
    Environment,
    base_requirements,
    built_wheel,
    extra_requirements,
    has_small_torch,
    is_without_torch,
    made,
    over,
    pythons,
    ran,
)

USED = {
    "build": "import transformers",
    "train": "import accelerate, jiwer; from forebay.train.loop.launch import process_state",
    "lora": "from forebay.train.models.lora import _peft; _peft()",
    "gpu": "import pynvml",
    "report": "from forebay.inspect.picture import new_figure; new_figure(2.0, 2.0)",
    "hf": "import datasets",
    "diffusers": "import diffusers",
    "remote": "from forebay.store.remote.bucket.bucket import _obstore; _obstore()",
    "ray": "from forebay.preprocess.runner.ray import imported; imported()",
    "zarr": "from forebay.store.cold.arrays import zarr; zarr()",
    "text": "import num2words\n"
    "from forebay.steps.text.language_detector import loaded, model_digest, model_file; "
    "loaded(model_file(), model_digest())",
    "segments": "import webvtt; from praatio.utilities import textgrid_io",
    "video": "import av; from forebay.steps.image.video_frames import require_av; require_av('x')",
    "completion": "import shtab",
}
"""What needs each extra."""

CHECKED = """
import importlib.metadata as metadata
from packaging.requirements import Requirement
checked = 0
for line in metadata.requires("forebay"):
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate({"extra": %r}):
        if wanted.name in %r:
            continue
        have = metadata.version(wanted.name)
        assert wanted.specifier.contains(have), (line, have)
        checked += 1
print(checked)
"""
"""Raises where a package that the wheel asks for is missing, or of another version."""


def test_every_extra_of_users_has_something_that_needs_it() -> None:
    assert sorted(USED) == sorted(set(extras()) - NOT_OF_USERS)
    assert {extra for extra, _, _ in MISSING.values()} <= set(USED)


@pytest.mark.parametrize("extra", ["", *USED])
def test_the_packages_of_this_environment_are_what_setup_cfg_asks_for(extra: str) -> None:
    for line in extra_requirements(extra) if extra else base_requirements():
        wanted = Requirement(line)
        try:
            have = version(wanted.name)
        except PackageNotFoundError:
            pytest.fail(f"{line} is not installed")
        assert wanted.specifier.contains(have), (line, have)


def test_a_python_is_found() -> None:
    assert set(pythons()) <= set(VERSIONS)
    assert pythons()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Callable[[str], Environment]]:
    """Makes the environment of a Python that has forebay without an extra; once a Python, and gone behind the tests."""
    folders = []

    @functools.cache
    def environment(python: str) -> Environment:
        is_whole = has_small_torch(python)
        folders.append(tmp_path_factory.mktemp(f"base{python}"))
        made_ = made(folders[-1] / "venv", python, is_whole=is_whole)
        if is_whole:
            made_.install(wheel)
        else:
            made_.install(wheel, has_dependencies=False)
            made_.install(*filter(is_without_torch, base_requirements()))
        made_.install("packaging")
        return made_

    yield environment
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of three of the demo's recordings."""
    planted = Planted.of_demo(tmp_path_factory.mktemp("install") / "raw")
    planted.keep("en_demo-thanks", "es_demo-thanks", "ru_digits_16")
    return Path(planted.config().path)


def _skipped(python: str) -> None:
    if python not in pythons():
        pytest.skip(f"there is no Python {python} on this machine")


@pytest.mark.wide
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("python", VERSIONS)
def test_forebay_runs_where_it_is_installed_without_an_extra(
    python: str, base: Callable[[str], Environment], config: Path, tmp_path: Path
) -> None:
    _skipped(python)
    environment = base(python)
    where = environment.run("import forebay; print(forebay.__file__)").strip()
    assert Path(where).is_relative_to(environment.packages)
    assert environment.forebay("--version").strip() == f"forebay {__version__}"
    environment.run(CHECKED % ("", set() if environment.is_whole else {"torch", "tensordict", "transformers"}))
    root = ("--cache-root", tmp_path / "caches")
    built = json.loads(environment.forebay("preprocess", config, *root, "--no-progress", "--json"))
    assert (built["sealed"], built["num_samples"]) == (True, 3)
    key = json.loads(environment.forebay("key", config, *root, "--json"))
    assert key["key"] == built["key"]
    assert "3 samples" in environment.forebay("lint", config, *root, "--no-progress")
    assert built["key"][:16] in environment.forebay("inspect", built["cache"])
    if environment.is_whole:
        code = f"import forebay; print(forebay.open_cache({built['cache']!r})[0]['waveform'].dtype)"
        assert environment.run(code).strip() == "torch.int16"


@pytest.mark.wide
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("extra", USED)
@pytest.mark.parametrize("python", VERSIONS)
def test_an_extra_is_what_its_part_of_forebay_needs(
    python: str, extra: str, base: Callable[[str], Environment], wheel: Path, tmp_path: Path
) -> None:
    _skipped(python)
    if not has_small_torch(python) and not all(map(is_without_torch, extra_requirements(extra))):
        pytest.skip(f"{extra} brings torch, and none without CUDA is at hand for Python {python}")
    environment = over(base(python), tmp_path / "venv")
    if environment.is_whole:
        environment.install(f"{wheel}[{extra}]")
    else:
        environment.install(*extra_requirements(extra))
    left = set() if environment.is_whole else {"torch", "tensordict", "transformers"}
    assert int(environment.run(CHECKED % (extra, left))) > 5, "packages that are there in a version that is wanted"
    environment.run(USED[extra])
    shutil.rmtree(environment.folder)


LOADED = """
import hashlib, sys
import forebay
config = forebay.load_config(sys.argv[1], overrides=["loader.cache=require", "run.cache_root=" + sys.argv[2]])
digest = hashlib.sha256()
for batch in forebay.train.make_loader(config):
    for name in sorted(batch):
        digest.update(name.encode() + batch[name].numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.wide
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("demo", ["speech", "any"])
def test_a_cache_is_read_and_trained_from_beside_the_transformers_that_trainers_pin(
    wheel: Path, tmp_path: Path, demo: str
) -> None:
    python, config = "3.11", ROOT / "configs" / f"demo_{demo}.toml"
    if not has_small_torch(python):
        pytest.skip("there is no torch without CUDA at hand")
    ran(sys.executable, "-m", "forebay", "preprocess", config, "--cache-root", tmp_path, "--no-progress", cwd=ROOT)
    wanted = ran(sys.executable, "-c", LOADED, config, tmp_path, cwd=ROOT)
    environment = made(tmp_path / "venv", python, is_whole=True)
    (torch,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    packages = (wheel, torch, "transformers==4.57.*", "accelerate")
    ran(environment.python, "-m", "pip", "install", "--quiet", *packages)
    assert ran(environment.python, "-c", LOADED, config, tmp_path, cwd=tmp_path) == wanted
    shutil.copy(ROOT / "examples" / "hf_trainer.py", tmp_path)
    settings = (f"run.cache_root={tmp_path}", f"train.output_dir={tmp_path / 'run'}", "train.warmup_steps=1")
    trained = (environment.python, tmp_path / "hf_trainer.py", config)
    assert "2 steps, mean loss" in ran(*trained, *settings, "train.max_steps=2", cwd=tmp_path)
    assert "4 steps, mean loss" in ran(*trained, "--resume", *settings, "train.max_steps=4", cwd=tmp_path)
    shutil.rmtree(environment.folder)
