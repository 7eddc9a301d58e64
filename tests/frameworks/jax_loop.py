"""The example of JAX, in an environment that has it: `make test-frameworks`. Not collected by `make test`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

import forebay

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jax_loop", ROOT / "examples" / "jax_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_learns(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run.cache_root={tmp_path}", "train.max_steps=12"]
    losses = example.main(str(ROOT / "configs" / "demo_speech.toml"), overrides)
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert capsys.readouterr().out.endswith(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n")


def test_arrays_are_the_tensors_of_the_same_loader(tmp_path: Path) -> None:
    config = forebay.load_config(ROOT / "configs" / "demo_speech.toml", overrides=[f"run.cache_root={tmp_path}"])
    forebay.preprocess.build(config)
    pairs = zip(forebay.train.make_loader(config, output="numpy"), forebay.train.make_loader(config), strict=True)
    for arrays, tensors in pairs:
        assert list(arrays) == list(tensors)
        for name, array in arrays.items():
            assert isinstance(array, np.ndarray)
            found = np.asarray(jnp.asarray(array))  # JAX has int32 where it is not told otherwise
            assert np.array_equal(found, tensors[name].numpy().astype(found.dtype))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
