"""What was decided and why: `Plan`, its `Parts` and its `Probe`s."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from .. import _errors
from ._arrays import LargeArray
from ._bytes import format_bytes
from ._decode import (
    Checks,
    checked,
    is_count,
    is_flag,
    is_list,
    is_mapping,
    is_maybe_count,
    is_seconds,
    is_size,
    is_text,
)
from ._plot import draw_plan
from ._table import grid, html_table

COMPILED = "compiled"
REMEMBERED = "remembered"
OUT_OF_MEMORY = "out of memory while compiling"
NO_FIGURES = "no figures"

# What lowers each part, listed by the table and by the errors. Knobs that exist only.
REMEDIES = {
    "parameters": "a narrower dtype; a model sharded over another axis of mesh=",
    "frozen": "a narrower dtype for what is not trained",
    "state": "a model with less state",
    "optimizer": (
        "fewer trained leaves (trainable=); shard_optimizer=True on several devices; "
        "an optimizer with a smaller state (optax.adafactor, optax.sgd)"
    ),
    "accumulator": "fewer trained leaves (trainable=)",
    "batch": "a smaller global_batch; narrower rows (uint8 images, int32 tokens)",
    "activations": (
        'remat="auto"; a narrower compute_dtype (jnp.bfloat16); a smaller microbatch'
    ),
}
# Parts below this share of the total are not worth advice.
_WORTH_ADVICE = 0.05

_MAGIC = "eqaccum.Plan"
_VERSION = 1


@dataclass(frozen=True)
class Parts:
    """The bytes of a step on one device, by what they hold.

    **Arguments:**

    - `parameters`: the trained leaves of the model.
    - `frozen`: leaves that are not trained, and arrays that the loss captured.
    - `state`: the `eqx.nn.State`.
    - `optimizer`: the optimizer's state.
    - `accumulator`: the sums over microbatches.
    - `batch`: rows resident on the device, those of the next batch included.
    - `activations`: what is left: the temporaries of forward and backward pass.
    - `extra`: further parts by name, as pairs `(name, bytes)`.

    !!! Example

        ```python
        parts = eqaccum.plan(model, data, global_batch=4096).parts
        print(parts.activations, parts.total)
        ```
    """

    parameters: int = 0
    frozen: int = 0
    state: int = 0
    optimizer: int = 0
    accumulator: int = 0
    batch: int = 0
    activations: int = 0
    extra: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.named().values())

    @property
    def fixed(self) -> int:
        """What no microbatch changes: everything but the activations."""
        return self.total - self.activations

    def named(self) -> dict[str, int]:
        """Every part by name, the extra ones last."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        extra = own.pop("extra")
        return own | dict(extra)

    def with_total(self, total: int) -> "Parts":
        """These parts with activations such that they add up to `total`.

        Where the other parts alone exceed `total` (a program that does not hold all
        of them at once) activations are 0.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["activations"] = max(0, total - self.fixed)
        return Parts(**values)


@dataclass(frozen=True)
class Probe:
    """One look at how many bytes a size needs.

    **Arguments:**

    - `num_microbatches`: passes per update.
    - `microbatch`: examples per device and pass.
    - `bytes`: what the compiled step needs on one device; `None` where unknown.
    - `seconds`: how long it took to compile.
    - `note`: `"compiled"`, `"remembered"`, `"out of memory while compiling"`,
        `"no figures"` or another word about where the figure comes from.

    !!! Example

        ```python
        for probe in eqaccum.plan(model, data, global_batch=4096).probes:
            print(probe.num_microbatches, probe.bytes, probe.note)
        ```
    """

    num_microbatches: int
    microbatch: int
    bytes: int | None
    seconds: float
    note: str

    @property
    def compiled(self) -> bool:
        """Whether something was compiled for it in this run."""
        return not self.note.startswith(REMEMBERED)


@dataclass(frozen=True)
class Plan:
    """How a global batch is cut, and why.

    `print(plan)` shows where the bytes go, `plan.plot()` draws them, and
    `fit(..., plan=plan)` uses it as it is. `predicted_bytes` and `limit_bytes` count
    bytes on one device; `None` is "cannot tell".

    !!! Example

        ```python
        plan = eqaccum.plan(model, data, global_batch=4096, memory_limit="40GiB")
        print(plan)
        eqaccum.fit(model, data, global_batch=4096, plan=plan)
        ```

    **Arguments:**

    - `global_batch`: examples per optimizer update, all devices together.
    - `devices`: how many devices share it.
    - `num_microbatches`: passes per update.
    - `microbatch`: examples per device in one pass.
    - `predicted_bytes`: what the step needs on one device.
    - `limit_bytes`: what it may take there.
    - `limit_source`: where the limit comes from, figure by figure.
    - `parts`: the predicted bytes by what they hold.
    - `probes`: every size that was looked at, in that order.
    - `source`: where the figures come from. A plan is for that backend only.
    - `notes`: what else was decided.
    - `windows`: pieces in which the rows are fed, more than one where the rows of the
        global batch do not fit beside the activations.
    - `rematerialised`: whether the loss is recomputed in segments in the backward pass
        (`remat="auto"`).
    - `arrays`: the largest arrays of a pass. A guide and no sum: those that are not
        needed at the same time share their place.
    - `measured_bytes`: what the device says that the first step took; None before it,
        and where the device keeps no count (CPUs).
    """

    global_batch: int
    devices: int
    num_microbatches: int
    microbatch: int
    predicted_bytes: int | None
    limit_bytes: int | None
    limit_source: str
    parts: Parts
    probes: tuple[Probe, ...]
    source: str
    notes: tuple[str, ...] = ()
    windows: int = 1
    rematerialised: bool = False
    arrays: tuple[LargeArray, ...] = ()
    measured_bytes: int | None = None

    @property
    def compilations(self) -> int:
        """How many sizes were compiled to make this plan."""
        return sum(probe.compiled for probe in self.probes)

    @property
    def seconds(self) -> float:
        """How long those compilations took together."""
        return sum((probe.seconds for probe in self.probes if probe.compiled), 0.0)

    def summary(self) -> str:
        """The plan in one line.

        **Returns:**

        `4096 = 6 passes of 683 (3.1 of 4.0 GiB), 2 compilations, 3.4 s`.
        """
        cut = f"{self.num_microbatches} {_plural(self.num_microbatches, 'pass', 'es')}"
        many = f" on {self.devices} devices" if self.devices > 1 else ""
        many += f" in {self.windows} windows" if self.windows > 1 else ""
        many += ", rematerialised" if self.rematerialised else ""
        count = self.compilations
        return (
            f"{self.global_batch} = {cut} of {self.microbatch}{many} "
            f"({_of_limit(self.predicted_bytes, self.limit_bytes)}), "
            f"{count} {_plural(count, 'compilation')}, {self.seconds:.1f} s"
        )

    def __str__(self) -> str:
        blocks = [
            self.summary(),
            grid(_part_rows(self), "<>><"),
            grid(_probe_rows(self), ">>>><"),
        ]
        if self.arrays:
            blocks.append(_ARRAYS + grid(_array_rows(self.arrays), "><<<"))
        advice = advise(self.parts)
        if advice:
            blocks.append(
                "What would lower it:\n"
                + "\n".join(f"  {name}: {text}" for name, text in advice.items())
            )
        blocks.append("\n".join([f"Figures: {self.source}", *self.notes]))
        return "\n\n".join(block for block in blocks if block)

    def _repr_html_(self) -> str:
        return html_table(self.summary(), _part_rows(self))

    def plot(self, ax: Any = None) -> Any:
        """Draws bytes against microbatch, with the limit and every probe.

        **Arguments:**

        - `ax`: the matplotlib `Axes` to draw on; a new figure's by default.

        **Returns:**

        The `Axes`.

        **Raises:**

        `EqaccumError` where matplotlib is not installed.
        """
        points = {p.microbatch: p.bytes for p in self.probes if p.bytes is not None}
        if self.predicted_bytes is not None:
            points[self.microbatch] = self.predicted_bytes
        return draw_plan(
            points,
            chosen=self.microbatch,
            limit=self.limit_bytes,
            title=self.summary(),
            ax=ax,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, numbers and text, ready for `json.dump`."""
        # The round trip turns tuples into lists, so that what is returned equals what
        # is read back from a file.
        return json.loads(
            json.dumps({"kind": _MAGIC, "version": _VERSION, **asdict(self)})
        )

    @classmethod
    @_errors.short_tracebacks
    def from_dict(cls, data: Any) -> "Plan":
        """The plan that `to_dict` wrote.

        **Arguments:**

        - `data`: what `to_dict` returned, or what was read back from JSON.

        **Raises:**

        `InputError` where it is foreign, damaged, or of another version; the message
        names the entry.
        """
        return _read_plan(data)


