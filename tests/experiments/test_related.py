"""Related methods against least squares written out, and against each other where they agree."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import lnb
from lnb._metric import Theta
from lnb_experiments import related
from lnb_experiments.data import types
from lnb_experiments.method import Problem
from lnb_experiments.related.fisher import sampled_loss
from lnb_experiments.related.kfac import measure
from lnb_experiments.related.levenberg_marquardt import gauss_newton
from lnb_experiments.related.regressions import Regression, regressions
from lnb_experiments.related.tensor_normal import invert, solve
from lnb_experiments.related.whitening import Whitening

N, D, H, OUT = 64, 5, 7, 3


def examples(inputs: Any, targets: Any) -> types.Split:
    """A batch of arrays that need not be NumPy's."""
    return types.Split(inputs, targets)


def outputs(params, batch, key=None, taps=(0.0, 0.0)):
    """An MLP, whatever of its biases there is; an added and a non-linear parameter on request."""
    x = batch.inputs
    x = x + params["shift"][None, :] if "shift" in params else x
    hidden = x @ params["w1"] + taps[0]
    hidden = jnp.tanh(hidden + params["b1"][None, :] if "b1" in params else hidden)
    out = hidden @ params["w2"] + taps[1]
    out = out + params["b2"][None, :] if "b2" in params else out
    return out * jnp.exp(params["log_scale"]) if "log_scale" in params else out


def objective(outputs, batch):
    return jnp.mean(jnp.sum((outputs - batch.targets) ** 2, axis=-1))


PROBLEM = Problem(outputs, objective)
GRADIENT = jax.jit(jax.grad(PROBLEM.loss))


def network(bias=True, further=False, seed=0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: rng.normal(size=shape)
    params = {"w1": array(D, H) / 2, "w2": array(H, OUT) / 2}
    params |= {"b1": array(H) / 4, "b2": array(OUT)} if bias else {}
    params |= {"shift": array(D), "log_scale": np.zeros(())} if further else {}
    batch = examples(array(N, D) @ (np.eye(D) + array(D, D) / 4) + 1, array(N, OUT))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), (params, batch))


def errors(params, batch):
    """n times the gradient of the loss with respect to what is added to each neuron's output."""
    taps = (jnp.zeros((N, H)), jnp.zeros((N, OUT)))
    loss = lambda taps, params, batch: objective(outputs(params, batch, taps=taps), batch)
    return [N * np.asarray(error) for error in jax.jit(jax.grad(loss))(taps, params, batch)]


def boosted(params, batch):
    """M^-1 g: the least squares fit of the errors to the features, with ones for a bias."""
    x = np.asarray(batch.inputs)
    hidden = np.tanh(x @ np.asarray(params["w1"]) + np.asarray(params.get("b1", np.zeros(H))))
    result = {}
    for i, (features, error) in enumerate(zip((x, hidden), errors(params, batch), strict=True), 1):
        ones = np.ones((N, 1)) if f"b{i}" in params else np.ones((N, 0))
        fit = np.linalg.lstsq(np.hstack([features, ones]), error)[0]
        result[f"w{i}"] = fit[: features.shape[1]]
        if f"b{i}" in params:
            result[f"b{i}"] = fit[-1]
    return result


def step_of(make, params, batch, learning_rate=1.0, **settings):
    """The direction of a method's first step."""
    method = make(PROBLEM, params, batch, None, **settings)
    after, _, _ = jax.jit(method.step)(learning_rate, params, method.init(params), batch, None)
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params, after)


def assert_close(found, expected, rtol=1e-6, atol=1e-9):
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol, atol)
    jax.tree.map(compare, found, expected)


# -- the methods one by one -----------------------------------------------------------------------


def test_foof_without_bias_is_boosting(x64):
    params, batch = network(bias=False)
    assert_close(step_of(related.foof, params, batch, damping=0.0), boosted(params, batch))


