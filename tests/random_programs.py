"""Random programs, and whether the library is right about them.

print(make_program(7).description)
check_program(7)  # raises AssertionError, or what the library raises, if it is not
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array, lax
from programs import KINDS, WORDS, Chain, Data, Draw, Loss, Tape, draw_chain, draw_network

import lnb

STEPS = 5
NORMS = ("auto", "neuron")
# Agreement that is asked for, relative to the largest entry. XLA leaves out some of the roundings
# to bfloat16.
TOLERANCES = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 5e-2}


class Program(NamedTuple):
    """A random program, `loss_fn(params, batch)`.

    `dtype` is "float64", "float32", or "bfloat16": float32, with some layers in bfloat16.
    """

    params: Any
    batch: Data
    layers: Chain
    loss: Loss
    dtype: str

    def loss_fn(self, params: Any, batch: Data) -> Array:
        return self.loss.run(self.layers, params, batch)

    @property
    def description(self) -> str:
        sizes = zip(("batch", "time", "width"), self.batch.x.shape, strict=True)
        said = ", ".join(f"{name} {size}" for name, size in sizes)
        return f"{self.dtype}, {said}\n{self.layers}\n{self.loss}"


def make_program(seed: int) -> Program:
    """The same program for the same seed, with its arrays in NumPy."""
    rng = np.random.default_rng(seed)
    while True:
        program = _draw_program(rng)
        if len(jax.tree.leaves(program.params)) <= (5 if program.loss.derivatives else 6):
            return program  # of larger ones, XLA takes too long to compile all


def _draw_program(rng: np.random.Generator) -> Program:
    kind = rng.choice([kind for kind, share in KINDS.items() for _ in range(share)])
    vmapped, constant, penalty = map(bool, rng.random(3) < (0.5, 0.3, 0.3))
    loss = Loss(str(kind), vmapped, constant, penalty)
    dtypes = ["float64"] if loss.derivatives else ["float64"] * 4 + ["float32"] * 2 + ["bfloat16"]
    dtype = str(rng.choice(dtypes))
    largest = (3, 2, 4) if loss.derivatives else (7, 3, 6)  # derivatives by hand are slow
    batch, time, width = map(int, rng.integers((2, 1, 1), np.add(largest, 1)))
    draw = Draw(rng, time, width, largest[-1], half=dtype == "bfloat16")
    if loss.derivatives:
        layers = draw_network(draw, 0 if loss.open_metric else 1, scales=loss.open_metric)
    else:
        layers = draw_chain(draw, depth=2, length=draw.pick(1, 1, 2))
    params = jax.tree.map(lambda p: _cast(p, dtype), layers.init(rng))
    outputs = 1 if loss.derivatives else draw.width
    data = Data(
        x=_cast(rng.normal(size=(batch, time, width)), dtype),
        y=_cast(rng.normal(size=(batch, draw.time, outputs)), dtype),
        tokens=rng.integers(WORDS, size=(batch, time), dtype=np.int32),
        each=rng.random(batch) < 0.5,
        turns=rng.random(4) < 0.5,
        flag=np.asarray(rng.random() < 0.5),
    )
    return Program(params, data, layers, loss, dtype)


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """To float32 or float64; what a layer stores in bfloat16 stays so."""
    if array.dtype != np.float64:
        return array
    return array.astype("float64" if dtype == "float64" else "float32")


# -- what is right --------------------------------------------------------------------------------


def flat(tree: Any) -> dict[str, np.ndarray]:
    """The leaves in float64, by key path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): np.asarray(leaf).astype(np.float64) for path, leaf in leaves}


def check_program(seed: int, norms: tuple[str, ...] = NORMS) -> None:
    """Raises an AssertionError that says what is wrong, or what the library itself raises."""
    program = make_program(seed)
    with settings(program):
        check_values(program, random_like(program.params))
        for norm in norms:
            check_training(program, norm)


@contextlib.contextmanager
def settings(program: Program) -> Iterator[None]:
    """As strict as all tests, and in float64 where the program is."""
    with (
        jax.enable_x64(program.dtype == "float64"),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


def random_like(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(p.dtype), tree)


def check_values(program: Program, vector: Any) -> None:
    """Value and gradient are those of JAX, the metric that of explicit Jacobians."""
    tolerance = TOLERANCES[program.dtype]
    run = jax.jit(functools.partial(measure, program.loss_fn))
    (value, gradient), ours = run(program.params, program.batch, vector)
    assert_close("value", ours.value, value, tolerance)
    for path, expected in flat(gradient).items():
        assert_close(f"gradient of {path}", flat(ours.gradient)[path], expected, tolerance)
    if program.loss.open_metric:
        return
    tape = Tape(flat(program.params), program.loss.derivatives)
    loss = program.loss.by_hand(program.layers, tape, program.batch)
    assert_close("the program by hand", loss, value, tolerance)
    vector, product = flat(vector), flat(ours.product)
    for path, expected in tape.product(vector).items():
        unclaimed = path in tape.lenient and np.array_equal(product[path], vector[path])
        if not unclaimed:
            assert_close(f"metric of {path}", product[path], expected, tolerance)


def check_training(program: Program, norm: str) -> None:
    """Some steps: nothing overflows, and none is left out."""
    run = jax.jit(functools.partial(train, program.loss_fn, norm))
    trained = run(program.params, program.batch)
    what = f"after {STEPS} steps, norm {norm!r}:"
    assert trained.skipped == 0, f"{what} {trained.skipped} were skipped"
    finite = jax.tree.map(lambda x: bool(np.isfinite(x.astype(float)).all()), flat(trained.params))
    assert np.isfinite(trained.losses).all(), f"{what} the losses are {trained.losses}"
    wrong = [path for path, good in finite.items() if not good]
    assert not wrong, f"{what} {wrong} are not finite"


def assert_close(what: str, actual: Any, expected: Any, tolerance: float) -> None:
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    scale = np.max(np.abs(expected), initial=1e-6 if expected.shape else 1.0)
    error = np.max(np.abs(actual - expected), initial=0.0) / scale
    assert error <= tolerance, f"{what}: wrong by {error:.2g} of the largest entry"


# -- what the library says: all calls of it are here ----------------------------------------------


class Measured(NamedTuple):
    value: Array
    gradient: Any
    product: Any


class Trained(NamedTuple):
    params: Any
    losses: Array
    skipped: Array


def measure(loss_fn: Any, params: Any, batch: Data, vector: Any) -> tuple[Any, Measured]:
    """Value and gradient by JAX; the same and the metric times `vector` by the library."""
    neurons = lnb.find_neurons(loss_fn, params, batch)
    value, gradient, features = lnb.backprop(loss_fn, neurons)(params, batch)
    product = lnb.metric_product(neurons, features, vector)
    return jax.value_and_grad(loss_fn)(params, batch), Measured(value, gradient, product)


def train(loss_fn: Any, norm: str, params: Any, batch: Data) -> Trained:
    """Some steps as the README writes them."""
    neurons = lnb.find_neurons(loss_fn, params, batch)
    optimizer = lnb.lnb(0.03, neurons, norm=norm)

    def step(carry: Any, _: None) -> tuple[Any, Array]:
        params, opt_state = carry
        backprop = lnb.backprop(loss_fn, neurons)
        loss, grads, features = backprop(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
        return (optax.apply_updates(params, updates), opt_state), loss

    start = (params, optimizer.init(params))
    (params, opt_state), losses = lax.scan(step, start, None, length=STEPS)
    return Trained(params, losses, lnb.diagnostics(opt_state)["skipped_steps"])
