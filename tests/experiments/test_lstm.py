"""The recurrent network, against loops in float64."""

import jax
import numpy as np

from lnb_experiments.data import Source
from lnb_experiments.experiments import Lstm

KEY = jax.random.key(0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_the_network_is_a_loop_over_time():
    experiment = Lstm.preset("tiny", layers=2)
    model = jax.jit(experiment.init)(KEY)
    batch = experiment.load(Source("synthetic")).train.take(slice(3))
    m = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model)
    outputs = jax.jit(experiment.outputs)(model, batch, None)
    for example, logits in zip(batch.inputs, outputs, strict=True):
        states = [(np.zeros(16), np.zeros(16)) for _ in m["layers"]]
        for byte, found in zip(example, logits, strict=True):
            x = m["embedding"][byte]
            for i, layer in enumerate(m["layers"]):
                hidden, cell = states[i]
                inputs, recurrent = layer["inputs"], layer["recurrent"]
                gates = x @ inputs["weight"] + inputs["bias"] + hidden @ recurrent["weight"]
                write, keep, candidate, read = gates.reshape(4, 16)
                cell = sigmoid(keep) * cell + sigmoid(write) * np.tanh(candidate)
                x = sigmoid(read) * np.tanh(cell)
                states[i] = x, cell
            expected = x @ m["head"]["weight"] + m["head"]["bias"]
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_sizes_and_forget_gates():
    experiment = Lstm.preset("arena")
    model = jax.eval_shape(experiment.init, KEY)
    width, gates = 128, 4 * 128
    expected = 256 * width + (width + 1) * gates + width * gates + (width + 1) * 256
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == expected
    bias = jax.jit(Lstm.preset("tiny").init)(KEY)["layers"][0]["inputs"]["bias"]
    np.testing.assert_array_equal(bias.reshape(4, 16).sum(1), [0, 16, 0, 0])
