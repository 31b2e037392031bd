"""A language model at a fixed budget of texts: small batches against accumulation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.random as jr
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
)
from .._statistics import at_most, is_not_below, over_seeds
from .._texts import TINY_TEXTS, TextsConfig, passages
from ..data import Tokens
from ..models import LanguageModel

FIXED, HALF_LIFE, ACCUMULATED = "fixed beta2", "fixed half-life", "accumulated"


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `texts`, `model`: the data and the language model.
    - `budget`: texts that every run sees.
    - `batches`: texts per update; the largest is what is accumulated to.
    - `microbatch`: of the accumulated run.
    - `rates`: the learning rates tried for each run; its best loss counts.
    - `beta2`: Adam's, at the largest batch. With a fixed half-life a batch B has
        `beta2 ** (B / largest)`.
    - `margin`: a small batch is no worse if its loss is at most so much above.
    """

    texts: TextsConfig = TextsConfig(vocab_size=2000, test=512)
    model: ModelConfig = ModelConfig()
    budget: int = 16384
    batches: tuple[int, ...] = (4, 16, 64, 256)
    microbatch: int = 4
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    beta2: float = 0.95
    margin: float = 0.0


def measure(config: Config, seed: int) -> Run:
    """The loss on other texts after the budget, for each policy, batch and rate."""
    train, test, vocab_size = passages(config.texts)
    model = fresh_model(config.model, train, vocab_size=vocab_size, seed=seed)
    task = _Task(model, train, test, seed)
    accumulated = dataclasses.replace(task, microbatch=config.microbatch)
    largest = config.batches[-1]
    losses: dict[str, dict[str, list[float]]] = {
        FIXED: {},
        HALF_LIFE: {},
        ACCUMULATED: {},
    }
    for batch in config.batches:
        for policy in (FIXED, HALF_LIFE):
            power = 1 if policy == FIXED else batch / largest
            losses[policy][str(batch)] = [
                _loss(config, task, batch, config.beta2**power, rate)
                for rate in config.rates
            ]
    losses[ACCUMULATED][str(largest)] = [
        _loss(config, accumulated, largest, config.beta2, rate) for rate in config.rates
    ]
    return {"losses": losses}


@dataclasses.dataclass(frozen=True)
class _Task:
    """What the runs of one seed share; `microbatch` None is all at once."""

    model: LanguageModel
    train: Tokens
    test: Tokens
    seed: int
    microbatch: int | None = None


def _loss(config: Config, task: _Task, batch: int, beta2: float, rate: float) -> float:
    steps = max(config.budget // batch, 1)
    warmup = max(steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, warmup, max(steps, warmup + 1)
    )
    result = eqaccum.fit(
        task.model,
        task.train,
        global_batch=batch,
        loss=token_loss,
        optimizer=optax.adam(schedule, b2=beta2),
        steps=steps,
        drop_remainder=True,
        key=jr.key(task.seed),
        microbatch=task.microbatch or batch,
        nonfinite="ignore",
        progress=False,
    )
    loss = test_loss(result.model, task.test)
    return loss if np.isfinite(loss) else 1e9  # a rate too high; JSON has no infinity


def _best(run: Run, policy: str, batch: int) -> float:
    return min(run["losses"][policy][str(batch)])


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """Small batches are as good where beta2 follows; accumulation is the big batch."""
    small, large = config.batches[0], config.batches[-1]
    gap = max(
        abs(_best(run, ACCUMULATED, large) / _best(run, FIXED, large) - 1)
        for run in runs
    )
    return [
        is_not_below(
            runs,
            lambda run: _best(run, ACCUMULATED, large) + config.margin,
            lambda run: _best(run, HALF_LIFE, small),
            f"fixed half-life: {small} texts an update are no worse than {large}",
        ),
        is_not_below(
            runs,
            lambda run: _best(run, FIXED, small),
            lambda run: _best(run, HALF_LIFE, small),
            f"at {small} texts a fixed half-life is no worse than a fixed beta2",
        ),
        at_most(
            f"accumulated to {large} and {large} at once: relative gap of the losses",
            gap,
            0.005,
        ),
    ]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    rows = []
    for batch in config.batches:
        cells = [
            str(over_seeds(runs, lambda r, p=policy, b=batch: _best(r, p, b)))
            if str(batch) in runs[0]["losses"][policy]
            else ""
            for policy in (FIXED, HALF_LIFE, ACCUMULATED)
        ]
        rows.append([str(batch), str(max(config.budget // batch, 1)), *cells])
    header = ["texts an update", "updates", FIXED, HALF_LIFE, ACCUMULATED]
    title = f"Loss per token on other texts after {config.budget:,} texts, best rate"
    return [Table(title, header, rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    for policy in (FIXED, HALF_LIFE):
        found = [
            over_seeds(runs, lambda r, p=policy, b=b: _best(r, p, b))
            for b in config.batches
        ]
        means, errors = [e.mean for e in found], [e.error or 0.0 for e in found]
        axes.errorbar(config.batches, means, errors, capsize=3, label=policy)
    last = config.batches[-1]
    found = over_seeds(runs, lambda r: _best(r, ACCUMULATED, last))
    axes.plot([last], [found.mean], "x", label=ACCUMULATED)
    axes.set(xscale="log", xlabel="texts an update", ylabel="loss per token")
    axes.legend()


EXPERIMENT = Experiment(
    name="wasteful",
    title="Accumulation is wasteful: the strongest objection to this library",
    claim=(
        "On one device and at a fixed budget of tokens, small batches without "
        "accumulation train as well as or better than a large batch, if Adam's beta2 "
        "keeps its half-life in tokens."
    ),
    says=(
        "Marek et al. 2025 (arXiv:2507.07101): beta2 = 0.95 at 512 becomes about "
        "0.9999 at 1; accumulate only across several replicas that lack bandwidth; use "
        "the smallest batch that still fills the device."
    ),
    notes=(
        "If it holds, the honest reading is: where nothing but the loss matters and "
        "the small batch fills the device, do not accumulate; eqaccum is for a global "
        "batch that the experiment asks for (contrastive losses, a published recipe, "
        "many devices), and it then gives exactly that batch. Debian's long "
        "descriptions, a two-layer causal transformer, the best of three learning "
        "rates for each cell, warm-up of 5 % and a cosine."
    ),
    minutes=60.0,
    full=Config(),
    tiny=Config(
        texts=TINY_TEXTS,
        model=TINY_MODEL,
        budget=8,
        batches=(2, 4),
        microbatch=2,
        rates=(1e-3,),
    ),
    large=Config(
        texts=TextsConfig(vocab_size=8000, passage_length=128, test=512),
        model=ModelConfig(width=512, depth=8, num_heads=8, hidden=2048),
        budget=262144,
        batches=(1, 4, 16, 64, 256, 1024),
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
