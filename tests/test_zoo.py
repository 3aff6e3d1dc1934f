"""Every model of the zoo: which neurons are found, and what comes back for them."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES, Case, Expected, Tape, flat, relaxed

import lnb

pytestmark = pytest.mark.usefixtures("x64")


def find(case: Case) -> lnb.Neurons:
    return lnb.find_neurons(case.loss_fn, case.params, *case.args, has_aux=case.has_aux, rows="all")


def by_hand(case: Case, vector: dict) -> tuple:
    """The loss written by hand, and what M times `vector` has to be."""
    tape = Tape(case.params)
    loss = relaxed(case.by_hand)(tape, *case.args)
    product = dict(vector)
    for neuron in case.expected or ():
        if neuron.kind == "identity":
            continue
        paths = [neuron.weight, neuron.bias] if neuron.bias else [neuron.weight]
        product |= {path: jnp.zeros_like(vector[path]) for path in paths}
        if neuron.n:
            product |= relaxed(tape.product)(neuron.weight, neuron.n, vector)
    return loss, product


def random_like(tree):
    rng = np.random.default_rng(0)

    def leaf(x):
        values = rng.normal(size=x.shape)
        if jnp.iscomplexobj(x):
            values = values + 1j * rng.normal(size=x.shape)
        return jnp.asarray(values).astype(x.dtype)

    return jax.tree.map(leaf, eqx.filter(tree, eqx.is_inexact_array))


def value_and_grad(case: Case):
    leaves = jax.tree.leaves(case.params)
    plain = all(eqx.is_inexact_array(leaf) for leaf in leaves)
    transform = jax.value_and_grad if plain else eqx.filter_value_and_grad
    return transform(case.loss_fn, has_aux=case.has_aux)


def assert_close(actual, expected, tolerance, what: str):
    """Equal structures and arrays; the tolerance is relative to the largest entry of each array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    for (path, right), left in pairs:
        if not eqx.is_inexact_array(right):
            continue
        where = f"{what} {jax.tree_util.keystr(path)}"
        assert left.shape == right.shape, where
        assert left.dtype == right.dtype, where
        scale = float(jnp.max(jnp.abs(right), initial=1e-3))
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * scale, err_msg=where)


def claimed(case: Case, neurons: lnb.Neurons) -> dict[str, list[lnb.Neuron]]:
    """The neurons by weight; those of a slice under the weight they are a slice of."""
    found: dict[str, list[lnb.Neuron]] = {}
    for neuron in neurons:
        whole = re.sub(r"\[.*\]$", "", neuron.weight)
        weight = whole if whole in case.sliced else neuron.weight
        found.setdefault(weight, []).append(neuron)
    return found


@pytest.mark.parametrize("name", CASES)
def test_claims(name: str):
    """The right neurons, no others, and a reason for every parameter left over."""
    case = CASES[name]()
    neurons = find(case)
    owners = {n.weight for n in neurons} | {n.bias for n in neurons if n.bias}
    reasons = dict(neurons.unclaimed)
    assert owners.isdisjoint(reasons)
    assert owners | set(reasons) == set(flat(case.params)), neurons
    assert all(reason.strip() for reason in reasons.values())
    if case.expected is None:
        return
    found = claimed(case, neurons)
    assert set(found) == {neuron.weight for neuron in case.expected}, neurons
    for expected in case.expected:
        if expected.weight in case.sliced:
            continue
        (neuron,) = found[expected.weight]
        assert neuron.name == expected.weight
        assert known(expected, neuron) == expected._replace(n=0), neurons
    assert set(reasons) == set(case.unclaimed), neurons


def known(expected: Expected, neuron: lnb.Neuron) -> Expected:
    """What was found, where something is expected; n is seen in the products."""
    found = {
        field: None if getattr(expected, field) is None else getattr(neuron, field)
        for field in ("kind", "d_in", "d_out", "sites")
    }
    return Expected(neuron.weight, neuron.bias, n=0, **found)


@pytest.mark.parametrize("name", CASES)
def test_products(name: str):
    """Value, aux, gradients, features and M, all in one compiled program a model."""
    case = CASES[name]()
    neurons = find(case)
    vector = random_like(case.params)

    @eqx.filter_jit
    def run(params, args, vector):
        traced = case._replace(params=params, args=args)
        theirs = value_and_grad(case)(params, *args)
        ours = one(case, neurons, params, args, vector)
        return theirs, ours, by_hand(traced, flat(vector))

    ((value, gradients), ours, (loss, product)) = run(case.params, case.args, vector)
    number = value[0] if case.has_aux else value
    assert_close(number, loss.astype(number.dtype), case.exact, "the loss written by hand")
    backprop, features, actual = ours
    assert_close(backprop[0], value, 1e-12, "value")
    assert_close(backprop[1], gradients, case.exact, "gradient")
    assert_close(features, backprop[2], 1e-12, "features")
    assert jax.tree.structure(actual) == jax.tree.structure(vector)
    if case.expected is not None:
        assert_close(flat(actual), product, case.exact, "product")


def one(case: Case, neurons: lnb.Neurons, params, args, vector):
    backprop = lnb.backprop(case.loss_fn, neurons)(params, *args)
    features = lnb.forward_features(case.loss_fn, neurons)(params, *args)
    return backprop, features, lnb.metric_product(neurons, backprop[2], vector)
