"""Neurons, features and metrics made by hand, with every matrix written out."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from lnb._backprop import features
from lnb._interpret import Layout
from lnb._metric import Features, Gram, Theta
from lnb._neurons import Neuron, find_neurons


def make_neuron(kind: str = "dense", metric: str = "gram", has_gram: bool = True) -> Neuron:
    """A neuron as solvers see it: they ask for nothing but these three."""
    layout = Layout.flat((1,))
    rest = {"name": "", "weight": "", "bias": None, "d_in": 1, "d_out": 1, "sites": 1, "n": 1}
    return Neuron(
        **rest, kind=kind, metric=metric, has_gram=has_gram, layout=layout, bias_layout=None
    )


def blocks(x) -> Array:
    """Features as [g, n, d]."""
    x = jnp.asarray(x)
    return x if x.ndim == 3 else x[None]


def gram_of(x, bias: bool) -> Gram:
    """Features held as a gram, from X of shape [n, d] or [g, n, d]."""
    x = blocks(x)
    count = jnp.asarray(x.shape[1], x.dtype)
    return Gram(x.mT @ x, x.sum(1) if bias else None, count)


def rows_of(x, bias: bool, outputs: int = 3) -> Features:
    """Features held as they are: those of X W + b in the library's own form."""
    x = blocks(x)
    weight = jnp.zeros((x.shape[0], x.shape[2], outputs), x.dtype)
    params = {"weight": weight} | ({"bias": weight[:, 0, :]} if bias else {})

    def loss_fn(params, x):
        outputs = x @ params["weight"]
        return jnp.sum(outputs + params["bias"][:, None, :] if bias else outputs)

    neurons = find_neurons(loss_fn, params, x, metric="matrix-free")
    return features(loss_fn, neurons)(params, x)["weight"]


def theta_of(d: int, o: int, bias: bool, g: int = 1, seed: int = 1) -> Theta:
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.normal(size=(g, d, o)))
    return Theta(weight, jnp.asarray(rng.normal(size=(g, o))) if bias else None)


def matrix(theta: Theta, block: int = 0) -> np.ndarray:
    """One block as a matrix [d, o], with the bias as a last row."""
    weight = np.asarray(theta.weight[block])
    return weight if theta.bias is None else np.vstack([weight, theta.bias[block]])


def with_ones(x: np.ndarray, bias: bool) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))]) if bias else x


def explicit_metric(x, bias: bool, gamma: float = 0.0) -> np.ndarray:
    """M of one block, [d, d], or [d + 1, d + 1] with the bias last; gamma added for weights."""
    x, d = with_ones(x, bias), x.shape[1]
    return x.T @ x / len(x) + np.diag([gamma] * d + [0.0] * bias)


def uncorrelated(n: int, d: int, centred: bool, seed: int = 0) -> np.ndarray:
    """Features with a diagonal covariance and a mean, or with a diagonal E[x x^T]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x = np.linalg.qr(x - x.mean(0) if centred else x)[0] * rng.uniform(1, 9, size=d)
    return x + rng.normal(size=d) if centred else x


def exact_inverse_root(matrix: Array) -> Array:
    """A^-1/2 of positive semi-definite matrices, from their eigenvalues; 0 stays 0."""
    values, vectors = jnp.linalg.eigh(matrix)
    positive = values > 1e-12 * jnp.max(values, axis=-1, keepdims=True)
    roots = jnp.where(positive, jnp.where(positive, values, 1) ** -0.5, 0)
    return (vectors * roots[..., None, :]) @ vectors.mT
