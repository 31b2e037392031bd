"""Gradients out of microbatches beside that of the whole batch, in plain JAX."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

import eqaccum

from .._dual import (
    TINY_ENCODER,
    EncoderConfig,
    dual_encoder,
    embed,
    head,
    plain_info_nce,
    training_data,
)
from .._experiment import Experiment, Finding, Run, Table
from .._statistics import at_least, at_most, relative_gap
from .._texts import TINY_TEXTS, TextsConfig, passages, retrieval_task
from ..data import Tokens
from ..models import LanguageModel, language_model

WEIGHTED, TOKENS = "weighted mean", "token mean"
CACHED, NAIVE = "InfoNCE, coupled", "InfoNCE, naive accumulation"
EXACT = (WEIGHTED, TOKENS, CACHED)
ORDER = "whole batch in another order"


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `texts`, `encoder`: the data and the dual encoder.
    - `global_batch`: examples in the whole batch.
    - `microbatches`: the sizes of the passes.
    - `rounding`: the largest relative gap that still is float32's rounding.
    - `apart`: the least gap of a gradient that is another one.
    """

    texts: TextsConfig = TextsConfig(pairs=3000, vocab_size=4000, test=256)
    encoder: EncoderConfig = EncoderConfig()
    global_batch: int = 128
    microbatches: tuple[int, ...] = (8, 48)
    rounding: float = 1e-5
    apart: float = 0.05


def measure(config: Config, seed: int) -> Run:
    """The gaps of one seed's model and batch, and those of rounding alone."""
    rng = np.random.default_rng(seed)
    gaps = {
        **_additive_gaps(config, seed, rng),
        **_contrastive_gaps(config, seed, rng),
    }
    return {"gaps": gaps}


def _additive_gaps(config: Config, seed: int, rng: np.random.Generator) -> Run:
    train, _, vocab_size = passages(config.texts)
    model = language_model(
        vocab_size=vocab_size,
        max_length=train.ids.shape[1],
        width=config.encoder.width,
        depth=config.encoder.depth,
        num_heads=config.encoder.num_heads,
        hidden=config.encoder.hidden,
        key=jr.key(seed),
    )
    batch = train[rng.permutation(len(train))[: config.global_batch]]
    weights = jnp.asarray(rng.uniform(0.5, 2, config.global_batch), jnp.float32)
    return {
        name: _gaps(config, name, model, batch, weights) for name in (WEIGHTED, TOKENS)
    }


def _contrastive_gaps(config: Config, seed: int, rng: np.random.Generator) -> Run:
    task = retrieval_task(config.texts)
    model = dual_encoder(config.encoder, task, key=jr.key(seed))
    rows = rng.permutation(len(task.query))[: config.global_batch]
    batch = jax.tree.map(lambda leaf: leaf[rows], training_data(task))
    whole = _whole_gradient(config, CACHED)
    want = whole(model, batch, None)
    naive = {
        str(n): relative_gap(_naive(whole, model, batch, n), want)
        for n in config.microbatches
    }
    return {CACHED: _gaps(config, CACHED, model, batch, None), NAIVE: naive}


def _gaps(
    config: Config, name: str, model: Any, batch: Any, weights: Any
) -> dict[str, float]:
    """Relative distances to plain JAX's gradient, by the size of the passes."""
    whole = _whole_gradient(config, name)
    want = whole(model, batch, weights)
    last_first = jax.tree.map(lambda leaf: leaf[::-1], (batch, weights))
    gaps = {ORDER: relative_gap(whole(model, *last_first), want)}
    for microbatch in config.microbatches:
        accumulated = _accumulated(config, name, microbatch)
        _, got = accumulated(model, batch, key=jr.key(0), weights=weights)
        gaps[str(microbatch)] = relative_gap(eqx.filter(got, eqx.is_array), want)
    return gaps


def _one_mean(model: LanguageModel, example: Tokens, key: Any) -> Float[Array, ""]:
    total, count = model.losses(example)
    return total / jnp.maximum(count, 1)


def _one_token_mean(model: LanguageModel, example: Tokens, key: Any) -> eqaccum.Mean:
    return eqaccum.Mean(*model.losses(example))