def advise(parts: Parts) -> dict[str, str]:
    """What would lower each part that matters, the largest part first."""
    ordered = sorted(parts.named().items(), key=lambda item: -item[1])
    return {
        name: REMEDIES[name]
        for name, count in ordered
        if name in REMEDIES and count > 0 and count >= _WORTH_ADVICE * parts.total
    }


# Text


def _plural(count: int, word: str, ending: str = "s") -> str:
    return word if count == 1 else word + ending


def _of_limit(needed: int | None, limit: int | None) -> str:
    need = "bytes unknown" if needed is None else format_bytes(needed)
    if limit is None:
        return f"{need}, no limit known"
    most = format_bytes(limit)
    if needed is None:
        return f"{need}, limit {most}"
    number, unit = need.split(" ")
    return f"{number if most.endswith(' ' + unit) else need} of {most}"


def _part_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Name, bytes, per cent of the limit (else of the total), and a remark."""
    always = {"parameters", "optimizer", "accumulator", "batch", "activations"}
    shown = {k: v for k, v in plan.parts.named().items() if v or k in always}
    whole = plan.limit_bytes or plan.parts.total

    def row(name: str, count: int, remark: str = "") -> tuple[str, ...]:
        share = f"{100 * count / whole:.1f} %" if whole else ""
        return name, format_bytes(count), share, remark

    of = "of limit" if plan.limit_bytes else "of total"
    rows = [("part", "bytes", of, ""), *(row(k, v) for k, v in shown.items())]
    if plan.predicted_bytes is None:
        rows.append(("predicted", "unknown", "", ""))
    else:
        rows.append(row("predicted", plan.predicted_bytes))
    if plan.measured_bytes is not None:
        rows.append(row("measured", plan.measured_bytes, "the device's own peak"))
    if plan.limit_bytes is None:
        rows.append(("limit", "unknown", "", plan.limit_source))
    else:
        rows.append(row("limit", plan.limit_bytes, plan.limit_source))
    return rows


def _probe_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Passes, microbatch, bytes, seconds, and what came of it."""
    rows: list[tuple[str, ...]] = [("passes", "microbatch", "bytes", "compile", "")]
    for probe in plan.probes:
        remark = probe.note
        if probe.num_microbatches == plan.num_microbatches:
            remark += ", chosen"
        elif probe.bytes and plan.limit_bytes and probe.bytes > plan.limit_bytes:
            remark += ", over the limit"
        rows.append(
            (
                str(probe.num_microbatches),
                str(probe.microbatch),
                "unknown" if probe.bytes is None else format_bytes(probe.bytes),
                f"{probe.seconds:.1f} s" if probe.compiled else "-",
                remark,
            )
        )
    return rows if plan.probes else []


