"""How fast losses fall: LNB's defaults beside AdamW and Muon on an MLP, a CNN and a transformer.

Every optimizer has the same three-point budget of learning rates; the table shows the rate with the
lowest training loss. Nothing else is tuned: one setting of LNB serves all three networks.

    python -m benchmarks.convergence DATA      # DATA/mnist/*.gz, DATA/cifar-10-batches-bin/*.bin
"""

import gzip
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lnb


class Data(NamedTuple):
    images: Any
    labels: Any


def load_mnist(folder: Path) -> tuple[Data, Data]:
    def read(name: str, offset: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((folder / "mnist" / name).read_bytes())[offset:], "u1")

    def part(name: str) -> Data:
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 784)
        labels = read(f"{name}-labels-idx1-ubyte.gz", 8)
        return Data(images.astype(np.float32) / 255, labels.astype(np.int32))

    return part("train"), part("t10k")


def load_cifar(folder: Path) -> tuple[Data, Data]:
    def part(*names: str) -> Data:
        files = [folder / "cifar-10-batches-bin" / f"{name}.bin" for name in names]
        records = np.concatenate([np.fromfile(file, "u1").reshape(-1, 3073) for file in files])
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) / np.float32(255)
        mean = np.asarray([0.4914, 0.4822, 0.4465], np.float32)
        std = np.asarray([0.2023, 0.1994, 0.2010], np.float32)
        return Data((images - mean) / std, records[:, 0].astype(np.int32))

    return part(*(f"data_batch_{i}" for i in range(1, 6))), part("test_batch")


def normal(key, *shape: int, fan_in: int | None = None) -> jax.Array:
    return jax.random.normal(key, shape) / (fan_in or shape[0]) ** 0.5


def mlp_init(key):
    sizes, keys = (784, 800, 800, 10), jax.random.split(key, 3)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [
        {"w": (2 / (1 + n / m)) ** 0.5 * normal(key, m, n), "b": jnp.zeros(n)}
        for key, m, n in pairs
    ]


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cnn_init(key):
    shapes, keys = [(3, 16), (16, 32), (32, 64)], jax.random.split(key, 4)
    convs = [
        {"w": 2**0.5 * normal(key, 3, 3, m, n, fan_in=9 * m), "b": jnp.zeros(n)}
        for key, (m, n) in zip(keys, shapes, strict=False)
    ]
    return {"convs": convs, "head": {"w": normal(keys[3], 64, 10), "b": jnp.zeros(10)}}


def cnn(params, x):
    for layer in params["convs"]:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["w"], (2, 2), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x + layer["b"])
    return x.mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]


WIDTH, HEADS, HIDDEN, DEPTH = 96, 4, 192, 4


def vit_init(key):
    keys = iter(jax.random.split(key, 4 + 6 * DEPTH))

    def block():
        attention = {name: normal(next(keys), WIDTH, WIDTH) for name in "qkvo"}
        up = {"w1": normal(next(keys), WIDTH, HIDDEN), "b1": jnp.zeros(HIDDEN)}
        down = {"w2": normal(next(keys), HIDDEN, WIDTH), "b2": jnp.zeros(WIDTH)}
        return attention | up | down

    return {
        "patch": {"w": normal(next(keys), 48, WIDTH), "b": jnp.zeros(WIDTH)},
        "positions": 0.02 * jax.random.normal(next(keys), (65, WIDTH)),
        "token": 0.02 * jax.random.normal(next(keys), (1, WIDTH)),
        "head": {"w": normal(next(keys), WIDTH, 10), "b": jnp.zeros(10)},
        "blocks": [block() for _ in range(DEPTH)],
    }


def vit(params, x):
    n = len(x)

    def norm(x):
        return jax.nn.standardize(x, epsilon=1e-5)

    def heads(x):
        return x.reshape(n, 65, HEADS, -1)

    x = x.reshape(n, 8, 4, 8, 4, 3).transpose(0, 1, 3, 5, 2, 4).reshape(n, 64, 48)
    x = x @ params["patch"]["w"] + params["patch"]["b"]
    token = jnp.broadcast_to(params["token"], (n, 1, WIDTH))
    x = jnp.concatenate([token, x], axis=1) + params["positions"]
    for p in params["blocks"]:
        h = norm(x)
        mixed = jax.nn.dot_product_attention(*(heads(h @ p[name]) for name in "qkv"))
        x = x + mixed.reshape(n, 65, WIDTH) @ p["o"]
        x = x + (jax.nn.gelu(norm(x) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])
    return norm(x)[:, 0] @ params["head"]["w"] + params["head"]["b"]


