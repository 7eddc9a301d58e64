"""Trains in JAX on batches of a cache: arrays of the loader's own memory, without torch in the step.

python examples/jax_loop.py configs/demo_speech.toml [section.field=value ...]

The model is one matrix, which says the first token of a clip from the mean of its log-mels: enough to show the loop.
`make test-frameworks` runs it in an environment with JAX.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import forebay


def first_targets(labels: np.ndarray) -> np.ndarray:
    """Returns the first label of each row that is learnt, int64 [batch]."""
    return labels[np.arange(len(labels)), (labels >= 0).argmax(axis=1)]


def loss_of(weights: jax.Array, features: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of one token a clip. features: [batch, n_mels, frames]."""
    logits = features.mean(axis=2) @ weights
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps; returns their losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config, output="numpy")
    constants = loader.source.constants
    weights = jnp.zeros((constants["n_mels"], constants["vocab_size"]))
    step = jax.jit(jax.value_and_grad(loss_of))
    losses: list[float] = []
    while len(losses) < config.train.max_steps:
        for batch in loader:  # one epoch; shapes are few: every clip is padded to 30 s, and the last batch is smaller
            targets = first_targets(batch["labels"])
            loss, gradient = step(weights, jnp.asarray(batch["input_features"]), jnp.asarray(targets))
            weights -= 0.5 * gradient
            losses.append(float(loss))
            if len(losses) == config.train.max_steps:
                break
    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