def test_foof_with_bias_is_not(x64):
    params, batch = network(bias=True)
    found, expected = step_of(related.foof, params, batch, damping=0.0), boosted(params, batch)
    gradient = GRADIENT(params, batch, None)
    assert_close(found["b1"], gradient["b1"])
    assert np.linalg.norm(found["w1"] - expected["w1"]) > 0.1 * np.linalg.norm(expected["w1"])


def test_foof_keeps_momentum_and_inverts_now_and_then(x64):
    params, batch = network(bias=False)
    method = related.foof(PROBLEM, params, batch, None, damping=0.1, momentum=0.5, every=2)
    step, state = jax.jit(method.step), method.init(params)
    inverses, gradients = [], []
    for scale in (1.0, 2.0, 3.0):
        data = examples(scale * batch.inputs, batch.targets)
        gradients.append(GRADIENT(params, data, None))
        _, state, _ = step(0.1, params, state, data, None)
        inverses.append(state.inverse["w1"])
    assert_close(inverses[1], inverses[0])
    assert not np.allclose(inverses[2], inverses[0])
    weights = (0.25, 0.5, 1.0)
    expected = sum(w * g["w1"] for w, g in zip(weights, gradients, strict=True))
    assert_close(state.momentum["w1"], expected)


@pytest.mark.parametrize("bias", [True, False])
def test_prong_is_boosting(x64, bias):
    params, batch = network(bias)
    method = related.prong(PROBLEM, params, batch, None, damping=0.0, every=1)
    step, state, expected = jax.jit(method.step), method.init(params), params
    for _ in range(3):
        direction = boosted(expected, batch)
        expected = jax.tree.map(lambda p, d: np.asarray(p) - 0.1 * d, expected, direction)
        params, state, _ = step(0.1, params, state, batch, None)
        assert_close(params, expected)


def test_prong_whitens_without_changing_the_function(x64):
    params, batch = network()
    method = related.prong(PROBLEM, params, batch, None, damping=0.0, every=2)
    step = jax.jit(method.step)
    same, state, _ = step(0.0, params, method.init(params), batch, None)
    assert_close(same, params)
    x, whitening = np.asarray(batch.inputs), state.whitening["w1"]
    white = (x - whitening.mean) @ np.asarray(whitening.inverse_root[0])
    assert_close(white.T @ white / N, np.eye(D))
    # What is trained computes the same from whitened features.
    phi = state.phi["w1"]
    assert_close(white @ phi.weight[0] + phi.bias, x @ params["w1"] + params["b1"][None, :])
    # Between refreshes it descends in phi, by the gradient there.
    shifted = examples(batch.inputs * 2, batch.targets)
    _, later, _ = step(0.1, same, state, shifted, None)
    assert_close(later.whitening, state.whitening)
    assert not np.allclose(later.phi["w1"].weight, phi.weight)


@pytest.mark.parametrize("bias", [True, False])
def test_locoprop_ends_at_boosting_and_begins_with_the_gradient(x64, bias):
    params, batch = network(bias)
    gamma = 0.3
    long = step_of(related.locoprop, params, batch, gamma, local_steps=20_000)
    expected = jax.tree.map(lambda h: gamma * h, boosted(params, batch))
    assert_close(long, expected, rtol=1e-4, atol=1e-6)
    short = step_of(related.locoprop, params, batch, gamma, local_steps=1, power_steps=100)
    gradient = GRADIENT(params, batch, None)
    ones = np.hstack([batch.inputs, np.ones((N, 1))]) if bias else np.asarray(batch.inputs)
    largest = np.linalg.eigvalsh(ones.T @ ones / N)[-1]
    assert_close(short["w1"], gamma / largest * gradient["w1"])