class Task(NamedTuple):
    load: Callable
    init: Callable
    predict: Callable
    batch: int
    steps: int


TASKS = {
    "MLP 784-800-800-10, MNIST": Task(load_mnist, mlp_init, mlp, 1000, 120),
    "CNN 16-32-64, CIFAR-10": Task(load_cifar, cnn_init, cnn, 128, 150),
    "ViT width 96, 4 blocks, CIFAR-10": Task(load_cifar, vit_init, vit, 128, 100),
}


class Contender(NamedTuple):
    make: Callable  # (learning_rate, neurons) -> optimizer
    rates: tuple[float, float, float]
    boosted: bool = True


CONTENDERS = {
    "optax.adamw": Contender(lambda rate, _: optax.adamw(rate), (1e-3, 3e-3, 1e-2), False),
    "optax.contrib.muon": Contender(
        lambda rate, _: optax.contrib.muon(rate), (0.01, 0.02, 0.04), False
    ),
    "lnb.lnb": Contender(lnb.lnb, (0.015, 0.03, 0.06)),
    "lnb.algorithm2": Contender(lnb.algorithm2, (0.1, 0.3, 1.0)),
}


def train(task: Task, data: tuple[Data, Data], contender: Contender, rate: float, seed: int):
    """Final smoothed training loss, test accuracy in percent, milliseconds a step."""
    training, test = data
    params = task.init(jax.random.key(seed))

    def loss_fn(params, batch):
        logits = task.predict(params, batch.images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    def pick(rows):
        return Data(training.images[rows], training.labels[rows])

    neurons = lnb.find_neurons(loss_fn, params, pick(np.arange(task.batch)))
    optimizer = optax.with_extra_args_support(contender.make(rate, neurons))

    @jax.jit
    def step(params, opt_state, batch):
        if contender.boosted:
            loss, grads, features = lnb.backprop(loss_fn, neurons)(params, batch)
        else:
            (loss, grads), features = jax.value_and_grad(loss_fn)(params, batch), None
        updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(seed)
    epochs = -(-task.steps * task.batch // len(training.labels))
    order = np.concatenate([rng.permutation(len(training.labels)) for _ in range(epochs)])
    opt_state = optimizer.init(params)
    jax.block_until_ready(step(params, opt_state, pick(order[: task.batch])))  # compiles
    losses, start = [], time.perf_counter()
    for rows in order[: task.steps * task.batch].reshape(task.steps, task.batch):
        params, opt_state, loss = step(params, opt_state, pick(rows))
        losses.append(float(loss))
    seconds = time.perf_counter() - start
    predict = jax.jit(task.predict)
    parts = np.arange(len(test.labels)).reshape(-1, 500)
    hits = [predict(params, test.images[i]).argmax(-1) == test.labels[i] for i in parts]
    return np.mean(losses[-20:]), 100 * np.mean(np.asarray(hits)), 1e3 * seconds / task.steps


def main(folder: str, seed: int = 0) -> None:
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, seed {seed}; each optimizer at"
    )
    print("the best of three learning rates, by the mean training loss of the last 20 steps")
    for title, task in TASKS.items():
        data = task.load(Path(folder))
        print(f"\n{title}: {task.steps} steps of {task.batch}")
        print(f"{'optimizer':<20}{'rate':>8}{'loss':>8}{'test %':>8}{'ms a step':>11}  (losses)")
        for name, contender in CONTENDERS.items():
            runs = {rate: train(task, data, contender, rate, seed) for rate in contender.rates}
            rate = min(runs, key=lambda rate: runs[rate][0])
            loss, accuracy, ms = runs[rate]
            losses = ", ".join(f"{r:g}: {run[0]:.3f}" for r, run in runs.items())
            row = f"{name:<20}{rate:>8g}{loss:>8.3f}{accuracy:>8.1f}{ms:>11.1f}"
            print(f"{row}  ({losses})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
