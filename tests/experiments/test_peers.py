"""Peers against their papers' equations, written out in NumPy and followed step by step."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lnb_experiments import peers
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.method import Problem
from lnb_experiments.optimizers import OPTIMIZERS
from lnb_experiments.peers.muon import hidden
from lnb_experiments.peers.psgd import learn, precondition, scale_by_psgd
from lnb_experiments.peers.shampoo import scale_by_shampoo
from lnb_experiments.peers.soap import scale_by_soap

SHAPES = {"layers": [{"weight": (6, 4), "bias": (4,)}], "conv": (2, 2, 3, 5), "stack": (2, 3, 4)}
PEERS = "adamw muon soap psgd schedule-free nadamw shampoo prodigy".split()


@pytest.fixture(autouse=True)
def standard_promotion():
    """Which optax's Adam needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda shape: scale * rng.normal(size=shape), SHAPES, is_leaf=is_shape)


def follow(optimizer, steps=12, rates=None):
    """The directions, or with rates the parameters, that a transformation gives to random
    gradients; and its state after each step."""
    params = jax.tree.map(jnp.asarray, arrays(0))
    update = jax.jit(lambda rate, g, s, p: optimizer(rate).update(g, s, p))
    state = optimizer(0.0).init(params)
    for t in range(1, steps + 1):
        rate = rates[t - 1] if rates else 1.0
        updates, state = update(rate, jax.tree.map(jnp.asarray, arrays(t)), state, params)
        params = optax.apply_updates(params, updates) if rates else params
        yield jax.tree.map(np.asarray, params if rates else updates), state


def matrices(tree):
    """By name: the weight, the convolution as a matrix, the first matrix of the stack."""
    return {
        "weight": tree["layers"][0]["weight"],
        "conv": tree["conv"].reshape(12, 5),
        "stack": tree["stack"][0],
    }


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), found, expected)


