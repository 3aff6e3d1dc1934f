"""The networks that steps are measured on, each with a batch of random data of its shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lnb_experiments.data import Split
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.experiments.layers import layer_norm, normal
from lnb_experiments.experiments.mlp import init_mlp, mlp
from lnb_experiments.experiments.transformer import apply_block, init_block


class Target(NamedTuple):
    """Ratios to Adam's step that `norm="neuron"` is to stay below."""

    time: float
    memory: float = 1.60


class Workload(NamedTuple):
    """A loss to take steps on.

    Attributes:
      loss_fn: (params, *args) -> loss.
      params: parameters.
      args: a batch.
      counted: the same loss as XLA counts it right: it counts the body of a loop once.
    """

    loss_fn: Callable[..., jax.Array]
    params: Any
    args: tuple[Any, ...]
    counted: Callable[..., jax.Array] | None = None


def perceptron(widths: tuple[int, ...], batch: int) -> Workload:
    """An MLP with tanh units that classifies."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, widths[0]), np.float32)
    labels = rng.integers(widths[-1], size=batch).astype(np.int32)

    def loss_fn(params, x, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), labels)
        return losses.mean()

    return Workload(loss_fn, init_mlp(jax.random.key(0), widths), (x, labels))


def of_experiment(name: str, preset: str, shape: tuple[int, ...], targets: Any) -> Workload:
    """The network and loss of one of the experiments, on random bytes."""
    experiment = EXPERIMENTS[name].preset(preset)
    rng = np.random.default_rng(0)
    inputs = rng.integers(256, size=(experiment.batch_size, *shape)).astype(np.uint8)
    batch = Split(inputs, targets(rng, experiment.batch_size))
    key = jax.random.key(0)
    return Workload(experiment.loss, experiment.init(key), (batch, key))


def labels(rng: np.random.Generator, *shape: int, classes: int = 10) -> np.ndarray:
    return rng.integers(classes, size=shape).astype(np.int32)


def language_model(
    width: int = 256, blocks: int = 8, tokens: int = 128, batch: int = 16, vocabulary: int = 256
) -> Workload:
    """A causal transformer with tied embeddings: a scan over rematerialised blocks."""
    keys = jax.random.split(jax.random.key(0), blocks + 2)
    stacked = jax.vmap(partial(init_block, width=width, mlp_width=2 * width))(keys[2:])
    params = {
        "embedding": normal(keys[0], (vocabulary, width), std=0.02),
        "positions": normal(keys[1], (tokens, width), std=0.02),
        "blocks": stacked,
    }
    text = labels(np.random.default_rng(0), batch, tokens + 1, classes=vocabulary)

    def loss_fn(params, text, unroll: int = 1):
        inputs, targets = text[:, :-1], text[:, 1:]
        block = jax.checkpoint(lambda x, p: (apply_block(p, x, heads=4, causal=True), None))
        x = params["embedding"][inputs] + params["positions"][None]
        x, _ = jax.lax.scan(block, x, params["blocks"], unroll=unroll)
        logits = layer_norm(x) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return Workload(loss_fn, params, (jnp.asarray(text),), partial(loss_fn, unroll=blocks))


WORKLOADS: dict[str, tuple[Callable[[], Workload], Target]] = {
    "ViT, width 512": (
        partial(of_experiment, "vit", "paper", (32, 32, 3), labels),
        Target(1.12),
    ),
    "ViT, width 96": (
        partial(of_experiment, "vit", "laptop", (32, 32, 3), labels),
        Target(1.10),
    ),
    "UNet 96 x 96": (
        partial(
            of_experiment,
            "unet",
            "laptop",
            (96, 96, 3),
            lambda rng, n: labels(rng, n, 96, 96, classes=21),
        ),
        Target(1.30),
    ),
    "transformer LM, scan + remat": (language_model, Target(1.20)),
    "MLP 784-800-800-10": (
        partial(perceptron, (784, 800, 800, 10), 1000),
        Target(1.60),
    ),
    "autoencoder": (
        partial(of_experiment, "autoencoder", "laptop", (784,), labels),
        Target(1.60),
    ),
}
