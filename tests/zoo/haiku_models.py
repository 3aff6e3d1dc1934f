"""Haiku transforms."""

import haiku as hk
import jax
import jax.numpy as jnp

from ._by_hand import convolve, same, standardize
from ._case import Case, Expected, case, fill, normal, relaxed


def _transform(function, *args):
    apply = hk.without_apply_rng(hk.transform(function))
    return apply, fill(jax.eval_shape(apply.init, jax.random.key(0), *args))


@case
def haiku_cnn() -> Case:
    """Conv2D with strides and SAME padding, Linear, an MLP."""

    @relaxed
    def model(x):
        x = jnp.sin(hk.Conv2D(3, kernel_shape=(3, 2), stride=2)(x))
        x = hk.Linear(4)(x.reshape(x.shape[0], -1))
        return hk.nets.MLP([3, 2])(jnp.sin(x))

    x = normal(0, 3, 4, 3, 2)
    apply, params = _transform(model, x)

    @relaxed
    def loss_fn(params, x):
        return jnp.mean(jnp.sin(apply.apply(params, x)))

    def by_hand(tape, x):
        x = jnp.moveaxis(x, -1, 1)
        padding = [same(4, 3, 2), same(3, 2, 2)]

        def conv(w, b):
            y = convolve(x, jnp.moveaxis(w, (-1, -2), (0, 1)), padding, stride=(2, 2))
            return jnp.moveaxis(y, 1, -1) + b

        def linear(x, path):
            return tape(lambda w, b: x @ w + b, f"{path}.w", f"{path}.b")

        y = jnp.sin(tape(conv, "conv2_d.w", "conv2_d.b")).reshape(3, -1)
        y = jnp.sin(linear(y, "linear"))
        y = jax.nn.relu(linear(y, "mlp/~/linear_0"))
        return jnp.mean(jnp.sin(linear(y, "mlp/~/linear_1")))

    expected = (
        Expected("conv2_d.w", "conv2_d.b", "conv", 12, 3, 3 * 4),
        Expected("linear.w", "linear.b", "dense", 12, 4, 3),
        Expected("mlp/~/linear_0.w", "mlp/~/linear_0.b", "dense", 4, 3, 3),
        Expected("mlp/~/linear_1.w", "mlp/~/linear_1.b", "dense", 3, 2, 3),
    )
    return Case(loss_fn, params, (x,), by_hand, expected)


@case
def haiku_layer_stack() -> Case:
    """`hk.layer_stack`: one scan over stacked weights, LayerNorm and Linear inside."""

    @relaxed
    def model(x):
        def block(x):
            y = hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)
            return x + hk.Linear(4, name="linear")(jnp.sin(y))

        return hk.layer_stack(3, name="stack")(block)(x)

    x = normal(0, 7, 4)
    apply, params = _transform(model, x)

    @relaxed
    def loss_fn(params, x):
        return jnp.mean(jnp.sin(apply.apply(params, x)))

    def by_hand(tape, x):
        for i in range(3):
            y = standardize(x)
            y = tape(lambda w, b: y * w[i] + b[i], "stack/norm.scale", "stack/norm.offset")
            y = jnp.sin(y)
            x = x + tape(lambda w, b: y @ w[i] + b[i], "stack/linear.w", "stack/linear.b")
        return jnp.mean(jnp.sin(x))

    expected = (
        Expected("stack/norm.scale", "stack/norm.offset", "scale", 1, 4, 7),
        Expected("stack/linear.w", "stack/linear.b", "dense", 4, 4, 7),
    )
    return Case(loss_fn, params, (x,), by_hand, expected)
