"""`check`: whether a loss's gradient is the same however the batch is cut."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import Form, Options, check_arguments, run_key
from .._coupled import Coupled
from .._data import Batch, Source, open_source
from .._errors import Finding
from .._plan import Plan, is_out_of_memory
from .._step import batch_norms, check_values
from .._tree import Role, partition
from ._at_the_door import Own, at_the_door
from ._cuts import (
    Comparison,
    Prepared,
    Subject,
    all_cuts,
    cheap_cuts,
    compare,
    is_batched,
    prepared,
    probe,
)
from ._plan import prepare_loss

# Leaves that a printed report shows, the worst first.
_SHOWN = 8
# Of two rows no cut is uneven, and means of equal parts do add up.
_FEWEST = 3


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. Print it.

    **Attributes:**

    - `ok`: whether nothing was found.
    - `errors`: of each trainable leaf, by its path, the largest relative error of its
        gradient over the cuts; empty where the gradient is not finite.
    - `tolerance`: what the errors were compared with; `dtype`: what was computed in;
        `cuts`: how the examples were cut, such as `"3+1"`.
    - `causes`: what was found wrong, in words; `remedies`: what to do, one for each.

    !!! Example

        ```python
        report = eqaccum.check(model, (x, y), loss)
        assert report.ok, report
        ```
    """

    ok: bool
    errors: Mapping[str, float]
    tolerance: float
    dtype: str
    cuts: tuple[str, ...]
    causes: tuple[str, ...]
    remedies: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "nothing wrong was found" if self.ok else "FAILED"
        lines = [f"check: {verdict}"]
        for cause, remedy in zip(self.causes, self.remedies, strict=True):
            lines += [f"  cause:  {cause}", f"  remedy: {remedy}"]
        lines.append(
            f"  relative error of the gradient, whole against {', '.join(self.cuts)}, "
            f"in {self.dtype} (tolerance {self.tolerance:.0e}):"
        )
        worst = sorted(self.errors.items(), key=lambda item: -item[1])
        width = max((len(name) for name, _ in worst[:_SHOWN]), default=0)
        lines += [f"    {name:<{width}}  {e:.1e}" for name, e in worst[:_SHOWN]]
        if len(worst) > _SHOWN:
            lines.append(f"    and {len(worst) - _SHOWN} leaves below these")
        return "\n".join(lines)


@at_the_door
def check(
    model: PyTree,
    data: Any,
    loss: Any = None,
    *,
    state: Any = None,
    key: Any = None,
    has_aux: bool = False,
    in_axes: PyTree = 0,
    trainable: PyTree = True,
    axis_name: Any = "batch",
    examples: Own[int, ...] = 4,
) -> CheckReport:
    """Whether the gradient of a loss is the same however the batch is cut.

    A few examples are taken whole and cut unevenly (of four: 2+2 and 3+1, the last pass
    filled up with copies of weight 0); the gradients are compared leaf by leaf, in
    float64 where the model can be computed so. What no cut shows is read from the
    traced loss: random numbers that do not come from `key`, a `Mean` whose weight
    depends on the model. It costs the compilation of three small gradients, and a
    fourth program where something is wrong.

    **Arguments:**

    - `model`, `data`, `loss`, `state`, `key`, `has_aux`, `in_axes`, `trainable`,
        `axis_name`: as in `fit`. A memory bank is left out.
    - `examples`: how many rows are looked at, spread over the data.

    **Returns:**

    A `CheckReport`; `report.ok` is the verdict.

    **Raises:**

    `InputError` where an argument cannot work, and the loss's own exceptions.

    !!! Example

        ```python
        print(eqaccum.check(model, (x, y), loss))
        ```
    """
    whole = isinstance(examples, int | np.integer) and not isinstance(examples, bool)
    if not whole or examples < _FEWEST:
        raise _errors.bad_examples(examples)
    check_values(model, state)
    source = open_source(data, in_axes=in_axes)
    if not source.has_values:
        raise _errors.only_shapes()
    if not source.restartable:
        _errors.warn(_errors.check_took_rows(source.description))
    chosen = prepare_loss(
        loss, model, state, source, compute_dtype=None, axis_name=axis_name
    ).fn
    if isinstance(chosen, Coupled) and chosen.bank is not None:
        chosen = Coupled(chosen.embed, chosen.head, chosen.group, None)
    check_arguments(chosen, has_state=state is not None)
    leaves = partition(model, trainable)
    if not leaves.paths(Role.TRAINABLE):
        raise _errors.nothing_to_train([])
    group = getattr(chosen, "group", None) or 0
    batch = _first(source, max(int(examples), 2 * group))
    needed = max(_FEWEST, group)
    if batch.count < needed:
        raise _errors.too_few_to_check(batch.count, needed)
    subject = _subject(
        batch,
        np.arange(batch.count),
        model=model,
        state=state,
        loss=chosen,
        key=run_key(key),
        options=Options(has_aux, axis_name),
        trainable=trainable,
    )
    return _report(subject)


def _report(subject: Subject) -> CheckReport:
    """The full test, in float64 unless the loss cannot be computed so."""
    # It fails with float32 by name somewhere; the user's own errors come again.
    with contextlib.suppress(Exception), jax.enable_x64(True):
        ready = prepared(subject.in_float64())
        return _verdict(ready, compare(ready, all_cuts(subject)))
    ready = prepared(subject)
    return _verdict(ready, compare(ready, all_cuts(subject)))


def _verdict(ready: Prepared, found: Comparison) -> CheckReport:
    findings = causes(ready, found)
    errors = {name: max(each) for name, each in (found.errors or {}).items()}
    return CheckReport(
        not findings,
        MappingProxyType(errors),
        found.tolerance,
        found.dtype,
        found.cuts,
        tuple(f.cause for f in findings),
        tuple(f.remedy for f in findings),
    )


