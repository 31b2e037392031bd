"""One batch of texts of differing lengths, cut in ever more pieces: right and naive."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

from .._experiment import Experiment, Finding, Run, Table
from .._language_training import (
    TINY_MODEL,
    ModelConfig,
    fresh_model,
    test_loss,
    token_loss,
    token_mean,
)
from .._statistics import at_least, at_most, is_above, over_seeds, relative_gap
from .._texts import TINY_TEXTS, TextsConfig, passages, rows_of_steps
from ..data import Tokens
from ..models import LanguageModel

WHOLE, RIGHT, NAIVE = "whole batch", "right", "naive"


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `texts`, `model`: the data and the language model.
    - `global_batch`: texts per update.
    - `splits`: into how many microbatches it is cut for the gaps.
    - `train_splits`: into how many it is cut in training.
    - `steps`, `learning_rate`: of the curves (Adam).
    - `batches`: how many batches the gaps are measured on.
    - `rounding`: the largest relative gap that still is float32's rounding.
    """

    texts: TextsConfig = TextsConfig(pairs=6000, vocab_size=2000, test=256)
    model: ModelConfig = ModelConfig()
    global_batch: int = 16
    splits: tuple[int, ...] = (1, 2, 4, 8, 16)
    train_splits: int = 16
    steps: int = 200
    learning_rate: float = 3e-3
    batches: int = 4
    rounding: float = 1e-5


def measure(config: Config, seed: int) -> Run:
    """The gaps at the fresh weights, the curves, and the losses on other texts."""
    train, test, vocab_size = passages(config.texts)
    model = fresh_model(config.model, train, vocab_size=vocab_size, seed=seed)
    rows = rows_of_steps(
        len(train), batch=config.global_batch, steps=config.steps, seed=seed
    )
    gaps = _gaps(config, model, [train[row] for row in rows[: config.batches]])
    curves, losses = {}, {}
    for name in (WHOLE, RIGHT, NAIVE):
        trained, curves[name] = _trained(config, name, model, train, rows)
        losses[name] = test_loss(trained, test)
    return {"gaps": gaps, "curves": curves, "test_losses": losses}


def _gaps(
    config: Config, model: LanguageModel, batches: list[Tokens]
) -> dict[str, dict[str, float]]:
    """The mean relative gap to the whole batch's gradient, by the number of pieces."""
    found: dict[str, dict[str, float]] = {RIGHT: {}, NAIVE: {}}
    for splits in config.splits:
        for name in (RIGHT, NAIVE):
            gaps = []
            for batch in batches:
                _, want = _gradient(config, WHOLE, 1)(model, batch)
                _, got = _gradient(config, name, splits)(model, batch)
                gaps.append(relative_gap(_arrays(got), _arrays(want)))
            found[name][str(splits)] = float(np.mean(gaps))
    return found


def _arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)


