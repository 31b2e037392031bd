"""Reading what the compiler says about a program's memory, and about its failures."""

from typing import Any

# How jaxlib words it. On CPU the words arrive nested in other messages, and as
# ValueError as well as JaxRuntimeError.
_OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "Out of memory allocating",
    "YNNPACK operation failed",
)
_SUMMED = ("argument", "output", "alias", "temp")
# Backends whose programs live in the host's memory, not in the device's.
_HOST_CODE = ("cpu",)


def program_bytes(analysis: Any, *, backend: str) -> int | None:
    """The bytes a compiled program takes on one device.

    Arguments and outputs, less what they share, and temporaries (and the program
    itself, where the device holds it); the peak field where it is larger. The peak
    alone will not do: on CPU it leaves temporaries out.

    **Arguments:**

    - `analysis`: what `compiled.memory_analysis()` returned.
    - `backend`: the platform: `"cpu"`, `"gpu"`, `"tpu"`.

    **Returns:**

    The bytes, or `None` for "cannot tell": no analysis, a field missing or negative,
    or no bytes of arguments, since a step has parameters.
    """
    fields = {name: _size(analysis, f"{name}_size_in_bytes") for name in _SUMMED}
    optional = [
        getattr(analysis, name, 0)
        for name in ("generated_code_size_in_bytes", "peak_memory_in_bytes")
    ]
    if any(size is None for size in fields.values()):
        return None
    code, peak = (size if isinstance(size, int) else 0 for size in optional)
    argument, output, alias, temp = (fields[name] or 0 for name in _SUMMED)
    total = argument + output - alias + temp
    if argument == 0 or total <= 0 or code < 0 or peak < 0:
        return None
    return max(total if backend in _HOST_CODE else total + code, peak)


def fresh_bytes(analysis: Any) -> int:
    """What a run of the program allocates beside its arguments; 0 where unknown.

    Its temporaries, and the outputs that take no donated argument's place.

    **Arguments:**

    - `analysis`: what `compiled.memory_analysis()` returned.
    """
    output, alias, temp = (
        _size(analysis, f"{name}_size_in_bytes") or 0
        for name in ("output", "alias", "temp")
    )
    return max(0, output - alias + temp)


def _size(analysis: Any, name: str) -> int | None:
    size = getattr(analysis, name, None)
    return size if isinstance(size, int) and size >= 0 else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of JAX's says that memory ran out."""
    text = str(error)
    return any(words in text for words in _OUT_OF_MEMORY)
