"""The time of a training step with LNB, as a multiple of Adam's.

Optimizers take turns of a few steps each, so that a slow moment of the machine hits all of them;
every round gives a ratio to Adam, and the table shows the median and quartiles over rounds.
Compiling is not included.
"""

import itertools
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles

import jax
import jax.numpy as jnp
import optax

import lnb

ROUNDS = 15
STEPS = 4  # a turn


def dense(key, d_in: int, d_out: int) -> dict:
    weight = jax.random.normal(key, (d_in, d_out)) / d_in**0.5
    return {"weight": weight, "bias": jnp.zeros(d_out)}


def conv(key, c_in: int, c_out: int, size: int = 3) -> dict:
    weight = jax.random.normal(key, (c_out, c_in, size, size)) / (c_in * size**2) ** 0.5
    return {"weight": weight, "bias": jnp.zeros(c_out)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp():
    """An MLP 784-800-800-10 on batches of 1000."""
    key = jax.random.key(0)
    sizes = itertools.pairwise((784, 800, 800, 10))
    params = [dense(jax.random.fold_in(key, i), *pair) for i, pair in enumerate(sizes)]
    x = jax.random.normal(key, (1000, 784))

    def loss_fn(params, x, labels):
        *hidden, last = params
        for layer in hidden:
            x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
        return cross_entropy(x @ last["weight"] + last["bias"], labels)

    return loss_fn, params, (x, jnp.arange(1000) % 10)


def conv_net():
    """Three 3 x 3 convolutions, two of them strided, on 128 images of 32 x 32."""
    keys = jax.random.split(jax.random.key(0), 5)
    convs = [conv(keys[0], 3, 16), conv(keys[1], 16, 32), conv(keys[2], 32, 64)]
    params = {"convs": convs, "head": dense(keys[3], 64, 10)}
    x = jax.random.normal(keys[4], (128, 3, 32, 32))

    def loss_fn(params, x, labels):
        for layer, stride in zip(params["convs"], (1, 2, 2), strict=True):
            x = jax.lax.conv(x, layer["weight"], (stride, stride), "SAME")
            x = jax.nn.relu(x + layer["bias"][:, None, None])
        x = x.mean((2, 3))
        return cross_entropy(x @ params["head"]["weight"] + params["head"]["bias"], labels)

    return loss_fn, params, (x, jnp.arange(128) % 10)


def plain_step(optimizer: optax.GradientTransformation, loss_fn, params, args):
    del args

    def step(params, opt_state, args):
        _, grads = jax.value_and_grad(loss_fn)(params, *args)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, optimizer.init(params)


def boosted_step(make_optimizer: Callable, loss_fn, params, args):
    neurons = lnb.find_neurons(loss_fn, params, *args)
    optimizer = make_optimizer(1e-2, neurons)

    def step(params, opt_state, args):
        _, grads, features = lnb.backprop(loss_fn, neurons)(params, *args)
        updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
        return optax.apply_updates(params, updates), opt_state

    return step, optimizer.init(params)


class Contender:
    """One optimizer at work: a compiled step and its state."""

    def __init__(self, step: Callable, params, opt_state, args):
        self.state, self.args = (params, opt_state), args
        self.step = jax.jit(step).lower(*self.state, args).compile()
        self.seconds()  # a program's first calls are slower

    def seconds(self) -> float:
        """Takes a turn; the time of one step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.state = self.step(*self.state, self.args)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / STEPS


def measure(problem: Callable) -> dict[str, list[float]]:
    """The seconds of a step, by optimizer, in every round."""
    loss_fn, params, args = problem()
    rarely = partial(lnb.lnb, solver=lnb.Cholesky(every=10))
    steps = {
        "optax.adam": plain_step(optax.adam(1e-3), loss_fn, params, args),
        "optax.contrib.muon": plain_step(optax.contrib.muon(1e-2), loss_fn, params, args),
        "lnb.lnb": boosted_step(lnb.lnb, loss_fn, params, args),
        "... every=10": boosted_step(rarely, loss_fn, params, args),
        "... norm=neuron": boosted_step(partial(lnb.lnb, norm="neuron"), loss_fn, params, args),
        "lnb.algorithm2": boosted_step(lnb.algorithm2, loss_fn, params, args),
    }
    contenders = {name: Contender(s, params, state, args) for name, (s, state) in steps.items()}
    rounds = [{name: c.seconds() for name, c in contenders.items()} for _ in range(ROUNDS)]
    return {name: [r[name] for r in rounds] for name in contenders}


def print_table(problem: Callable) -> None:
    print(f"\n{problem.__doc__}")
    print(f"{'optimizer':<20}{'ms a step':>12}{'times Adam':>14}{'quartiles':>18}")
    times = measure(problem)
    for name, seconds in times.items():
        ratios = [s / a for s, a in zip(seconds, times["optax.adam"], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        middle = f"{1e3 * median(seconds):>12.2f}{median(ratios):>14.2f}"
        print(f"{name:<20}{middle}{f'{low:.2f} to {high:.2f}':>18}")


def main() -> None:
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind} ({platform.machine()})")
    print(f"Medians over {ROUNDS} rounds of {STEPS} steps each.")
    for problem in (mlp, conv_net):
        print_table(problem)


if __name__ == "__main__":
    main()
