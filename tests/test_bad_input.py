"""Bad input to `find_neurons`, `backprop`, `features`, `metric_product`: a clear error, early."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    (_, aux), _, _ = lnb.backprop(pair, neurons, has_aux=True)(PARAMS, X)
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


@pytest.mark.parametrize("metric", ["diagonal", "", None, "Gram"])
def test_unknown_metric(metric):
    with pytest.raises(ValueError, match=r"(?s)auto.*matrix-free.*gram"):
        find(metric=metric)


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
        lnb.features(renamed_loss, find())(renamed, X)


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
        lnb.features(loss_fn, find())(wider, X)


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
    features = lnb.features(loss_fn, neurons)(PARAMS, X)
    wrong = {"first": {"w": normal(4, 3, 5), "b": normal(5, 4)}, "second": {"w": normal(6, 4, 2)}}
    with pytest.raises(ValueError, match=r"first\.w"):
        lnb.metric_product(neurons, features, wrong)
    with pytest.raises(ValueError, match="third"):
        lnb.metric_product(neurons, features, {"third": normal(4, 2, 2)})


def test_product_with_features_of_other_neurons():
    neurons = find()
    features = lnb.features(loss_fn, find(exclude="second"))(PARAMS, X)
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
