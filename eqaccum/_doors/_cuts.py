"""The same few examples taken whole and cut, compared leaf by leaf."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._accumulate import (
    AdditivePasses,
    Arguments,
    Batch as Slots,
    Batched,
    Cut,
    Form,
    LossSpec,
    Options,
    Passes,
    PassInputs,
    Reading,
    SharedKey,
    even_cut,
    read_forward,
    trace_passes,
)
from .._data import Layout
from .._mesh import DATA
from .._tree import Partition, Role, partition, struct

# A leaf whose gradient is small beside the others is compared with these shares of all.
_FLOOR = 1e-3
_FLOOR_OF_16_BITS = 0.1


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, a loss and a few rows: what is tested."""

    model: PyTree
    state: Any
    loss: Any
    layout: Layout
    rows: list[Any]  # one array per row leaf, the examples in front
    whole: list[Any]
    key: np.ndarray
    options: Options
    trainable: PyTree
    compute_dtype: Any = None

    @property
    def count(self) -> int:
        return self.rows[0].shape[0]

    def in_float64(self) -> "Subject":
        """The same with all floats wide; inside `jax.enable_x64`."""
        model, state, loss, rows, whole = jax.tree.map(
            _wide, (self.model, self.state, self.loss, self.rows, self.whole)
        )
        return replace(
            self, model=model, state=state, loss=loss, rows=rows, whole=whole
        )


@dataclass(frozen=True)
class Comparison:
    """How far the gradients of cuts are from the whole one.

    `errors` are by leaf and by cut, relative; None where the whole gradient is not
    finite. `weights` are what each was divided by, the whole first.
    """

    errors: dict[str, tuple[float, ...]] | None
    weights: tuple[float, ...]
    cuts: tuple[str, ...]
    tolerance: float
    dtype: str
    reading: Reading

    @property
    def same(self) -> bool:
        if self.errors is None:
            return False
        return all(e <= self.tolerance for each in self.errors.values() for e in each)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A subject as the flat lists that programs take."""

    subject: Subject
    spec: LossSpec
    arguments: Arguments
    state: list[Any]
    names: tuple[str, ...]
    _traced: dict[int, Passes] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the programs are called with, the captured arrays excepted."""
        return self.arguments, self.state, self.subject.rows, self.subject.key

    def inputs(self, n: int) -> PassInputs:
        """The structs of a pass of n rows."""
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return PassInputs(
            jax.tree.map(struct, self.arguments),
            [struct(leaf) for leaf in self.state],
            [
                jax.ShapeDtypeStruct((n, *leaf.shape[1:]), struct(leaf).dtype)
                for leaf in self.subject.rows
            ],
            jax.ShapeDtypeStruct((n,), jnp.float32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
            key,
            key,
            [],
        )

    def trace(self, n: int) -> Passes:
        """The passes of n rows; the user's code runs once for each n."""
        if n not in self._traced:
            self._traced[n] = self._trace(n)
        return self._traced[n]

    def _trace(self, n: int) -> Passes:
        return trace_passes(
            self.spec,
            self.subject.loss,
            self.inputs(n),
            rows=self.subject.count,
            axis_env=[(DATA, 1)],
            rewrite_convolutions=False,
        )


def prepared(subject: Subject) -> Prepared:
    model = partition(subject.model, subject.trainable)
    loss = partition(subject.loss)
    state: Partition | None = None
    state_leaves: list[Any] = []
    if subject.state is not None:
        state = partition(subject.state)
        state_leaves = state.split(subject.state).frozen
    split = model.split(subject.model)
    spec = LossSpec(
        model,
        loss,
        state,
        subject.layout.unflatten,
        subject.options,
        compute_dtype=subject.compute_dtype,
    )
    arguments = Arguments(
        split.trainable, split.frozen, loss.split(subject.loss).frozen, subject.whole
    )
    names = model.paths(Role.TRAINABLE)
    return Prepared(subject, spec, arguments, state_leaves, names)


def all_cuts(subject: Subject) -> list[Cut]:
    """The whole, halves, and all but one row beside one and copies of weight 0."""
    loss, rows = subject.loss, subject.count
    if isinstance(loss, Form):
        passes = loss.passes(rows=rows, devices=1) or [1, 2, 3]
        cuts = [loss.cut(k, rows=rows, devices=1, axis_name=None) for k in passes[:3]]
    else:
        cuts = [even_cut(1, rows, 1, None), even_cut(2, rows, 1, None)]
    if not isinstance(loss, Form) or loss.cut(
        1, rows=rows, devices=1, axis_name=None
    ) == even_cut(1, rows, 1, None):
        cuts.append(Cut(2, rows - 1, 1, None))
    distinct = {(c.num_microbatches, c.microbatch): c for c in cuts}
    return list(distinct.values())


def cheap_cuts(subject: Subject, microbatch: int) -> list[Cut]:
    """The whole and one uneven cut, or two cuts where the whole is too large."""
    count = subject.count
    if microbatch < count:
        return [Cut(2, count - 1, 1, None), Cut(count, 1, 1, None)]
    return [Cut(1, count, 1, None), Cut(2, count - 1, 1, None)]


def compare(ready: Prepared, cuts: Sequence[Cut]) -> Comparison:
    """Runs the gradient under each cut, the first one whole."""
    whole, *parts = cuts
    passes = {cut.microbatch: ready.trace(cut.microbatch) for cut in cuts}
    reading = read(ready, passes[whole.microbatch], whole.microbatch)

    def program(ready_arrays: Any, captured: dict[int, Any]) -> Any:
        sums = [
            _gradient(ready, passes[cut.microbatch], cut, ready_arrays, captured)
            for cut in cuts
        ]
        (first, _), *others = sums
        norms = [_norm(g) for g in first]
        away = [
            [_norm(a - b) for a, b in zip(gradient, first, strict=True)]
            for gradient, _ in others
        ]
        return norms, away, [weight for _, weight in sums]

    captured = {n: [jnp.asarray(c) for c in p.captured] for n, p in passes.items()}
    norms, away, weights = jax.device_get(_compiled(program)(ready.arrays, captured))
    return Comparison(
        _relative(ready.names, norms, away, reading.eps),
        tuple(float(w) for w in weights),
        tuple(_text(cut, ready.subject.count) for cut in parts),
        _tolerance(reading.eps),
        str(np.asarray(norms[0]).dtype) if norms else "",
        reading,
    )


def read(ready: Prepared, passes: Passes, n: int) -> Reading:
    """What the loss depends on; of a coupled one, what its embedding does."""
    subject = ready.subject
    if isinstance(passes, AdditivePasses):
        return read_forward(passes.forward, ready.inputs(n))
    embed = getattr(subject.loss, "embed", None)
    if embed is None:
        return Reading((), False, False, float(jnp.finfo(jnp.float32).eps))
    probe = replace(
        subject,
        loss=_as_loss(embed, subject.state is not None),
        options=replace(subject.options, has_aux=False),
    )
    alone = prepared(probe)
    traced = alone.trace(subject.count)
    assert isinstance(traced, AdditivePasses)
    return replace(
        read_forward(traced.forward, alone.inputs(subject.count)),
        weight_follows_model=False,
    )


def _as_loss(embed: Any, has_state: bool) -> Any:
    """An embedding as the loss of one example: the sum of its numbers."""
    fn = embed.fn if isinstance(embed, SharedKey) else embed

    def loss(*args: Any) -> Any:
        out = fn(*args)
        embedded, state = out if has_state else (out, None)
        leaves = [
            jnp.sum(jnp.real(leaf))
            for leaf in jax.tree.leaves(embedded)
            if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)
        ]
        total = sum(leaves[1:], leaves[0]) if leaves else jnp.zeros(())
        return (total, state) if has_state else total

    return SharedKey(loss) if isinstance(embed, SharedKey) else loss