@pytest.mark.parametrize("bias", [True, False])
def test_boosted_backprop_regresses_on_the_errors(x64, bias):
    params, batch = network(bias)
    neurons = lnb.find_neurons(PROBLEM.loss, params, batch, None, rows="all")
    backprop = jax.jit(regressions(PROBLEM.loss, neurons))
    value, gradients, found = backprop(params, batch, None)
    assert_close(value, PROBLEM.loss(params, batch, None))
    assert_close(gradients, GRADIENT(params, batch, None))
    for name, error in zip(("w1", "w2"), errors(params, batch), strict=True):
        assert_close(found[name].errors[0], error)
    assert_close(found["w1"].features[0], batch.inputs)
    # Each neuron's step has length one as a function, so z = h . M h = h . g counts for each.
    expected = boosted(params, batch)
    for i in (1, 2):
        mine = {name: h for name, h in expected.items() if name.endswith(str(i))}
        z = sum(np.sum(h * np.asarray(gradients[name])) for name, h in mine.items())
        expected |= {name: 0.2 * h / np.sqrt(z) for name, h in mine.items()}
    assert_close(step_of(related.boosted_backprop, params, batch, 0.2, ridge=0.0), expected)


def test_boosted_backprop_with_a_ridge_leaves_biases_free(x64):
    params, batch = network()
    found = step_of(related.boosted_backprop, params, batch, ridge=0.5)
    x = np.hstack([batch.inputs, np.ones((N, 1))])
    penalty = np.diag([0.5] * D + [0.0])
    h = np.linalg.solve(x.T @ x / N + penalty, x.T @ np.asarray(errors(params, batch)[0]) / N)
    h = h / np.sqrt(np.mean(np.sum((x @ h) ** 2, axis=1)))
    assert_close(np.vstack([found["w1"], found["b1"]]), h)


def convolution(params, x):
    x = jax.lax.conv_general_dilated(x, params["k"], (2, 1), "SAME", feature_group_count=2)
    x = jnp.tanh(x + params["c"][None, :, None, None])
    return jnp.mean(x, axis=(2, 3)) @ params["v"]


def attention(params, x):
    def example(x):
        x = x * params["scale"][None, :] + params["offset"][None, :]
        heads = jnp.einsum("td,dhk->htk", x, params["q"]) + params["p"][:, None, :]
        keys = jnp.einsum("td,dhk->htk", x, params["k"])
        scores = jax.nn.softmax(heads @ keys.mT)
        return jnp.einsum("hts,hsk,hko->to", scores, keys, params["o"]).sum(0)

    return jax.vmap(jax.jit(example))(x)


SHAPES = {
    convolution: ((8, 4, 6, 5), {"k": (6, 2, 3, 3), "c": (6,), "v": (6, 3)}),
    attention: (
        (8, 5, 6),
        {
            "scale": (6,),
            "offset": (6,),
            "q": (6, 2, 4),
            "p": (2, 4),
            "k": (6, 2, 4),
            "o": (2, 4, 3),
        },
    ),
}


@pytest.mark.parametrize("model", SHAPES)
def test_rows_and_errors_belong_together(x64, model):
    """E[x lambda^T] is the gradient, whatever the order of axes."""
    rng = np.random.default_rng(0)
    x_shape, shapes = SHAPES[model]
    x = jnp.asarray(rng.normal(size=x_shape))
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    loss = lambda params, x: jnp.mean(jnp.sin(model(params, x)))
    neurons = lnb.find_neurons(loss, params, x, rows="all")
    _, gradients, found = jax.jit(regressions(loss, neurons))(params, x)
    assert {n.kind for n in neurons} >= {"dense", "conv" if model is convolution else "scale"}
    for neuron in neurons:
        features, error = found[neuron.name]
        weight = features.mT @ error / neuron.n
        assert_close(neuron.layout.from_matrix(weight), gradients[neuron.weight])
        if neuron.bias is not None and neuron.bias_layout is not None:
            bias = neuron.bias_layout.from_matrix(jnp.mean(error, axis=1, keepdims=True))
            assert_close(bias, gradients[neuron.bias])