@functools.cache  # for all seeds one program
def _gradient(config: Config, name: str, splits: int) -> Callable:
    """`(model, batch)` to the loss and its gradient, in one of the three ways."""
    if name == WHOLE:
        return eqx.filter_jit(eqx.filter_value_and_grad(token_mean))
    if name == RIGHT:
        microbatch = -(-config.global_batch // splits)
        return eqaccum.value_and_grad(token_loss, microbatch=microbatch)

    def mean_of_means(model: LanguageModel, batch: Tokens) -> Any:
        cut = jax.tree.map(
            lambda leaf: leaf.reshape(splits, -1, *leaf.shape[1:]), batch
        )
        return jnp.mean(jax.lax.map(lambda part: token_mean(model, part), cut))

    return eqx.filter_jit(eqx.filter_value_and_grad(mean_of_means))


def _trained(
    config: Config, name: str, model: LanguageModel, train: Tokens, rows: np.ndarray
) -> tuple[LanguageModel, list[float]]:
    """Adam on one of the gradients; the curve is the whole batch's loss per token."""
    gradient = _gradient(config, name, config.train_splits)
    optimizer = optax.adam(config.learning_rate)
    state = optimizer.init(_arrays(model))
    curve = []
    for row in rows:
        batch = train[row]
        curve.append(token_mean(model, batch))
        _, gradients = gradient(model, batch)
        model, state = _updated(optimizer, model, state, gradients)
    return model, [round(float(value), 5) for value in curve]


@eqx.filter_jit
def _updated(
    optimizer: optax.GradientTransformation, model: Any, state: Any, gradients: Any
) -> tuple[Any, Any]:
    updates, state = optimizer.update(_arrays(gradients), state)
    return eqx.apply_updates(model, updates), state


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """The right one equal, the naive one further off the more pieces there are."""
    several = [str(splits) for splits in config.splits if splits > 1]
    right = max(run["gaps"][RIGHT][n] for run in runs for n in several)
    growth = min(
        run["gaps"][NAIVE][more] - run["gaps"][NAIVE][fewer]
        for run in runs
        for fewer, more in zip(several, several[1:], strict=False)
    )
    apart = max(
        abs(a / b - 1)
        for run in runs
        for a, b in zip(run["curves"][RIGHT], run["curves"][WHOLE], strict=True)
    )
    return [
        at_most("right: largest relative gap of the gradient", right, config.rounding),
        at_least(
            "naive: the gap grows with every further cut, smallest growth", growth, 0.0
        ),
        at_most("right: largest relative distance of the curves", apart, 1e-2),
        is_above(
            runs,
            lambda run: run["test_losses"][NAIVE],
            lambda run: run["test_losses"][RIGHT],
            "naive accumulation ends at a higher loss per token on other texts",
        ),
    ]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    splits = [str(n) for n in config.splits]
    gaps = [
        [
            name,
            *(
                str(over_seeds(runs, lambda r, k=name, n=n: r["gaps"][k][n]))
                for n in splits
            ),
        ]
        for name in (RIGHT, NAIVE)
    ]
    losses = [
        [
            name,
            str(over_seeds(runs, lambda r, k=name: r["test_losses"][k])),
            str(
                over_seeds(runs, lambda r, k=name: float(np.mean(r["curves"][k][-20:])))
            ),
        ]
        for name in (WHOLE, RIGHT, NAIVE)
    ]
    return [
        Table("Relative gap of the gradient, by microbatches", ["way", *splits], gaps),
        Table(
            f"After {config.steps} updates in {config.train_splits} microbatches",
            ["way", "loss on other texts", "loss of the last 20 updates"],
            losses,
        ),
    ]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    gaps, curves = figure.subplots(1, 2)
    for name in (RIGHT, NAIVE):
        values = [
            over_seeds(runs, lambda r, k=name, n=n: r["gaps"][k][str(n)]).mean
            for n in config.splits
        ]
        gaps.plot(config.splits, values, "o-", label=name)
    gaps.set(yscale="log", xlabel="microbatches", ylabel="relative gap of the gradient")
    gaps.legend()
    for name, style in ((WHOLE, "-"), (RIGHT, ":"), (NAIVE, "--")):
        curves.plot(runs[0]["curves"][name], style, label=name)
    curves.set(xlabel="update", ylabel="loss per token, one seed")
    curves.legend()


EXPERIMENT = Experiment(
    name="tokenmean",
    title="A mean of means is not the mean over tokens",
    claim=(
        "Where texts differ in length, accumulating the microbatches' mean losses "
        "gives another gradient than the whole batch's, the more so the more "
        "microbatches, and a worse model; dividing once by all tokens gives the same."
    ),
    says=(
        "Unsloth and Hugging Face (October 2024): naive accumulation ends at a higher "
        "loss; the sum over microbatches divided by the tokens of the whole update "
        "restores the whole batch's curve up to float error."
    ),
    notes=(
        "Debian's long descriptions, cut at 64 word pieces, which makes their lengths "
        "less unequal than the texts are; a causal transformer of two layers from "
        "scratch, Adam, 16 texts an update. The curves are of the same measure for all "
        "three ways: the loss per token of the whole batch before its update."
    ),
    minutes=4.0,
    full=Config(),
    tiny=Config(
        texts=TINY_TEXTS,
        model=TINY_MODEL,
        global_batch=4,
        splits=(2, 4),
        train_splits=4,
        steps=3,
        batches=1,
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
