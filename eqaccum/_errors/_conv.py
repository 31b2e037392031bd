"""Messages about programs that were rewritten for the device."""

from ._exceptions import InputError


def rewritten_for_running() -> InputError:
    return InputError(
        "A gradient that eqaccum computed was differentiated once more, through the "
        "custom derivative rule of an operation around a convolution. On CPU "
        "convolutions are rewritten to channels-last arrays, for which that rule was "
        "not made. Differentiate the loss itself, with jax.grad, without eqaccum."
    )
