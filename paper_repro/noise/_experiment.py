"""McCandlish's simple noise scale over a training run on Fashion-MNIST."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
import optax

import eqaccum

from .._experiment import Experiment, Finding, Run, Table
from .._images import image_rows
from .._statistics import at_least, at_most, over_seeds


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `synthetic`: made-up images instead of Fashion-MNIST.
    - `rows`: training images used.
    - `width`, `depth`: of the multilayer perceptron.
    - `global_batch`, `microbatch`: the big and the small batch of the estimate.
    - `epochs`, `learning_rate`: of the run (SGD with momentum 0.9).
    - `window`: the share of the run that its beginning and its end are.
    - `low`, `high`: the published range that the run's median has to lie in.
    - `rise`: how many times the end is above the beginning at least.
    """

    synthetic: bool = False
    rows: int = 60000
    width: int = 256
    depth: int = 2
    global_batch: int = 512
    microbatch: int = 32
    epochs: int = 10
    learning_rate: float = 0.02
    window: float = 0.05
    low: float = 100.0
    high: float = 5000.0
    rise: float = 10.0


def measure(config: Config, seed: int) -> Run:
    """The two parts of the estimate at every update, and the loss."""
    data = image_rows(config.rows, synthetic=config.synthetic)
    model = eqx.filter_jit(eqx.nn.MLP)(
        data[0].shape[1], 10, config.width, config.depth, key=jr.key(seed)
    )
    result = eqaccum.fit(
        model,
        data,
        global_batch=config.global_batch,
        epochs=config.epochs,
        optimizer=optax.sgd(config.learning_rate, momentum=0.9),
        key=jr.key(seed),
        microbatch=config.microbatch,
        drop_remainder=True,
        noise_scale=True,
        progress=False,
    )
    return {
        name: [float(f"{value:.5g}") for value in result.history[name]]
        for name in ("grad_variance", "grad_square", "loss")
    }


def _scales(config: Config, run: Run) -> np.ndarray:
    """tr(Sigma) / |G|^2 window by window, each part averaged by itself."""
    variance, square = (np.array(run[n]) for n in ("grad_variance", "grad_square"))
    pieces = max(round(1 / config.window), 1)
    means = [
        (np.mean(v), np.mean(s))
        for v, s in zip(
            np.array_split(variance, pieces),
            np.array_split(square, pieces),
            strict=True,
        )
        if len(v)
    ]
    # Where noise hides the gradient altogether the scale has no estimate.
    return np.array([v / s if s > 0 else np.nan for v, s in means])


def _ends(config: Config, run: Run) -> tuple[float, float]:
    """The first and the last window that have an estimate."""
    known = _scales(config, run)
    known = known[np.isfinite(known)]
    return (float(known[0]), float(known[-1])) if len(known) else (1.0, 0.0)


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """Within the published range of small images, and rising through the run."""
    medians = [float(np.nanmedian(_scales(config, run))) for run in runs]
    rises = [last / first for first, last in (_ends(config, run) for run in runs)]
    return [
        at_least("smallest median of the noise scale", min(medians), config.low),
        at_most("largest median of the noise scale", max(medians), config.high),
        at_least("end over beginning, least of the seeds", min(rises), config.rise),
    ]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    median = over_seeds(runs, lambda r: float(np.nanmedian(_scales(config, r))))
    rows = [
        ["beginning", str(over_seeds(runs, lambda run: _ends(config, run)[0]))],
        ["median", str(median)],
        ["end", str(over_seeds(runs, lambda run: _ends(config, run)[1]))],
    ]
    return [Table("Noise scale, in examples", ["window", "B_simple"], rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    for seed, run in enumerate(runs):
        scales = _scales(config, run)
        axes.plot(np.linspace(0, 1, len(scales)), scales, "o-", label=f"seed {seed}")
    axes.set(yscale="log", xlabel="share of the run", ylabel="noise scale, examples")
    axes.legend()


EXPERIMENT = Experiment(
    name="noise",
    title="The gradient noise scale, free from accumulation",
    claim=(
        "The noise scale tr(Sigma) / |G|^2 of small images is some hundreds to "
        "thousands of examples, and rises tenfold through training."
    ),
    says=(
        "McCandlish et al. 2018 (arXiv:1812.06162), run averages of B_crit / B_simple: "
        "MNIST 200 / 900, SVHN 500 / 4,000, CIFAR-10 900 / 2,000; it rises through "
        "training."
    ),
    notes=(
        "Fashion-MNIST, a multilayer perceptron, SGD with momentum. "
        "`noise_scale=True`: the microbatches' gradients are the small batches and "
        "their mean the big one, so no gradient is computed for it. Its two parts are "
        "averaged by window, then divided. The paper's hyperbola of steps against "
        "examples needs a search of the learning rate at each batch size, and is not "
        "repeated here."
    ),
    minutes=5.0,
    full=Config(),
    tiny=Config(
        synthetic=True,
        rows=128,
        width=8,
        depth=1,
        global_batch=32,
        microbatch=8,
        epochs=1,
        window=0.5,
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
