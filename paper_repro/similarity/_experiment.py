"""Where a query's similarity lies: on passages of this update, or of older ones."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

import eqaccum

from .._comparison import ComparisonConfig, start_b, started, tiny
from .._dual import Example, embed, training_data
from .._experiment import Experiment, Finding, Run, Table
from .._methods import cont_accum, dpr
from .._statistics import at_least, over_seeds
from .._texts import rows_of_steps


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `comparison`: the start, and the methods in whose training it is measured.
    - `ages`: the oldest passages looked at, in updates.
    - `every`: each how many updates it is measured.
    - `kept`: the share of the in-batch negatives' mass that each age has to keep.
    """

    comparison: ComparisonConfig
    ages: int = 6
    every: int = 10
    kept: float = 0.8


def measure(config: Config, seed: int) -> Run:
    """The mass by age, averaged over the training of each method."""
    task, model = started(config.comparison, seed)
    data = training_data(task)
    found = {}
    for method in config.comparison.methods:
        steps = config.comparison.training.steps(method)
        step = eqaccum.make_step(
            method.loss(config.comparison.encoder),
            config.comparison.training.optimizer(steps),
            global_batch=method.global_batch,
            microbatch=method.pass_size,
        )
        train = step.init(model, jr.key(seed))
        held = collections.deque(maxlen=config.ages + 1)
        masses = []
        rows = rows_of_steps(
            len(task.query), batch=method.global_batch, steps=steps, seed=seed
        )
        for number, row in enumerate(rows):
            batch = jax.tree.map(lambda leaf, row=row: leaf[row], data)
            q, p = _encoded(train.model, batch)
            held.appendleft(p)  # encoded by the weights of their own update
            if len(held) > config.ages and number % config.every == 0:
                temperature = config.comparison.encoder.temperature
                masses.append(masses_by_age(q, jnp.stack(list(held)), temperature))
            train, _ = step(train, batch)
        found[method.name] = np.mean(masses, axis=0).tolist()
    return {"mass": found}


@eqx.filter_jit
def _encoded(model: Any, batch: Example) -> tuple[Array, Array]:
    q, p, *_ = jax.vmap(lambda example: embed(model, example, None))(batch)
    return q, p


@jax.jit
def masses_by_age(
    q: Float[Array, "queries d"],
    p: Float[Array, "ages queries d"],
    temperature: float | Float[Array, ""],
) -> Float[Array, " ages"]:
    """Equation (10): the mean over the queries of the softmax's mass on each age.

    The softmax is over the passages of all ages without the query's own, so that age 0
    holds the in-batch negatives: one passage fewer than the others, made up for by the
    mean per passage, times the passages of an age.
    """
    ages, queries, _ = p.shape
    similarity = jnp.einsum("qd,apd->qap", q, p) / temperature
    own = (
        jnp.eye(queries, dtype=bool)[:, None, :]
        & (jnp.arange(ages) == 0)[None, :, None]
    )
    masked = jnp.where(own, -jnp.inf, similarity)
    weights = jax.nn.softmax(masked.reshape(queries, -1), axis=1)
    mass = jnp.mean(jnp.sum(weights.reshape(similarity.shape), axis=2), axis=0)
    passages = jnp.full(ages, queries).at[0].add(-1).astype(mass.dtype)
    return mass * queries / passages


def _kept(run: Run, name: str) -> list[float]:
    """The mass of each age over that of the in-batch negatives."""
    mass = run["mass"][name]
    return [one / mass[0] for one in mass]


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """No age falls far below the in-batch negatives."""
    return [
        at_least(
            f"{method.name}: least mass of an age over the in-batch negatives'",
            min(min(_kept(run, method.name)) for run in runs),
            config.kept,
        )
        for method in config.comparison.methods
    ]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    ages = range(config.ages + 1)
    rows = [
        [
            method.name,
            *(
                str(over_seeds(runs, lambda r, m=method.name, a=age: _kept(r, m)[a]))
                for age in ages
            ),
        ]
        for method in config.comparison.methods
    ]
    title = "Mass by the passages' age in updates, over the in-batch negatives'"
    return [Table(title, ["method", *map(str, ages)], rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    for method in config.comparison.methods:
        means = np.mean([_kept(run, method.name) for run in runs], axis=0)
        axes.plot(means, "o-", label=method.name)
    axes.set(ylim=(0, None), xlabel="age in updates")
    axes.set(ylabel="mass over the in-batch negatives'")
    axes.legend()


EXPERIMENT = Experiment(
    name="similarity",
    title="Figure 6: old passages are as good negatives as new ones",
    claim="The similarity mass of passages up to six updates old is that of new ones.",
    says="ContAccum, Figure 6: no notable drop up to six updates, for it and DPR-128.",
    notes=(
        "As `table1` (start B, slow drift). Passages are kept as the weights of their "
        "own update encoded them; the softmax is over all ages without the query's own "
        "passage. From scratch at a high rate it is expected to fall with age."
    ),
    minutes=15.0,
    full=Config(start_b((cont_accum(8, 128, 1024), dpr(128)))),
    tiny=Config(tiny((dpr(8),)), ages=1, every=1),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
