"""Data of three kinds as one resumable stream of global batches."""

from ._batch import Batch as Batch, Place as Place, batch_of as batch_of
from ._dataset import examples as examples
from ._layout import Layout as Layout, read as read
from ._open import open_source as open_source
from ._order import Slots as Slots, epoch_order as epoch_order, slots as slots
from ._shares import Shares as Shares
from ._source import Source as Source
from ._weights import batch_weights as batch_weights
