"""What every step measured, as numpy arrays by name."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .. import _errors
from .._types import Metrics

# Device scalars are read in blocks: a transfer for each would be a wait for each.
_BLOCK = 256
# How the names of what a validation measured begin.
VALIDATION = "validation_"


class History(Mapping[str, np.ndarray]):
    """One entry per batch under each name, the auxiliary scalars' names included.

    **Names:**

    - `loss`, `penalty`, `grad_norm`, `weight`, `examples`, `skipped`: the step's
        `Metrics`.
    - `seconds`: from one step's wait to the next.
    - `step`: updates completed; `epoch`: the epoch of the batch.
    - with `noise_scale=True`: `noise_scale`, `grad_variance`, `grad_square`,
        `loss_spread`.
    - `validation_step`, `validation_loss`, ...: one entry per validation.

    !!! Example

        ```python
        result = eqaccum.fit(model, (x, y), global_batch=4096)
        result.history["loss"][-1]
        result.history.frame().plot(x="step", y="loss")  # with pandas
        ```
    """

    def __init__(self) -> None:
        self._read: dict[str, list[Any]] = {}
        self._waiting: list[dict[str, Any]] = []

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "History":
        """A history that goes on after these arrays, which it copies."""
        history = cls()
        history._read = {name: list(array) for name, array in arrays.items()}
        return history

    def add(self, metrics: Metrics, **more: Any) -> None:
        entry = {
            "loss": metrics.loss,
            "penalty": metrics.penalty,
            "grad_norm": metrics.grad_norm,
            "weight": metrics.weight,
            "examples": metrics.examples,
            "skipped": metrics.skipped,
            **more,
        }
        for name in ("noise_scale", "grad_variance", "grad_square", "loss_spread"):
            if getattr(metrics, name) is not None:
                entry[name] = getattr(metrics, name)
        for prefix, told in (("aux", metrics.aux), ("grad", metrics.grad_metrics)):
            for name, value in _scalars(told):
                taken = name in entry or _is_validation(name)
                entry[f"{prefix}.{name}" if taken else name] = value
        self._waiting.append(entry)
        if len(self._waiting) >= _BLOCK:
            self._flush()

    def add_validation(self, step: int, values: dict[str, float]) -> None:
        """Adds one entry to `validation_step` and each `validation_...` name."""
        self._flush()  # the names of a batch stand before those of a validation
        for name, value in {"step": step, **values}.items():
            self._read.setdefault(f"{VALIDATION}{name}", []).append(value)

    def last(self, name: str) -> float:
        """The newest value of a name."""
        if self._waiting:
            return float(self._waiting[-1][name])
        return float(self._read[name][-1])

    def newest(self) -> dict[str, Any]:
        """What the newest batch measured, by name; empty before the first one."""
        if self._waiting:
            read = jax.device_get(self._waiting[-1])
            return {name: read[name] for name in self._waiting[-1]}
        return {
            name: values[-1]
            for name, values in self._read.items()
            if not name.startswith(VALIDATION)
        }

    def since(self, name: str, start: int) -> np.ndarray:
        """The entries of a name from number `start` on."""
        self._flush()
        return np.asarray(self._read[name][start:])

    def frame(self) -> Any:
        """The history as a pandas `DataFrame`, one row per batch.

        What a validation measured stands in the row of the batch before it, and is
        missing (NaN) in the others.

        **Raises:**

        `EqaccumError` with the install command where pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise _errors.not_installed(
                "history.frame()", "pandas", 'pip install "eqaccum[frame]"'
            ) from error
        columns = {name: self[name] for name in self if not _is_validation(name)}
        frame = pandas.DataFrame(columns)
        frame.index.name = "batch"
        for name in filter(_is_validation, self):
            column = np.full(len(frame), np.nan)
            column[self.rows_of_validations()] = self[name]
            frame[name] = column
        return frame.drop(columns=f"{VALIDATION}step", errors="ignore")

    def rows_of_validations(self) -> np.ndarray:
        """The batch after which each validation was made: its step's last one."""
        steps = self["step"]
        return np.searchsorted(steps, self[f"{VALIDATION}step"], side="right") - 1

    def _flush(self) -> None:
        # device_get sorts the names
        read = jax.device_get(self._waiting)
        for names, entry in zip(self._waiting, read, strict=True):
            for name in names:
                self._read.setdefault(name, []).append(entry[name])
        self._waiting = []

    def __getitem__(self, name: str) -> np.ndarray:
        self._flush()
        return np.asarray(self._read[name])

    def __iter__(self) -> Iterator[str]:
        self._flush()
        return iter(self._read)

    def __len__(self) -> int:
        self._flush()
        return len(self._read)

    def __repr__(self) -> str:
        names = ", ".join(self)
        entries = len(self["loss"]) if names else 0
        return f"History({entries} batches: {names})"


def _is_validation(name: str) -> bool:
    return name.startswith(VALIDATION)


def _scalars(aux: Any) -> Iterator[tuple[str, Any]]:
    for path, value in jax.tree_util.tree_leaves_with_path(aux):
        if np.ndim(value) == 0:
            yield ".".join(str(_part(part)) for part in path) or "aux", value


def _part(part: Any) -> Any:
    for name in ("key", "name", "idx"):
        if hasattr(part, name):
            return getattr(part, name)
    return part