def adam(gradients, b1, b2, eps=1e-8):
    """Adam's directions, for each of a sequence of gradients."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


# -- one by one -----------------------------------------------------------------------------------


def test_adamw_decays_matrices_only(x64):
    p = arrays(0)
    rates = [0.1, 0.2, 0.3]
    bias = adam((arrays(t)["layers"][0]["bias"] for t in (1, 2, 3)), 0.9, 0.99)
    conv = adam((arrays(t)["conv"] for t in (1, 2, 3)), 0.9, 0.99)
    for (found, _), rate, b, c in zip(
        follow(peers.adamw, 3, rates), rates, bias, conv, strict=True
    ):
        p["layers"][0]["bias"] -= rate * b
        p["conv"] -= rate * (c + 0.1 * p["conv"])
        assert_close(found["layers"][0]["bias"], p["layers"][0]["bias"])
        assert_close(found["conv"], p["conv"])


def test_weight_decay_is_for_problems_that_people_use_it_on():
    """Where its gradient is zero, only weight decay moves a weight."""
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    outputs = lambda params, batch, key: params["b"]
    for name, decays in product(PEERS, (True, False)):
        problem = Problem(outputs, lambda outputs, batch: jnp.sum(outputs**2), decays)
        method = OPTIMIZERS[name].make(problem, params, None, None)
        state = method.init(params)
        new = params
        for _ in range(3):
            new, state, _ = method.step(jnp.float32(0.1), new, state, None, None)
        assert bool(jnp.any(new["w"] != params["w"])) == decays, name


def test_muon_orthogonalises_nesterov_momentum(x64):
    """Of one matrix, wide, long or a convolution; with rates that change."""
    rates, names = [0.1, 0.2, 0.3], ("weight", "conv", "stack")
    p = matrices(arrays(0))
    m = dict.fromkeys(names, 0.0)
    for t, (found, _) in enumerate(follow(peers.muon, 3, rates), 1):
        for name, g in matrices(arrays(t)).items():
            m[name] = 0.95 * m[name] + 0.05 * g
            x = 0.95 * m[name] / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            x /= np.linalg.norm(x)
            x = x.T if (tall := x.shape[0] > x.shape[1]) else x
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if tall else x
            p[name] -= rates[t - 1] * (0.2 * max(x.shape) ** 0.5 * x + 0.1 * p[name])
        assert_close(matrices(found), p, rtol=1e-4, atol=1e-5)


HIDDEN = {
    "mnist": {"0/weight"},
    "autoencoder": {"encoder/0/weight", "encoder/1/weight", "decoder/0/weight"},
    "char-lm": {f"blocks/0/{name}/weight" for name in "query key value output".split()}
    | {"blocks/0/expand/weight", "blocks/0/contract/weight"},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_leaves_the_outer_layers_to_adamw(name):
    experiment = EXPERIMENTS[name].preset("tiny")
    params = jax.eval_shape(experiment.init, jax.random.key(0))
    found = jax.tree_util.tree_leaves_with_path(hidden(params))
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
    assert {path(keys) for keys, own in found if own} == HIDDEN[name]


def test_muon_leaves_the_first_convolution_to_adamw():
    params = jax.eval_shape(EXPERIMENTS["unet"].preset("tiny").init, jax.random.key(0))
    own = hidden(params)
    assert [pair[0]["weight"] for pair in own["down"]] == [False, True, True]
    assert own["down"][0][1]["weight"]
    assert not own["head"]["weight"]


def test_soap_is_adam_in_a_basis_that_follows_the_gradients(x64):
    b, every = 0.95, 4
    steps = list(follow(lambda _: scale_by_soap(every=every), steps=12))
    for name in ("weight", "conv", "stack"):
        m = v = left = right = 0.0
        bases: Any = ()
        for t, (found, state) in enumerate(steps):
            g = matrices(arrays(t + 1))[name]
            if t == 0:
                assert not matrices(found)[name].any()
            else:
                q, r = bases
                m, v = b * m + (1 - b) * g, b * v + (1 - b) * (q.T @ g @ r) ** 2
                step = (q.T @ m @ r) / (1 - b**t) / np.sqrt(v / (1 - b**t))
                assert_close(matrices(found)[name], q @ step @ r.T, rtol=1e-5)
            left, right = b * left + (1 - b) * g @ g.T, b * right + (1 - b) * g.T @ g
            if t == 0:
                # Of a singular matrix there are many: any will do, the largest first.
                own = state.stacks["x".join(map(str, g.shape)) + " float64"]
                bases = tuple(np.asarray(side.basis[0]) for side in own.sides)
                for second, basis in zip((left, right), bases, strict=True):
                    rotated = basis.T @ second @ basis
                    values = np.linalg.eigvalsh(second)[::-1]
                    assert_close(rotated, np.diag(values), atol=1e-10)
            elif t % every == 0:
                new = []
                for axis, (second, basis) in enumerate(zip((left, right), bases, strict=True)):
                    order = np.argsort(-np.diag(basis.T @ second @ basis))
                    v = np.take(v, order, axis)
                    new.append(np.linalg.qr(second @ basis[:, order])[0])
                bases = tuple(new)


def test_soap_leaves_vectors_and_long_sides_to_adam(x64):
    _, *steps = follow(lambda _: scale_by_soap(max_size=2), steps=5)
    for tree in (lambda t: t["layers"][0]["bias"], lambda t: t["conv"]):
        expected = adam((tree(arrays(t)) for t in range(2, 6)), 0.95, 0.95)
        for (found, _), step in zip(steps, expected, strict=True):
            assert_close(tree(found), step, rtol=1e-5)


def test_shampoo_has_the_length_of_adams_step(x64):
    b1, b2, every, ridge = 0.9, 0.99, 3, 1e-6

    def root(second):
        values, vectors = np.linalg.eigh(second)
        values = np.maximum(values, 0) + ridge * values[-1]
        return vectors @ np.diag(values**-0.25) @ vectors.T

    steps = list(follow(lambda _: scale_by_shampoo(b1, b2, every=every), steps=8))
    for name in ("weight", "conv", "stack"):
        gradients = [matrices(arrays(t))[name] for t in range(1, 9)]
        m, left, right, roots = 0.0, 0.0, 0.0, None
        grafts = adam(gradients, b1, b2)
        for t, (g, (found, _), graft) in enumerate(zip(gradients, steps, grafts, strict=True), 1):
            m = b1 * m + (1 - b1) * g
            left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
            if t % every == 0:
                roots = root(left), root(right)
            if roots:
                step = roots[0] @ m @ roots[1]
                graft = step * np.linalg.norm(graft) / np.linalg.norm(step)
            assert_close(matrices(found)[name], graft, rtol=1e-5)


def test_psgd_learns_triangular_factors(x64):
    rng = np.random.default_rng(0)
    q, r = np.triu(rng.normal(size=(5, 5))) + 3 * np.eye(5), 1 + rng.uniform(size=3)
    g, noise = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    found = jax.jit(lambda *args: learn(*args, rate=0.1))(
        [jnp.asarray(q), jnp.asarray(r)], g, noise
    )
    g = g + np.finfo(np.float32).eps ** 0.5 * np.abs(g).mean() * noise
    a = q @ g @ np.diag(r)
    b = np.linalg.inv(q).T @ noise @ np.diag(1 / r)
    up, down = a @ a.T, b @ b.T
    change = q - np.asarray(found[0])
    expected = np.triu(up - down) @ q
    size = np.sum(expected**2) / np.sum(change * expected)
    assert_close(change, expected / size)
    largest = np.linalg.eigvalsh(up + down)[-1] / 0.1
    assert largest / 2**0.5 <= size <= largest * (1 + 1e-9)
    up, down = np.sum(a**2, axis=0), np.sum(b**2, axis=0)
    assert_close(found[1], r - 0.1 * (up - down) * r / np.max(up + down))
    p = q.T @ q @ g @ np.diag(r**2)
    assert_close(precondition([jnp.asarray(q), jnp.asarray(r)], jnp.asarray(g)), p)


def test_psgd_whitens():
    """At a small rate: at a fixed one the factors never come to rest."""
    rng = np.random.default_rng(0)
    mix = jnp.asarray(rng.normal(size=(4, 4)) + 2 * np.eye(4), jnp.float32)
    draw = lambda key: mix @ jax.random.normal(key, (4, 3))

    def turn(factors, key):
        keys = jax.random.split(key)
        noise = jax.random.normal(keys[0], (4, 3))
        return learn(factors, draw(keys[1]), noise, rate=0.005), None

    start = [jnp.eye(4), jnp.eye(3)]
    factors, _ = jax.jit(
        lambda s: jax.lax.scan(turn, s, jax.random.split(jax.random.key(0), 6000))
    )(start)
    samples = jax.vmap(draw)(jax.random.split(jax.random.key(1), 2000))
    white = np.asarray(jax.vmap(lambda g: precondition(factors, g))(samples)).reshape(2000, 12)
    assert np.abs(white.T @ white / 2000 - np.eye(12)).max() < 0.35
    raw = np.asarray(samples).reshape(2000, 12)
    assert np.abs(raw.T @ raw / 2000 - np.eye(12)).max() > 3


def test_psgd_preconditions_momentum_and_updates_when_it_is_due(x64):
    steps = follow(lambda _: scale_by_psgd(probability=lambda count: jnp.float32(0.4)), steps=6)
    m, last = 0.0, None
    for t, (found, state) in enumerate(steps, 1):
        m = 0.9 * m + 0.1 * arrays(t)["layers"][0]["weight"]
        q, r = (np.asarray(factor[0]) for factor in state.factors["6x4 float64"])
        step = q.T @ q @ (m / (1 - 0.9**t)) @ r.T @ r
        step /= max(1, np.sqrt(np.mean(step**2)) / 1.1)
        assert_close(found["layers"][0]["weight"], step)
        assert (last is None or not np.array_equal(q, last)) == (t == 1 or t % 3 == 0)
        last = q


def test_schedule_free_averages_by_the_largest_rate(x64):
    """With a warm-up: the learning rate is another in each step."""
    rates = [0.1, 0.2, 0.3, 0.3, 0.2]
    evaluated = optax.contrib.schedule_free_eval_params
    steps = list(follow(peers.schedule_free, 5, rates))
    for name, decay in (("weight", 0.08), ("bias", 0.0)):
        x = z = y = arrays(0)["layers"][0][name]
        v, total = 0.0, 0.0
        for t, (found, state) in enumerate(steps, 1):
            g = arrays(t)["layers"][0][name]
            v = 0.9955 * v + 0.0045 * g**2
            z = z - rates[t - 1] * (g / (np.sqrt(v / (1 - 0.9955**t)) + 1e-8) + decay * y)
            weight = max(rates[:t]) ** 2
            total += weight
            x = x + weight / total * (z - x)
            y = 0.9 * x + 0.1 * z
            assert_close(found["layers"][0][name], y, rtol=1e-5)
            assert_close(evaluated(state, found)["layers"][0][name], x, rtol=1e-5)


# -- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_descends_a_tree_of_all_shapes(name):
    """Vectors, matrices, convolutions, stacks; a traced rate; a donated state."""
    params = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), {**arrays(0), "scale": np.ones(())}
    )
    target = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), {**arrays(1), "scale": np.zeros(())}
    )

    def distance(params: Any, _: Any) -> jax.Array:
        squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), params, target)
        return jnp.asarray(optax.tree.sum(squares))

    problem = Problem(lambda params, batch, key: params, distance)
    optimizer = OPTIMIZERS[name]
    assert optimizer.advice
    method = optimizer.make(problem, params, None, None)
    state, first = jax.jit(method.init)(params), params
    step = jax.jit(method.step, donate_argnums=2)
    for _ in range(30):
        params, state, _ = step(jnp.float32(optimizer.rates[1]), params, state, None, None)
    assert distance(method.evaluated(params, state), None) < 0.97 * distance(first, None)
    assert jax.tree.structure(params) == jax.tree.structure(first)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