def causes(ready: Prepared, found: Comparison) -> list[Finding]:
    """Everything that is wrong, by its name."""
    findings: list[Finding] = []
    reading = found.reading
    if reading.draws:
        findings.append(_errors.saw_foreign_draws(reading.draws))
    if reading.weight_follows_model:
        findings.append(_errors.saw_weight_of_model())
    if found.errors is None:
        findings.append(_errors.saw_not_finite())
    elif not found.same:
        findings += _causes_of_cuts(ready, found, explained=bool(reading.draws))
    return findings


def _causes_of_cuts(
    ready: Prepared, found: Comparison, *, explained: bool
) -> list[Finding]:
    loss = ready.subject.loss
    norms = batch_norms(ready.subject.model)
    if is_batched(loss):
        return _causes_in_batched(ready, found, explained=explained)
    if norms and ready.subject.state is not None:
        return [_errors.saw_batch_norm(norms)]
    if found.reading.reads_state:
        return [_errors.saw_state()]
    if isinstance(loss, Form):
        return [_errors.saw_coupled_embedding()]
    return [_errors.saw_collective(ready.subject.options.axis_name)]


def _causes_in_batched(
    ready: Prepared, found: Comparison, *, explained: bool
) -> list[Finding]:
    norms = batch_norms(ready.subject.model)
    if norms and ready.subject.state is not None:
        return [_errors.saw_batch_norm(norms)]
    probed = probe(ready, found.tolerance)
    whole, *cut = found.weights
    uneven = any(abs(w - whole) > 1e-6 * abs(whole) for w in cut)
    findings = []
    if probed.follows_keys:
        findings.append(_errors.saw_one_key())
    if probed.counts_nothing and not uneven:
        findings.append(_errors.saw_counted_padding())
    elif uneven or (probed.all_equal and probed.follows_rows):
        findings.append(_errors.saw_mean_of_means())
    elif probed.follows_rows:
        findings.append(_errors.saw_batch_statistics())
    if findings or explained:
        return findings
    if probed.follows_shared_key:
        return [_errors.saw_shared_draw()]
    if found.reading.reads_state:
        return [_errors.saw_state()]
    if ready.subject.loss.weighted:
        return [_errors.saw_batch_statistics()]
    return [_errors.saw_mean_of_means()]


# --- The cheap form, before the first step of `fit` ------------------------------

# What was found of programs that were tested already, by their text.
_tested: dict[int, tuple[Finding, ...]] = {}


@dataclass(frozen=True)
class SelfTest:
    """The cheap form: one uneven cut, in the run's own dtypes, on the first batch.

    It costs the compilation of two small gradients, and less than three of its
    examples' forward and backward passes; a program that was tested is not again.
    """

    loss: Any
    options: Options
    trainable: PyTree
    compute_dtype: Any
    microbatch: int

    def __call__(self, model: PyTree, state: Any, key: Any, batch: Batch) -> None:
        """Warns where something is wrong."""
        weights = batch.weights
        rows = np.arange(batch.count) if weights is None else np.flatnonzero(weights)
        if len(rows) < _FEWEST or not _is_here((model, state)):
            return
        subject = _subject(
            batch,
            rows[: min(4, max(_FEWEST, self.microbatch))],
            model=model,
            state=state,
            loss=self.loss,
            key=np.asarray(key),
            options=self.options,
            trainable=self.trainable,
        )
        subject = replace(subject, compute_dtype=self.compute_dtype)
        findings = self._found(prepared(subject), cheap_cuts(subject, self.microbatch))
        if findings:
            _errors.warn(_errors.depends_on_cut(findings))

    def _found(self, ready: Prepared, cuts: Sequence[Any]) -> tuple[Finding, ...]:
        text = hash(
            tuple(str(j) for c in cuts for j in ready.trace(c.microbatch).jaxprs)
        )
        if text in _tested:
            return _tested[text]
        try:
            found = compare(ready, cuts)
            if found.errors is None:  # the step says so better
                return ()
            findings = tuple(causes(ready, found))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return ()
        _tested[text] = findings
        return findings


def self_test(
    loss: Any,
    model: PyTree,
    state: Any,
    *,
    options: Options,
    trainable: PyTree,
    compute_dtype: Any,
    plan: Plan,
) -> SelfTest | None:
    """The cheap form, where the loss can go wrong; None where it cannot.

    Examples that do not know of each other cannot. A stateful loss is tested where
    there are several passes; the model's `BatchNorm`s are told of with the plan.
    """
    stateful = state is not None and plan.num_microbatches > 1
    if batch_norms(model) or isinstance(loss, Form):
        stateful = False
    if not (is_batched(loss) or stateful) or plan.microbatch < 2:
        return None
    return SelfTest(loss, options, trainable, compute_dtype, plan.microbatch)


def _is_here(tree: Any) -> bool:
    return all(
        leaf.is_fully_addressable
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
    )


def _first(source: Source, rows: int) -> Batch:
    """So many rows, spread over the data where they can be indexed."""
    order = None
    if source.rows is not None and source.can_shuffle:
        rows = min(rows, source.rows)
        order = np.zeros(source.rows, np.intp)
        order[:rows] = np.linspace(0, source.rows - 1, rows).round()
    return next(source.epoch(0, global_batch=rows, order=order))


def _subject(batch: Batch, rows: np.ndarray, **more: Any) -> Subject:
    return Subject(
        layout=batch.layout, rows=batch.take(rows), whole=list(batch.whole), **more
    )
