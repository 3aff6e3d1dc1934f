"""Bad input to `find_neurons`, `backprop`, `features`, `metric_product`: a clear error, early."""

import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import lnb


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {"first": {"w": normal(0, 3, 4), "b": normal(1, 4)}, "second": {"w": normal(2, 4, 2)}}
X = normal(3, 7, 3)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"][None])
    return jnp.mean((hidden @ params["second"]["w"]) ** 2)


def vector_loss(params, x):
    return jnp.sum((x @ params["first"]["w"]) ** 2, axis=1)


def find(**options) -> lnb.Neurons:
    return lnb.find_neurons(loss_fn, PARAMS, X, **options)


def test_loss_is_not_scalar():
    with pytest.raises((TypeError, ValueError), match=r"scalar.*7"):
        lnb.find_neurons(vector_loss, PARAMS, X)
    with pytest.raises((TypeError, ValueError), match=r"scalar.*7"):
        lnb.backprop(vector_loss, find())(PARAMS, X)


def test_loss_is_not_real():
    def integer_loss(params, x):
        return jnp.sum(x @ params["first"]["w"]).astype(jnp.int32)

    with pytest.raises((TypeError, ValueError), match="int32"):
        lnb.find_neurons(integer_loss, PARAMS, X)


def test_aux_that_was_not_announced():
    """The commonest mistake: a pair is returned, `has_aux` forgotten, or the other way round."""

    def pair(params, x):
        return loss_fn(params, x), x

    with pytest.raises((TypeError, ValueError), match="has_aux"):
        lnb.find_neurons(pair, PARAMS, X)
    with pytest.raises((TypeError, ValueError), match="has_aux"):
        lnb.find_neurons(loss_fn, PARAMS, X, has_aux=True)


def test_aux_is_anything():
    """Auxiliary output need be no array."""

    def pair(params, x):
        return loss_fn(params, x), {"name": "tanh", "rows": x.shape[0], "x": x}

    neurons = lnb.find_neurons(pair, PARAMS, X, has_aux=True)
    (_, aux), _, _ = lnb.backprop(pair, neurons)(PARAMS, X)
    assert (aux["name"], aux["rows"]) == ("tanh", 7)
    np.testing.assert_array_equal(aux["x"], X)


@pytest.mark.parametrize("params", [{}, {"steps": 3}, {"table": jnp.arange(3)}, None])
def test_no_inexact_parameters(params):
    with pytest.raises((TypeError, ValueError), match=r"inexact|floating"):
        lnb.find_neurons(lambda params, x: jnp.mean(x), params, X)


def test_empty_batch():
    """Names a neuron that would have no positions."""
    with pytest.raises(ValueError, match=r"(?s)empty.*first\.w|first\.w.*empty"):
        lnb.find_neurons(loss_fn, PARAMS, X[:0])
    with pytest.raises(ValueError, match=r"(?s)empty.*first\.w|first\.w.*empty"):
        lnb.backprop(loss_fn, find())(PARAMS, X[:0])


def test_empty_argument_that_is_no_batch():
    """Placeholders of size zero are common in states; only positions count."""
    neurons = lnb.find_neurons(lambda params, x, _: loss_fn(params, x), PARAMS, X, jnp.zeros(0))
    assert [neuron.name for neuron in neurons] == ["first.w", "second.w"]


@pytest.mark.parametrize("rows", ["few", "", None, 100])
def test_unknown_rows(rows):
    with pytest.raises(ValueError, match=r"auto.*all"):
        find(rows=rows)


def test_exclude_by_pattern():
    neurons = find(exclude=r"^second\.")
    assert [neuron.name for neuron in neurons] == ["first.w"]
    ((path, reason),) = neurons.unclaimed
    assert path == "second.w"
    assert "exclude" in reason


def test_exclude_by_function():
    neurons = find(exclude=lambda path: path == "first.w")
    names = {neuron.name: neuron.kind for neuron in neurons}
    assert names == {"first.b": "identity", "second.w": "dense"}
    assert [path for path, _ in neurons.unclaimed] == ["first.w"]


def test_exclude_a_bias():
    """Without its bias the weight has the bias-free metric."""
    neurons = find(exclude="b$")
    assert {neuron.name: neuron.bias for neuron in neurons} == {"first.w": None, "second.w": None}
    _, gradients, features = lnb.backprop(loss_fn, neurons)(PARAMS, X)
    product = lnb.metric_product(neurons, features, gradients)
    expected = X.T @ (X @ gradients["first"]["w"]) / 7
    np.testing.assert_allclose(product["first"]["w"], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(product["first"]["b"], gradients["first"]["b"])


def test_exclude_gives_jax_gradients():
    neurons = find(exclude="w$")
    assert all(neuron.kind == "identity" for neuron in neurons)
    value, gradients, _ = lnb.backprop(loss_fn, neurons)(PARAMS, X)
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (value, gradients), expected
    )


