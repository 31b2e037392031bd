"""Seconds per update of GradAccum, ContAccum and GradCache over the global batch."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np
import optax

import eqaccum

from .._dual import TINY_ENCODER, EncoderConfig, dual_encoder, training_data
from .._experiment import Experiment, Finding, Run, Table
from .._methods import Method, cont_accum, grad_accum, grad_cache
from .._statistics import is_above, over_seeds
from .._texts import TINY_TEXTS, TextsConfig, retrieval_task

ACCUM, CONT, CACHE = "GradAccum", "ContAccum", "GradCache"
# GradCache over GradAccum, as its authors say and as ContAccum's say.
_PUBLISHED = (1.20, 1.93)


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `texts`, `encoder`: the data (its shapes are what matters) and the dual encoder.
    - `local`: N_local, the examples of a pass.
    - `totals`: N_total, the global batches.
    - `bank`: N_memory of ContAccum.
    - `repeats`: updates that are timed, after two that are not; their median counts.
    """

    texts: TextsConfig = TextsConfig(
        source="synthetic", query_length=20, passage_length=64, vocab_size=None, test=32
    )
    encoder: EncoderConfig = EncoderConfig()
    local: int = 8
    totals: tuple[int, ...] = (64, 128, 256, 512)
    bank: int = 8192
    repeats: int = 5


def measure(config: Config, seed: int) -> Run:
    """Each method's seconds per update, the methods taking turns."""
    task = retrieval_task(config.texts)
    model = dual_encoder(config.encoder, task, key=jr.key(seed))
    data = training_data(task)
    seconds: dict[str, dict[str, float]] = {ACCUM: {}, CONT: {}, CACHE: {}}
    for total in config.totals:
        rows = np.random.default_rng(seed).integers(0, len(task.query), total)
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], data)
        methods = (
            grad_accum(config.local, total),
            cont_accum(config.local, total, config.bank),
            grad_cache(config.local, total),
        )
        times = _times(config, methods, model, batch)
        for method, taken in zip(methods, times, strict=True):
            seconds[method.name][str(total)] = taken
    return {"seconds": seconds}


def _times(
    config: Config, methods: Sequence[Method], model: Any, batch: Any
) -> list[float]:
    steps = [
        eqaccum.make_step(
            method.loss(config.encoder),
            optax.adamw(1e-4),
            global_batch=method.global_batch,
            microbatch=method.pass_size,
        )
        for method in methods
    ]
    states = [step.init(model) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for repeat in range(config.repeats + 2):
        for place, step in enumerate(steps):
            start = time.perf_counter()
            states[place], _ = step(states[place], batch)
            jax.block_until_ready(states[place].trainable_leaves)
            if repeat >= 2:  # the first compiles, the second warms up
                times[place].append(time.perf_counter() - start)
    return [statistics.median(one) for one in times]


def _over(run: Run, name: str, total: int) -> float:
    """A method's seconds over GradAccum's."""
    return run["seconds"][name][str(total)] / run["seconds"][ACCUM][str(total)]


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """GradAccum, then ContAccum, then GradCache, at every global batch."""
    findings = []
    for total in config.totals:
        for slow, fast in ((CONT, ACCUM), (CACHE, CONT)):
            findings.append(
                is_above(
                    runs,
                    lambda run, t=total, n=slow: _over(run, n, t),
                    lambda run, t=total, n=fast: _over(run, n, t),
                    f"N_total {total}: {slow} takes longer than {fast}",
                )
            )
    return findings


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    rows = []
    for total in config.totals:
        base = over_seeds(runs, lambda run, t=total: run["seconds"][ACCUM][str(t)])
        over = [
            str(over_seeds(runs, lambda run, t=total, n=name: _over(run, n, t)))
            for name in (CONT, CACHE)
        ]
        rows.append([str(total), str(base), *over, *map(str, _PUBLISHED)])
    header = ["N_total", "GradAccum, seconds", "ContAccum / GradAccum"]
    header += ["GradCache / GradAccum", "GradCache's paper", "ContAccum's paper"]
    return [Table("Per update", header, rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    for name in (ACCUM, CONT, CACHE):
        means = [
            over_seeds(runs, lambda run, t=t, n=name: run["seconds"][n][str(t)]).mean
            for t in config.totals
        ]
        axes.plot(config.totals, means, "o-", label=name)
    axes.set(xlabel="N_total", ylabel="seconds per update")
    axes.legend()


EXPERIMENT = Experiment(
    name="speed",
    title="Figure 4: the seconds of an update",
    claim="GradAccum is fastest, ContAccum next, GradCache slowest, at every N_total.",
    says=(
        "ContAccum, Figure 4, N_total 512: GradCache +93 % over GradAccum, ContAccum "
        "with a bank of 8192 +26 %. GradCache's own paper: about +20 %. The two "
        "contradict each other; counting passes, one more forward beside forward and "
        "backward is +33 %."
    ),
    notes=(
        "Ratios on two CPU cores say nothing about an A100: a similarity matrix of "
        "8200 columns is nearly free there beside BERT-base and is not beside a small "
        "encoder here. The encoder is small, the lengths are 20 and 64."
    ),
    minutes=25.0,
    full=Config(),
    tiny=Config(
        texts=TINY_TEXTS,
        encoder=TINY_ENCODER,
        local=4,
        totals=(8,),
        bank=8,
        repeats=1,
    ),
    large=Config(
        texts=TextsConfig(query_length=32, passage_length=256, vocab_size=None),
        encoder=EncoderConfig(weights="minilm", pooling="cls", normalize=False),
        totals=(64, 128, 256, 512, 1024, 4096),
        repeats=20,
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
