"""Does a larger batch achieve anything? Digits, the same network, many global batches.

Command: `python benchmarks/worthwhile.py > benchmarks/results/worthwhile.md`
Time: 40 seconds of processor time

Accumulation gives the gradient of the global batch, no more; what that is worth is a
property of the problem. Two budgets: the same passes over the data, and the same number
of updates. The mean of three runs; the learning rate is the best of three for each row.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqaccum

TRAIN = 1437
BATCHES = (16, 64, 256, 1024)
RATES = (3e-3, 1e-2, 3e-2)
SEEDS = range(3)
EPOCHS, UPDATES = 10, 100


def digits():
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = np.asarray(pixels, np.float32)[order] / 16
    y = np.asarray(labels, np.int32)[order]
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def loss_after(global_batch: int, rate: float, seed: int, **length: int) -> float:
    """The held-out loss of one run."""
    train, test = digits()
    key = jax.random.key(seed)
    result = eqaccum.fit(
        eqx.nn.MLP(64, 10, width_size=64, depth=1, key=key),
        train,
        global_batch=global_batch,
        optimizer=optax.adam(rate),
        key=key,
        progress=False,
        **length,
    )
    return eqaccum.evaluate(result.model, test)["loss"]


def row(global_batch: int, **length: int) -> tuple[float, float]:
    """The best rate and its mean held-out loss."""
    means = {
        rate: float(
            np.mean([loss_after(global_batch, rate, s, **length) for s in SEEDS])
        )
        for rate in RATES
    }
    best = min(means, key=lambda rate: means[rate])
    return best, means[best]


def main() -> None:
    print("<!-- python benchmarks/worthwhile.py -->\n")
    print(
        f"| global batch | {EPOCHS} epochs: updates | held-out loss | rate "
        f"| {UPDATES} updates: epochs | held-out loss | rate |"
    )
    print("|---|---|---|---|---|---|---|")
    for batch in BATCHES:
        rate, loss = row(batch, epochs=EPOCHS)
        same_rate, same_loss = row(batch, steps=UPDATES, epochs=10**6)
        updates = EPOCHS * -(-TRAIN // batch)
        epochs = UPDATES * batch / TRAIN
        print(
            f"| {batch:,} | {updates} | {loss:.3f} | {rate:g} "
            f"| {epochs:.1f} | {same_loss:.3f} | {same_rate:g} |"
        )
    print(
        f"\nDigits of scikit-learn, 64-64-10 network, adam, {len(SEEDS)} runs each; "
        f"jax {jax.__version__}."
    )


if __name__ == "__main__":
    main()
