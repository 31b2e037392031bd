"""What XLA:CPU's convolutions allocate beside the program that the analysis shows.

Measured with jaxlib 0.10.2 on two cores: every allocation of some 100 single
convolutions was counted, outside of loops with channels first and inside with channels
last, which makes no difference. What is written here is theirs to 1 MB, or above it.

 - 2-D in float32 and float64 goes to YNNPACK, unless it is small (at most 16 features)
   or its output or kernel is longer than its input. With padding it holds the padded
   input; without padding the whole unfolded input (each row once per kernel position:
   558 MB for an input of 64 MB), with feature groups both. It holds a copy of the
   kernel too, which for a kernel's gradient is the cotangent. The input's buffer comes
   twice where more than 64 features come out of more than 576 products each.
 - Everything else goes to Eigen. With a dilated input (the input's gradient under
   strides) in one or two dimensions it holds what every input position adds to the
   output before that is summed (151 MB for an input of 34 MB), and a copy of the input.
   Otherwise it holds the unfolded input (604 MB for an input of 67 MB of 16 features),
   of which at most some 700 products for each number that comes out (measured: 530 to
   674), and in three dimensions a copy of the output.
 - float16 and bfloat16 are computed in float32.
 - Two convolutions hold theirs at the same time in some runs, even on two cores: they
   run at once (kernel gradients of two layers: 100 and 98 of 199 MB; another run 100 of
   167), or Eigen frees the first one's when the second has begun.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

_SMALL_FEATURES = 16
_ONE_BLOCK_FEATURES = 64
_ONE_BLOCK_PRODUCTS = 576
_EIGEN_PRODUCTS = 704


def conv_scratch(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Bytes that XLA:CPU's convolutions take beyond any program's analysis.

    The two convolutions of a program that take most, since two may run at once. An
    upper bound: in some runs they do not meet.

    **Arguments:**

    - `jaxpr`: the program on one device, or the part of it that holds its
        convolutions; those of inner jaxprs (loops, calls, custom rules) count too.
    """
    sizes = sorted(_read(equation).scratch for equation in _convolutions(jaxpr))
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


@dataclass(frozen=True)
class _Convolution:
    """One convolution, whatever the order of its axes; sizes in elements."""

    batch: int
    features: int
    out_features: int
    products: int  # that are summed for one output number
    rows: tuple[int, ...]  # of the input, by spatial axis
    padded_rows: tuple[int, ...]  # with dilation and padding
    out_rows: tuple[int, ...]
    window: tuple[int, ...]  # of the kernel
    kernel_size: int
    groups: int
    batch_groups: int
    has_padding: bool
    is_strided: bool
    input_dilated: bool
    kernel_dilated: bool
    itemsize: int

    @property
    def scratch(self) -> int:
        if self._fits_ynnpack:
            elements = self._ynnpack
        elif self.batch_groups > 1 and len(self.rows) == 2:
            elements = self._padded + self.kernel_size
        elif self._is_transposed:
            elements = self._added_up
        else:
            elements = self._eigen
        return elements * self.itemsize

    @property
    def _fits_ynnpack(self) -> bool:
        return (
            len(self.rows) == 2
            and self.batch_groups == 1
            and not self.input_dilated
            and max(self.features, self.out_features) > _SMALL_FEATURES
            and all(o <= i for o, i in zip(self.out_rows, self.rows, strict=True))
            and all(k <= i for k, i in zip(self.window, self.rows, strict=True))
        )

    @property
    def _is_transposed(self) -> bool:
        """Whether it is how the gradient of a strided convolution's input is made."""
        plain = not (self.is_strided or self.kernel_dilated)
        alone = self.groups == 1 and self.batch_groups == 1
        return self.input_dilated and plain and alone and len(self.rows) <= 2

    @property
    def _ynnpack(self) -> int:
        depthwise = self.groups == self.features
        buffer = self._unfolded
        if self.groups > 1 and not depthwise:
            buffer += self._padded
        elif self.has_padding or self.kernel_dilated or depthwise:
            buffer = self._padded
        many = self.out_features > _ONE_BLOCK_FEATURES
        if many and self.products > _ONE_BLOCK_PRODUCTS:
            buffer *= 2
        return buffer + self.kernel_size

    @property
    def _added_up(self) -> int:
        positions = self.batch * math.prod(self.rows)
        return positions * (math.prod(self.window) * self.out_features + self.features)

    @property
    def _eigen(self) -> int:
        positions = self.batch * math.prod(self.out_rows)
        unfolded = positions * self.groups * min(self.products, _EIGEN_PRODUCTS)
        copy = positions * self.out_features if len(self.rows) > 2 else 0
        return unfolded + copy

    @property
    def _padded(self) -> int:
        return self.batch * self.features * math.prod(self.padded_rows)

    @property
    def _unfolded(self) -> int:
        positions = self.batch * math.prod(self.out_rows)
        return positions * self.products * self.groups


def _read(equation: Any) -> _Convolution:
    lhs, rhs = (var.aval for var in equation.invars)
    (out,) = (var.aval for var in equation.outvars)
    params = equation.params
    specs = params["dimension_numbers"]
    batch, features, *rows = (lhs.shape[axis] for axis in specs.lhs_spec)
    _, group_features, *window = (rhs.shape[axis] for axis in specs.rhs_spec)
    _, out_features, *out_rows = (out.shape[axis] for axis in specs.out_spec)
    padding = [tuple(ends) for ends in params["padding"]]
    return _Convolution(
        batch=batch,
        features=features,
        out_features=out_features,
        products=group_features * math.prod(window),
        rows=tuple(rows),
        padded_rows=_padded_rows(rows, params["lhs_dilation"], padding),
        out_rows=tuple(out_rows),
        window=tuple(window),
        kernel_size=rhs.size,
        groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        has_padding=any(ends != (0, 0) for ends in padding),
        is_strided=any(s != 1 for s in params["window_strides"]),
        input_dilated=any(d != 1 for d in params["lhs_dilation"]),
        kernel_dilated=any(d != 1 for d in params["rhs_dilation"]),
        itemsize=max(4, lhs.dtype.itemsize),
    )


def _padded_rows(
    rows: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    return tuple(
        max(0, (size - 1) * step + 1 + low + high)
        for size, step, (low, high) in zip(rows, dilation, padding, strict=True)
    )
