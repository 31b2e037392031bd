"""A step's settings, checked before anything is computed."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _errors
from .._accumulate import Form, check_arguments, check_loss
from .._mesh import DATA, Placement, Spread
from .._plan import Plan, parse_bytes
from .._tree import Partition, Role, is_array, partition, struct
from ._ema import is_decay

Nonfinite = Literal["raise", "skip", "ignore"]
_NONFINITE = ("raise", "skip", "ignore")


@dataclass(frozen=True)
class Settings:
    """What `make_step` was asked for, checked. Fields are as in `make_step`."""

    loss: Any
    optimizer: Any
    global_batch: int
    placement: Placement
    in_axes: Any = 0
    has_aux: bool = False
    penalty: Callable | None = None
    trainable: Any = True
    microbatch: int | str = "largest"
    memory_limit: int | str | None = None
    plan: Plan | None = None
    remat: Any = None
    compute_dtype: Any = None
    nonfinite: Nonfinite = "raise"
    grad_metrics: Callable | None = None
    ema: float | None = None
    noise_scale: bool = False
    shard_optimizer: bool = False
    shares: int = 1  # of the rows of a batch, one for each process
    saves: bool = False  # whether checkpoints are written while steps run
    axis_name: str = "batch"
    cache: bool = True
    compiler_options: Mapping[str, Any] | None = None

    @property
    def compares(self) -> bool:
        """Whether the passes are chosen so that the gradient's noise can be told."""
        chosen = self.plan is None and isinstance(self.microbatch, str)
        return self.noise_scale and chosen


def check_settings(
    *,
    loss: Any,
    global_batch: Any,
    placement: Placement,
    microbatch: Any,
    memory_limit: Any,
    compute_dtype: Any,
    penalty: Any = None,
    plan: Plan | None = None,
    remat: Any = None,
    nonfinite: Any = "raise",
    grad_metrics: Any = None,
    ema: Any = None,
    noise_scale: bool = False,
) -> None:
    """Refuses what can be refused without the model."""
    check_global_batch(global_batch)
    if nonfinite not in _NONFINITE:
        raise _errors.bad_choice("nonfinite", nonfinite, _NONFINITE)
    check_microbatch(microbatch)
    if memory_limit is not None:
        parse_bytes(memory_limit)
    _check_penalty(penalty)
    check_compute_dtype(compute_dtype)
    check_remat(remat)
    if grad_metrics is not None and not callable(grad_metrics):
        raise _errors.not_callable("grad_metrics", grad_metrics)
    if ema is not None and not is_decay(ema):
        raise _errors.bad_ema(ema)
    check_loss(loss)
    if noise_scale and isinstance(loss, Form):
        loss.check_noise_scale()
    if plan is not None:
        _check_plan(plan, global_batch, placement.size)


