"""Data of three kinds as one resumable stream of global batches."""

from ._batch import Batch as Batch, batch_of as batch_of
from ._layout import Layout as Layout
from ._order import Slots as Slots, epoch_order as epoch_order, slots as slots
from ._source import Source as Source
