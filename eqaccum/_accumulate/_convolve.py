"""Channels-last convolutions in the form that XLA:CPU does fast.

Fast are one- and two-dimensional convolutions without groups whose window is not longer
than the array. The others are written with those: as they are, grouped ones take 10 to
70 times as long, three-dimensional ones 5 to 20 times and long windows 10 to 15 times
(measured), inside of a loop or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jax import lax
from jax.lax import ConvDimensionNumbers

# Groups are merged until this many channels are convolved at once: fewer keep the
# vector units idle, more multiply too many zeros.
_CHANNELS_AT_ONCE = 16
_MOST_PARTS = 32  # convolutions that a grouped one may become
_MOST_SLABS = 4  # and that a three-dimensional one may become

# XLA's convolution of few channels into few takes as long as one of many: a product
# with the patches is quicker where a patch is at most this long.
_LONGEST_PATCH = 32


def channels_last_numbers(rank: int) -> ConvDimensionNumbers:
    """`NHWC`, `HWIO`, `NHWC`, for any number of spatial axes."""
    spatial = range(rank - 2)
    ends = (0, rank - 1, *(axis + 1 for axis in spatial))
    return ConvDimensionNumbers(ends, (rank - 1, rank - 2, *spatial), ends)


@dataclass(frozen=True)
class Convolution:
    """What a convolution does to channels-last arrays.

    The left one is `(batch, *spatial, features)`, the kernel `(*window, features of a
    group, output features)`, and the output lies as the left one does.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_groups: int
    batch_groups: int
    precision: Any
    out_dtype: Any

    @classmethod
    def of(cls, params: dict[str, Any]) -> "Convolution":
        """From the parameters of `conv_general_dilated`."""
        return cls(
            strides=tuple(params["window_strides"]),
            padding=tuple(params["padding"]),
            lhs_dilation=tuple(params["lhs_dilation"]),
            rhs_dilation=tuple(params["rhs_dilation"]),
            feature_groups=params["feature_group_count"],
            batch_groups=params["batch_group_count"],
            precision=params["precision"],
            out_dtype=params["preferred_element_type"],
        )

    def __call__(self, lhs: Any, kernel: Any) -> Any:
        return self._form(lhs.shape, kernel.shape)(lhs, kernel)

    def is_plain(self, lhs_shape: Sequence[int], kernel_shape: Sequence[int]) -> bool:
        """Whether XLA's own convolution is the form that is used."""
        return self._form(lhs_shape, kernel_shape) == self._plain

    def _form(
        self, lhs_shape: Sequence[int], kernel_shape: Sequence[int]
    ) -> Callable[[Any, Any], Any]:
        *window, features, out_features = kernel_shape
        windows = [
            self._windows(lhs_shape, kernel_shape, axis)
            for axis in range(1, len(lhs_shape) - 1)
        ]
        if 0 in lhs_shape or 0 in kernel_shape or any(w.count <= 0 for w in windows):
            return self._plain
        if self.batch_groups > 1:
            return self._by_batch_groups
        if self.feature_groups > 1:
            return self._by_feature_groups
        if len(window) > 2:
            return self._by_slabs
        if prod(window) * features <= _LONGEST_PATCH and out_features < _LONGEST_PATCH:
            return self._by_patches
        if any(w.size > w.length or min(w.padding) < 0 for w in windows):
            return self._padded_first
        return self._plain

    def _plain(self, lhs: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            lhs,
            kernel,
            window_strides=self.strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            dimension_numbers=channels_last_numbers(lhs.ndim),
            feature_group_count=self.feature_groups,
            batch_group_count=self.batch_groups,
            precision=self.precision,
            preferred_element_type=self.out_dtype,
        )

    def _by_feature_groups(self, lhs: Any, kernel: Any) -> Any:
        """Neighbouring groups at once, with zeros between them in the kernel."""
        groups, last = self.feature_groups, lhs.ndim - 1
        merged = _merged_groups(groups, lhs.shape[last] // groups)
        whole = replace(self, feature_groups=1)
        parts = zip(
            _parts(lhs, groups // merged, last),
            _parts(kernel, groups // merged, last),
            strict=True,
        )
        outs = [whole(part, _block_diagonal(kernel, merged)) for part, kernel in parts]
        return _joined(outs, last)

    def _by_batch_groups(self, lhs: Any, kernel: Any) -> Any:
        """Neighbouring groups at once; what one does to another is thrown away."""
        groups, last = self.batch_groups, lhs.ndim - 1
        merged = _merged_groups(groups, lhs.shape[0] // groups)
        whole = replace(self, batch_groups=1)
        parts = zip(
            _parts(lhs, groups // merged, 0),
            _parts(kernel, groups // merged, last),
            strict=True,
        )
        outs = [_diagonal_blocks(whole(part, kernel), merged) for part, kernel in parts]
        return _joined(outs, last)

    def _by_slabs(self, lhs: Any, kernel: Any) -> Any:
        """The windows of the first spatial axis become features: one axis less."""
        windows = self._windows(lhs.shape, kernel.shape, 1)
        rest = replace(
            self,
            strides=self.strides[1:],
            padding=self.padding[1:],
            lhs_dilation=self.lhs_dilation[1:],
            rhs_dilation=self.rhs_dilation[1:],
        )
        depth, *window, features, out_features = kernel.shape
        order = (*range(1, kernel.ndim - 2), 0, kernel.ndim - 2, kernel.ndim - 1)
        kernel = lax.transpose(kernel, order)
        kernel = lax.reshape(kernel, (*window, depth * features, out_features))
        lhs, outs = windows.padded(lhs), []
        for start, stop in _intervals(windows.count, _MOST_SLABS):
            slab = windows.as_features(lhs, start, stop)
            flat = lax.reshape(slab, (slab.shape[0] * slab.shape[1], *slab.shape[2:]))
            out = rest(flat, kernel)
            outs.append(lax.reshape(out, (*slab.shape[:2], *out.shape[1:])))
        return _joined(outs, 1)

    def _by_patches(self, lhs: Any, kernel: Any) -> Any:
        """The windows of all axes become features: a product is left."""
        *window, features, out_features = kernel.shape
        for axis in range(1, lhs.ndim - 1):
            windows = self._windows(lhs.shape, kernel.shape, axis)
            lhs = windows.as_features(windows.padded(lhs), 0, windows.count)
        # The window that was taken last is now the first part of the features.
        order = (*reversed(range(len(window))), kernel.ndim - 2, kernel.ndim - 1)
        kernel = lax.transpose(kernel, order)
        return lax.dot_general(
            lhs,
            lax.reshape(kernel, (prod(window) * features, out_features)),
            (((lhs.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.out_dtype,
        )

    def _padded_first(self, lhs: Any, kernel: Any) -> Any:
        """Padding by hand, for two weaknesses: a window longer than the array, as for
        the kernel gradient of a transposed convolution, is slow, and where padding is
        negative XLA:CPU may read what is not there (seen: 2e28 for 3)."""
        for axis in range(1, lhs.ndim - 1):
            lhs = self._windows(lhs.shape, kernel.shape, axis).padded(lhs)
        rank = len(self.padding)
        done = replace(self, padding=((0, 0),) * rank, lhs_dilation=(1,) * rank)
        # Without the barrier XLA puts padding and convolution together again.
        return done(lax.optimization_barrier(lhs), kernel)

    def _windows(
        self, lhs_shape: Sequence[int], kernel_shape: Sequence[int], axis: int
    ) -> "_Windows":
        i = axis - 1
        return _Windows(
            axis=axis,
            length=lhs_shape[axis],
            size=kernel_shape[i],
            stride=self.strides[i],
            padding=self.padding[i],
            lhs_dilation=self.lhs_dilation[i],
            rhs_dilation=self.rhs_dilation[i],
        )


@dataclass(frozen=True)
class _Windows:
    """Where a kernel stands along one axis."""

    axis: int
    length: int
    size: int
    stride: int
    padding: tuple[int, int]
    lhs_dilation: int
    rhs_dilation: int

    @property
    def count(self) -> int:
        length = max((self.length - 1) * self.lhs_dilation + 1, 0) + sum(self.padding)
        span = (self.size - 1) * self.rhs_dilation + 1
        return (length - span) // self.stride + 1

    def padded(self, array: Any) -> Any:
        config = [(0, 0, 0)] * array.ndim
        config[self.axis] = (*self.padding, self.lhs_dilation - 1)
        zero = lax.full((), 0, array.dtype)
        return lax.pad(array, zero, config)

    def as_features(self, padded: Any, start: int, stop: int) -> Any:
        """The windows `start` to `stop`: the axis counts them, and the features are
        `(size of the window, features)`."""
        if stop - start == 1 and self.size > 1:
            return self._one_as_features(padded, start)
        span = (stop - start - 1) * self.stride + 1
        firsts = (start * self.stride + k * self.rhs_dilation for k in range(self.size))
        places = [
            lax.slice_in_dim(padded, first, first + span, self.stride, self.axis)
            for first in firsts
        ]
        return _joined(places, padded.ndim - 1)

    def _one_as_features(self, padded: Any, index: int) -> Any:
        first = index * self.stride
        last = first + (self.size - 1) * self.rhs_dilation
        window = lax.slice_in_dim(padded, first, last + 1, self.rhs_dilation, self.axis)
        axes = [axis for axis in range(padded.ndim - 1) if axis != self.axis]
        window = lax.transpose(window, (*axes, self.axis, padded.ndim - 1))
        shape = list(padded.shape)
        shape[self.axis], shape[-1] = 1, self.size * padded.shape[-1]
        return lax.reshape(window, shape)


def _merged_groups(groups: int, channels: int) -> int:
    """How many neighbours of the groups are convolved at once."""
    return next(
        merged
        for merged in range(1, groups + 1)
        if groups % merged == 0
        and (merged * channels >= _CHANNELS_AT_ONCE or merged == groups)
        and groups // merged <= _MOST_PARTS
    )


def _block_diagonal(kernel: Any, groups: int) -> Any:
    """A kernel for all features of these groups, zero from one group to another."""
    *window, features, out_features = kernel.shape
    shape = (*window, groups, features, groups, out_features // groups)
    rank = len(window)
    blocks = lax.reshape(kernel, (*window, features, groups, shape[-1]))
    # A place where another group would be is not multiplied by zero: it may be NaN.
    blocks = lax.broadcast_in_dim(
        blocks, shape, (*range(rank), *range(rank + 1, rank + 4))
    )
    own = _equal(shape, rank, rank + 2)
    blocks = lax.select(own, blocks, lax.full_like(blocks, 0))
    return lax.reshape(blocks, (*window, groups * features, out_features))


def _diagonal_blocks(out: Any, groups: int) -> Any:
    """What each group of the batch gives in its own group of output features."""
    batch, *spatial, features = out.shape
    shape = (groups, batch // groups, *spatial, groups, features // groups)
    blocks = lax.reshape(out, shape)
    own = _equal(shape, 0, len(shape) - 2)
    blocks = lax.select(own, blocks, lax.full_like(blocks, 0))
    return lax.reshape(lax.reduce_sum(blocks, (0,)), (*shape[1:-2], features))


def _equal(shape: Sequence[int], axis: int, other: int) -> Any:
    iotas = [lax.broadcasted_iota("int32", shape, a) for a in (axis, other)]
    return lax.eq(*iotas)


def _parts(array: Any, count: int, axis: int) -> Sequence[Any]:
    if count == 1:
        return [array]
    return lax.split(array, [array.shape[axis] // count] * count, axis)


def _joined(arrays: Sequence[Any], axis: int) -> Any:
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, axis)


def _intervals(length: int, most: int) -> list[tuple[int, int]]:
    """At most so many intervals of nearly one length."""
    count = min(length, most)
    ends = [length * i // count for i in range(count + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))
