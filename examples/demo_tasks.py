"""The four tasks of demo.py: networks in plain JAX, and data that needs no download.

The images are scikit-learn's handwritten digits, 8 x 8 pixels. The text is the source code of
Python's own standard library, which every installation has.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

DIGITS_BATCH, TEXT_BATCH, CONTEXT = 1024, 16, 64
WIDTH, HEADS, BLOCKS, CHARACTERS = 64, 4, 2, 128  # of the transformer


class Network(NamedTuple):
    """How to make the parameters, and the loss of a batch."""

    init: Callable  # key -> params
    loss: Callable  # (params, batch) -> mean loss


class Task(NamedTuple):
    """What to train, on what."""

    title: str
    unit: str  # what the loss is
    network: Network
    sample: Callable  # a random generator -> a training batch
    validation: Any
    test: Any


# Networks: "hidden" holds the layers that are neither first nor last.


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    weight = jax.random.normal(key, (inputs, outputs)) / inputs**0.5
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def apply(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["weight"] + layer["bias"]


def init_layers(sizes: tuple[int, ...], key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, len(sizes) - 1)
    first, *hidden, last = map(dense, keys, sizes[:-1], sizes[1:])
    return {"first": first, "hidden": hidden, "last": last}


def apply_layers(params: dict[str, Any], x: jax.Array, activation: Callable) -> jax.Array:
    for layer in (params["first"], *params["hidden"]):
        x = activation(apply(layer, x))
    return apply(params["last"], x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classifier_loss(params, batch):
    images, labels = batch
    return cross_entropy(apply_layers(params, images, jax.nn.relu), labels)


def autoencoder_loss(params, batch):
    images, _ = batch
    return jnp.sum((apply_layers(params, images, jnp.tanh) - images) ** 2, axis=-1).mean()


def init_transformer(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 3 + 6 * BLOCKS))
    shapes = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    norm = {"scale": jnp.ones(WIDTH), "offset": jnp.zeros(WIDTH)}
    block = lambda: {
        "norms": [norm, norm],
        **{name: dense(next(keys), *shape) for name, shape in shapes.items()},
    }
    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (CHARACTERS, WIDTH)),
        "positions": 0.02 * jax.random.normal(next(keys), (CONTEXT, WIDTH)),
        "hidden": [block() for _ in range(BLOCKS)],
        "norm": norm,
        "last": dense(next(keys), WIDTH, CHARACTERS),
    }


def normalize(norm: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * norm["scale"] + norm["offset"]


def attention(block: dict[str, Any], x: jax.Array) -> jax.Array:
    heads = lambda name: apply(block[name], x).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
    mixed = jax.nn.dot_product_attention(
        heads("query"), heads("key"), heads("value"), is_causal=True
    )
    return apply(block["out"], mixed.reshape(x.shape))


def transformer_loss(params, text):
    x = params["embedding"][text[:, :-1]] + params["positions"]
    for block in params["hidden"]:
        x = x + attention(block, normalize(block["norms"][0], x))
        hidden = jax.nn.gelu(apply(block["up"], normalize(block["norms"][1], x)))
        x = x + apply(block["down"], hidden)
    return cross_entropy(apply(params["last"], normalize(params["norm"], x)), text[:, 1:])


# Data


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves each image by up to one pixel in both directions: there are only 1,078 to train on."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)), mode="edge")
    rows, columns = rng.integers(3, size=(2, len(images), 1)) + np.arange(8)
    image = np.arange(len(images))[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].reshape(images.shape)


def split_digits(images: np.ndarray, labels: np.ndarray) -> tuple[Callable, Any, Any]:
    """A sampler of training images (60%), validation images and test images (20% each)."""
    order = np.random.default_rng(0).permutation(len(labels))
    train, validation, test = np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10])

    def sample(rng):
        rows = rng.choice(train, DIGITS_BATCH, replace=False)
        return shift(images[rows], rng), labels[rows]

    return sample, (images[validation], labels[validation]), (images[test], labels[test])


def split_text() -> tuple[Callable, np.ndarray, np.ndarray]:
    """The same for the source code of Python's standard library, file by file."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_bytes() for file in files]
    join = lambda texts: np.frombuffer(b"".join(texts), np.uint8).astype(np.int32) % CHARACTERS
    train = join(text for i, text in enumerate(texts) if i % 10 > 1)

    def sample(rng, text=train, count=TEXT_BATCH):
        starts = rng.integers(len(text) - CONTEXT - 1, size=count)
        return text[starts[:, None] + np.arange(CONTEXT + 1)]

    fixed = lambda i: sample(np.random.default_rng(i), join(texts[i::10]), 8 * TEXT_BATCH)
    return sample, fixed(0), fixed(1)


def make_tasks() -> list[Task]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    mlp = Network(partial(init_layers, (64, 128, 128, 128, 10)), classifier_loss)
    sizes = (64, 128, 128, 128, 16, 128, 128, 128, 64)
    autoencoder = Network(partial(init_layers, sizes), autoencoder_loss)
    transformer = Network(init_transformer, transformer_loss)
    digits, inverted = split_digits(images, labels), split_digits(1 - images, labels)
    return [
        Task("MLP on x", "cross-entropy", mlp, *digits),
        Task("MLP on 1 - x", "cross-entropy", mlp, *inverted),
        Task("autoencoder", "squared error", autoencoder, *digits),
        Task("transformer", "nats per character", transformer, *split_text()),
    ]