def test_boosted_backprop_says_what_it_cannot_do():
    def looped(params, batch, key):
        return jax.lax.scan(
            lambda x, _: (jnp.tanh(x @ params["w1"]), None), batch.inputs, length=2
        )[0]

    params, batch = {"w1": jnp.eye(D)}, examples(jnp.ones((N, D)), jnp.ones((N, D)))
    with pytest.raises(ValueError, match=r"'w1' is applied in a loop.*lnb\.algorithm1"):
        related.boosted_backprop(Problem(looped, objective), params, batch, None)
    lookup = lambda params, batch, key: params["w1"][batch.inputs]
    batch = examples(jnp.zeros(N, jnp.int32), jnp.ones((N, D)))
    with pytest.raises(ValueError, match="'w1' has no features that stand as rows"):
        related.boosted_backprop(Problem(lookup, objective), params, batch, None)

    def repeated(params, batch, key):
        weights = jnp.broadcast_to(params["w1"], (N, D, D))
        return jnp.einsum("bd,bdo->bo", batch.inputs, weights)

    batch = examples(jnp.ones((N, D)), jnp.ones((N, D)))
    with pytest.raises(ValueError, match="'w1' is repeated along an axis"):
        related.boosted_backprop(Problem(repeated, objective), params, batch, None)


def test_regressions_need_all_rows():
    params, batch = network()
    neurons = lnb.find_neurons(PROBLEM.loss, params, batch, None)
    with pytest.raises(ValueError, match='rows="all"'):
        regressions(PROBLEM.loss, neurons)


def factorization(rows, columns, n, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.result_type(float))
    x = normal(n, columns)
    batch = examples(x, x @ normal(rows, columns).T)
    params = {"w1": normal(rows, columns), "w2": normal(columns, columns)}
    predict = lambda params, batch, key: batch.inputs @ params["w2"].T @ params["w1"].T
    return Problem(predict, lambda y, batch: jnp.sum((y - batch.targets) ** 2)), params, batch


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_levenberg_marquardt_factorizes_a_matrix(x64, solver):
    problem, params, batch = factorization(10, 6, 100)
    method = related.levenberg_marquardt(problem, params, batch, None, solver=solver)
    step, state = jax.jit(method.step), method.init(params)
    first = last = problem.loss(params, batch, None)
    for _ in range(100):
        params, state, loss = step(1.0, params, state, batch, None)
        assert loss <= last
        last = loss
    assert last < 1e-10 * first


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_gauss_newton_solves_linear_least_squares_at_once(x64, solver):
    _, batch = network()
    params = {"w": jnp.ones((D, OUT))}
    problem = Problem(lambda params, batch, key: batch.inputs @ params["w"], objective)
    method = related.levenberg_marquardt(
        problem, params, batch, None, damping=1e-14, solver=solver, tolerance=1e-12
    )
    params, _, _ = jax.jit(method.step)(1.0, params, method.init(params), batch, None)
    assert_close(params["w"], np.linalg.lstsq(batch.inputs, batch.targets)[0])


