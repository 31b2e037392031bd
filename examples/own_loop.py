"""A training loop of one's own: hard digits count more, and more so with each epoch.

`make_step` gives the step; what a batch is and what a row weighs is the loop's affair.

Command: `python examples/own_loop.py`
Time: 12 seconds of processor time
Number: 96.7 % of the held-out digits are read correctly
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqaccum

GLOBAL_BATCH = 512
TRAIN = 1437


def loss(model: eqx.nn.MLP, example, key: jax.Array):
    del key
    x, y = example
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def hardness(model: eqx.nn.MLP, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """One minus the probability of the right digit, for each row."""
    logits = eqaccum.predict(model, x)
    right = jax.nn.softmax(logits)[np.arange(len(y)), y]
    return 1 - np.asarray(right)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few seconds")
    tiny = parser.parse_args(arguments).tiny
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = np.asarray(pixels, np.float32)[order] / 16
    y = np.asarray(labels, np.int32)[order]
    x_train, y_train = x[:TRAIN], y[:TRAIN]

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    step = eqaccum.make_step(
        loss, optimizer, global_batch=GLOBAL_BATCH, memory_limit="3MiB"
    )
    model = eqx.nn.MLP(64, 10, width_size=256, depth=2, key=jax.random.key(0))
    train = step.init(model, jax.random.key(1))

    shuffled = np.random.default_rng(1)
    epochs = 2 if tiny else 40
    for epoch in range(epochs):
        # Easy rows lose weight as training goes on, down to a tenth.
        hard = hardness(train.model, x_train, y_train)
        weights = (1 - epoch / epochs) + epoch / epochs * np.maximum(hard, 0.1)
        rows = shuffled.permutation(TRAIN)
        for start in range(0, TRAIN, GLOBAL_BATCH):
            batch = rows[start : start + GLOBAL_BATCH]  # the last one is short
            train, metrics = step(
                train, (x_train[batch], y_train[batch]), weights=weights[batch]
            )
            if train.step % 30 == 0:
                print(
                    f"epoch {epoch}, update {train.step}: loss {metrics.loss:.4f}, "
                    f"weight {metrics.weight:.0f} of {metrics.examples} rows"
                )
    assert step.plan is not None
    print(step.plan.summary())
    held_out = eqaccum.predict(train.model, x[TRAIN:]).argmax(axis=1) == y[TRAIN:]
    accuracy = float(np.mean(held_out))
    print(f"{accuracy:.1%} of {len(held_out)} held-out digits are read correctly")
    return accuracy


if __name__ == "__main__":
    main()