def test_parameters_of_another_structure():
    renamed = {"first": PARAMS["first"], "third": PARAMS["second"]}

    def renamed_loss(params, x):
        return loss_fn({"first": params["first"], "second": params["third"]}, x)

    with pytest.raises(ValueError, match=r"second\.w"):
        lnb.backprop(renamed_loss, find())(renamed, X)
    with pytest.raises(ValueError, match=r"second\.w"):
        lnb.forward_features(renamed_loss, find())(renamed, X)


def test_parameters_too_many():
    more = {**PARAMS, "third": normal(4, 2, 2)}

    def more_loss(params, x):
        return loss_fn(params, x) + jnp.mean(x[:, :2] @ params["third"])

    with pytest.raises(ValueError, match="third"):
        lnb.backprop(more_loss, find())(more, X)


def test_parameters_of_another_shape():
    wider = {
        "first": {"w": normal(4, 3, 5), "b": normal(5, 5)},
        "second": {"w": normal(6, 5, 2)},
    }
    shapes = {"w": (r"\(3, 4\)", r"\(3, 5\)"), "b": (r"\(4,\)", r"\(5,\)")}
    orders = [(name, *pair[::step]) for name, pair in shapes.items() for step in (1, -1)]
    pattern = "|".join(rf"first\.{name}.*{one}.*{other}" for name, one, other in orders)
    with pytest.raises(ValueError, match=pattern):
        lnb.backprop(loss_fn, find())(wider, X)
    with pytest.raises(ValueError, match=pattern):
        lnb.forward_features(loss_fn, find())(wider, X)


def test_another_loss():
    """The same parameters, used in another way than `find_neurons` saw."""

    def other_loss(params, x):
        weight = params["first"]["w"] / jnp.linalg.norm(params["first"]["w"])
        hidden = jnp.tanh(x @ weight + params["first"]["b"][None])
        return jnp.mean((hidden @ params["second"]["w"]) ** 2)

    with pytest.raises(ValueError, match=r"first\.w.*find_neurons"):
        lnb.backprop(other_loss, find())(PARAMS, X)


def test_product_with_another_structure():
    neurons = find()
    features = lnb.forward_features(loss_fn, neurons)(PARAMS, X)
    wrong = {"first": {"w": normal(4, 3, 5), "b": normal(5, 4)}, "second": {"w": normal(6, 4, 2)}}
    with pytest.raises(ValueError, match=r"first\.w"):
        lnb.metric_product(neurons, features, wrong)
    with pytest.raises(ValueError, match="third"):
        lnb.metric_product(neurons, features, {"third": normal(4, 2, 2)})


def test_product_with_features_of_other_neurons():
    neurons = find()
    features = lnb.forward_features(loss_fn, find(exclude="second"))(PARAMS, X)
    with pytest.raises(ValueError, match=r"second\.w"):
        lnb.metric_product(neurons, features, PARAMS)


def test_exclude_that_finds_nothing():
    with pytest.raises(ValueError, match=r"third.*first\.w"):
        find(exclude="third")


def test_optimizer_of_no_neurons():
    with pytest.raises(TypeError, match=r"find_neurons.*lnb\.lnb\(learning_rate, neurons\)"):
        lnb.lnb(find(), 0.03)  # pyright: ignore[reportArgumentType]


def test_solver_that_is_none():
    with pytest.raises(TypeError, match=r"'cg'.*lnb\.CG\(\)"):
        lnb.lnb(0.03, find(), solver="cg")  # pyright: ignore[reportArgumentType]


# What people try first


