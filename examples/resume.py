"""A run that is stopped half-way and resumed, and one that never was: the same bits.

Command: `python examples/resume.py` (needs `pip install "eqaccum[checkpoint]"`)
Time: 11 seconds of processor time
Number: 0 parameters differ, bit for bit
"""

import argparse
import tempfile

import equinox as eqx
import jax
import numpy as np
from sklearn.datasets import load_digits

import eqaccum


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few seconds")
    epochs = 4 if parser.parse_args(arguments).tiny else 20
    pixels, labels = load_digits(return_X_y=True)
    data = np.asarray(pixels, np.float32) / 16, np.asarray(labels, np.int32)
    model = eqx.nn.MLP(64, 10, width_size=128, depth=2, key=jax.random.key(0))

    def train(**more) -> eqaccum.FitResult:
        return eqaccum.fit(model, data, global_batch=512, epochs=epochs, **more)

    def stop_half_way(info: eqaccum.Info) -> bool:
        return info.epoch >= epochs // 2  # True stops the run

    with tempfile.TemporaryDirectory() as folder:
        first = train(checkpoint=folder, save_every=3, callbacks=[stop_half_way])
        print(f"stopped after update {first.train.step}")
        # The same call in a new process: resume=True goes on, or starts.
        resumed = train(checkpoint=folder, save_every=3, resume=True)
        loaded = eqaccum.load(folder, model)
    undisturbed = train()

    leaves = [
        jax.tree.leaves(eqx.filter(net, eqx.is_array))
        for net in (resumed.model, loaded, undisturbed.model)
    ]
    differing = sum(
        int(np.sum((np.asarray(a) != c) | (np.asarray(b) != c)))
        for a, b, c in zip(*leaves, strict=True)
    )
    print(f"resumed at update {first.train.step}, ended at {resumed.train.step}")
    print(f"{differing} parameters differ from those of a run that was never stopped")
    return differing


if __name__ == "__main__":
    main()