_ARRAYS = "Largest arrays of a pass (a guide: they share memory, so no sum):\n"


def _array_rows(arrays: tuple[LargeArray, ...]) -> list[tuple[str, ...]]:
    """Bytes, shape, name and place of each."""
    return [
        (
            f"  {format_bytes(array.bytes)}",
            (f"{array.count} x " if array.count > 1 else "") + array.shape,
            array.name,
            array.source,
        )
        for array in arrays
    ]


# Reading

_PARTS: Checks = {
    f.name: is_list if f.name == "extra" else is_count for f in fields(Parts)
}
_PROBE: Checks = {
    "num_microbatches": is_size,
    "microbatch": is_size,
    "bytes": is_maybe_count,
    "seconds": is_seconds,
    "note": is_text,
}
_ARRAY: Checks = {
    "bytes": is_count,
    "shape": is_text,
    "count": is_size,
    "name": is_text,
    "source": is_text,
}
_PLAN: Checks = {
    "global_batch": is_size,
    "devices": is_size,
    "num_microbatches": is_size,
    "microbatch": is_size,
    "predicted_bytes": is_maybe_count,
    "limit_bytes": is_maybe_count,
    "limit_source": is_text,
    "parts": is_mapping,
    "probes": is_list,
    "source": is_text,
    "notes": is_list,
    "windows": is_size,
    "rematerialised": is_flag,
    "arrays": is_list,
    "measured_bytes": is_maybe_count,
}


def _checked(data: Any, checks: Checks, where: str) -> dict[str, Any]:
    return checked(data, checks, where=where, refuse=_errors.foreign_plan)


def _read_plan(data: Any) -> Plan:
    if not is_mapping(data) or data.get("kind") != _MAGIC:
        raise _errors.foreign_plan(f"its kind is not {_MAGIC!r}")
    if data.get("version") != _VERSION:
        raise _errors.foreign_plan(
            f"it is of version {data.get('version')!r}, this eqaccum reads {_VERSION}"
        )
    body = {k: v for k, v in data.items() if k not in ("kind", "version")}
    values = _checked(body, _PLAN, "plan")
    if any(not is_text(note) for note in values["notes"]):
        raise _errors.foreign_plan("plan.notes holds something that is not text")
    values["notes"] = tuple(values["notes"])
    values["parts"] = _read_parts(values["parts"])
    values["probes"] = tuple(
        _read_probe(probe, f"plan.probes[{i}]")
        for i, probe in enumerate(values["probes"])
    )
    values["arrays"] = tuple(
        LargeArray(**_checked(array, _ARRAY, f"plan.arrays[{i}]"))
        for i, array in enumerate(values["arrays"])
    )
    plan = Plan(**values)
    if plan.num_microbatches * plan.microbatch * plan.devices < plan.global_batch:
        raise _errors.foreign_plan(
            f"{plan.num_microbatches} passes of {plan.microbatch} on {plan.devices} "
            f"devices do not hold {plan.global_batch} examples"
        )
    return plan


def _read_probe(data: Any, where: str) -> Probe:
    values = _checked(data, _PROBE, where)
    values["seconds"] = float(values["seconds"])
    return Probe(**values)


def _read_parts(data: Any) -> Parts:
    values = _checked(data, _PARTS, "plan.parts")
    for pair in values["extra"]:
        is_pair = is_list(pair) and len(pair) == 2
        if not (is_pair and is_text(pair[0]) and is_count(pair[1])):
            raise _errors.foreign_plan(f"plan.parts.extra holds {pair!r:.80}")
    values["extra"] = tuple((name, count) for name, count in values["extra"])
    return Parts(**values)
