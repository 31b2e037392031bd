"""Reading what the compiler says about a program's memory, and about its failures."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

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


def _size(analysis: Any, name: str) -> int | None:
    size = getattr(analysis, name, None)
    return size if isinstance(size, int) and size >= 0 else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of JAX's says that memory ran out."""
    text = str(error)
    return any(words in text for words in _OUT_OF_MEMORY)


# XLA:CPU's convolutions allocate buffers that no analysis shows. Measured with jaxlib
# 0.10.2 on two cores (resident memory above the analysis, 16 to 250 MB operands, 3x3
# kernels unless said):
#
#  - 2-D in float32 goes to YNNPACK. With padding it holds the padded input; without
#    padding the whole unfolded input (each row once per kernel position: 558 MB for an
#    input of 64 MB), with feature groups both. It holds a copy of the kernel too, which
#    for a kernel's gradient is the cotangent (66 + 128 of 194 MB).
#  - The input's buffer comes twice where more than 64 features come out of more than
#    576 products each (64 to 128 channels: once; 100 to 128: twice).
#  - float16 and bfloat16 are computed in float32 copies.
#  - A small one (at most 16 features), one whose output is larger than its input, or
#    one with a dilated input (the input's gradient under strides) goes to Eigen, which
#    holds the dilated input and blocks of the unfolded one (2 to 20 MB).
#  - 3-D holds the input once; 1-D nothing.
#  - Two convolutions run at the same time in some runs, even on two cores (kernel
#    gradients of two layers: 100 and 98 of 199 MB; another run 100 of 167).
_SMALL_FEATURES = 16
_ONE_BLOCK_FEATURES = 64
_ONE_BLOCK_PRODUCTS = 576
_EIGEN_BLOCKS = 20 * 2**20


def conv_scratch(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Bytes that XLA:CPU's convolutions take beyond any program's analysis.

    The two convolutions of a program that take most, since two may run at once. An
    upper bound: in some runs they do not meet.

    **Arguments:**

    - `jaxpr`: the program on one device, or the part of it that holds its
        convolutions; those of inner jaxprs (loops, calls, custom rules) count too.
    """
    sizes = sorted(_equation_scratch(equation) for equation in _convolutions(jaxpr))
    return sum(sizes[-2:])


def _convolutions(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, ClosedJaxpr | Jaxpr):
                    yield from _convolutions(item)


def _equation_scratch(equation: Any) -> int:
    lhs, rhs = (var.aval for var in equation.invars)
    (out,) = (var.aval for var in equation.outvars)
    params = equation.params
    specs = params["dimension_numbers"]
    batch, features, *rows = _axes(lhs.shape, specs.lhs_spec)
    products, kernel = _kernel(rhs.shape, specs.rhs_spec)
    _, out_features, *out_rows = _axes(out.shape, specs.out_spec)

    itemsize = max(4, lhs.dtype.itemsize)
    padded_rows = _padded(rows, params["lhs_dilation"], params["padding"])
    padded = batch * features * math.prod(padded_rows) * itemsize
    dilated = any(d != 1 for d in params["lhs_dilation"])
    if len(rows) != 2:
        return padded if len(rows) == 3 else 0
    groups = params["feature_group_count"]
    unfolded = batch * math.prod(out_rows) * products * groups * itemsize
    fits_ynnpack = (
        params["batch_group_count"] == 1
        and max(features, out_features) > _SMALL_FEATURES
        and not dilated
        and all(o <= i for o, i in zip(out_rows, rows, strict=True))
        and all(k <= i for k, i in zip(kernel, rows, strict=True))
    )
    if not fits_ynnpack:
        return (padded if dilated else 0) + min(unfolded, _EIGEN_BLOCKS)

    has_padding = any(p != (0, 0) for p in map(tuple, params["padding"]))
    has_holes = any(d != 1 for d in params["rhs_dilation"])
    buffer = padded if has_padding or has_holes or groups == features else unfolded
    if groups > 1 and groups != features:
        buffer = padded + unfolded
    if out_features > _ONE_BLOCK_FEATURES and products > _ONE_BLOCK_PRODUCTS:
        buffer *= 2
    return buffer + rhs.size * itemsize


def _axes(shape: Sequence[int], spec: Sequence[int]) -> list[int]:
    """Batch (or output features), features, then the spatial sizes."""
    return [shape[axis] for axis in spec]


def _kernel(shape: Sequence[int], spec: Sequence[int]) -> tuple[int, list[int]]:
    """The products summed for one output number, and the kernel's spatial sizes."""
    _, features, *rows = _axes(shape, spec)
    return features * math.prod(rows), rows


def _padded(
    rows: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[Sequence[int]],
) -> list[int]:
    return [
        max(0, (size - 1) * step + 1 + low + high)
        for size, step, (low, high) in zip(rows, dilation, padding, strict=True)
    ]
