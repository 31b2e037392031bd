"""A small vision transformer on Fashion-MNIST; the fastest microbatch, not the largest.

Command: `python -m examples.vit`, from the root of the repository
Data: Debian's package `dataset-fashion-mnist`; `--tiny` draws images of its own
Time: 1.5 minutes of processor time
Number: 81.4 % of the test images are named correctly after 2 epochs
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

PATCH = 7
PATCHES = (28 // PATCH) ** 2


class Block(eqx.Module):
    """Attention and a small network, each after a norm and beside a shortcut."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, *, key: jax.Array):
        a, b = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=b)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        a, b = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y), key=a)
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=b)


class ViT(eqx.Module):
    """Patches, positions, blocks, and the mean over the patches."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, *, key: jax.Array):
        a, b, c, *keys = jax.random.split(key, 3 + depth)
        self.embed = eqx.nn.Linear(PATCH * PATCH, width, key=a)
        self.positions = 0.02 * jax.random.normal(b, (PATCHES, width))
        self.head = eqx.nn.Linear(width, 10, key=c)
        self.blocks = [Block(width, key=key) for key in keys]

    def __call__(self, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = [None] * len(self.blocks)
        if key is not None:
            keys = list(jax.random.split(key, len(self.blocks)))
        side = 28 // PATCH
        patches = image.astype(jnp.float32).reshape(side, PATCH, side, PATCH) / 255
        x = patches.transpose(0, 2, 1, 3).reshape(PATCHES, PATCH * PATCH)
        x = jax.vmap(self.embed)(x) + self.positions
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, block_key)
        return self.head(jnp.mean(x, axis=0))


def images(tiny: bool):
    if tiny:  # every class is a bright row of its own
        labels = np.arange(64) % 10
        drawn = np.zeros((64, 28, 28), np.uint8)
        drawn[np.arange(64), 2 * labels] = 255
        return (drawn, labels), (drawn, labels)
    from paper_repro.data import fashion_mnist

    read = fashion_mnist()
    test = (read.test_images, read.test_labels.astype(np.int32))
    return (read.train_images, read.train_labels.astype(np.int32)), test


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few seconds, no data")
    tiny = parser.parse_args(arguments).tiny
    train, (test_images, test_labels) = images(tiny)
    model = ViT(16 if tiny else 64, 1 if tiny else 3, key=jax.random.key(0))

    # No loss is given: integer labels mean cross-entropy, and the key is for dropout.
    result = eqaccum.fit(
        model,
        train,
        optimizer=lambda total: optax.adamw(
            optax.warmup_cosine_decay_schedule(0.0, 3e-3, total // 10, total)
        ),
        global_batch=32 if tiny else 512,
        microbatch=8 if tiny else "fastest",
        epochs=1 if tiny else 2,
    )
    print(result.plan.summary())
    predicted = eqaccum.predict(result.model, test_images).argmax(axis=1)
    accuracy = float(np.mean(predicted == test_labels))
    print(f"{accuracy:.1%} of the test images are named correctly")
    return accuracy


if __name__ == "__main__":
    main()
