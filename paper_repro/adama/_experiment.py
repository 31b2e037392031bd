"""Adam on an accumulated gradient beside moments that take each microbatch's."""

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

from .. import _errors
from .._experiment import Experiment, Finding, Run, Table
from .._language_training import (
    TINY_MODEL,
    ModelConfig,
    fresh_model,
    test_loss,
    token_loss,
)
from .._statistics import at_least, at_most, over_seeds
from .._texts import TINY_TEXTS, TextsConfig, passages, rows_of_steps
from ..data import Tokens
from ..models import LanguageModel

OURS, ADAM, ADAMA = "eqaccum", "accumulate, then Adam", "AdamA"
_B1, _B2, _EPS = 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `texts`, `model`: the data and the language model.
    - `global_batch`, `microbatch`: texts per update and per pass.
    - `steps`, `learning_rate`: of the runs.
    - `saved`: the least saving that counts as a buffer, in sizes of the parameters.
    - `loss_gap`: the largest relative gap of the final losses.
    """

    texts: TextsConfig = TextsConfig(pairs=6000, vocab_size=2000, test=256)
    model: ModelConfig = ModelConfig(width=128, hidden=512)
    global_batch: int = 16
    microbatch: int = 2
    steps: int = 150
    learning_rate: float = 1e-3
    saved: float = 0.8
    loss_gap: float = 0.02


def measure(config: Config, seed: int) -> Run:
    """The bytes of each step's program, and the loss that each ends at."""
    train, test, vocab_size = passages(config.texts)
    model = fresh_model(config.model, train, vocab_size=vocab_size, seed=seed)
    rows = rows_of_steps(
        len(train), batch=config.global_batch, steps=config.steps, seed=seed
    )
    losses, needed, curves = {}, {}, {}
    for name in (ADAM, ADAMA):
        trained, curves[name], needed[name] = _trained(config, name, model, train, rows)
        losses[name] = test_loss(trained, test)
    trained, curves[OURS], needed[OURS] = _ours(config, model, train, rows)
    losses[OURS] = test_loss(trained, test)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return {
        "bytes": needed,
        "parameters": sum(leaf.nbytes for leaf in leaves),
        "test_losses": losses,
        "curves": curves,
    }


def _ours(
    config: Config, model: LanguageModel, train: Tokens, rows: np.ndarray
) -> tuple[LanguageModel, list[float], int]:
    step = eqaccum.make_step(
        token_loss,
        optax.adam(config.learning_rate, b1=_B1, b2=_B2, eps=_EPS),
        global_batch=config.global_batch,
        microbatch=config.microbatch,
        cache=False,
    )
    state = step.init(model)
    curve = []
    for row in rows:
        state, metrics = step(state, train[row])
        curve.append(round(float(metrics.loss), 5))
    assert step.plan is not None and step.plan.predicted_bytes is not None
    return state.model, curve, step.plan.predicted_bytes


def _trained(
    config: Config, name: str, model: LanguageModel, train: Tokens, rows: np.ndarray
) -> tuple[LanguageModel, list[float], int]:
    """One of the two steps in plain JAX, each one fused and donated program."""
    parameters, static = eqx.partition(model, eqx.is_array)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    # The step consumes what it is given; the caller's model has to stay.
    own = jax.tree.map(jnp.copy, parameters)
    carry = (own, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.int32))
    program, needed = _program(config, name, static, carry, train[rows[0]])
    curve = []
    for row in rows:
        carry, loss = program(carry, train[row])
        curve.append(loss)
    trained = eqx.combine(carry[0], static)
    return trained, [round(float(loss), 5) for loss in curve], needed


_PROGRAMS: dict[tuple[Config, str], tuple[Callable, int]] = {}


def _program(
    config: Config, name: str, static: Any, carry: Any, batch: Tokens
) -> tuple[Callable, int]:
    """The compiled step and its bytes: arguments, outputs and temporaries."""
    if (config, name) not in _PROGRAMS:
        step = functools.partial(_STEPS[name], config, static)
        compiled = jax.jit(step, donate_argnums=0).lower(carry, batch).compile()
        said = compiled.memory_analysis()
        if said is None:
            raise _errors.no_analysis()
        held = said.argument_size_in_bytes + said.output_size_in_bytes
        needed = held - said.alias_size_in_bytes + said.temp_size_in_bytes
        _PROGRAMS[config, name] = compiled, int(needed)
    return _PROGRAMS[config, name]


def _parts(config: Config, static: Any, batch: Tokens) -> tuple[Tokens, Callable]:
    """The microbatches, and `(parameters, part)` to its share of the token mean."""
    tokens = jnp.sum(jnp.asarray(batch.mask)[:, 1:]).astype(jnp.float32)
    cut = jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (-1, config.microbatch, *leaf.shape[1:])), batch
    )

    def share(parameters: Any, part: Tokens) -> Any:
        model = eqx.combine(parameters, static)
        return jnp.sum(jax.vmap(model.losses)(part)[0]) / tokens

    return cut, jax.value_and_grad(share)


