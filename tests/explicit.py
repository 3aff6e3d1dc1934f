"""Neurons, features and metrics made by hand, with every matrix written out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import lnb
from lnb._metric import Theta


def fed(x, bias: bool, kind: str = "dense", outputs: int = 3) -> tuple[lnb.Neuron, Any]:
    """A neuron and its features, from X of shape [n, d] or [g, n, d]; of a lookup, from indices.

    These are the library's own, of a network that is X W + b in each of g blocks.
    """
    x = jnp.asarray(x)
    x = x if x.ndim == 3 or kind == "lookup" else x[None]
    if kind == "scale":
        shapes = {"weight": (len(x),), "bias": (len(x),)}
        apply = lambda p, x: x[:, :, 0].T * p["weight"][None] + (p["bias"][None] if bias else 0)
    elif kind == "lookup":
        shapes = {"weight": (int(x.max()) + 1, outputs), "bias": (outputs,)}
        apply = lambda p, x: p["weight"][x]
    else:
        shapes = {"weight": (len(x), x.shape[2], outputs), "bias": (len(x), outputs)}
        apply = lambda p, x: x @ p["weight"] + (p["bias"][:, None] if bias else 0)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
    params = {k: jnp.zeros(shape, dtype) for k, shape in shapes.items() if bias or k == "weight"}
    loss_fn = lambda params, x: jnp.sum(apply(params, x))
    neurons = lnb.find_neurons(loss_fn, params, x, rows="all")
    return neurons["weight"], lnb.forward_features(loss_fn, neurons)(params, x)["weight"]


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
