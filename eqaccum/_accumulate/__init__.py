from ._additive import (
    AdditivePasses as AdditivePasses,
    positions as positions,
    split_keys as split_keys,
    trace_passes as trace_passes,
    wide_products as wide_products,
    with_spread as with_spread,
    zeros as zeros,
)
from ._aux import (
    AuxLeaves as AuxLeaves,
    AuxSpec as AuxSpec,
    Kind as Kind,
    finish_aux as finish_aux,
    read_aux as read_aux,
)
from ._conv import channels_last as channels_last
from ._defaults import (
    DefaultLoss as DefaultLoss,
    accepts_key as accepts_key,
    check_labels as check_labels,
    check_not_one_hot as check_not_one_hot,
    choose_default_loss as choose_default_loss,
    narrowed as narrowed,
)
from ._forms import (
    Batched as Batched,
    Options as Options,
    SharedKey as SharedKey,
    batched as batched,
    check_arguments as check_arguments,
    check_loss as check_loss,
    shared_key as shared_key,
    signature_accepts as signature_accepts,
    state_leaves as state_leaves,
)
from ._jaxpr import Left as Left, hoist as hoist, walk as walk
from ._keys import (
    batch_keys as batch_keys,
    example_keys as example_keys,
    run_key as run_key,
    wrap_key as wrap_key,
)
from ._noise import (
    DECAY as DECAY,
    Noise as Noise,
    common_sum as common_sum,
    noise_of as noise_of,
    noise_scale as noise_scale,
    over_devices as over_devices,
    smoothed as smoothed,
    spread_struct as spread_struct,
    squared_norm as squared_norm,
)
from ._reads import Reading as Reading, read_forward as read_forward
from ._records import (
    Arguments as Arguments,
    Batch as Batch,
    Cut as Cut,
    Form as Form,
    Passes as Passes,
    PassInputs as PassInputs,
    PassOutputs as PassOutputs,
    Sums as Sums,
    even_cut as even_cut,
)
from ._scan import run as run
from ._trace import (
    LossSpec as LossSpec,
    Traced as Traced,
    holds_float16 as holds_float16,
    model_of as model_of,
    power_of_two_near as power_of_two_near,
    rematerialised as rematerialised,
    trace as trace,
    widened as widened,
)
