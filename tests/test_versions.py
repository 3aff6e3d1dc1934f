"""What a release of JAX describes in a way that is not known is left alone, and said so."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lnb
from lnb._jaxpr import _versions


def scanned(params, x):
    """A recurrent network, with a head outside of its loop."""

    def turn(h, y):
        return jnp.tanh(h @ params["w"] + y), None

    h, _ = jax.lax.scan(turn, x[0], x)
    return jnp.mean((h @ params["v"]) ** 2)


def called(params, x):
    """A layer in each of the other kinds of control flow."""
    x = jax.jit(lambda x: jnp.tanh(x @ params["w"]))(x)
    x = jax.checkpoint(lambda x: jnp.tanh(x @ params["u"]))(x)
    x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ params["b"], lambda x: x, x)
    return jnp.mean((x @ params["v"]) ** 2)


def values(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


PROGRAMS = {
    "scan": (scanned, {"w": values(3, 3), "v": values(3, 2)}, values(5, 4, 3), ["w"]),
    "jit": (called, None, values(6, 3), ["w"]),
    "checkpoint": (called, None, values(6, 3), ["u"]),
    "cond": (called, None, values(6, 3), ["b"]),
    "dot_general": (called, None, values(6, 3), ["b", "u", "v", "w"]),
}


def refuse(raw):
    """What reading a parameter that is no longer there does."""
    raise KeyError(raw.primitive.name)


def check(name):
    """The parameters inside are unclaimed, with the reason; all else is as if nothing was."""
    loss_fn, params, x, unread = PROGRAMS[name]
    if params is None:
        params = {key: values(3, 3) for key in "wub"} | {"v": values(3, 2)}
    neurons = lnb.find_neurons(loss_fn, params, x)
    assert sorted(path for path, _ in neurons.unclaimed) == unread
    reason = f"it is used inside {name}, which jax {jax.__version__} describes in a new way"
    assert {why for _, why in neurons.unclaimed} == {reason}
    assert sorted(neuron.weight for neuron in neurons) == sorted(params.keys() - set(unread))
    value, grads, features = lnb.backprop(loss_fn, neurons)(params, x)
    expected = jax.value_and_grad(loss_fn)(params, x)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), expected)
    optimizer = lnb.lnb(0.1, neurons)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, features=features)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["scan", "jit", "checkpoint", "cond"])
def test_control_flow_that_cannot_be_read(monkeypatch, name):
    monkeypatch.setitem(_versions._CONTROL, name, refuse)
    check(name)


def test_a_parameter_that_is_no_longer_there(monkeypatch):
    monkeypatch.setitem(_versions._READ, "dot_general", "dimension_numbers no_longer_there")
    check("dot_general")


def test_a_parameter_that_is_new(monkeypatch):
    """It may mean anything. Here `preferred_element_type` stands for one."""
    monkeypatch.setattr(_versions, "_HARMLESS", _versions._HARMLESS - {"preferred_element_type"})
    check("dot_general")


def test_operands_that_are_passed_on_otherwise(monkeypatch):
    """A body that has other inputs than its equation is no body of ours."""
    whole = _versions._CONTROL["scan"]

    def one_input_less(raw):
        found = whole(raw)
        return {**found, "bodies": [jax.make_jaxpr(lambda x: x)(1.0)]}

    monkeypatch.setitem(_versions._CONTROL, "scan", one_input_less)
    check("scan")


def test_no_other_module_reads_equations():
    """All of `lnb` but one module does without the fields of JAX's own equations."""
    folder = pathlib.Path(lnb.__file__).parent
    for path in folder.rglob("*.py"):
        if path.name != "_versions.py":
            text = path.read_text()
            for field in (
                ".primitive",
                ".eqns",
                ".constvars",
                "jax.extend.core",
                "extend import core",
                "jax._src",
            ):
                assert field not in text, f"{path.name} reads {field}"
