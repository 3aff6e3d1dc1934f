"""Weights that meet data in two orientations: tied layers, and derivatives inside of the loss."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import OPTIMIZERS

import lnb


class Problem(NamedTuple):
    loss_fn: Callable
    params: Any
    batch: tuple


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp(*widths: int) -> list[dict[str, jax.Array]]:
    pairs = enumerate(itertools.pairwise(widths))
    return [
        {"w": normal(i, *pair) / pair[0] ** 0.5, "b": 0.1 * normal(i, pair[1])} for i, pair in pairs
    ]


def apply(params, x: jax.Array) -> jax.Array:
    """The scalar output of a network for one input vector."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[0]


def tied() -> Problem:
    """An autoencoder whose decoder is its encoder, transposed."""

    def loss_fn(params, x):
        code = jnp.tanh(x @ params["w"] + params["b"][None])
        return jnp.mean((code @ params["w"].T + params["c"][None] - x) ** 2)

    params = {"w": normal(0, 10, 5) / 3, "b": 0.1 * normal(1, 5), "c": jnp.zeros(10)}
    return Problem(loss_fn, params, (normal(2, 16, 10),))


def physics() -> Problem:
    """Burgers' equation: the network's derivatives satisfy u_t + u u_x = u_xx / 10."""

    def residual(params, point):
        u = lambda point: apply(params, point)
        u_x, u_t = jax.grad(u)(point)
        u_xx = jax.hessian(u)(point)[0, 0]
        return u_t + u(point) * u_x - 0.1 * u_xx

    def loss_fn(params, points, initial):
        inside = jax.vmap(residual, (None, 0))(params, points)
        starts = jnp.stack([initial, jnp.zeros_like(initial)], axis=-1)
        start = jax.vmap(apply, (None, 0))(params, starts) + jnp.sin(initial)
        return jnp.mean(inside**2) + jnp.mean(start**2)

    return Problem(loss_fn, mlp(2, 8, 8, 1), (normal(3, 16, 2), normal(4, 12)))


def critic() -> Problem:
    """A Wasserstein critic, whose gradient with respect to its input has a norm near 1."""

    def loss_fn(params, real, fake):
        score = jax.vmap(apply, (None, 0))
        slope = jax.vmap(jax.grad(apply, argnums=1), (None, 0))(params, (real + fake) / 2)
        penalty = jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)
        return jnp.mean(score(params, fake)) - jnp.mean(score(params, real)) + 10 * penalty

    return Problem(loss_fn, mlp(4, 8, 8, 1), (normal(5, 16, 4) + 1, normal(6, 16, 4)))


def score_matching() -> Problem:
    """The score of an unnormalised density: squared gradient and trace of the Hessian."""

    def loss_fn(params, x):
        slope = jax.vmap(jax.grad(apply, argnums=1), (None, 0))(params, x)
        curvature = jax.vmap(jax.hessian(apply, argnums=1), (None, 0))(params, x)
        trace = jnp.trace(curvature, axis1=1, axis2=2)
        return jnp.mean(0.5 * jnp.sum(slope**2, axis=-1) + trace)

    return Problem(loss_fn, mlp(3, 6, 1), (normal(7, 16, 3),))


def forces() -> Problem:
    """Energies and forces: the latter are the energy's gradients."""

    def loss_fn(params, positions, energies, forces):
        value_and_grad = jax.vmap(jax.value_and_grad(apply, argnums=1), (None, 0))
        predicted, gradients = value_and_grad(params, positions)
        return jnp.mean((predicted - energies) ** 2) + jnp.mean((gradients + forces) ** 2)

    batch = (normal(8, 16, 6), normal(9, 16), normal(10, 16, 6))
    return Problem(loss_fn, mlp(6, 8, 8, 1), batch)


PROBLEMS = {f.__name__: f for f in (tied, physics, critic, score_matching, forces)}


def train(problem: Problem, make_optimizer: Callable, rate: float, steps: int) -> list[float]:
    loss_fn, params, batch = problem
    neurons = lnb.find_neurons(loss_fn, params, *batch)
    assert not neurons.unclaimed
    optimizer = make_optimizer(rate, neurons)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, grads, features = lnb.backprop(loss_fn, neurons)(params, *batch)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tied_layer_with_a_bias(name):
    losses = train(tied(), OPTIMIZERS[name], 0.1, 30)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_training(name):
    losses = train(PROBLEMS[name](), lnb.lnb, 0.01, 60)
    assert losses[-1] < losses[0] - 0.3 * abs(losses[0])
