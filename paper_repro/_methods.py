"""The methods that the paper compares, and one training run of any of them."""

import dataclasses
from typing import Any

import jax.random as jr
import numpy as np
import optax

import eqaccum

from ._dual import EncoderConfig, embed, head, training_data
from ._texts import RetrievalTask
from .models import DualEncoder

# Rows of the similarity matrix at a time, where a bank is long.
BLOCK_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Method:
    """How a loss is put together from microbatches.

    **Attributes:**

    - `name`: as the paper calls it.
    - `global_batch`: N_total, examples per update.
    - `group`: N_local where the loss is that of groups; None where it is that of the
        whole global batch.
    - `microbatch`: examples per pass, which changes nothing but memory and time; None
        for all of a group (or of the batch).
    - `bank`: N_memory, 0 for none.
    - `queries`: whether queries are banked (M_q).
    - `clear`: whether the bank is emptied after each update (no past encodings).
    - `start`: the first update that reads the bank.
    - `block_rows`: rows of the similarity matrix at a time, None for all at once.
    """

    name: str
    global_batch: int
    group: int | None = None
    microbatch: int | None = None
    bank: int = 0
    queries: bool = True
    clear: bool = False
    start: int = 0
    block_rows: int | None = None

    def loss(self, config: EncoderConfig) -> Any:
        """As a loss that eqaccum takes."""
        bank = None
        if self.bank:
            bank = eqaccum.MemoryBank(
                self.bank, queries=self.queries, clear=self.clear, start=self.start
            )
        heading = head(config, block_rows=self.block_rows)
        return eqaccum.coupled(embed, heading, group=self.group, bank=bank)

    @property
    def pass_size(self) -> int:
        return self.microbatch or self.group or self.global_batch


def dpr(batch: int) -> Method:
    """The whole batch at once."""
    return Method(f"DPR-{batch}", batch)


def grad_accum(local: int, total: int) -> Method:
    """Each group's own negatives."""
    return Method("GradAccum", total, group=local)


def grad_cache(local: int, total: int) -> Method:
    """The whole batch's negatives, in two passes."""
    return Method("GradCache", total, microbatch=local)


def cont_accum(local: int, total: int, bank: int, **options: Any) -> Method:
    """Each group's negatives and the bank's, a long one's in blocks of rows."""
    block_rows = BLOCK_ROWS if bank > BLOCK_ROWS else None
    options = {"name": "ContAccum", "block_rows": block_rows} | options
    return Method(global_batch=total, group=local, bank=bank, **options)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast; AdamW without decay, clipped, warmed up, then linear.

    **Attributes:**

    - `examples`: pairs that are seen in all, whatever the method's batch. Methods of a
        smaller batch so take more updates.
    - `learning_rate`, `warmup`, `clip`: the peak, the share of updates that lead up to
        it, and the largest norm of a gradient.
    """

    examples: int
    learning_rate: float
    warmup: float = 0.06
    clip: float = 2.0

    def steps(self, method: Method) -> int:
        return max(self.examples // method.global_batch, 1)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        warmup = max(int(self.warmup * steps), 1)
        schedule = optax.join_schedules(
            [
                optax.linear_schedule(0, self.learning_rate, warmup),
                optax.linear_schedule(self.learning_rate, 0, max(steps - warmup, 1)),
            ],
            [warmup],
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(schedule, eps=1e-8, weight_decay=0),
        )


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, and each update's loss and GradNormRatio."""

    model: DualEncoder
    losses: np.ndarray
    ratios: np.ndarray


def norms(gradient: DualEncoder) -> dict[str, Any]:
    """The norms of the two encoders' gradients, for `grad_metrics`."""
    return {
        "query_norm": optax.tree.norm(gradient.query),
        "passage_norm": optax.tree.norm(gradient.passage),
    }


def trained(
    method: Method,
    config: TrainingConfig,
    encoder: EncoderConfig,
    model: DualEncoder,
    task: RetrievalTask,
    *,
    seed: int,
) -> Trained:
    """One run; every method sees the same pairs in the same order under one seed."""
    steps = config.steps(method)
    result = eqaccum.fit(
        model,
        training_data(task),
        global_batch=method.global_batch,
        loss=method.loss(encoder),
        optimizer=config.optimizer(steps),
        steps=steps,
        drop_remainder=True,
        key=jr.key(seed),
        microbatch=method.pass_size,
        grad_metrics=norms,
        progress=False,
    )
    ratios = result.history["passage_norm"] / result.history["query_norm"]
    return Trained(result.model, result.history["loss"], np.asarray(ratios))


def similarity_bytes(local: int, bank: int) -> int:
    """One float32 similarity matrix of a group and the bank: what (11) leaves out."""
    return (local + bank) ** 2 * 4