def _adam_step(config: Config, static: Any, carry: Any, batch: Tokens) -> Any:
    """The gradient is summed over the microbatches, then the moments take it."""
    parameters, first, second, count = carry
    cut, share = _parts(config, static, batch)

    def one(total: Any, part: Tokens) -> Any:
        loss, gradient = share(parameters, part)
        return jax.tree.map(jnp.add, total, gradient), loss

    gradient, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, first), cut)
    first = jax.tree.map(lambda m, g: _B1 * m + (1 - _B1) * g, first, gradient)
    second = jax.tree.map(lambda v, g: _B2 * v + (1 - _B2) * g**2, second, gradient)
    return _moved(config, parameters, first, second, count), jnp.sum(losses)


def _adama_step(config: Config, static: Any, carry: Any, batch: Tokens) -> Any:
    """The moments decay once and take each microbatch's gradient as it comes."""
    parameters, first, second, count = carry
    cut, share = _parts(config, static, batch)
    decayed = (
        jax.tree.map(lambda m: _B1 * m, first),
        jax.tree.map(lambda v: _B2 * v, second),
    )

    def one(moments: Any, part: Tokens) -> Any:
        loss, gradient = share(parameters, part)
        m = jax.tree.map(lambda m, g: m + (1 - _B1) * g, moments[0], gradient)
        v = jax.tree.map(lambda v, g: v + (1 - _B2) * g**2, moments[1], gradient)
        return (m, v), loss

    (first, second), losses = jax.lax.scan(one, decayed, cut)
    return _moved(config, parameters, first, second, count), jnp.sum(losses)


def _moved(config: Config, parameters: Any, first: Any, second: Any, count: Any) -> Any:
    """Adam's bias-corrected step."""
    count = count + 1
    steps = count.astype(jnp.float32)
    one, two = 1 - _B1**steps, 1 - _B2**steps

    def moved(p: Any, m: Any, v: Any) -> Any:
        return p - config.learning_rate * (m / one) / (jnp.sqrt(v / two) + _EPS)

    return jax.tree.map(moved, parameters, first, second), first, second, count


_STEPS = {ADAM: _adam_step, ADAMA: _adama_step}


def _saving(run: Run) -> float:
    """What AdamA saves, in sizes of the parameters."""
    return (run["bytes"][ADAM] - run["bytes"][ADAMA]) / run["parameters"]


def _loss_gap(run: Run) -> float:
    return abs(run["test_losses"][ADAMA] / run["test_losses"][ADAM] - 1)


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """A buffer saved, a loss that is about the same."""
    ours = max(
        abs(run["test_losses"][OURS] / run["test_losses"][ADAM] - 1) for run in runs
    )
    return [
        at_least(
            "bytes saved, in sizes of the parameters", _saving(runs[0]), config.saved
        ),
        at_most(
            "relative gap of the final losses, AdamA to Adam",
            max(map(_loss_gap, runs)),
            config.loss_gap,
        ),
        at_most("relative gap of the final losses, eqaccum to Adam", ours, 0.005),
    ]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    size = runs[0]["parameters"]
    rows = [
        [
            name,
            f"{runs[0]['bytes'][name]:,}",
            f"{runs[0]['bytes'][name] / size:.2f}",
            str(over_seeds(runs, lambda run, n=name: run["test_losses"][n])),
        ]
        for name in (OURS, ADAM, ADAMA)
    ]
    header = ["step", "bytes", "in sizes of the parameters", "loss on other texts"]
    return [Table(f"After {config.steps} updates", header, rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    needed, curves = figure.subplots(1, 2)
    names = (OURS, ADAM, ADAMA)
    needed.bar(names, [runs[0]["bytes"][n] / runs[0]["parameters"] for n in names])
    needed.set(ylabel="bytes of the step, in sizes of the parameters")
    needed.tick_params(axis="x", labelrotation=15)
    for name, style in zip(names, ("-", ":", "--"), strict=True):
        curves.plot(runs[0]["curves"][name], style, label=name)
    curves.set(xlabel="update", ylabel="loss per token, one seed")
    curves.legend()


EXPERIMENT = Experiment(
    name="adama",
    title="AdamA saves the gradient's buffer",
    claim=(
        "Folding each microbatch's gradient into Adam's moments instead of into an "
        "accumulator saves a buffer of the parameters' size, at the same loss."
    ),
    says=(
        "AdamA (arXiv:2305.19982): up to 23 % less memory than gradient accumulation, "
        "under 2 % slower, the same convergence."
    ),
    notes=(
        "It is another update, not a rearrangement: the second moment takes the sum of "
        "the squares in place of the square of the sum, which is up to K times smaller "
        "where the microbatches agree, so that its steps are up to sqrt(K) longer. "
        "eqaccum does not offer it. Bytes: arguments, outputs not aliased, and "
        "temporaries, as XLA's analysis of each fused program in plain JAX says them "
        "(eqaccum's own three programs beside, with the next batch)."
    ),
    minutes=3.0,
    full=Config(),
    tiny=Config(
        texts=TINY_TEXTS, model=TINY_MODEL, global_batch=4, microbatch=2, steps=2
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
