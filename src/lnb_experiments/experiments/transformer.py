"""The transformer block that the vision transformer and the language model share."""

import jax
import jax.numpy as jnp
from jax import Array

from .layers import Layer, dropout, init_linear, layer_norm, linear, split_key

Block = dict[str, Layer]


def init_blocks(key: Array, count: int, width: int, mlp_width: int) -> list[Block]:
    """Blocks of tokens of a width: attention without biases, an MLP with them."""
    return [init_block(key, width, mlp_width) for key in jax.random.split(key, count)]


def init_block(key: Array, width: int, mlp_width: int) -> Block:
    keys = iter(jax.random.split(key, 6))
    attention = {
        name: init_linear(next(keys), width, width, bias=False)
        for name in ("query", "key", "value", "output")
    }
    return {
        **attention,
        "expand": init_linear(next(keys), width, mlp_width),
        "contract": init_linear(next(keys), mlp_width, width),
    }


def apply_block(
    block: Block, x: Array, *, heads: int, causal: bool = False, rate: float = 0.0, key=None
) -> Array:
    """Attention, then an MLP, each on normalised tokens and added to them.

    Args:
      block: its parameters.
      x: [batch, tokens, width].
      heads: number of attention heads.
      causal: whether a token sees only itself and those before it.
      rate: probability of dropout, after the MLP's GELU and after its output.
      key: for dropout; without it there is none.
    """
    hidden_key, output_key = split_key(key, 2)
    x = x + attention(block, layer_norm(x), heads, causal)
    hidden = jax.nn.gelu(linear(block["expand"], layer_norm(x)))
    update = linear(block["contract"], dropout(hidden, rate, hidden_key))
    return x + dropout(update, rate, output_key)


def attention(block: Block, x: Array, heads: int, causal: bool) -> Array:
    """Multi-head self-attention of tokens [batch, tokens, width]."""
    batch, tokens, width = x.shape

    def split(name: str) -> Array:  # [batch, heads, tokens, numbers of a head]
        y = linear(block[name], x).reshape(batch, tokens, heads, width // heads)
        return y.transpose(0, 2, 1, 3)

    scores = split("query") @ split("key").mT * (width // heads) ** -0.5
    if causal:
        seen = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    mixed = jax.nn.softmax(scores) @ split("value")
    return linear(block["output"], mixed.transpose(0, 2, 1, 3).reshape(x.shape))
