"""What a traced loss depends on, read from its jaxpr: nothing runs.

Labels flow through the equations: which inputs a value was computed from, and which
random bits were drawn from no key that eqaccum gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from ._jaxpr import AnyJaxpr, open_jaxpr, subjaxprs
from ._records import Arguments, PassInputs, PassOutputs
from ._trace import Traced

# Sets of labels are ints: one bit for each.
_PARAMETERS = 1
_HELD_ONCE = 2  # parameters, behind one stop_gradient
_HELD = 4  # behind two or more: the user's own, and the one of each weight
_KEY = 8
_ROWS = 16
_STATE = 32
_DRAWS = 64  # this bit and all above: one for each drawing from no key of ours

_FROM_PARAMETERS = _PARAMETERS | _HELD_ONCE | _HELD
_RANDOM = (
    "random_bits",
    "random_gamma",
    "threefry2x32",
    "rng_bit_generator",
    "rng_uniform",
)
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)


@dataclass(frozen=True)
class Reading:
    """What a loss depends on.

    - `draws`: the shapes of random bits that reach its value, or its state, and come
        from a key that is neither eqaccum's nor computed from the example.
    - `weight_follows_model`: whether a `Mean`'s weight has a derivative by the
        parameters that the user did not stop.
    - `reads_state`: whether the value depends on the state.
    - `eps`: of the narrowest dtype that parameters are computed with.
    """

    draws: tuple[str, ...]
    weight_follows_model: bool
    reads_state: bool
    eps: float


def read_forward(forward: Traced, inputs: PassInputs) -> Reading:
    """Reads the forward jaxpr of an additive loss, traced on `inputs`."""
    reader = _Reader()
    labels = jax.tree.leaves(_labels(inputs))
    flat = reader.through(forward.jaxpr, [0] * len(forward.captured) + labels)
    out: PassOutputs = jax.tree.unflatten(forward.out_tree, flat)
    value = _union([*out.totals, *out.weights])
    reached = value | _union(out.state)
    return Reading(
        tuple(shape for bit, shape in reader.draws.values() if bit & reached),
        bool(_union(out.weights) & _HELD_ONCE),
        bool(value & _STATE),
        reader.eps,
    )


def _labels(inputs: PassInputs) -> PassInputs:
    def marked(tree: Any, label: int) -> Any:
        return jax.tree.map(lambda _: label, tree)

    arguments = inputs.arguments
    return PassInputs(
        Arguments(
            marked(arguments.trainable, _PARAMETERS),
            marked(arguments.frozen, 0),
            marked(arguments.loss, 0),
            marked(arguments.whole, 0),
        ),
        marked(inputs.state, _STATE),
        marked(inputs.rows, _ROWS),
        0,
        0,
        marked(inputs.rows_key, _KEY),
        marked(inputs.shared_key, _KEY),
        [],
    )


def _union(labels: Sequence[int]) -> int:
    out = 0
    for label in labels:
        out |= label
    return out


class _Reader:
    def __init__(self) -> None:
        self.draws: dict[int, tuple[int, str]] = {}  # by the equation's identity
        self.eps = 0.0

    def through(self, jaxpr: AnyJaxpr, labels: Sequence[int]) -> list[int]:
        """The labels of a jaxpr's outputs, out of those of its inputs."""
        jaxpr = open_jaxpr(jaxpr)
        known: dict[Var, int] = dict(zip(jaxpr.invars, labels, strict=True))

        def label(atom: Any) -> int:
            return 0 if isinstance(atom, Literal) else known.get(atom, 0)

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [label(atom) for atom in eqn.invars])
            for var, result in zip(eqn.outvars, results, strict=True):
                known[var] = self._of_dtype(var.aval, result)
        return [label(atom) for atom in jaxpr.outvars]

    def _of_dtype(self, aval: Any, label: int) -> int:
        """No derivative goes through what is not inexact; notes how narrow it is."""
        dtype = getattr(aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return label & ~_FROM_PARAMETERS
        if label & _FROM_PARAMETERS:
            self.eps = max(self.eps, float(jnp.finfo(dtype).eps))
        return label

    def _equation(self, eqn: JaxprEqn, labels: list[int]) -> list[int]:
        name, union = eqn.primitive.name, _union(labels)
        if name == "stop_gradient":
            return [_stopped(label) for label in labels]
        if name in _RANDOM and not union & (_KEY | _ROWS):
            union |= self._drawing(eqn)
        inner = list(subjaxprs(eqn))
        if name in _CALLS and len(inner) == 1:
            if len(open_jaxpr(inner[0]).invars) == len(labels):
                return self.through(inner[0], labels)
        if name == "scan":
            return self._scan(eqn, labels)
        if name == "while":
            return self._while(eqn, labels)
        if name == "cond":
            index, *rest = labels
            branches = [self.through(b, rest) for b in eqn.params["branches"]]
            return [index | _union(outs) for outs in zip(*branches, strict=True)]
        for jaxpr in inner:  # of a kind that is not known here: all from all
            count = len(open_jaxpr(jaxpr).invars)
            union |= _union(self.through(jaxpr, [union] * count))
        return [union] * len(eqn.outvars)

    def _drawing(self, eqn: JaxprEqn) -> int:
        if id(eqn) not in self.draws:
            shape = getattr(eqn.outvars[0].aval, "shape", ())
            bit = _DRAWS << len(self.draws)
            self.draws[id(eqn)] = bit, str(tuple(shape))
        return self.draws[id(eqn)][0]

    def _scan(self, eqn: JaxprEqn, labels: list[int]) -> list[int]:
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        fixed, carry = labels[:consts], labels[consts : consts + carries]
        xs, body = labels[consts + carries :], eqn.params["jaxpr"]

        def once(carry: list[int]) -> list[int]:
            return self.through(body, [*fixed, *carry, *xs])

        carry = self._settled(carry, lambda carry: once(carry)[:carries])
        return [*carry, *once(carry)[carries:]]

    def _while(self, eqn: JaxprEqn, labels: list[int]) -> list[int]:
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, fixed = labels[:tests], labels[tests : tests + bodies]

        def once(carry: list[int]) -> list[int]:
            return self.through(eqn.params["body_jaxpr"], [*fixed, *carry])

        carry = self._settled(labels[tests + bodies :], once)
        (ends,) = self.through(eqn.params["cond_jaxpr"], [*test, *carry])
        return [label | ends for label in carry]

    def _settled(self, carry: list[int], once: Any) -> list[int]:
        """The labels of a carry after any number of rounds.

        What is drawn in the first round from a constant may come from a key later.
        """
        before, base = dict(self.draws), _with(self.draws) - 1
        while True:
            self.draws = dict(before)
            new = [(a | b) & base for a, b in zip(carry, once(carry), strict=True)]
            if new == carry:
                break
            carry = new
        while True:  # what the keys depend on is settled: so are the drawings
            new = [a | b for a, b in zip(carry, once(carry), strict=True)]
            if new == carry:
                return carry
            carry = new


def _with(draws: dict[int, tuple[int, str]]) -> int:
    return _DRAWS << len(draws)


def _stopped(label: int) -> int:
    held = label & ~_FROM_PARAMETERS
    if label & _PARAMETERS:
        held |= _HELD_ONCE
    if label & (_HELD_ONCE | _HELD):
        held |= _HELD
    return held
