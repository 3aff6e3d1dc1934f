"""Moments of a convolution's windows by shifts, against windows cut out one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lnb
from lnb._features._windows import Windows, cheaper_windows

BATCH, CHANNELS = 3, 4

# Image, filter, padding, layout.
CASES = [
    ((6, 5), (3, 3), ((1, 1), (1, 1)), "NHWC"),
    ((6, 5), (3, 3), ((0, 0), (0, 0)), "NCHW"),
    ((7,), (3,), ((2, 0),), "NWC"),
    ((5, 6), (2, 3), ((0, 1), (2, 2)), "NHWC"),
    ((4, 4, 3), (3, 2, 2), ((1, 1), (0, 1), (1, 0)), "NDHWC"),
    ((6, 5), (1, 1), ((0, 0), (0, 0)), "NHWC"),
    ((6, 5), (3, 3), ((-1, 1), (1, 0)), "NHWC"),  # cropped
    ((3, 3), (5, 5), ((2, 2), (2, 2)), "NHWC"),  # more taps than pixels
]


def cut_out(image: np.ndarray, taps, padding) -> np.ndarray:
    """All windows of images [batch, *image, channels], as rows (channel, tap)."""
    for axis, (low, high) in enumerate(padding, start=1):
        image = np.pad(
            image, [(max(low, 0), max(high, 0)) if i == axis else (0, 0) for i in range(image.ndim)]
        )
        keep = slice(max(-low, 0), image.shape[axis] - max(-high, 0))
        image = image[(slice(None),) * axis + (keep,)]
    places = [range(n - k + 1) for n, k in zip(image.shape[1:-1], taps, strict=True)]
    rows = []
    for example, start in itertools.product(image, itertools.product(*places)):
        window = example[tuple(slice(s, s + k) for s, k in zip(start, taps, strict=True))]
        rows.append(np.moveaxis(window, -1, 0).ravel())
    return np.stack(rows)


def make_images(image, layout: str):
    """Random images in a layout, and the same as [batch, *image, channels]."""
    x = np.random.default_rng(0).normal(size=(BATCH, *image, CHANNELS))
    usual = "N" + layout.replace("N", "").replace("C", "") + "C"
    return x.transpose([usual.index(axis) for axis in layout]), x


@pytest.mark.parametrize(("image", "taps", "padding", "layout"), CASES)
def test_moments_of_windows(image, taps, padding, layout, x64):
    x, plain = make_images(image, layout)
    rows = cut_out(plain, taps, padding)
    spatial = layout.replace("N", "").replace("C", "")
    axes = tuple(layout.index(axis) for axis in "N" + spatial + "C")
    before, after = zip(
        *([k - 1 - side for side in pad] for k, pad in zip(taps, padding, strict=True)), strict=True
    )
    windows = Windows(axes, image, CHANNELS, BATCH, taps, before, after)
    x = jnp.asarray(x)
    np.testing.assert_allclose(windows.second(x, x.dtype), rows.T @ rows, atol=1e-12)
    np.testing.assert_allclose(windows.first(x, x.dtype), rows.sum(0), atol=1e-12)
    assert windows.patch_flops() == 2 * rows.shape[0] * rows.shape[1] ** 2


def options_of(x, weight, **changes) -> dict:
    """What a convolution in the layouts NHWC and HWIO is described by."""
    numbers = lax.conv_dimension_numbers(x.shape, weight.shape, ("NHWC", "HWIO", "NHWC"))
    options = {
        "filter_shape": weight.shape[:2],
        "window_strides": (1, 1),
        "padding": ((1, 1), (1, 1)),
        "lhs_dilation": (1, 1),
        "rhs_dilation": (1, 1),
        "dimension_numbers": numbers,
    }
    return options | changes


def convolve(weight, x, options):
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    return lax.conv_general_dilated(x, weight, **{name: options[name] for name in names})


@pytest.mark.parametrize(
    ("size", "taps", "changes", "chosen"),
    [
        (16, 3, {}, True),
        (5, 1, {"padding": ((0, 0), (0, 0))}, True),
        (3, 2, {"lhs_dilation": (2, 2)}, False),  # a transposed convolution, filters side by side
        (3, 2, {"lhs_dilation": (2, 2), "padding": ((0, 1), (1, 1))}, False),
        (3, 3, {}, False),  # almost all is border
        (16, 3, {"window_strides": (2, 2)}, False),
        (16, 3, {"rhs_dilation": (2, 2)}, False),
        (16, 3, {"padding": ((3, 0), (0, 0))}, False),  # windows that see nothing
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_metric_of_a_convolution(size, taps, changes, chosen, bias, x64):
    """Whatever way is chosen, M is (1/n) J^T J of an explicit Jacobian."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, size, size, 2))
    params = {"w": jax.random.normal(keys[1], (taps, taps, 2, 1))}
    if bias:
        params["b"] = jnp.zeros(1)
    options = options_of(x, params["w"], **changes)
    assert (cheaper_windows(x.shape, options) is not None) == chosen

    def apply(params):
        out = convolve(params["w"], x, options)
        return out + params["b"][None, None, None] if bias else out

    def loss_fn(params, x):
        out = convolve(params["w"], x, options)
        return jnp.sum(jnp.sin(out + params["b"][None, None, None] if bias else out))

    neurons = lnb.find_neurons(loss_fn, params, x, rows="all")
    (neuron,) = neurons
    vector = jax.tree.map(lambda p: jax.random.normal(keys[2], p.shape), params)
    _, _, features = lnb.backprop(loss_fn, neurons)(params, x)
    product = lnb.metric_product(neurons, features, vector)
    jacobian = jax.tree.map(lambda j, p: j.reshape(-1, p.size), jax.jacobian(apply)(params), params)
    n = neuron.n
    outputs = sum(jacobian[k] @ vector[k].ravel() for k in params)
    for name, value in product.items():
        expected = (jacobian[name].T @ outputs / n).reshape(value.shape)
        np.testing.assert_allclose(value, expected, atol=1e-10)
