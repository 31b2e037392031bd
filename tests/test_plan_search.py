"""The search over passes, against fakes and an exhaustive search."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import eqaccum._errors as errors
from eqaccum._plan import (
    Limit,
    Measurement,
    Parts,
    distinct_passes,
    pinned,
    search,
)


@dataclass
class Fake:
    """A step whose bytes are a function of (passes, microbatch), and who asked."""

    bytes: Callable[[int, int], Any]
    rows: int
    devices: int = 1
    fixed: int = 0
    calls: list = field(default_factory=list)

    def microbatch(self, passes):
        return math.ceil(self.rows / (self.devices * passes))

    def need(self, passes) -> Any:
        need = self.bytes(passes, self.microbatch(passes))
        return need if need is None else int(need)

    def measure(self, passes):
        self.calls.append(passes)
        return Measurement(self.need(passes), self.fixed, 0.5, "compiled", passes)

    def search(self, limit, **kwargs):
        return search(
            self.measure, rows=self.rows, devices=self.devices, limit=limit, **kwargs
        )

    def exhaustive(self, limit):
        """The fewest passes that fit: every number of passes is tried."""
        for passes in range(1, math.ceil(self.rows / self.devices) + 1):
            need = self.need(passes)
            if need is not None and need <= limit:
                return passes
        return None


def affine(fixed, slope, *, accumulator=0, whole=0):
    return lambda k, n: fixed + (whole if k == 1 else accumulator) + slope * n


def checked(fake, limit, **kwargs):
    """Searches, and checks what every search must keep."""
    found = fake.search(limit, **kwargs)
    k = found.num_microbatches
    assert k in fake.calls and len(set(fake.calls)) == len(fake.calls)
    assert found.microbatch == fake.microbatch(k)
    assert found.measurement.bytes == fake.need(k) <= limit
    assert found.measurement.program == k
    assert [p.num_microbatches for p in found.probes] == fake.calls
    for probe in found.probes:
        assert probe.bytes == fake.need(probe.num_microbatches)
        assert probe.microbatch == fake.microbatch(probe.num_microbatches)
        assert (probe.seconds, probe.note) == (0.5, "compiled")
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 97, 1000])
def test_distinct_passes(rows):
    first = {}
    for passes in range(1, rows + 1):
        first.setdefault(math.ceil(rows / passes), passes)
    assert distinct_passes(rows) == sorted(first.values())


def test_distinct_passes_of_a_huge_batch_are_few():
    assert len(distinct_passes(10**8)) < 2 * 10**4 + 2


def test_all_rows_at_once_where_they_fit():
    fake = Fake(affine(100, 10), rows=50)
    assert checked(fake, 600).num_microbatches == 1
    assert fake.calls == [1]


def test_one_byte_over_is_over():
    fake = Fake(affine(100, 10), rows=50, fixed=100)
    assert checked(fake, 599).num_microbatches == 2


def test_twelve_rows_that_admit_five():
    # Passes of 5 or more do not fit: 3 passes of 4, which divide 12.
    fake = Fake(lambda k, n: 10 * n, rows=12)
    found = checked(fake, 50)
    assert (found.num_microbatches, found.microbatch) == (3, 4)


GRID = [
    (rows, devices, fixed, accumulator, whole, share)
    for rows, devices in [(64, 1), (100, 3), (1000, 1), (4096, 8), (60_000, 1)]
    for fixed in (0.02, 0.1, 0.5)
    for accumulator in (0, 0.5, 1.0)
    for whole in (0, 0.5, 1.0)
    for share in (1.2, 0.83, 0.61, 0.37, 0.21, 0.104, 0.051, 0.019)
]


def grid_case(rows, devices, fixed, accumulator, whole, share, wobble=0.0):
    """A step of 1 GB of activations; fixed bytes and what they add are shares of it."""
    size = 10**9
    per_row = size / math.ceil(rows / devices)

    def need(k, n):
        extra = whole if k == 1 else accumulator
        wave = 1 + wobble * math.sin(7 * math.log(n + 1) + 9 * fixed)
        return fixed * size * (1 + extra) + per_row * n * wave

    fake = Fake(need, rows, devices, fixed=int(fixed * size))
    return fake, int(fixed * size * (1 + accumulator) + share * size)


@pytest.mark.parametrize("wobble", [0.0, 0.02])
def test_grid_equals_exhaustive_search_with_few_compilations(wobble):
    counts = []
    for case in GRID:
        fake, limit = grid_case(*case, wobble=wobble)
        best = next(
            (k for k in distinct_passes(fake.microbatch(1)) if fake.need(k) <= limit),
            None,
        )
        if best is None:
            with pytest.raises(errors.DoesNotFit):
                fake.search(limit)
            continue
        assert checked(fake, limit).num_microbatches == best, case
        counts.append(len(fake.calls))
    assert len(counts) > 0.9 * len(GRID)
    assert statistics.median(counts) <= 3
    assert max(counts) <= 8


@given(
    rows=st.integers(1, 400),
    devices=st.integers(1, 5),
    fixed=st.integers(0, 1000),
    slope=st.integers(1, 50),
    accumulator=st.integers(0, 1000),
    whole=st.integers(0, 1000),
    limit=st.integers(1, 25_000),
)
@settings(max_examples=200)
def test_affine_equals_exhaustive_search(
    rows, devices, fixed, slope, accumulator, whole, limit
):
    # One pass may cost more or less than several, by less than what they share.
    accumulator, whole = min(accumulator, fixed), min(whole, fixed)
    model = affine(fixed, slope, accumulator=accumulator, whole=whole)
    fake = Fake(model, rows, devices, fixed=fixed)
    best = fake.exhaustive(limit)
    if best is None:
        with pytest.raises(errors.DoesNotFit):
            fake.search(limit)
    else:
        assert checked(fake, limit).num_microbatches == best


@given(data=st.data(), rows=st.integers(1, 300), devices=st.integers(1, 4))
@settings(max_examples=200)
def test_any_memory_at_all(data, rows, devices):
    # Steps, spikes, no figures: what is returned was compiled and fits, or it is said.
    passes = distinct_passes(math.ceil(rows / devices))
    figure = st.none() | st.integers(1, 100)
    table = {k: data.draw(figure, label=f"bytes of {k} passes") for k in passes}
    fixed = data.draw(st.integers(0, 120))
    fake = Fake(lambda k, n: table[k], rows, devices, fixed=fixed)
    try:
        checked(fake, 50)
    except errors.DoesNotFit:
        assert any(table[k] is not None for k in fake.calls)
    except errors.CannotTell:
        assert all(table[k] is None for k in fake.calls)
    assert len(fake.calls) <= 30


def test_stepped_memory():
    # Whole blocks of 64 rows are allocated.
    for limit in (700, 1300, 2600, 5000):
        fake = Fake(lambda k, n: 500 + 10 * 64 * math.ceil(n / 64) / 8, 4096, fixed=500)
        found = checked(fake, limit)
        assert found.microbatch <= 64 * int((limit - 500) / 80)
        assert found.num_microbatches == fake.exhaustive(limit)


def test_one_example_per_pass_may_need_more_than_two():
    # Measured on an MLP: 24.5 MB at n = 1, 15.9 MB at n = 2.
    fake = Fake(lambda k, n: 24_500 if n == 1 else 14_000 + 950 * n, 64, fixed=13_000)
    found = checked(fake, 16_000)
    assert (found.microbatch, found.num_microbatches) == (2, 32)


def test_only_one_example_per_pass_fits():
    # That program holds no batch axis and may be far cheaper than the line says.
    fake = Fake(lambda k, n: 4630 if n == 1 else 5600 + 8 * n, 256, fixed=4620)
    assert checked(fake, 5000).num_microbatches == 256
    assert len(fake.calls) <= 4


def test_two_passes_may_need_more_than_one():
    # The accumulator comes on top: fewer rows do not help at once.
    fake = Fake(affine(1000, 10, accumulator=600), rows=100, fixed=1000)
    assert checked(fake, 1990).num_microbatches == fake.exhaustive(1990) == 3


def test_what_cannot_be_told_is_never_chosen():
    # No figures up to 8 passes: the passes double until there is one.
    fake = Fake(lambda k, n: None if k < 9 else 10 * n, 512)
    found = checked(fake, 10**6)
    assert fake.calls[:5] == [1, 2, 4, 8, 16]
    assert found.num_microbatches == 9


def test_no_figures_at_all():
    fake = Fake(lambda k, n: None, 100)
    with pytest.raises(errors.CannotTell, match="microbatch=32") as caught:
        fake.search(10**9)
    assert "microbatch 100, microbatch 50" in str(caught.value)
    assert fake.calls[-2:] == [100, 50]


def out_of_memory_above(rows_per_pass, fake):
    def measure(k):
        new = fake.measure(k)
        if fake.microbatch(k) <= rows_per_pass:
            return new
        note = "out of memory while compiling"
        return Measurement(None, fake.fixed, 2.0, note, fits=False)

    return measure


def test_out_of_memory_while_compiling_is_does_not_fit():
    fake = Fake(lambda k, n: 10 * n, 64)
    found = search(out_of_memory_above(8, fake), rows=64, devices=1, limit=10**9)
    assert (found.microbatch, found.num_microbatches) == (8, 8)
    failed = [p for p in found.probes if p.bytes is None]
    assert failed and failed[0].note == "out of memory while compiling"
    assert failed[0].seconds == 2.0


def test_out_of_memory_everywhere_is_does_not_fit():
    fake = Fake(lambda k, n: 10 * n, 64)
    with pytest.raises(errors.DoesNotFit, match="more than could be compiled"):
        search(out_of_memory_above(0, fake), rows=64, devices=1, limit=10**9)


def test_exceptions_of_the_user_pass_through_at_once():
    calls = []

    def measure(k):
        calls.append(k)
        raise ValueError("shapes of mine")

    with pytest.raises(ValueError, match="^shapes of mine$"):
        search(measure, rows=64, devices=1, limit=100)
    assert calls == [1]


def test_nothing_fits_says_what_is_needed_and_what_would_help():
    parts = Parts(parameters=300, optimizer=600, activations=124)
    calls = []

    def measure(k):
        calls.append(k)
        n = math.ceil(64 / k)
        return Measurement(900 + 124 * n, 900, 1.0, "compiled", parts=parts)

    with pytest.raises(errors.DoesNotFit) as caught:
        search(measure, rows=64, devices=1, limit=950, limit_source="given")
    text = str(caught.value)
    assert "1.0 KiB (1,024 bytes) at microbatch 1" in text
    assert "the limit is 950 B (950 bytes), given" in text
    assert "optimizer 600 B, parameters 300 B, activations 124 B" in text
    assert "shard_optimizer=True" in text and 'remat="auto"' in text
    assert 64 in calls and len(calls) <= 4


def test_nothing_fits_without_parts():
    fake = Fake(affine(2000, 10), rows=8, fixed=2000)
    with pytest.raises(errors.DoesNotFit, match="2.0 KiB depend on no microbatch"):
        fake.search(100)


def test_at_most_one_program_is_kept():
    import gc
    import weakref

    class Program:
        pass

    alive = weakref.WeakSet()
    most = 0

    def measure(k):
        nonlocal most
        gc.collect()
        most = max(most, len(alive))
        program = Program()
        alive.add(program)
        return Measurement(100 + 10 * math.ceil(999 / k), 50, 0.1, "compiled", program)

    found = search(measure, rows=999, devices=1, limit=700)
    gc.collect()
    assert len(found.probes) > 1
    assert most <= 1 and list(alive) == [found.measurement.program]


# Even cuts


@given(
    rows=st.integers(1, 300),
    devices=st.integers(1, 4),
    limit=st.integers(10, 3000),
    spikes=st.sets(st.integers(1, 300)),
)
@settings(max_examples=200)
def test_divisor(rows, devices, limit, spikes):
    fake = Fake(lambda k, n: 10 * n, rows, devices)
    least = checked(fake, limit).num_microbatches
    # Some even cuts beyond the fewest passes do not fit.
    spikes = {k for k in spikes if k > least}
    fake = Fake(lambda k, n: 10**6 if k in spikes else 10 * n, rows, devices)
    even = [
        k
        for k in range(least, 2 * least)
        if rows % (devices * k) == 0 and k not in spikes
    ]
    found = replace(fake).search(limit, divisor=True)
    assert found.num_microbatches == (even[0] if even else least)
    assert found.measurement.program == found.num_microbatches


# A microbatch that was asked for


def given_limit(count, given=True):
    return Limit(count, "a source", given)


@pytest.mark.parametrize(
    "rows, devices, microbatch, passes, size",
    [
        (100, 1, 30, 4, 25),
        (100, 1, 100, 1, 100),
        (100, 1, 5000, 1, 100),
        (100, 1, 1, 100, 1),
        (100, 3, 30, 2, 17),
        (4096, 1, 700, 6, 683),
        (1, 4, 3, 1, 1),
    ],
)
def test_pinned_is_an_upper_bound_evened_out(rows, devices, microbatch, passes, size):
    fake = Fake(affine(0, 1), rows, devices)
    found = pinned(
        fake.measure,
        rows=rows,
        devices=devices,
        microbatch=microbatch,
        limit=given_limit(10**6),
    )
    assert (found.num_microbatches, found.microbatch) == (passes, size)
    assert fake.calls == [passes]
    assert found.measurement.program == passes


def test_pinned_over_a_given_limit_is_an_error():
    fake = Fake(affine(0, 100), 100)
    with pytest.raises(errors.DoesNotFit) as caught:
        pinned(
            fake.measure, rows=100, devices=1, microbatch=50, limit=given_limit(4999)
        )
    for words in ("microbatch=50", "5,000 bytes", "4,999 bytes", "a source", "largest"):
        assert words in str(caught.value)


def test_pinned_over_the_machine_is_a_warning_with_both_figures():
    fake = Fake(affine(0, 100), 100)
    limit = given_limit(4999, given=False)
    with pytest.warns(errors.EqaccumWarning, match="5,000 bytes.*4,999 bytes"):
        found = pinned(fake.measure, rows=100, devices=1, microbatch=50, limit=limit)
    assert found.measurement.program == 2


def test_pinned_without_figures_or_limit_goes_on():
    fake = Fake(lambda k, n: None, 100)
    for limit in (given_limit(10), None):
        found = pinned(fake.measure, rows=100, devices=1, microbatch=50, limit=limit)
        assert found.measurement.bytes is None and found.measurement.program == 2


def test_pinned_that_cannot_be_compiled_is_an_error():
    fake = Fake(affine(0, 100), 100)
    for limit in (given_limit(10**9, given=False), None):
        with pytest.raises(errors.DoesNotFit, match="more than could be compiled"):
            pinned(
                out_of_memory_above(8, fake),
                rows=100,
                devices=1,
                microbatch=50,
                limit=limit,
            )


@pytest.mark.parametrize("microbatch", [0, -1, True])
def test_pinned_refuses_a_microbatch_below_one(microbatch):
    with pytest.raises(errors.InputError, match="microbatch="):
        pinned(
            Fake(affine(0, 1), 8).measure,
            rows=8,
            devices=1,
            microbatch=microbatch,
            limit=None,
        )


@pytest.mark.parametrize("rows, devices", [(0, 1), (1, 0), (-3, 1)])
def test_rows_and_devices_are_needed(rows, devices):
    with pytest.raises(errors.InputError, match="at least 1"):
        search(Fake(affine(0, 1), 8).measure, rows=rows, devices=devices, limit=1)