class Normalised(nnx.Module):
    """A network that changes while it runs."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"net": model}])
def test_an_nnx_module_as_parameters(wrap):
    """What it changes inside of the loss would be lost; the recipe in the message works."""
    model = Normalised(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"(?s)Normalised.*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
        lnb.find_neurons(lambda params, x: jnp.mean(x), wrap(model), X)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, x):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            model = nnx.merge(graphdef, params, rest)
            return jnp.mean(model(x) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    neurons = lnb.find_neurons(loss_fn, params, rest, X, has_aux=True)
    assert [(n.weight, n.kind) for n in neurons] == [
        ("linear.kernel", "dense"),
        ("norm.scale", "scale"),
    ]
    (_, new), _, _ = lnb.backprop(loss_fn, neurons)(params, rest, X)
    mean = lambda state: state["norm"]["mean"][...]
    draws: Any = lambda state: state["dropout"]["rngs"]["count"][...]
    assert jnp.any(mean(new) != mean(rest))
    assert draws(new) == draws(rest) + 1


def test_init_with_a_whole_equinox_model():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    neurons = lnb.find_neurons(loss_fn, model, X)
    for make in (lnb.lnb, lambda rate, neurons: lnb.scale_by_lnb(neurons)):
        optimizer: Any = make(0.1, neurons)
        with pytest.raises(TypeError, match=r"activation.*eqx\.filter\(model, "):
            optimizer.init(model)
        optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def test_features_for_apply_gradients():
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), X)
    apply: Any = model.apply
    loss_fn = lambda params, x: jnp.mean(apply(params, x) ** 2)
    neurons = lnb.find_neurons(loss_fn, params, X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=lnb.lnb(0.1, neurons))
    _, grads, features = lnb.backprop(loss_fn, neurons)(params, X)
    with pytest.raises(ValueError, match=r"(?s)apply_gradients.*state\.tx\.update\("):
        state.apply_gradients(grads=grads, features=features)


def test_features_as_a_positional_argument():
    neurons = find()
    _, grads, features = lnb.backprop(loss_fn, neurons)(PARAMS, X)
    for optimizer in (lnb.lnb(0.1, neurons), lnb.scale_by_lnb(neurons)):
        update: Any = optimizer.update
        with pytest.raises(TypeError, match=r"features are a keyword .*features=features"):
            update(grads, optimizer.init(PARAMS), PARAMS, features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {**p, "second": {"w": normal(0, 4, 5)}}, r"'second\.w' has shape \(4, 5\)"),
        (lambda p: {**p, "third": normal(0, 4)}, "'third' was not there"),
        (lambda p: {**p, "first": {"w": p["first"]["w"]}}, r"'first\.b' is gone"),
    ],
)
def test_other_parameters(change, message):
    def any_loss(params, x):
        hidden = jnp.tanh(x @ params["first"]["w"])
        return jnp.mean((hidden @ params["second"]["w"]) ** 2)

    with pytest.raises(ValueError, match=message):
        lnb.backprop(any_loss, find())(change(PARAMS), X)


def test_backprop_with_parameters_in_place_of_neurons():
    backprop: Any = lnb.backprop
    with pytest.raises(TypeError, match=r"dict.*lnb\.backprop\(loss_fn, neurons\)\(params,"):
        backprop(loss_fn, PARAMS)
    features: Any = lnb.forward_features
    with pytest.raises(TypeError, match="find_neurons"):
        features(loss_fn, PARAMS)


def test_names_of_before():
    with pytest.raises(AttributeError, match="forward_features"):
        _ = lnb.features  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="no attribute 'adam'"):
        _ = lnb.adam  # pyright: ignore[reportAttributeAccessIssue]


def test_a_dummy_batch_of_one():
    with pytest.warns(UserWarning, match=r"first\.w, second\.w see a single position"):
        lnb.find_neurons(loss_fn, PARAMS, X[:1])


def test_slices_of_one_weight_have_names_of_their_own():
    def sliced(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"][:, :2]) @ params["w"][:2, 2:])

    neurons = lnb.find_neurons(sliced, {"w": normal(0, 3, 4)}, X)
    assert len(neurons) == 2
    with pytest.raises(KeyError) as error:
        neurons["w"]
    assert all(neuron.name in str(error.value) for neuron in neurons)
    assert [neurons[neuron.name] for neuron in neurons] == list(neurons)


# Reasons


def reasons(loss_fn, params, *args):
    return dict(lnb.find_neurons(loss_fn, params, *args).unclaimed)


def test_the_reason_of_a_product_of_parameters():
    """Low-rank adapters beside a frozen weight, which is no parameter."""
    base = normal(0, 3, 4)
    params = {"a": normal(1, 3, 2), "b": normal(2, 2, 4)}
    merged = reasons(lambda p, x: jnp.mean((x @ (base + p["a"] @ p["b"])) ** 2), params, X)
    assert set(merged) == {"a", "b"}
    assert all("multiplied by another parameter (dot_general)" in why for why in merged.values())
    assert all("(x @ a) @ b" in why for why in merged.values())
    assert not reasons(lambda p, x: jnp.mean((x @ base + (x @ p["a"]) @ p["b"]) ** 2), params, X)


def test_the_reason_of_experts_under_a_vmapped_switch():
    params = {"w": normal(0, 4, 3, 2)}

    def switched(params, x, choice):
        branches = [lambda x, i=i: x @ params["w"][i] for i in range(4)]
        outputs = jax.vmap(lambda x, i: jax.lax.switch(i, branches, x))(x, choice)
        return jnp.mean(jnp.tanh(outputs))

    (why,) = reasons(switched, params, X, jnp.arange(7) % 4).values()
    assert "lax.switch" in why
    assert "w[expert]" in why


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"])), "combined with itself (mul)"),
        (lambda p, x: x @ jnp.exp(p["w"]), "a non-linear function of it (exp) meets data"),
        (lambda p, x: x * jnp.sum(p["v"] + 0 * p["w"][0]), "combined with another parameter (add)"),
        (lambda p, x: x, "the loss makes no use of it that meets data"),
    ],
)
def test_other_reasons(function, why):
    params = {"w": normal(0, 3, 4), "v": normal(1, 4)}
    found = reasons(lambda p, x: jnp.mean(jnp.tanh(function(p, x))), params, X)
    assert why in found["w"]


# States of other optimizers


def state_of(neurons, **options):
    return lnb.lnb(0.1, neurons, **options).init(PARAMS)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ({"solver": lnb.CG()}, {}),
        ({}, {"solver": lnb.CG()}),
        ({"solver": lnb.Krylov()}, {"solver": lnb.CG()}),
    ],
)
def test_a_state_made_by_another_optimizer(made, used):
    neurons = find(rows="all")
    _, grads, features = lnb.backprop(loss_fn, neurons)(PARAMS, X)
    optimizer = lnb.lnb(0.1, neurons, **used)
    with pytest.raises(ValueError, match=r"'first\.w'.*another solver or norm.*optimizer\.init"):
        optimizer.update(grads, state_of(neurons, **made), PARAMS, features=features)
    optimizer.update(grads, state_of(neurons, **used), PARAMS, features=features)


# Features


def test_features_of_other_neurons():
    neurons = find(rows="all")
    optimizer = lnb.lnb(0.1, neurons)
    other = {"first": PARAMS["first"], "second": {"w": normal(2, 4, 2)}, "third": normal(3, 2)}

    def other_loss(params, x):
        hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"][None])
        return jnp.mean(hidden @ params["second"]["w"] + params["third"][None])

    _, grads, _ = lnb.backprop(loss_fn, neurons)(PARAMS, X)
    others = lnb.find_neurons(other_loss, other, X, rows="all")
    _, _, features = lnb.backprop(other_loss, others)(other, X)
    with pytest.raises(ValueError, match="same `neurons`"):
        optimizer.update(grads, optimizer.init(PARAMS), PARAMS, features=features)


# Names of earlier versions


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda n: lnb.backprop(loss_fn, n, opt_state=()), "leave it out"),  # pyright: ignore
        (lambda n: lnb.backprop(loss_fn, n, has_aux=True), "find_neurons"),  # pyright: ignore
        (lambda n: lnb.lnb(0.1, n, relative_damping=False), "lnb.Absolute"),  # pyright: ignore
        (lambda n: lnb.find_neurons(loss_fn, PARAMS, X, statistics_share=1), 'rows="all"'),
        (lambda n: lnb.features, "forward_features"),
    ],
)
def test_old_names_say_the_new_ones(call, advice):
    neurons = lnb.find_neurons(loss_fn, PARAMS, X)
    with pytest.raises((TypeError, AttributeError), match=re.escape(advice)):
        call(neurons)


# Experts


EXPERTS = {"w": normal(0, 4, 3, 2)}


def gathered(params, x, choice):
    """The weight of each example's expert, taken by its index."""
    return jnp.mean(jnp.tanh(jnp.einsum("nd,ndo->no", x, params["w"][choice])))


