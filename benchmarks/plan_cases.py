"""What the benchmarks of the plan run: models, sizes, optimizers, passes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import _models
import optax

OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
}
PASSES = (1, 2, 3, 6)


@dataclass(frozen=True)
class Case:
    """A workload by its sizes, and the rows of one pass of it."""

    build: Callable[..., _models.Workload]
    sizes: Mapping[str, Any]
    microbatch: int

    def workload(self) -> _models.Workload:
        return self.build(**self.sizes)


# Above 1 GB for each optimizer: the parameters of the MLP, the activations of others.
LARGE = {
    "MLP": Case(
        _models.mlp, {"features": 4096, "width": 4096, "depth": 7, "classes": 1000}, 256
    ),
    "transformer LM": Case(
        _models.language_model,
        {"vocabulary": 4096, "length": 128, "width": 256, "depth": 6, "heads": 8},
        40,
    ),
    "ViT": Case(
        _models.vision_transformer,
        {"size": 32, "patch": 4, "width": 256, "depth": 2, "heads": 4},
        288,
    ),
    "GRU": Case(_models.gru, {"vocabulary": 1024, "length": 64, "width": 256}, 704),
    "CNN": Case(_models.cnn, {"size": 64, "widths": (32, 64, 128), "blocks": 1}, 96),
    "BatchNorm": Case(
        _models.batch_norm_net, {"size": 64, "widths": (32, 64, 128)}, 384
    ),
}

# A row's activations count, not the parameters: one pass takes more than 1 GB.
WIDE_BATCH = {
    "MLP": Case(
        _models.mlp, {"features": 64, "width": 256, "depth": 16, "classes": 10}, 36_000
    ),
    "transformer LM": LARGE["transformer LM"],
    "CNN": LARGE["CNN"],
}
CASES = {"large": LARGE, "wide batch": WIDE_BATCH}

# Quick to compile: all numbers of passes of `SMALL_BATCH` rows are.
SMALL_BATCH = 50
SMALL = {
    "MLP": Case(
        _models.mlp, {"features": 64, "width": 64, "depth": 8, "classes": 10}, 1
    ),
    "transformer LM": Case(
        _models.language_model,
        {"vocabulary": 512, "length": 32, "width": 64, "depth": 2, "heads": 4},
        1,
    ),
    "ViT": Case(
        _models.vision_transformer,
        {"size": 32, "patch": 8, "width": 64, "depth": 2, "heads": 4},
        1,
    ),
    "GRU": Case(_models.gru, {"vocabulary": 128, "length": 32, "width": 64}, 1),
    "CNN": Case(_models.cnn, {"size": 32, "widths": (32, 64), "blocks": 1}, 1),
    "BatchNorm": Case(_models.batch_norm_net, {"size": 32, "widths": (32, 64)}, 1),
}
