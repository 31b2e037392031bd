"""A small run with everything in it that a resume must not lose.

Dropout (keys), BatchNorm (state), AdamW with warm-up (moments and a count), a shuffled
epoch whose last batch is short. In a process of its own:

    python tests/resumed.py DIRECTORY STEPS [SECONDS]

continues or starts the run, waiting that long after each step, and says each one. It
appends the examples of each step to `DIRECTORY.rows`, as they reach the loss.
"""

import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, GLOBAL_BATCH, EPOCHS = 60, 8, 3  # 8 steps an epoch, the last of 4 rows
STEPS = 20


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key, width: int = 8):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(4, width, key=first)
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.3)
        self.last = eqx.nn.Linear(width, 3, key=last)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def net(width: int = 8, seed: int = 1) -> tuple[Net, eqx.nn.State]:
    return eqx.nn.make_with_state(Net)(jax.random.key(seed), width)


def loss(model, state, example, key):
    logits, state = model(example["x"], state, key)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])
    return value, state, {"row": example["row"].astype(jnp.float32)[None]}


def data() -> dict[str, np.ndarray]:
    """Rows with their numbers, so that each can be seen where it is used."""
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(ROWS, 4)).astype(np.float32),
        "y": draw.integers(0, 3, ROWS),
        "row": np.arange(ROWS),
    }


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, STEPS))


def arguments(**more: Any) -> dict[str, Any]:
    """What `fit` gets in all of these runs."""
    model, state = net()
    return {
        "model": model,
        "data": data(),
        "state": state,
        "loss": loss,
        "has_aux": True,
        "optimizer": optimizer(),
        "global_batch": GLOBAL_BATCH,
        "microbatch": 2,
        "epochs": EPOCHS,
        "key": jax.random.key(5),
        **more,
    }


def rows_of(info: Any) -> list[int]:
    """The numbers of the rows that this step's loss was computed on."""
    return [int(row) for row in np.ravel(info.metrics.aux["row"])]


def main(directory: str, steps: str, seconds: str = "0", *more: str) -> None:
    import eqaccum

    log = Path(directory + ".rows")

    def note(info: Any) -> None:
        with log.open("a") as file:
            file.write(f"{info.metrics.examples} {info.step} {rows_of(info)}\n")
        print(f"step {info.step}", flush=True)
        time.sleep(float(seconds))

    eqaccum.fit(
        **arguments(
            steps=int(steps),
            checkpoint=directory,
            save_every=1,
            resume=True,
            callbacks=[note],
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
