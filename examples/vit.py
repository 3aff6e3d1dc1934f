"""A vision transformer in Equinox, and the neurons that are found in it.

Nothing is computed here: the model and the batch are shapes only, and the loss is traced once.

    python examples/vit.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import lnb

WIDTH, HEADS, MLP_WIDTH, PATCH, PATCHES, CLASSES = 96, 4, 192, 4, 64, 10


class Block(eqx.Module):
    """Attention and an MLP, each on normalised tokens and added to them."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, MLP_WIDTH, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.norms[0])(tokens)
        tokens = tokens + self.attention(x, x, x)
        return tokens + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(tokens))


class VisionTransformer(eqx.Module):
    """Patches to class scores."""

    patch_embedding: eqx.nn.Conv2d
    class_token: jax.Array
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, depth=2):
        keys = iter(jax.random.split(key, depth + 4))
        self.patch_embedding = eqx.nn.Conv2d(3, WIDTH, PATCH, PATCH, key=next(keys))
        self.class_token = 0.02 * jax.random.normal(next(keys), (1, WIDTH))
        self.positions = 0.02 * jax.random.normal(next(keys), (PATCHES + 1, WIDTH))
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=next(keys))
        self.blocks = [Block(key) for key in keys]

    def __call__(self, image):
        patches = self.patch_embedding(image).reshape(WIDTH, -1).T
        tokens = jnp.concatenate([self.class_token, patches]) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[0])


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def find() -> lnb.Neurons:
    model = eqx.filter_eval_shape(VisionTransformer, jax.random.key(0))
    images = jax.ShapeDtypeStruct((128, 3, 32, 32), jnp.float32)
    labels = jax.ShapeDtypeStruct((128,), jnp.int32)
    return lnb.find_neurons(loss_fn, model, images, labels)


if __name__ == "__main__":
    print(find())