def _gradient(
    ready: Prepared, passes: Passes, cut: Cut, arrays: Any, captured: dict[int, Any]
) -> tuple[list[Array], Float[Array, ""]]:
    arguments, state, rows, key = arrays
    count = ready.subject.count
    order = np.arange(cut.capacity)
    weights = (order < count).astype(np.float32)
    order = order % count
    if cut.places is not None:
        order, weights = order[cut.places], weights[cut.places]
    shape = (cut.num_microbatches, cut.microbatch)
    batch = Slots(
        [jnp.asarray(leaf)[order].reshape(*shape, *leaf.shape[1:]) for leaf in rows],
        jnp.asarray(weights.reshape(shape)),
        key,
        None,
    )
    shared: dict[str, Any] = {
        "captured": captured[cut.microbatch],
        "arguments": arguments,
        "state": state,
        "batch": batch,
    }
    ratios: list[Array] = []
    if passes.num_terms > 1:
        totals = passes.weigh(cut, **shared).weights
        ratios = [
            (totals[0] / w).astype(t.dtype)
            for w, t in zip(totals, passes.outputs.totals, strict=True)
        ]
    sums = passes.accumulate(cut, ratios=ratios, **shared)
    weight = sums.outputs.weights[0]
    gradient = [g / weight.astype(jnp.finfo(g.dtype).dtype) for g in sums.gradients]
    return gradient, weight


def _compiled(program: Any) -> Any:
    """The program, where the axis of the devices is in scope, of size 1.

    It runs once, on a few rows: on CPU it is not worth optimising (a third of the time
    to compile).
    """

    def run(*args: Any) -> Any:
        mapped = jax.vmap(
            program, in_axes=None, out_axes=0, axis_size=1, axis_name=DATA
        )
        return jax.tree.map(lambda leaf: leaf[0], mapped(*args))

    options = None
    if jax.default_backend() == "cpu":
        options = {
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        }
    return jax.jit(run, compiler_options=options)