def gathered_under_vmap(params, x, choice):
    return jnp.mean(jnp.tanh(jax.vmap(lambda x, i: x @ params["w"][i])(x, choice)))


def ragged(params, x, choice):
    sizes = jnp.bincount(choice, length=4)
    return jnp.mean(jnp.tanh(jax.lax.ragged_dot(x, params["w"], sizes)))


@pytest.mark.parametrize("experts", [gathered, gathered_under_vmap, ragged])
def test_experts_are_neurons(experts):
    """One second moment an expert: that of the examples that it is given."""
    choice = jnp.asarray([0, 0, 1, 1, 1, 2, 3])
    neurons = lnb.find_neurons(experts, EXPERTS, X, choice)
    (neuron,) = neurons
    assert (neuron.kind, neuron.d_in, neuron.d_out, neuron.n) == ("dense", 3, 2, 7)
    _, _, features = lnb.backprop(experts, neurons)(EXPERTS, X, choice)
    vector = {"w": normal(5, 4, 3, 2)}
    product = lnb.metric_product(neurons, features, vector)
    for expert in range(4):
        rows = X[choice == expert]
        expected = rows.T @ rows @ vector["w"][expert] / 7
        np.testing.assert_allclose(product["w"][expert], expected, rtol=1e-4, atol=1e-6)
