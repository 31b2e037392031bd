from ._additive import (
    trace_additive as trace_additive,
    wide_products as wide_products,
)
from ._aux import AuxSpec as AuxSpec, finish_aux as finish_aux
from ._defaults import (
    DefaultLoss as DefaultLoss,
    check_labels as check_labels,
    check_not_one_hot as check_not_one_hot,
    choose_default_loss as choose_default_loss,
)
from ._forms import (
    Batched as Batched,
    Options as Options,
    batched as batched,
    check_arguments as check_arguments,
    check_loss as check_loss,
    shared_key as shared_key,
)
from ._jaxpr import hoist as hoist, walk as walk
from ._keys import batch_keys as batch_keys, run_key as run_key
from ._records import (
    Arguments as Arguments,
    Batch as Batch,
    Cut as Cut,
    Passes as Passes,
    PassInputs as PassInputs,
    PassOutputs as PassOutputs,
    Sums as Sums,
)
from ._trace import LossSpec as LossSpec