def test_one_product_solves_a_layer_whose_metric_preconditions(x64):
    """For one layer and a sum of squares G is c M, however badly conditioned M is."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, D)) * np.logspace(0, 3, D) + 5
    batch = examples(jnp.asarray(x), jnp.asarray(rng.normal(size=(50, OUT))))
    params = {"w": jnp.zeros((D, OUT)), "b": jnp.zeros(OUT)}
    problem = Problem(lambda p, batch, key: batch.inputs @ p["w"] + p["b"][None], objective)
    method = related.levenberg_marquardt(
        problem, params, batch, None, damping=1e-14, solver="cg", cg_steps=1
    )
    params, _, _ = jax.jit(method.step)(1.0, params, method.init(params), batch, None)
    expected = np.linalg.lstsq(np.column_stack([x, np.ones(50)]), batch.targets)[0]
    assert_close((params["w"], params["b"]), (expected[:-1], expected[-1]))


def test_gauss_newton_product(x64):
    params, batch = network()
    entropy = lambda out, batch: optax.softmax_cross_entropy(
        out, jax.nn.softmax(batch.targets)
    ).sum()
    problem = Problem(outputs, entropy)
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def multiplied(flat, vector):
        loss, gradient, product = gauss_newton(problem, unravel, flat, batch, None)
        return loss, gradient, product(vector)

    predict = lambda v: outputs(unravel(v), batch).ravel()
    jacobian = np.asarray(jax.jit(jax.jacobian(predict))(flat))
    hessian = jax.jit(jax.hessian(lambda y: entropy(y.reshape(N, OUT), batch)))(predict(flat))
    vector = jnp.asarray(np.random.default_rng(1).normal(size=flat.shape))
    loss, gradient, product = multiplied(flat, vector)
    assert_close(product, jacobian.T @ np.asarray(hessian) @ jacobian @ np.asarray(vector))
    expected, slope = jax.jit(jax.value_and_grad(problem.loss))(params, batch, None)
    assert_close((loss, gradient), (expected, ravel_pytree(slope)[0]))


def test_levenberg_marquardt_takes_no_step_uphill():
    """The arc tangent's Gauss-Newton steps overshoot, far from its root."""
    problem = Problem(
        lambda params, batch, key: jnp.arctan(params["a"])[None, None] * batch.inputs, objective
    )
    params, batch = {"a": jnp.float32(3.0)}, examples(jnp.ones((4, 1)), jnp.zeros((4, 1)))
    method = related.levenberg_marquardt(problem, params, batch, None, damping=1e-6)
    step = jax.jit(method.step)
    after, state, _ = step(1.0, params, method.init(params), batch, None)
    assert after == params
    assert state.rejected == 1
    assert state.damping > 1e-6
    for _ in range(60):
        params, state, loss = step(1.0, params, state, batch, None)
    assert loss < 1e-8


def test_levenberg_marquardt_says_what_is_too_large():
    params = {"w": jax.ShapeDtypeStruct((200, 200), jnp.float32)}
    with pytest.raises(ValueError, match=r"40,000 parameters.*solver=\"cg\""):
        related.levenberg_marquardt(PROBLEM, params, None, None, solver="dense")


def cross_entropy(outputs, batch):
    """Of classes, the largest of the targets."""
    labels = jnp.argmax(batch.targets, axis=-1)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_by_its_equations(x64, bias):
    """Two steps, with classes drawn from the model for G: a = [x, 1], g = p - e_y."""
    params, batch = network(bias)
    problem, damping, decay = Problem(outputs, cross_entropy), 0.01, 0.95
    method = related.kfac(problem, params, batch, None, damping=damping, every=1, kl_clip=1e9)
    step, state = jax.jit(method.step), method.init(params)
    gradient, averages, trace = jax.jit(jax.grad(problem.loss)), {}, dict.fromkeys(params, 0.0)
    for t in range(2):
        x = np.asarray(batch.inputs)
        hidden = np.tanh(x @ np.asarray(params["w1"]) + np.asarray(params.get("b1", np.zeros(H))))
        out = outputs(params, batch)
        draw = jax.random.fold_in(jax.random.key(0), t)
        drawn = np.eye(OUT)[np.asarray(jax.random.categorical(draw, out))]
        g2 = np.asarray(jax.nn.softmax(out)) - drawn
        g1 = (g2 @ np.asarray(params["w2"]).T) * (1 - hidden**2)
        gradients = {k: np.asarray(v) for k, v in gradient(params, batch, None).items()}
        for i, (a, g) in enumerate(((x, g1), (hidden, g2)), 1):
            a = np.hstack([a, np.ones((N, int(bias)))])
            new = a.T @ a / N, g.T @ g / N
            old = averages.get(i, new)
            weight = (1 - decay) / (1 - decay ** (t + 1))
            averages[i] = tuple(
                (1 - weight) * o + weight * n for o, n in zip(old, new, strict=True)
            )
            A, G = averages[i]
            pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
            v = np.vstack(
                [gradients[f"w{i}"], gradients[f"b{i}"][None]] if bias else [gradients[f"w{i}"]]
            )
            v = np.linalg.solve(A + pi * np.sqrt(damping) * np.eye(len(A)), v)
            v = v @ np.linalg.inv(G + np.sqrt(damping) / pi * np.eye(len(G)))
            trace[f"w{i}"] = 0.9 * trace[f"w{i}"] + v[: len(gradients[f"w{i}"])]
            if bias:
                trace[f"b{i}"] = 0.9 * trace[f"b{i}"] + v[-1]
        expected = {name: np.asarray(p) - 0.1 * trace[name] for name, p in params.items()}
        params, state, _ = step(0.1, params, state, batch, None)
        assert_close(params, expected)