def check_global_batch(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise _errors.bad_global_batch(value)


def _check_penalty(penalty: Any) -> None:
    if penalty is None:
        return
    if not callable(penalty):
        raise _errors.not_callable("penalty", penalty)
    try:
        signature = inspect.signature(penalty)
    except (TypeError, ValueError):  # builtins tell nothing
        return
    try:
        signature.bind("model")
    except TypeError as error:
        raise _errors.penalty_arguments(penalty, signature) from error


def _check_plan(plan: Plan, global_batch: int, devices: int) -> None:
    for name, planned, here in (
        ("global_batch", plan.global_batch, global_batch),
        ("devices", plan.devices, devices),
    ):
        if planned != here:
            raise _errors.plan_mismatch(name, planned, here)


def check_microbatch(value: Any) -> None:
    if isinstance(value, str):
        if value not in ("largest", "fastest"):
            raise _errors.bad_microbatch(value)
    elif isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _errors.bad_microbatch(value)
    elif value < 1:
        raise _errors.bad_microbatch(value)


def check_remat(remat: Any) -> None:
    """None, "auto", True (in segments) or a `jax.checkpoint` policy."""
    if remat is None or remat is True or remat == "auto" or callable(remat):
        return
    raise _errors.bad_remat(remat)


def check_compute_dtype(dtype: Any) -> None:
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise _errors.bad_compute_dtype(dtype)


@dataclass(frozen=True)
class Skeleton:
    """The partitions of model, loss and state, and the structs of their leaves."""

    model: Partition
    loss: Partition
    state: Partition | None
    trainable: list[jax.ShapeDtypeStruct]
    frozen: list[jax.ShapeDtypeStruct]
    loss_arrays: list[Any]
    state_structs: list[jax.ShapeDtypeStruct]
    spreads: list[Spread]  # of the trainable leaves
    frozen_specs: list[PartitionSpec]

    def same(self, other: "Skeleton | None") -> bool:
        """Whether the same programs serve both."""
        return other is not None and (
            self.model == other.model
            and self.loss == other.loss
            and self.state == other.state
            and self.trainable == other.trainable
            and self.frozen == other.frozen
            and self.state_structs == other.state_structs
            and self.spreads == other.spreads
            and self.frozen_specs == other.frozen_specs
        )

    @property
    def loss_structs(self) -> list[jax.ShapeDtypeStruct]:
        return [struct(leaf) for leaf in self.loss_arrays]

    @property
    def parameter_specs(self) -> list[PartitionSpec]:
        return [spread.parameter for spread in self.spreads]


def skeleton(
    settings: Settings, model: Any, state: Any, *, forward: bool = False
) -> Skeleton:
    """Reads a model (arrays or structs); nothing is copied or computed.

    **Raises:**

    `InputError` for a model without trainable leaves, a `state` that is none, and a
    loss that cannot be called with its form's arguments.
    """
    if state is not None and not isinstance(state, eqx.nn.State):
        raise _errors.state_type(state)
    check_arguments(settings.loss, has_state=state is not None)
    parts = partition(model, settings.trainable, fixed=True)
    if not forward and not parts.paths(Role.TRAINABLE):
        leaves = [leaf for leaf in jax.tree.leaves(model) if is_array(leaf)]
        raise _errors.nothing_to_train(sorted({str(leaf.dtype) for leaf in leaves}))
    split = parts.split(model)
    loss = partition(settings.loss)
    state_part = None if state is None else partition(state)
    state_leaves = [] if state_part is None else state_part.split(state).frozen
    placement, shard = settings.placement, settings.shard_optimizer
    return Skeleton(
        parts,
        loss,
        state_part,
        [struct(leaf) for leaf in split.trainable],
        [struct(leaf) for leaf in split.frozen],
        loss.split(settings.loss).frozen,
        [struct(leaf) for leaf in state_leaves],
        [
            placement.spread(np.shape(leaf), placement.spec_of(name, leaf), shard=shard)
            for name, leaf in zip(
                parts.paths(Role.TRAINABLE), split.trainable, strict=True
            )
        ],
        [
            placement.spec_of(name, leaf)
            for name, leaf in zip(parts.paths(Role.FROZEN), split.frozen, strict=True)
        ],
    )


def check_values(model: Any, state: Any) -> None:
    """Refuses a model of shapes, which is enough for a plan."""
    leaves = jax.tree.leaves((model, state))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise _errors.model_of_shapes()


def batch_norms(model: Any) -> list[str]:
    """The names of the BatchNorm layers that take statistics of the batch, in order."""
    return _named(
        model,
        lambda node: isinstance(node, eqx.nn.BatchNorm) and not _in_inference(node),
    )


def in_inference_mode(model: Any) -> list[str]:
    """The names of the layers that are in inference mode, in order."""
    return _named(model, _in_inference)


def _in_inference(node: Any) -> bool:
    return isinstance(node, eqx.Module) and getattr(node, "inference", None) is True


def _named(model: Any, chosen: Callable[[Any], bool]) -> list[str]:
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=chosen)
    return [
        jax.tree_util.keystr(path).lstrip(".") or type(node).__name__
        for path, node in nodes
        if chosen(node)
    ]


def axis_environment(placement: Placement) -> list[tuple[str, int]]:
    return [(DATA, placement.size)]
