"""Training to the end: the paper's matrix factorization, and handwritten digits, beside Adam."""

from collections.abc import Callable
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from sklearn.datasets import load_digits

import lnb

# Matrix factorization


def make_factorization(seed: int):
    """Parameters, inputs and targets A x, with a condition number of 1e5 and correlated columns.

    Losses and metrics of 10,000 samples are those of the triangular factor of X = Q R.
    """
    rng = np.random.default_rng(seed)
    left, _, right = np.linalg.svd(rng.random((100, 60)), full_matrices=False)
    a = left * np.linspace(1, 1e-5, 60) @ right
    x = np.linalg.qr(rng.normal(size=(10_000, 60)), mode="r") * np.sqrt(60 / 10_000)
    params = {"first": rng.normal(size=(60, 60)), "second": rng.normal(size=(60, 100))}
    return params, x, x @ a.T


def factorization_loss(params, x, y):
    return 0.5 * jnp.mean(jnp.sum((x @ params["first"] @ params["second"] - y) ** 2, axis=1))


def factorize(optimizer, backprop: Callable, steps: int, params, x, y) -> jax.Array:
    """The losses of full-batch training, relative to the first."""

    def step(carry, _):
        params, state = carry
        loss, gradients, features = backprop(params, x, y)
        updates, state = optimizer.update(gradients, state, params, features=features)
        return (optax.apply_updates(params, updates), state), loss

    _, losses = lax.scan(step, (params, optimizer.init(params)), length=steps)
    return losses / losses[0]


def make_lnb(neurons: lnb.Neurons, solver: str):
    """No memory, damping of 0.1, and a learning rate that falls with the error."""
    options = {
        "exact": {"solver": lnb.Cholesky(decay=0.0), "norm": "spectral"},
        "ten steps of cg": {"solver": lnb.CG(steps=10), "norm": "neuron"},
    }
    return lnb.lnb(
        optax.exponential_decay(30.0, transition_steps=1, decay_rate=0.98),
        neurons,
        gradient_decay=0.0,
        nesterov=False,
        damping=lnb.Absolute(0.1),
        weight_decay=0.0,
        **options[solver],
    )


@pytest.mark.parametrize("solver", ["exact", "ten steps of cg"])
def test_matrix_factorization_converges(solver, x64):
    problems = [make_factorization(seed) for seed in range(3)]
    neurons = lnb.find_neurons(factorization_loss, *problems[0])
    optimizer = make_lnb(neurons, solver)
    backprop = lnb.backprop(factorization_loss, neurons)
    train = jax.jit(partial(factorize, optimizer, backprop, 1000))
    for problem in problems:
        losses = train(*problem)
        assert np.all(np.isfinite(losses))
        assert losses[-1] < 1e-10


def without_features(loss_fn: Callable) -> Callable:
    """Backpropagation as `factorize` calls it."""
    return lambda *args: (*jax.value_and_grad(loss_fn)(*args), None)


@jax.numpy_dtype_promotion("standard")  # which Adam needs
def test_matrix_factorization_is_hard_for_adam(x64):
    backprop, problem = without_features(factorization_loss), make_factorization(0)

    @jax.jit
    @jax.vmap
    def train(rate):
        optimizer = optax.with_extra_args_support(optax.adam(rate))
        return factorize(optimizer, backprop, 3000, *jax.tree.map(jnp.asarray, problem))

    losses = train(jnp.asarray([1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0]))
    assert losses.min() > 1e-8  # at any rate, at any time
    assert losses[5].min() < 1e-5  # and it does try


# Handwritten digits

EPOCHS, BATCH, TRAINING, TARGET = 8, 128, 11 * 128, 0.97
RATES = {"lnb": (0.01, 0.03, 0.1), "adam": (3e-3, 1e-2, 3e-2)}


def load_images():
    """Training and test images with their labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    y = labels[order].astype(np.int32)
    return (x[:TRAINING], y[:TRAINING]), (x[TRAINING:], y[TRAINING:])


def make_params(shapes, seed: int) -> list:
    rng = np.random.default_rng(seed)

    def layer(shape):
        w = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(shape[-1])}

    return [layer(shape) for shape in shapes]


def dense(layer, x):
    return x @ layer["w"] + layer["b"][None]


def convolution(layer, x, stride: int):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, layer["w"], (stride, stride), "SAME", dimension_numbers=numbers)
    return x + layer["b"][None, None, None]


def mlp(params, x):
    first, second, last = params
    x = jax.nn.relu(dense(first, x.reshape(len(x), -1)))
    return dense(last, jax.nn.relu(dense(second, x)))


def cnn(params, x):
    first, second, last = params
    x = jax.nn.relu(convolution(first, x, stride=1))
    x = jax.nn.relu(convolution(second, x, stride=2))
    return dense(last, x.reshape(len(x), -1))


NETWORKS = {
    "mlp": (mlp, [(64, 64), (64, 64), (64, 10)]),
    "cnn": (cnn, [(3, 3, 1, 8), (3, 3, 8, 16), (256, 10)]),
}


def make_trainer(network: str, optimizer: str) -> Callable:
    """A function from a rate, parameters and orders to test accuracies, one an epoch."""
    predict, shapes = NETWORKS[network]
    (x, y), (x_test, y_test) = jax.tree.map(jnp.asarray, load_images())

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()

    if optimizer == "lnb":
        neurons = lnb.find_neurons(loss_fn, make_params(shapes, 0), x[:BATCH], y[:BATCH])
        make, backprop = partial(lnb.lnb, neurons=neurons), lnb.backprop(loss_fn, neurons)
    else:
        make, backprop = optax.adam, without_features(loss_fn)

    @jax.jit
    def step(rate, params, state, batch):
        optimizer = optax.with_extra_args_support(make(rate))
        _, gradients, features = backprop(params, x[batch], y[batch])
        updates, state = optimizer.update(gradients, state, params, features=features)
        return optax.apply_updates(params, updates), state

    accuracy = jax.jit(lambda params: jnp.mean(predict(params, x_test).argmax(-1) == y_test))

    def train(rate, params, orders):
        state, accuracies = make(rate).init(params), []
        for order in orders:  # not a scan: in a loop of its own XLA's convolutions are slow
            for batch in order:
                params, state = step(rate, params, state, batch)
            accuracies.append(float(accuracy(params)))
        return np.array(accuracies)

    return train


def epochs_to_target(network: str, optimizer: str) -> float:
    """The median over seeds, at the best rate; one more than there are where it is not reached."""
    train, shapes = make_trainer(network, optimizer), NETWORKS[network][1]

    def epochs(rate, seed):
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(TRAINING).reshape(-1, BATCH) for _ in range(EPOCHS)]
        accuracies = train(rate, make_params(shapes, seed), np.stack(orders))
        reached = np.append(accuracies >= TARGET, True)
        return int(reached.argmax()) + 1

    return min(median(epochs(rate, seed) for seed in range(3)) for rate in RATES[optimizer])


@pytest.mark.parametrize("network", NETWORKS)
@jax.numpy_dtype_promotion("standard")  # which Adam needs
def test_digits_in_fewer_epochs_than_adam(network):
    ours = epochs_to_target(network, "lnb")
    assert ours <= EPOCHS
    assert ours < epochs_to_target(network, "adam")