def test_kfac_clips_the_step(x64):
    params, batch = network()
    problem = Problem(outputs, cross_entropy)
    far, near = (
        step_of(lambda _, *args, **kw: related.kfac(problem, *args, **kw), params, batch, kl_clip=c)
        for c in (1e9, 1e-3)
    )
    gradient = jax.grad(problem.loss)(params, batch, None)
    size = sum(np.sum(far[name] * np.asarray(gradient[name])) for name in params)
    assert size > 1e-3
    assert_close(near, jax.tree.map(lambda x: x * np.sqrt(1e-3 / size), far))


@pytest.mark.parametrize("loss", [objective, cross_entropy])
def test_drawn_targets_have_the_fisher_matrix(x64, loss):
    """N times the second moment of their mean gradient is the Gauss-Newton matrix."""
    params, batch = network(bias=False)
    problem = Problem(outputs, loss)
    drawn = sampled_loss(problem, params, batch, None)
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def gradients(keys):
        gradient = jax.grad(lambda v, draw: drawn(unravel(v), batch, None, draw))
        return jax.vmap(lambda draw: gradient(flat, draw))(keys)

    g = np.asarray(gradients(jax.random.split(jax.random.key(0), 4000)))
    _, _, product = gauss_newton(problem, unravel, flat, batch, None)
    matrix = np.asarray(jax.vmap(product)(jnp.eye(flat.size)))
    assert np.linalg.norm(N * g.T @ g / 4000 - matrix) < 0.15 * np.linalg.norm(matrix)
    assert np.abs(g.mean(0)).max() < 5 * np.abs(g).std() / 4000**0.5


