"""Several methods from one start: what the retrieval experiments share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.random as jr
import numpy as np

from ._dual import TINY_ENCODER, EncoderConfig, dual_encoder, retrieval_scores
from ._experiment import Run, Table
from ._methods import Method, TrainingConfig, dpr, trained
from ._statistics import Estimate, over_seeds
from ._texts import TINY_TEXTS, RetrievalTask, TextsConfig, retrieval_task
from .models import DualEncoder

# Of a curve, so many points are kept.
_POINTS = 120


@dataclasses.dataclass(frozen=True)
class ComparisonConfig:
    """What all methods of a comparison have in common, and which they are.

    **Attributes:**

    - `texts`, `encoder`: the data and the dual encoder.
    - `start`: the training before, at the whole batch, that stands for the paper's
        pretrained encoder (start B); None begins from the weights as they are.
    - `start_batch`: the global batch of that training.
    - `training`: that of every method.
    - `methods`: what is compared; their names differ.
    """

    texts: TextsConfig
    encoder: EncoderConfig
    start: TrainingConfig | None
    start_batch: int
    training: TrainingConfig
    methods: tuple[Method, ...]


# One epoch of 128 at a high rate from scratch, then one at a low rate: slow drift.
_EPOCH = 239 * 128


def start_b(methods: tuple[Method, ...]) -> ComparisonConfig:
    """The CPU's setting: a small encoder that was warmed up."""
    return ComparisonConfig(
        texts=TextsConfig(),
        encoder=EncoderConfig(),
        start=TrainingConfig(examples=_EPOCH, learning_rate=5e-4),
        start_batch=128,
        training=TrainingConfig(examples=_EPOCH, learning_rate=1e-4),
        methods=methods,
    )


def start_c(methods: tuple[Method, ...]) -> ComparisonConfig:
    """The GPU's setting: MiniLM with the paper's head, ten epochs, hard negatives."""
    return ComparisonConfig(
        texts=TextsConfig(
            vocab_size=None, query_length=32, passage_length=128, negatives=True
        ),
        encoder=EncoderConfig(
            weights="minilm", pooling="cls", normalize=False, temperature=1.0
        ),
        start=None,
        start_batch=128,
        training=TrainingConfig(examples=10 * _EPOCH, learning_rate=2e-5),
        methods=methods,
    )


def tiny(methods: tuple[Method, ...]) -> ComparisonConfig:
    """Made-up pairs, two updates."""
    return ComparisonConfig(
        texts=TINY_TEXTS,
        encoder=TINY_ENCODER,
        start=None,
        start_batch=8,
        training=TrainingConfig(examples=16, learning_rate=1e-3),
        methods=methods,
    )


@functools.lru_cache(maxsize=2)
def started(config: ComparisonConfig, seed: int) -> tuple[RetrievalTask, DualEncoder]:
    """The pairs and the encoder that every method starts from.

    The warm-up has another order of the pairs than the methods have.
    """
    task = retrieval_task(config.texts)
    model = dual_encoder(config.encoder, task, key=jr.key(seed))
    if config.start is not None:
        method = dpr(config.start_batch)
        warm = trained(
            *(method, config.start, config.encoder, model, task), seed=1000 + seed
        )
        model = warm.model
    return task, model


def compare(config: ComparisonConfig, seed: int) -> Run:
    """Trains every method; its scores, losses and ratio of gradient norms."""
    task, model = started(config, seed)
    begin = retrieval_scores(model, task)
    found = {}
    for method in config.methods:
        after = trained(method, config.training, config.encoder, model, task, seed=seed)
        scores = retrieval_scores(after.model, task)
        found[method.name] = {
            "top": {str(k): value for k, value in scores.top.items()},
            "mrr": scores.mrr,
            "updates": len(after.losses),
            "losses": thinned(after.losses),
            "ratios": thinned(after.ratios),
        }
    return {"start": {str(k): v for k, v in begin.top.items()}, "methods": found}


def thinned(values: np.ndarray) -> list[float]:
    """At most so many points of a curve, the last one included."""
    places = np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(int)
    return [round(float(values[place]), 5) for place in places]


def top(name: str, k: int = 20) -> Callable[[Run], float]:
    """Takes a method's Top@k out of a run."""
    return lambda run: run["methods"][name]["top"][str(k)]


def top_over_seeds(runs: Sequence[Run], name: str, k: int = 20) -> Estimate:
    """A method's Top@k with its standard error."""
    return over_seeds(runs, top(name, k))


def score_table(runs: Sequence[Run]) -> Table:
    """Each method's scores, the start's first."""
    depths = list(runs[0]["start"])
    start = [str(over_seeds(runs, lambda r, k=k: r["start"][k])) for k in depths]
    rows = [["(start)", "", *start, ""]]
    for name, one in runs[0]["methods"].items():
        scores = [str(top_over_seeds(runs, name, int(k))) for k in depths]
        mrr = str(over_seeds(runs, lambda r, n=name: r["methods"][n]["mrr"]))
        rows.append([name, str(one["updates"]), *scores, mrr])
    header = ["method", "updates", *(f"Top@{k}" for k in depths), "MRR@10"]
    return Table("Percent of the test queries, all passages searched", header, rows)


def draw_scores(runs: Sequence[Run], figure: Any) -> None:
    """Top@20 of each method, with standard errors."""
    axes = figure.add_subplot()
    names = list(runs[0]["methods"])
    found = [top_over_seeds(runs, name) for name in names]
    errors = [one.error or 0.0 for one in found]
    axes.errorbar([one.mean for one in found], names, xerr=errors, fmt="o", capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="Top@20, percent")


def draw_ratios(runs: Sequence[Run], figure: Any) -> None:
    """Each method's ratio of gradient norms over the training, one seed."""
    axes = figure.add_subplot()
    for name, one in runs[0]["methods"].items():
        axes.plot(np.linspace(0, 1, len(one["ratios"])), one["ratios"], label=name)
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.set(yscale="log", xlabel="share of the training", ylabel="GradNormRatio")
    axes.legend()