def _norm(leaf: Array) -> Array:
    """The norm, of a sum of squares that cannot overflow."""
    if leaf.size == 0:
        return jnp.zeros((), jnp.finfo(leaf.dtype).dtype)
    largest = jnp.max(jnp.abs(leaf))
    scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return scale * jnp.sqrt(jnp.sum(jnp.abs(leaf / scale) ** 2))


def _relative(
    names: Sequence[str], norms: list[Any], away: list[list[Any]], eps: float
) -> dict[str, tuple[float, ...]] | None:
    sizes = np.asarray(norms, np.float64)
    if not np.all(np.isfinite(sizes)):
        return None
    floor = _FLOOR if eps < 1e-4 else _FLOOR_OF_16_BITS
    by = np.maximum(sizes, floor * np.linalg.norm(sizes))
    by = np.where(by > 0, by, 1.0)
    errors = np.asarray(away, np.float64).reshape(len(away), len(names)) / by
    errors = np.where(np.isfinite(errors), errors, np.inf)
    return {
        name: tuple(map(float, column))
        for name, column in zip(names, errors.T, strict=True)
    }


def _tolerance(eps: float) -> float:
    """Far above rounding, far below what a wrong gradient does."""
    return float(np.clip(1e4 * eps, 1e-6, 0.1))


def _text(cut: Cut, rows: int) -> str:
    """`3+1`: the rows of each pass."""
    if cut.group is not None:
        return f"{cut.num_microbatches} passes"
    n = cut.microbatch
    return "+".join(
        str(min(n, rows - k * n)) for k in range(cut.num_microbatches) if rows > k * n
    )


def _wide(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return leaf
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    wide = np.asarray(leaf).astype(np.complex128 if is_complex else np.float64)
    return jnp.asarray(wide) if isinstance(leaf, jax.Array) else wide


# --- Why the rows of a batched loss are not independent --------------------------


@dataclass(frozen=True)
class Probed:
    """How a row's value in a batched loss reacts to what is not its own."""

    follows_rows: bool
    follows_keys: bool
    follows_shared_key: bool
    all_equal: bool  # each row has the same value, though the rows differ
    counts_nothing: bool  # there is a value where all rows have weight 0


def probe(ready: Prepared, tolerance: float) -> Probed:
    """Changes the other rows, the other keys and the shared key, and looks at one."""
    count = ready.subject.count
    passes = ready.trace(count)
    assert isinstance(passes, AdditivePasses)
    ours = len(passes.captured) - len(passes.forward.captured)
    captured = [jnp.asarray(c) for c in passes.captured[ours:]]
    settings = _settings(count)

    def program(arrays: Any, captured: list[Array], settings: Any) -> Array:
        arguments, state, rows, key = arrays
        keys = jax.random.split(jax.random.wrap_key_data(jnp.asarray(key)))
        rows_key, shared_key = jax.random.key_data(keys)

        def value(setting: Any) -> Array:
            order, positions, weights, change = setting
            given = PassInputs(
                arguments,
                state,
                [jnp.asarray(leaf)[order] for leaf in rows],
                weights,
                positions,
                rows_key,
                shared_key + change,
                [],
            )
            out = passes.forward(captured, given)
            return jnp.stack([t.astype(out.totals[0].dtype) for t in out.totals])

        return jax.lax.map(value, settings)

    run = _compiled(program)
    values = np.asarray(run(ready.arrays, captured, settings), np.float64)
    plain, rows_moved, keys_moved, shared_moved, none = values.reshape(5, count, -1)
    scale = max(float(np.max(np.abs(plain))), 1e-30)

    def moved(other: np.ndarray) -> bool:
        return bool(np.max(np.abs(other - plain)) > tolerance * scale)

    return Probed(
        moved(rows_moved),
        moved(keys_moved),
        moved(shared_moved),
        bool(np.max(np.abs(plain - plain[:1])) <= tolerance * scale),
        bool(np.max(np.abs(none)) > tolerance * scale),
    )


def _settings(count: int) -> tuple[Any, ...]:
    """Rows, positions, weights and change of the shared key.

    One row weighs 1; in the last settings none does.
    """
    own = np.arange(count, dtype=np.int32)
    alone = np.eye(count, dtype=np.float32)
    plain = np.tile(own, (count, 1))
    same = np.tile(own[:, None], (1, count))
    elsewhere = np.where(alone > 0, plain, plain + 1000).astype(np.int32)
    orders = np.concatenate([plain, same, plain, plain, plain])
    positions = np.concatenate([plain, plain, elsewhere, plain, plain])
    shared = np.repeat(np.array([0, 0, 0, 1, 0], np.uint32), count)
    weights = np.concatenate([np.tile(alone, (4, 1)), np.zeros_like(alone)])
    return orders, positions, weights, shared


def is_batched(loss: Any) -> bool:
    return isinstance(loss, Batched)
