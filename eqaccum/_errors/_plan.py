"""Messages of the planning room: memory limits, figures, searches, kept plans."""

from ._exceptions import CannotTell, DoesNotFit, EqaccumError, InputError


def bad_bytes(value: object) -> InputError:
    """A memory limit that is neither positive bytes nor text with a unit."""
    hint = ""
    if isinstance(value, float) and value.is_integer() and value > 0:
        hint = f" Write memory_limit={int(value)}."
    elif isinstance(value, str) and value.strip().replace(".", "", 1).isdigit():
        hint = f" The unit is missing: did you mean {value.strip() + 'GiB'!r}?"
    return InputError(
        f"memory_limit={value!r} is not a number of bytes above zero. Pass an int of "
        "bytes (memory_limit=8_000_000_000), text with a unit B, kB, MB, GB, TB, KiB, "
        "MiB, GiB or TiB ('10GiB', '40GB', '512MiB', '1.5 GiB'), or None to ask the "
        f"device.{hint}"
    )


def no_limit(device: str, problem: str) -> CannotTell:
    """The device was asked how much memory it has, and does not say."""
    return CannotTell(
        f"memory_limit=None asks the device how much memory is left, but {device} "
        f"{problem}. Say how many bytes the step may take on each device: "
        "memory_limit='10GiB', say."
    )


def no_devices() -> InputError:
    """A limit was asked for without any device of this process."""
    return InputError(
        "No device of this process was passed, so there is no memory to ask about. "
        "Pass the devices that will run the step, such as jax.devices()."
    )


def no_figures(tried: str) -> CannotTell:
    """No probe gave a number of bytes."""
    return CannotTell(
        "The backend gives no usable memory figures for any size that was compiled "
        f"({tried}), so no microbatch can be said to fit. Choose one yourself: "
        "microbatch=32, say; if it runs out of memory, halve it."
    )


def nothing_fits(*, needed: str, limit: str, largest: str, remedies: str) -> DoesNotFit:
    """Not even one example per device and pass fits."""
    return DoesNotFit(
        "Not even one example per device and pass fits: the step needs "
        f"{needed} at microbatch 1, the limit is {limit}. {largest} "
        f"What would help: {remedies}."
    )


def not_in_windows(error: str, *, rows: int) -> DoesNotFit:
    """The rows of a coupled loss do not fit beside the rest."""
    return DoesNotFit(
        f"{error} A coupled loss is not fed in windows: all rows of the global batch "
        f"stay on the device, and those of the next one ({rows:,} bytes in all), where "
        "a loss of single examples would be fed a part at a time."
    )


def pinned_over_limit(
    *, microbatch: int, needed: str, limit: str, remedies: str
) -> DoesNotFit:
    """A microbatch was asked for that the given limit does not hold."""
    return DoesNotFit(
        f"microbatch={microbatch} needs {needed}, but the limit is {limit}. "
        "Pass a smaller microbatch, or microbatch='largest' to have the largest one "
        f"that fits chosen, or raise memory_limit. What else would help: {remedies}."
    )


def bad_rows(*, rows: int, devices: int) -> InputError:
    """A search without rows or devices."""
    return InputError(
        f"A plan was asked for {rows} rows on {devices} devices; both must be at "
        "least 1. Pass a global_batch of at least one example."
    )


def bad_microbatch(value: object) -> InputError:
    """A microbatch below one."""
    return InputError(
        f"microbatch={value!r} was passed; expected 'largest', 'fastest' or an int of "
        "at least 1: the examples that one device takes in one pass."
    )


def bad_cache_switch(value: str) -> InputError:
    """EQACCUM_CACHE is neither on nor off."""
    return InputError(
        f"The environment says EQACCUM_CACHE={value!r}; expected 0 (no, off, false) to "
        "remember plans in the process only, or 1 (yes, on, true). The folder is "
        "named by EQACCUM_CACHE_DIR."
    )


def microbatch_is_a_number(value: object) -> InputError:
    """A door that does not search was given something else than a number."""
    return InputError(
        f"microbatch={value!r} was passed; expected an int of at least 1: the examples "
        "of one pass. value_and_grad does not search for the largest one: "
        "eqaccum.plan(...).microbatch tells it."
    )


def foreign_plan(problem: str) -> InputError:
    """A dict that is no plan of this version."""
    return InputError(
        f"This is not a plan that eqaccum can read: {problem}. Expected what "
        "Plan.to_dict() returned, unchanged. Make a new one with eqaccum.plan(...)."
    )


def no_matplotlib() -> EqaccumError:
    """A plot was asked for without matplotlib."""
    return EqaccumError(
        "plot() draws with matplotlib, which is not installed. Install it with "
        'pip install "eqaccum[plot]", or print the plan instead.'
    )
