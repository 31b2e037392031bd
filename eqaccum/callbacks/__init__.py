"""Ready-made callbacks for `fit(..., callbacks=[...])`.

One's own is any function of one record: `callback(info)`, with `info.step`,
`info.metrics`, `info.validation`, `info.history` and `info.model`; with an attribute
`every` it is called every so many steps; returning True stops the run.
"""

from ._best import BestCheckpoint as BestCheckpoint
from ._files import CSV as CSV, JSONL as JSONL
from ._stop import EarlyStopping as EarlyStopping
from ._tensorboard import TensorBoard as TensorBoard
from ._wandb import WandB as WandB
