"""Two encoders that find the lower half of an image by its upper half (InfoNCE).

Every other image of the global batch is a negative, so the loss couples all its rows,
and accumulating means of small batches would be another loss. `--group 64` is that
other loss: negatives come from groups of 64, one update per global batch all the same.

Command: `python -m examples.dual_encoder`, from the root of the repository
Data: Debian's package `dataset-fashion-mnist`; `--tiny` takes scikit-learn's digits
Time: 38 seconds of processor time
Number: 52.7 % of 2,000 lower halves are found; 45.4 % with `--group 64`
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

WIDTH = 64
TEST = 2000


class DualEncoder(eqx.Module):
    """Upper halves and lower halves to vectors of one length."""

    upper: eqx.nn.MLP
    lower: eqx.nn.MLP
    log_temperature: jax.Array

    def __init__(self, pixels: int, *, key: jax.Array):
        a, b = jax.random.split(key)
        self.upper = eqx.nn.MLP(pixels, WIDTH, 512, 2, key=a)
        self.lower = eqx.nn.MLP(pixels, WIDTH, 512, 2, key=b)
        self.log_temperature = jnp.log(0.1)


def unit(vector: jax.Array) -> jax.Array:
    return vector / jnp.linalg.norm(vector)


def embed(model: DualEncoder, image: jax.Array, key: jax.Array):
    del key
    upper, lower = jnp.split(image.reshape(-1).astype(jnp.float32) / 255, 2)
    return unit(model.upper(upper)), unit(model.lower(lower))


def head(model: DualEncoder, embeddings, weights: jax.Array) -> jax.Array:
    upper, lower = embeddings
    temperature = jnp.exp(model.log_temperature)
    return eqaccum.losses.info_nce(
        upper, lower, temperature=temperature, weights=weights
    )


class Embeddings(eqx.Module):
    """`embed` as a model, for `predict`."""

    model: DualEncoder

    def __call__(self, image: jax.Array):
        return embed(self.model, image, jax.random.key(0))


def images(tiny: bool) -> tuple[np.ndarray, np.ndarray]:
    if tiny:
        from sklearn.datasets import load_digits

        pixels, _ = load_digits(return_X_y=True)
        digits = np.asarray(pixels[:128], np.uint8)
        return digits, digits[:32]
    from paper_repro.data import fashion_mnist

    read = fashion_mnist()
    return read.train_images, read.test_images[:TEST]


def found(model: DualEncoder, test: np.ndarray) -> float:
    """How many upper halves are nearest to their own lower half, of all of them."""
    upper, lower = eqaccum.predict(Embeddings(model), test)
    return float(np.mean((upper @ lower.T).argmax(axis=1) == np.arange(len(test))))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", type=int, help="negatives from so many images only")
    parser.add_argument("--tiny", action="store_true", help="a few seconds, no data")
    given = parser.parse_args(arguments)
    train, test = images(given.tiny)
    result = eqaccum.fit(
        DualEncoder(train[0].size // 2, key=jax.random.key(0)),
        train,
        loss=eqaccum.coupled(embed, head, group=given.group),
        optimizer=lambda total: optax.adamw(optax.cosine_decay_schedule(1e-3, total)),
        global_batch=64 if given.tiny else 1024,
        memory_limit=None if given.tiny else "40MiB",
        epochs=1 if given.tiny else 8,
    )
    right = found(result.model, test)
    print(f"{right:.1%} of {len(test)} lower halves are found by their upper half")
    return right


if __name__ == "__main__":
    main()
