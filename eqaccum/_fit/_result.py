"""`FitResult`: what a run gives back."""

from dataclasses import dataclass
from typing import Any, Generic

import equinox as eqx
import numpy as np

from .. import _errors
from .._plan import Plan, html_table
from .._types import Model, TrainState
from ._history import VALIDATION, History

VALIDATION_LOSS = f"{VALIDATION}loss"


@dataclass(frozen=True)
class FitResult(Generic[Model]):
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

    train: TrainState[Model]
    history: History
    plan: Plan

    @property
    def model(self) -> Model:
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
        """Draws the loss against the batches, with the validation loss if there is one.

        **Arguments:**

        - `ax`: the matplotlib `Axes` to draw on; a new figure's by default.

        **Returns:**

        The `Axes`.

        **Raises:**

        `EqaccumError` with the install command where matplotlib is missing.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise _errors.no_matplotlib() from error
            _, ax = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
        loss = self.history.get("loss", np.empty(0))
        ax.plot(np.arange(1, len(loss) + 1), loss, linewidth=1, label="loss")
        if VALIDATION_LOSS in self.history:
            batches = self.history.rows_of_validations() + 1
            values = self.history[VALIDATION_LOSS]
            ax.plot(batches, values, ".-", label="validation loss")
            ax.legend()
        ax.set(xlabel="batch", ylabel="loss")
        ax.set_title(self.plan.summary(), fontsize="small")
        return ax

    def __repr__(self) -> str:
        told = "".join(f", {name} {value}" for name, value in self._told().items())
        return f"FitResult(steps={self.train.step}{told}; {self.plan.summary()})"

    def _repr_html_(self) -> str:
        told = {"steps": f"{self.train.step:,}", **self._told()}
        told["plan"] = self.plan.summary()
        return html_table("FitResult", [("", "value"), *told.items()])

    def _told(self) -> dict[str, str]:
        """What a reader wants to know first, by name."""
        history = self.history
        if "loss" not in history:
            return {}
        seconds = float(np.sum(history["seconds"]))
        rate = float(np.sum(history["examples"])) / max(seconds, 1e-9)
        told = {"epochs": f"{int(history['epoch'][-1]) + 1:,}"}
        for name in ("loss", VALIDATION_LOSS):
            if name in history:
                first, last = history[name][0], history[name][-1]
                told[name] = f"{first:.4g} -> {last:.4g}"
        skipped = int(np.sum(history["skipped"]))
        if skipped:
            told["skipped batches"] = f"{skipped:,}"
        return told | {"time": f"{seconds:.1f} s", "examples/s": f"{rate:,.0f}"}
