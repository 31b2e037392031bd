"""How far accumulated gradients are from the whole batch's, loss by loss.

    python benchmarks/exact.py [--tiny] [--resume]

Some five minutes on two cores; it writes results/exact.md and results/exact.json. For
each loss and microbatch the gradient, computed in float32 out of that many rows at a
time, is compared with `jax.grad` of the loss of all rows at once in float64: the norm
of the difference over all leaves, relative to that of the gradient. Three ways:

- eqaccum: `make_step`, as a user writes the loss;
- MultiSteps: `optax.MultiSteps` around an optimizer, called with `jax.grad` of the
  batch's loss on each microbatch;
- microbatch: `optax.microbatch(jax.grad(loss), ..., accumulator=MEAN)`. It refuses
  sizes that do not divide the batch.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _machine
import equinox as eqx
import exact_cases
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import eqaccum

RESULTS = Path(__file__).parent / "results"
ROWS = 24
MICROBATCHES = (24, 8, 5, 1)
REFUSED = "refused"
FLOAT32 = 1e-5  # at most this: the whole batch's gradient, to rounding
KEY = jr.key(7)


def recorder() -> optax.GradientTransformation:
    """An optimizer that changes nothing and keeps the gradient as its state."""

    def init(parameters: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, parameters)

    def update(gradient: Any, state: Any, parameters: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, gradient), gradient

    return optax.GradientTransformation(init, update)


# The three ways


def ours(case: exact_cases.Case, microbatch: int) -> Any:
    step = eqaccum.make_step(
        case.loss,
        recorder(),
        global_batch=ROWS,
        microbatch=microbatch,
        penalty=case.penalty,
    )
    train = step.init(case.model, KEY, state=case.state)
    train, _ = step(train, case.batch, weights=case.weights)
    return train.opt_state


def multi_steps(case: exact_cases.Case, microbatch: int) -> Any:
    starts = range(0, ROWS, microbatch)
    optimizer = optax.MultiSteps(recorder(), every_k_schedule=len(starts))
    parameters, static = eqx.partition(case.model, eqx.is_inexact_array)
    gradient = jax.jit(jax.grad(_value(case, static)))
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)
    for k, start in enumerate(starts):
        rows = slice(start, start + microbatch)
        part = jax.tree.map(lambda x, rows=rows: x[rows], peers_batch(case))
        grads = gradient(parameters, part, peers_key(case, k))
        _, state = update(grads, state, parameters)
    return state.inner_opt_state


def microbatch(case: exact_cases.Case, size: int) -> Any:
    parameters, static = eqx.partition(case.model, eqx.is_inexact_array)
    key = peers_key(case, 0)
    gradient = optax.microbatch(
        lambda p, batch: jax.grad(_value(case, static))(p, batch, key),
        argnums=1,
        microbatch_size=size,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    try:
        return jax.jit(gradient)(parameters, peers_batch(case))
    except ValueError:
        return None


def _value(case: exact_cases.Case, static: Any) -> Callable:
    def value(parameters: Any, batch: Any, key: Any) -> jax.Array:
        return case.full(eqx.combine(parameters, static), batch, key)

    return value


# Their keys: those of eqaccum's documentation, so that all are compared with one truth


def _keys() -> tuple[jax.Array, jax.Array]:
    rows, shared = jr.split(jr.fold_in(KEY, 0))
    return jax.vmap(lambda i: jr.fold_in(rows, i))(jnp.arange(ROWS)), shared


def peers_batch(case: exact_cases.Case) -> Any:
    """The rows, and where rows have keys of their own, those: they are data here."""
    return case.batch | ({"key": _keys()[0]} if case.key == "rows" else {})


def peers_key(case: exact_cases.Case, k: int) -> jax.Array | None:
    return _keys()[1] if case.key == "shared" else None


def truth(case: exact_cases.Case) -> Any:
    """The gradient of all rows at once, in float64."""
    key = peers_key(case, 0)
    batch = peers_batch(case)
    with jax.enable_x64(True):

        def wide(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.asarray(x, jnp.float64) if _floating(x) else x, tree
            )

        parameters, static = eqx.partition(case.model, eqx.is_inexact_array)
        gradient = jax.jit(jax.grad(_value(case, static)))
        return gradient(wide(parameters), wide(batch), key)


def _floating(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


# Comparing


def flat(tree: Any) -> np.ndarray:
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])


def error(got: Any, want: Any) -> float | str:
    if got is None:
        return REFUSED
    difference = np.linalg.norm(flat(got) - flat(want))
    return float(difference / np.linalg.norm(flat(want)))


WAYS = {"eqaccum": ours, "MultiSteps": multi_steps, "microbatch": microbatch}


def measured(case: exact_cases.Case, sizes: tuple[int, ...]) -> dict[str, Any]:
    want = truth(case)
    return {
        way: {str(n): error(gradient(case, n), want) for n in sizes}
        for way, gradient in WAYS.items()
    }


# The page


def page(found: dict[str, Any]) -> str:
    sizes = [str(n) for n in found["microbatches"]]
    lines = [
        "| loss | way | " + " | ".join(sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for name, ways in found["errors"].items():
        for way, by_size in ways.items():
            shown = " | ".join(_shown(by_size[n]) for n in sizes)
            lines.append(f"| {name if way == 'eqaccum' else ''} | {way} | {shown} |")
    blocks = [
        "# Is the accumulated gradient the whole batch's?",
        _machine.described(found["machine"]) + " Made by `make bench-exact`.",
        f"Relative error of the gradient of {ROWS} rows, computed in float32 with the "
        "microbatch at the head of the column, against `jax.grad` of all rows at once "
        f"in float64. **Bold**: above {FLOAT32:g}, not a matter of rounding.",
        "All ways get the same loss, rows, keys and weights, and `optax` the keys row "
        "by row as data (a key for each microbatch, as is usual, gives other dropout "
        "masks). MultiSteps and microbatch average the gradients of the microbatches "
        f"alike; microbatch refuses sizes that do not divide {ROWS}. "
        "The losses: exact_cases.py.",
        "\n".join(lines),
        _verdict(found),
    ]
    return "\n\n".join(blocks) + "\n"


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"**{value:.1e}**" if value > FLOAT32 else f"{value:.1e}"


def _verdict(found: dict[str, Any]) -> str:
    exact = {
        name: max(by["eqaccum"].values())
        for name, by in found["errors"].items()
        if name not in found["not_exact"]
    }
    worst = max(exact, key=lambda name: exact[name])
    others = ", ".join(found["not_exact"])
    return (
        f"eqaccum's worst error over {len(exact)} losses and "
        f"{len(found['microbatches'])} microbatches: {exact[worst]:.1e} ({worst}). "
        f"{others} is not among them: its statistics are those of a microbatch in "
        "every way of accumulating, which eqaccum says by name before the first step."
    )


def chosen(tiny: bool) -> Iterator[exact_cases.Case]:
    for index, case in enumerate(exact_cases.cases(ROWS)):
        if not tiny or index % 7 == 0:
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="three losses, no page")
    parser.add_argument("--resume", action="store_true", help="keep what is there")
    options = parser.parse_args()
    tiny = options.tiny
    # BatchNorm is told of at each size, and once is enough
    warnings.filterwarnings("ignore", category=eqaccum.EqaccumWarning)
    file = RESULTS / "exact.json"
    kept = json.loads(file.read_text())["errors"] if options.resume else {}
    found: dict[str, Any] = {
        "machine": _machine.facts(),
        "rows": ROWS,
        "microbatches": MICROBATCHES,
        "not_exact": [],
        "errors": {},
    }
    for case in chosen(tiny):
        errors = kept.get(case.name) or measured(case, MICROBATCHES)
        found["errors"][case.name] = errors
        found["not_exact"] += [] if case.exact else [case.name]
        print(case.name, json.dumps(errors), flush=True)
        if not tiny:
            file.write_text(json.dumps(found, indent=1) + "\n")
    if not tiny:
        (RESULTS / "exact.md").write_text(page(found))
        print(page(found))


if __name__ == "__main__":
    main()
