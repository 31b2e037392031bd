"""What a callback is told."""

from dataclasses import dataclass
from typing import Any

from .._types import Metrics, TrainState
from ._history import History


@dataclass(frozen=True)
class Info:
    """One step, as callbacks see it.

    **Attributes:**

    - `step`: updates completed; `epoch`: the epoch of this batch.
    - `metrics`: the step's `Metrics`, device values.
    - `validation`: the metrics of a validation made after this step, else None.
    - `history`: everything so far.
    - `train`, `model`, `state`: valid during the call; copy what is to be kept.

    !!! Example

        ```python
        def stop_at_zero(info):
            return float(info.metrics.loss) < 1e-6  # True stops the run

        stop_at_zero.every = 10  # steps
        eqaccum.fit(model, data, global_batch=512, callbacks=[stop_at_zero])
        ```
    """

    step: int
    epoch: int
    metrics: Metrics
    validation: dict[str, float] | None
    history: History
    train: TrainState

    @property
    def model(self) -> Any:
        return self.train.model

    @property
    def state(self) -> Any:
        return self.train.state
