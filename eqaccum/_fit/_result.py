"""`FitResult`: what a run gives back."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np

from .. import _errors
from .._plan import Plan
from .._types import TrainState
from ._history import History


@dataclass(frozen=True)
class FitResult:
    """The trained state, what happened, and the plan.

    **Attributes:**

    - `train`: the `TrainState`; `model`, `state` and `opt_state` are built from it.
    - `history`: numpy arrays by name, one entry per batch.
    - `plan`: the `Plan` that was used; `fit(..., plan=result.plan)` pins it.

    !!! Example

        ```python
        result = eqaccum.fit(model, (x, y), global_batch=4096)
        model = result.model
        print(result.plan)
        ```
    """

    train: TrainState
    history: History
    plan: Plan

    @property
    def model(self) -> Any:
        return self.train.model

    @property
    def state(self) -> eqx.nn.State | None:
        return self.train.state

    @property
    def opt_state(self) -> Any:
        return self.train.opt_state

    @property
    def ema(self) -> Any:
        """The model with the averaged parameters, None without `ema=`."""
        return self.train.ema

    def plot(self, ax: Any = None) -> Any:
        """Draws the loss against the steps and returns the matplotlib Axes.

        **Raises:**

        `ImportError` with the install command where matplotlib is missing.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise _errors.no_matplotlib() from error
        if ax is None:
            _, ax = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
        loss = self.history["loss"]
        ax.plot(np.arange(1, len(loss) + 1), loss, linewidth=1)
        ax.set(xlabel="batch", ylabel="loss", title=self.plan.summary())
        return ax

    def __repr__(self) -> str:
        if not len(self.history):
            return f"FitResult(steps={self.train.step}, {self.plan.summary()})"
        loss = self.history["loss"]
        seconds = float(np.sum(self.history["seconds"]))
        return (
            f"FitResult(steps={self.train.step}, loss {loss[0]:.4g} -> {loss[-1]:.4g}, "
            f"{seconds:.1f} s; {self.plan.summary()})"
        )
