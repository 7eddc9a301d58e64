"""Looking into caches takes none of the packages that training takes: commands run where these cannot be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inspect.checks.planted import Planted
from tests.preprocess.here_pool import build_here
from tests.processes import ROOT, python

TRAINING = (
    *("accelerate", "datasets", "jiwer", "matplotlib", "obstore", "peft", "pynvml", "ray", "shtab", "zarr", "pandas"),
    *("lightning", "tensorboard", "torchdata", "numcodecs"),
)
"""Packages of extras, and of what others train with."""

HEAVY = ("torch", "tensordict", "transformers", "tokenizers", "soundfile", "soxr", "scipy")
"""What comes with forebay, and is for making features, batches and tokens."""
BUILDING = ("transformers", "tokenizers", "huggingface_hub", "soundfile", "soxr", "scipy", "PIL")
"""What a build takes and reading does not."""

BLOCKER = """
import sys
BLOCKED = frozenset(%r)
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def blocking(folder: Path, *names: str) -> Path:
    """Returns a folder whose sitecustomize.py makes packages missing, in workers too."""
    (folder / "sitecustomize.py").write_text(BLOCKER % (names,))
    return folder


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes both kinds of packages missing."""
    return blocking(tmp_path_factory.mktemp("blocked"), *TRAINING, *HEAVY)


def forebay(without: Path, *arguments: object, is_code: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs `forebay ARGUMENTS`, or code, where the packages are missing."""
    how = ["-c"] if is_code else ["-m", "forebay"]
    return subprocess.run(
        [sys.executable, *how, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{without}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_packages_are_missing_there(without: Path) -> None:
    for name in ("torch", "accelerate"):
        result = forebay(without, f"import {name}", is_code=True)
        assert f"No module named '{name}'" in result.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of three of the demo's recordings with features and tokens, and its config beside its folder."""
    planted = Planted.of_demo(tmp_path_factory.mktemp("light") / "raw")
    planted.keep("en_demo-thanks", "es_demo-thanks", "ru_digits_16")
    return Path(build_here(planted.config('audio.features="log_mel"', text=True)).cache)


COMMANDS = (
    (("--version",), "forebay "),
    (("--help",), "COMMAND"),
    (("cache", "--help"), "ACTION"),
    (("inspect", "CACHE"), "planted"),
    (("inspect", "CACHE", "--sample", "0"), "not decoded: a cache does not hold its tokenizer"),
    (("inspect", "CACHE", "--verify", "--no-progress"), "verify: ok"),
    (("inspect", "CACHE", "--json"), '"key"'),
    (("inspect", "CONFIG", "--set", "audio.features=log_mel"), "planted"),
    (("key", "CONFIG", "--set", "audio.features=log_mel"), "(sealed)"),
    (("key", "configs/demo_speech.toml", "--cache-root", "NOWHERE", "--no-hash"), "recipe key: "),
    (("key", "configs/demo_vision.toml", "--cache-root", "NOWHERE", "--no-hash"), "recipe key: "),
    (("key", "configs/demo_any.toml", "--cache-root", "NOWHERE", "--no-hash"), "recipe key: "),
    (("lint", "--explain-checks"), "silent (error)"),
    (("key", "CONFIG", "--cache-root", "NOWHERE", "--json"), '"key": "'),
    (("cache", "subset", "CACHE", "--where", "duration_s > 1", "--out", "NOWHERE/part", "--no-progress"), "part"),
    (("inspect", "NOWHERE/part", "--export", "NOWHERE/rows.parquet"), "rows.parquet"),
)
ONE_PROCESS = """
import sys
from forebay import cli
for arguments in %r:
    print("\\0", end="")
    try:
        code = cli.main([*arguments])
    except SystemExit as end:
        code = end.code
    print("\\0", code, end="")
"""


def test_commands_need_no_training_packages(without: Path, cache: Path, tmp_path: Path) -> None:
    """All of them in one process: what one of them loads is no package that is missing."""
    places = {"CACHE": str(cache), "CONFIG": str(cache.parents[1] / "config.toml"), "NOWHERE": str(tmp_path)}
    asked = [[re.sub("^[A-Z]+", lambda m: places.get(m[0], m[0]), part) for part in words] for words, _ in COMMANDS]
    result = forebay(without, ONE_PROCESS % asked, is_code=True)
    assert (result.returncode, result.stderr) == (0, "")
    outs, codes = result.stdout.split("\0")[1::2], result.stdout.split("\0")[2::2]
    assert [code.strip() for code in codes] == ["0"] * len(COMMANDS)
    for out, (words, says) in zip(outs, COMMANDS, strict=True):
        assert says in out, words
    assert (tmp_path / "rows.parquet").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        (("--help",), ("numpy.ma", "forebay.steps", "forebay.caches")),
        (("inspect", "CACHE"), ("forebay.steps.recipe", "forebay.preprocess", "forebay.rows", "pydantic")),
        (("cache", "ls", "--cache-root", "ROOT"), ("forebay.steps.recipe", "forebay.preprocess")),
        (("key", "CONFIG", "--set", "audio.features=log_mel"), ("forebay.preprocess.groups", "pyarrow.compute")),
    ],
)
def test_a_look_imports_nothing_that_takes_long(
    cache: Path, arguments: tuple[str, ...], others: tuple[str, ...], tmp_path: Path
) -> None:
    places = {"CACHE": cache, "CONFIG": cache.parents[1] / "config.toml", "ROOT": cache.parent}
    result = forebay(
        tmp_path,
        "import sys, runpy; sys.argv = ['forebay', *sys.argv[1:]]\n"
        "try: runpy.run_module('forebay', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, *sys.modules, file=sys.stderr)",
        *(places.get(part, part) for part in arguments),
        is_code=True,
    )
    code, *names = result.stderr.split()
    assert (code, "forebay.cli" in names) == ("0", True)
    assert not {"pandas", "pyarrow.dataset", "asyncio", *HEAVY, *others}.intersection(names)


def test_the_package_reads_a_cache_without_torch(without: Path, cache: Path) -> None:
    code = (
        f"import forebay; cache = forebay.open_cache({str(cache)!r}); cache.samples; print(len(cache), *cache.read(0))"
    )
    result = forebay(without, code, is_code=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split()[0] == "3"


READ = """
import forebay
config = forebay.load_config(%r, overrides=[
    "audio.features=log_mel", "plan={kind='bucket', batch_seconds=4}", "loader.cache=require",
])
loader = forebay.train.make_loader(config)
batches = list(loader)
loader.load_state_dict(loader.state_dict())
print(sum(len(batch["labels"]) for batch in batches), sorted(batches[0]))
"""


def test_a_cache_is_planned_and_loaded_beside_reading_s_packages_alone(cache: Path, tmp_path: Path) -> None:
    config = str(cache.parents[1] / "config.toml")
    blocked = forebay(blocking(tmp_path, *TRAINING, *BUILDING), READ % config, is_code=True)
    assert (blocked.returncode, blocked.stderr) == (0, "")
    everything = python("-c", READ % config)
    assert blocked.stdout == everything.stdout
    assert blocked.stdout.startswith("3 ")
