"""Ready-made heads and losses that couple the examples of a global batch.

Each takes the embeddings of all rows and their weights, so it is what a head of
`eqaccum.coupled` returns.
"""

from ._contrastive import (
    info_nce as info_nce,
    sigmoid_contrastive as sigmoid_contrastive,
)
from ._redundancy import barlow_twins as barlow_twins, vicreg as vicreg
from ._router import load_balance as load_balance