@functools.cache  # for all seeds one program
def _accumulated(config: Config, name: str, microbatch: int) -> Callable:
    loss = {
        WEIGHTED: _one_mean,
        TOKENS: _one_token_mean,
        CACHED: eqaccum.coupled(embed, head(config.encoder)),
    }[name]
    return eqaccum.value_and_grad(loss, microbatch=microbatch)


@functools.cache
def _whole_gradient(config: Config, name: str) -> Callable:
    """The gradient over the whole batch, in JAX alone."""

    def whole(model: Any, batch: Any, weights: Any) -> Float[Array, ""]:
        if name == CACHED:
            temperature = config.encoder.temperature
            return plain_info_nce(model, batch, temperature=temperature)
        totals, counts = jax.vmap(model.losses)(batch)
        if name == TOKENS:
            return jnp.sum(weights * totals) / jnp.sum(weights * counts)
        means = totals / jnp.maximum(counts, 1)
        return jnp.sum(weights * means) / jnp.sum(weights)

    gradient = eqx.filter_jit(eqx.filter_grad(whole))
    return lambda *arguments: eqx.filter(gradient(*arguments), eqx.is_array)


def _naive(whole: Callable, model: Any, batch: Any, microbatch: int) -> Any:
    """The mean of the microbatches' gradients, each of its own InfoNCE.

    What does not fill a microbatch is a smaller one, weighted by its rows.
    """
    rows = len(batch[0])
    total = None
    for start in range(0, rows, microbatch):
        part = jax.tree.map(lambda leaf, s=start: leaf[s : s + microbatch], batch)
        share = len(part[0]) / rows
        gradient = jax.tree.map(
            lambda leaf, share=share: share * np.asarray(leaf, np.float64),
            whole(model, part, None),
        )
        total = gradient if total is None else jax.tree.map(np.add, total, gradient)
    return total


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """Every exact form within rounding, the naive one clearly apart."""
    findings = [
        at_most(
            f"{name}: largest relative gap to the whole batch's gradient",
            max(_of(run, name, str(n)) for run in runs for n in config.microbatches),
            config.rounding,
        )
        for name in EXACT
    ]
    least = min(_of(run, NAIVE, str(n)) for run in runs for n in config.microbatches)
    return [*findings, at_least(f"{NAIVE}: smallest gap", least, config.apart)]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    columns = [ORDER, *map(str, config.microbatches)]
    rows = [
        [name, *(_largest(runs, name, column) for column in columns)]
        for name in (*EXACT, NAIVE)
    ]
    title = (
        f"Largest relative gap over the seeds, by microbatch of {config.global_batch}"
    )
    return [Table(title, ["loss", *columns], rows)]


def _largest(runs: Sequence[Run], name: str, column: str) -> str:
    found = [run["gaps"][name].get(column) for run in runs]
    return "" if None in found else f"{max(found):.2g}"


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    for name in (*EXACT, NAIVE):
        gaps = [
            max(_of(run, name, str(n)) for run in runs) for n in config.microbatches
        ]
        axes.plot(config.microbatches, gaps, "o-", label=name)
    axes.set(yscale="log", xlabel="microbatch", ylabel="relative gap of the gradient")
    axes.legend()


def _of(run: Run, name: str, column: str) -> float:
    return run["gaps"][name][column]


EXPERIMENT = Experiment(
    name="exactness",
    title="Accumulation is exact for additive and, in two passes, contrastive losses",
    claim=(
        "Accumulating a loss that adds up over examples gives the gradient of the "
        "whole batch; gradient caching gives it for InfoNCE; averaging the "
        "microbatches' own InfoNCE gives another gradient."
    ),
    says=(
        "GradCache (arXiv:2101.06983, section 3) derives the first two; ContAccum "
        "(arXiv:2406.12356, section 3) counts the negatives that naive accumulation "
        "loses: N_local - 1 for N_total - 1. Neither gives the gap in figures."
    ),
    notes=(
        "The reference is `jax.grad` of each loss, written here in plain JAX, over the "
        "whole batch. The gaps are those of all parameters together, relative to the "
        "gradient's norm; the first column is what the order of the sum alone does in "
        "float32. The weights are fresh; microbatches need not divide the batch."
    ),
    minutes=1.5,
    full=Config(),
    tiny=Config(
        texts=TINY_TEXTS, encoder=TINY_ENCODER, global_batch=12, microbatches=(4,)
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
