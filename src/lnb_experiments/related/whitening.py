"""The reparameterisation that whitens what a neuron is fed."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from lnb._metric import Theta, moments

from .neurons import centred, damped, multiply


class Whitening(NamedTuple):
    r"""The paper's W (section "Update Properties"), of one neuron: :math:`\theta = W \phi`.

    .. math:: W = \begin{pmatrix} \Sigma^{-1/2} & 0 \\ -\mu^T \Sigma^{-1/2} & 1 \end{pmatrix}

    Without a bias there is no mean, and :math:`\Sigma` is :math:`E[x x^T]`.

    Attributes:
      mean: [blocks, inputs], zeros without a bias.
      root: the symmetric root of Sigma, [blocks, inputs, inputs] or a diagonal [blocks, inputs].
      inverse_root: its inverse.
    """

    mean: Array
    root: Array
    inverse_root: Array

    @classmethod
    def identity(cls, theta: Theta, diagonal: bool) -> "Whitening":
        mean = jnp.zeros_like(theta.weight[:, :, 0])
        ones = jnp.ones_like(mean)
        eye = jnp.eye(ones.shape[1], dtype=ones.dtype)
        root = ones if diagonal else ones[:, :, None] * eye[None]
        return cls(mean, root, root)

    @classmethod
    def of(cls, features: Any, bias: bool, damping: float) -> "Whitening":
        """From the features of one batch."""
        mean, covariance = centred(moments(features), bias)
        covariance = damped(covariance, damping)
        if covariance.ndim == 2:
            root = jnp.sqrt(covariance)
            return cls(mean, root, 1 / root)
        values, vectors = jnp.linalg.eigh(covariance)
        roots = jnp.sqrt(jnp.maximum(values, jnp.finfo(values.dtype).tiny))[:, None, :]
        return cls(mean, (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT)

    def theta(self, phi: Theta) -> Theta:
        """W phi: the parameters of the network as it was given."""
        weight = multiply(self.inverse_root, phi.weight)
        if phi.bias is None:
            return Theta(weight, None)
        return Theta(weight, phi.bias - self._shift(weight))

    def phi(self, theta: Theta) -> Theta:
        """The parameters of the whitened network: the inverse of `theta`."""
        weight = multiply(self.root, theta.weight)
        if theta.bias is None:
            return Theta(weight, None)
        return Theta(weight, theta.bias + self._shift(theta.weight))

    def _shift(self, weight: Array) -> Array:
        return multiply(self.mean[:, None, :], weight)[:, 0, :]
