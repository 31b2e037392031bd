"""One training run on one device and on four, and that it is the same run.

The four devices are pieces of one CPU (`jax_num_cpu_devices`); on a machine with GPUs
nothing but that line would go.

Command: `python examples/devices.py`
Time: 9 seconds of processor time
Number: 9.0e-07, the largest relative difference of the losses of 80 updates
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqaccum

GLOBAL_BATCH = 512
DEVICES = 4


class Net(eqx.Module):
    """Two layers with dropout between them: the masks must be the same ones."""

    inner: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    outer: eqx.nn.Linear

    def __init__(self, *, key: jax.Array):
        a, b = jax.random.split(key)
        self.inner = eqx.nn.Linear(64, 128, key=a)
        self.dropout = eqx.nn.Dropout(0.2)
        self.outer = eqx.nn.Linear(128, 10, key=b)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.outer(self.dropout(jax.nn.relu(self.inner(x)), key=key))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few seconds")
    tiny = parser.parse_args(arguments).tiny
    pixels, labels = load_digits(return_X_y=True)
    data = np.asarray(pixels, np.float32) / 16, np.asarray(labels, np.int32)
    model = Net(key=jax.random.key(0))

    runs = []
    for count in (1, DEVICES):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        result = eqaccum.fit(
            model,
            data,
            global_batch=GLOBAL_BATCH,
            optimizer=optax.sgd(0.3, momentum=0.9),
            epochs=1 if tiny else 20,
            mesh=mesh,
        )
        print(f"{count} device(s): {result.plan.summary()}")
        runs.append(result)

    one, four = (run.history["loss"] for run in runs)
    apart = float(np.max(np.abs(four - one) / one))
    print(f"last loss {one[-1]:.6f} and {four[-1]:.6f}")
    print(f"the losses of {len(one)} updates are at most {apart:.1e} apart, relative")
    return apart


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