def test_kfac_takes_convolutions_and_leaves_lookups(x64):
    """F of a convolution: a sum over positions of a a^T, a mean of g g^T (Grosse and Martens)."""
    rng = np.random.default_rng(0)
    x, errors = rng.normal(size=(1, 4 * 9, 6)), rng.normal(size=(1, 4 * 9, 3))  # 4 images, 9 pixels
    found = measure(Regression(jnp.asarray(x), 36 / 4 * jnp.asarray(errors)), False, 4)
    omega, gamma = x[0].T @ x[0] / 4, errors[0].T @ errors[0] / 36
    assert_close(np.kron(found.inputs[0], found.outputs[0]), np.kron(omega, gamma))
    shapes = {"embedding": (11, 4), "k": (2, 4, 6), "c": (6,)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}

    def predict(params, batch, key):
        tokens = params["embedding"][batch.inputs]
        y = jax.lax.conv_general_dilated(
            tokens, params["k"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return y + params["c"][None, None, :]

    labels = optax.softmax_cross_entropy_with_integer_labels
    problem = Problem(predict, lambda y, batch: labels(y, batch.targets).mean())
    batch = examples(
        jnp.asarray(rng.integers(11, size=(8, 5))), jnp.asarray(rng.integers(6, size=(8, 5)))
    )
    method = related.kfac(problem, params, batch, None)
    state, first = method.init(params), problem.loss(params, batch, None)
    assert list(state.factors) == ["k"]
    for _ in range(10):
        params, state, loss = jax.jit(method.step)(0.1, params, state, batch, None)
    assert loss < 0.9 * first


def test_natural_gradient_is_by_the_fisher_matrix(x64):
    """E[grad log p(y) grad log p(y)^T] over the model's own classes y, written out."""
    params, batch = network()
    problem = Problem(outputs, cross_entropy)
    flat, unravel = ravel_pytree(params)
    logs = lambda v: jax.nn.log_softmax(outputs(unravel(v), batch))
    scores = np.asarray(jax.jit(jax.jacobian(logs))(flat))
    fisher = np.einsum("iy,iya,iyb->ab", np.exp(logs(flat)), scores, scores) / N
    gradient = ravel_pytree(jax.grad(problem.loss)(params, batch, None))[0]
    expected = np.linalg.solve(fisher + 0.01 * np.eye(flat.size), gradient)
    make = lambda _, *args: related.natural_gradient(
        problem, *args, damping=0.01, cg_steps=1000, tolerance=1e-12
    )
    assert_close(ravel_pytree(step_of(make, params, batch))[0], expected, rtol=1e-5)


def test_tensor_normal_finds_both_covariances(x64):
    """Of a matrix that is tensor normal, from its exact moments; and a vector's own."""
    rng = np.random.default_rng(0)
    roots = [rng.normal(size=(n, n)) for n in (4, 3)]
    u, v = (root @ root.T for root in roots)
    exact = [jnp.asarray(u * np.trace(v))[None], jnp.asarray(v * np.trace(u))[None]]
    g = rng.normal(size=(1, 4, 3))
    expected = np.linalg.solve(np.kron(u, v), g.ravel())
    inverses = invert(exact, 0.0)
    assert_close(solve(inverses, jnp.asarray(g)).ravel(), expected)
    means = [np.linalg.eigvalsh(np.linalg.inv(x[0])).mean() for x in inverses]
    assert_close(*means)
    inverses = invert([jnp.asarray(u)[None]], 0.1)
    expected = np.linalg.solve(u + 0.1 * np.eye(4), g[0, :, 0])
    assert_close(solve(inverses, jnp.asarray(g[:, :, 0]))[0], expected)


def test_tensor_normal_by_its_equations(x64):
    """One step: gradients of drawn classes, their second moments, inverses with damping."""
    params, batch = network()
    problem, damping = Problem(outputs, cross_entropy), 0.01
    make = lambda _, *args: related.tensor_normal(problem, *args, damping=damping, kl_clip=1e9)
    found = step_of(make, params, batch)
    labels = jax.random.categorical(
        jax.random.fold_in(jax.random.key(0), 0), outputs(params, batch)
    )
    drawn = lambda p: optax.softmax_cross_entropy_with_integer_labels(outputs(p, batch), labels)
    drawn = jax.grad(lambda p: drawn(p).mean())(params)
    gradient = jax.grad(problem.loss)(params, batch, None)
    g, s = np.asarray(gradient["w1"]), N**0.5 * np.asarray(drawn["w1"])
    total = np.sum(s**2)
    u, v = s @ s.T * np.sqrt(D / H / total), s.T @ s * np.sqrt(H / D / total)
    u, v = u + np.sqrt(damping) * np.eye(D), v + np.sqrt(damping) * np.eye(H)
    assert_close(found["w1"], np.linalg.solve(u, g) @ np.linalg.inv(v))
    g, s = np.asarray(gradient["b1"]), N**0.5 * np.asarray(drawn["b1"])
    assert_close(found["b1"], np.linalg.solve(np.outer(s, s) + damping * np.eye(H), g))


@pytest.mark.parametrize("bias", [True, False])
def test_diagonal_whitening_is_batch_normalisation_before_the_weights(x64, bias):
    """The paper, "Function Space Optimization and Whitening": descent on the parameters phi of
    x -> phi^T (x - mu) / sigma, with statistics of the batch, is preconditioned by W W^T."""
    params, batch = network(bias)
    x = np.asarray(batch.inputs)
    mean = x.mean(0) if bias else np.zeros(D)
    std = np.sqrt(np.mean((x - mean) ** 2, axis=0))
    normalised = examples(jnp.asarray((x - mean) / std), batch.targets)
    phi = {**params, "w1": params["w1"] * jnp.asarray(std)[:, None]}
    if bias:
        phi["b1"] = params["b1"] + jnp.asarray(mean) @ params["w1"]
    assert_close(outputs(phi, normalised), outputs(params, batch))
    after = jax.tree.map(lambda p, g: p - 0.1 * g, phi, GRADIENT(phi, normalised, None))
    theta = {"w1": np.asarray(after["w1"]) / std[:, None]}
    if bias:
        theta["b1"] = np.asarray(after["b1"]) - mean @ theta["w1"]
    whitening = Whitening(*(jnp.asarray(a)[None] for a in (mean, std, 1 / std)))
    gradient = {name: np.asarray(g) for name, g in GRADIENT(params, batch, None).items()}
    # W^T g, then W of it.
    inner = Theta(
        jnp.asarray(
            (gradient["w1"] - (np.outer(mean, gradient["b1"]) if bias else 0)) / std[:, None]
        )[None],
        jnp.asarray(gradient["b1"])[None] if bias else None,
    )
    direction = whitening.theta(inner)
    assert_close(theta["w1"], np.asarray(params["w1"]) - 0.1 * np.asarray(direction.weight[0]))
    if bias:
        assert direction.bias is not None
        assert_close(theta["b1"], np.asarray(params["b1"]) - 0.1 * np.asarray(direction.bias[0]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tau", [0.05, 1e-9, 1e9])
def test_proxprop_is_between_the_gradient_and_boosting(x64, bias, tau):
    params, batch = network(bias)
    scale = max(1.0, tau * N)  # a tiny step would be lost in the parameters' rounding
    found = step_of(related.proxprop, params, batch, scale, tau=tau, momentum=0.0)
    if tau < 1e-6:
        assert_close(found, GRADIENT(params, batch, None), atol=1e-6)
    elif tau > 1e6:
        assert_close(found, boosted(params, batch), atol=1e-6)
    x = np.hstack([batch.inputs, np.ones((N, int(bias)))])
    rows = np.vstack([x, np.eye(x.shape[1]) / tau**0.5])
    error = np.vstack([errors(params, batch)[0] / N, np.zeros((x.shape[1], H))])
    implicit = scale * np.linalg.lstsq(rows, error)[0] / tau
    own = np.vstack([found["w1"], found["b1"][None]]) if bias else found["w1"]
    assert_close(own, implicit, atol=1e-6)


# -- all of them ----------------------------------------------------------------------------------

METHODS = {
    related.foof: 0.02,
    related.prong: 0.05,
    related.locoprop: 0.05,
    related.boosted_backprop: 0.1,
    related.levenberg_marquardt: 1.0,
    related.natural_gradient: 0.3,
    related.kfac: 0.1,
    related.tensor_normal: 0.1,
    related.proxprop: 0.02,
}


@pytest.mark.parametrize("make", METHODS)
@pytest.mark.parametrize(("bias", "further"), [(True, False), (False, False), (True, True)])
def test_every_method_trains(make, bias, further):
    params, batch = network(bias, further)
    if further:
        neurons = lnb.find_neurons(PROBLEM.loss, params, batch, None)
        assert neurons["shift"].kind == "identity"
        assert [name for name, _ in neurons.unclaimed] == ["log_scale"]
    shapes = jax.eval_shape(lambda: (params, batch, jax.random.key(0)))
    method = make(PROBLEM, *shapes)
    start, key = params, jax.random.key(0)
    state = method.init(params)
    step = jax.jit(method.step, donate_argnums=2)
    losses = []
    for _ in range(10):
        params, state, loss = step(jnp.float32(METHODS[make]), params, state, batch, key)
        losses.append(loss)
    assert losses[-1] < 0.9 * losses[0]
    assert all(not np.array_equal(params[name], start[name]) for name in params)


@pytest.mark.parametrize("make", METHODS)
def test_every_method_takes_a_filtered_module(make):
    _, batch = network()
    model = eqx.nn.MLP(D, OUT, H, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    predict = lambda params, batch, key: jax.vmap(eqx.combine(params, static))(batch.inputs)
    problem = Problem(predict, objective)
    method = make(problem, params, batch, None)
    step, state = jax.jit(method.step), method.init(params)
    before = problem.loss(params, batch, None)
    for _ in range(3):
        params, state, _ = step(METHODS[make], params, state, batch, None)
    assert problem.loss(params, batch, None) < before
