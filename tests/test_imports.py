"""Modules that an import loads, in a fresh interpreter: finding and reading a cache needs none of the heavy ones."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tests.processes import ROOT, python

HEAVY = (
    "PIL",
    "accelerate",
    "forebay.steps.audio.spectrum",
    "pandas",
    "pyarrow",
    "pydantic",
    "soundfile",
    "soxr",
    "tensordict",
    "torch",
    "transformers",
)
GOLDEN = "tests/golden/v4_audio/golden-train-audio"


def loaded(code: str) -> str:
    """Runs code at the repository root and returns which of the heavy modules it has loaded."""
    report = f"\nimport sys\nprint(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    result = python("-c", code + report, is_warm=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


def test_type_checkers_find_the_package_in_an_editable_install() -> None:
    """They read `.pth` files and run no finder of imports; [editable_wheel] of setup.cfg says which is written."""
    site = Path(sysconfig.get_path("purelib"))
    named = [Path(line) for path in site.glob("*forebay*.pth") for line in path.read_text().splitlines()]
    assert any((folder / "forebay" / "py.typed").is_file() for folder in [site, *named])


def test_nothing_heavy_is_loaded() -> None:
    """One process for all: what the first of them loads would be there for the last."""
    codes = (
        "import forebay",
        "import forebay.config, forebay.steps.recipe, forebay.steps.table, forebay.errors",
        "forebay.load_config; forebay.config",
        "import forebay.store.cache, forebay.store.key, forebay.store.lookup, forebay.store.seal",
        f"cache = forebay.open_cache({GOLDEN!r}); cache.read(0); cache.lengths['num_frames'].sum()",
        f"from forebay.store.cache import open_cache; open_cache({GOLDEN!r}).shard('text', 0).strings('text')",
    )
    assert loaded("\n".join(codes)) == ""


def test_a_local_cache_loads_nothing_of_stores() -> None:
    read = f"import forebay; forebay.open_cache({GOLDEN!r}).read(0)"
    names = "import sys; print([name for name in sys.modules if 'remote.' in name or name == 'obstore'])"
    result = python("-c", f"{read}; {names}", is_warm=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]")


def test_plans_load_nothing_heavy() -> None:
    files = sorted((ROOT / "forebay" / "plan").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert "forebay.plan.cursor" in names
    assert loaded(f"import {', '.join(names)}") == ""


def test_tensors_load_torch_and_the_row_table_loads_arrow_and_neither_the_other() -> None:
    opened = f"import forebay; cache = forebay.open_cache({GOLDEN!r}); "
    assert loaded(opened + "cache[0]") == "torch"
    # pyarrow loads pandas where that is installed
    assert loaded(opened + "cache.samples") in {"pyarrow", "pandas pyarrow"}


def test_a_config_loads_pydantic_alone() -> None:
    assert loaded("import forebay; forebay.load_config('configs/demo_speech.toml')") == "pydantic"


def test_finding_a_cache_loads_no_step_s_compute() -> None:
    names = [str(path) for path in sorted((ROOT / "configs").glob("*.toml")) if path.stem != "demo_remote"]
    assert len(names) > 4  # without demo_remote, whose lookup asks a store
    code = (
        "import forebay; from forebay.steps.recipe import recipe_of; from forebay.store.lookup import find_cache\n"
        f"for name in {names}:\n"
        "    config = forebay.load_config(name, overrides=['run.cache_root=nowhere'])\n"
        "    assert find_cache(config, recipe_of(config)).found is None"
    )
    assert loaded(code) == "pydantic"


def test_every_step_is_imported_without_what_computes_it() -> None:
    code = (
        "from forebay.steps.table import STEPS, settings_of\n"
        "named = [(table, name) for table in STEPS for name in STEPS[table]]\n"
        "assert [name for table, name in named if 'version' in settings_of(table, name)] == []"
    )
    assert loaded(code) == ""


def test_the_standard_inspect_is_not_hidden_at_the_root() -> None:
    assert loaded("import inspect, torch; inspect.signature") == "torch"


def test_every_public_name_of_the_package_is_there() -> None:
    code = "import forebay; [getattr(forebay, name) for name in forebay.__all__ if name not in {'preprocess', 'train'}]"
    assert loaded(code) == ""
    unknown = "import forebay\ntry:\n    forebay.nothing\nexcept AttributeError as err:\n    print(err)"
    assert loaded(unknown).startswith("module 'forebay' has no attribute 'nothing'")


def test_lazy_names_are_listed_and_completed_without_being_loaded() -> None:
    code = (
        "import rlcompleter, forebay\n"
        "for room in (forebay, forebay.train, forebay.preprocess):\n"
        "    assert set(room.__all__) <= set(dir(room)), dir(room)\n"
        "    assert not {'Any', 'annotations', 'importlib', 'TYPE_CHECKING'} & set(dir(room)), dir(room)\n"
        "complete = rlcompleter.Completer({'forebay': forebay}).complete\n"
        "found = [complete('forebay.', i) for i in range(20)]\n"
        "assert {'forebay.train', 'forebay.open_cache(', 'forebay.config'} <= set(found), found\n"
        "assert complete('forebay.train.nothing', 0) is None"
    )
    assert loaded(code) == ""
