"""The record of a plan: text, JSON, drawing."""

import builtins
import json
from dataclasses import replace

import pytest

import eqaccum._errors as errors
from eqaccum._plan import Parts, Plan, Probe, format_bytes, parse_bytes

GIB = 2**30


def make_plan(**changes) -> Plan:
    predicted = 3328599654  # 3.1 GiB
    parts = Parts(
        parameters=400 * 2**20,
        optimizer=800 * 2**20,
        accumulator=400 * 2**20,
        batch=12 * 2**20,
        extra=(("embeddings", 2**20),),
    )
    plan = Plan(
        global_batch=4096,
        devices=1,
        num_microbatches=6,
        microbatch=683,
        predicted_bytes=predicted,
        limit_bytes=4 * GIB,
        limit_source="given",
        parts=parts.with_total(predicted),
        probes=(
            Probe(1, 4096, 17 * GIB, 1.75, "compiled"),
            Probe(6, 683, predicted, 1.65, "compiled"),
        ),
        source="memory analysis of cpu; a plan for this backend only",
        notes=("2 rows of padding",),
    )
    return replace(plan, **changes)


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_048_575, "1.0 MiB"),
        (3328599654, "3.1 GiB"),
        (5 * 2**50, "5120.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    "value, count",
    [
        (1, 1),
        ("10GiB", 10 * 2**30),
        ("40GB", 40 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        (" 2 tib ", 2**41),
        ("7 B", 7),
        (".5kb", 500),
    ],
)
def test_parse_bytes(value, count):
    assert parse_bytes(value) == count


@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 1.5, 4e9, None, "", "10", "GiB", "10Gi", "-1GiB", "1e3 GiB"]
    + [
        "0GiB",
        "0.1 B",
        "10 GiB per device",
        "1,5GiB",
        [1],
        b"1GiB",
        "nan GiB",
        "inf B",
    ],
)
def test_parse_bytes_refuses(value):
    with pytest.raises(errors.InputError, match="10GiB") as caught:
        parse_bytes(value)
    assert repr(value) in str(caught.value)


def test_parse_bytes_says_what_was_meant():
    with pytest.raises(errors.InputError, match="memory_limit=4000000000"):
        parse_bytes(4e9)
    with pytest.raises(errors.InputError, match="'16GiB'"):
        parse_bytes("16")


def test_parts_add_up():
    parts = Parts(parameters=10, batch=5, extra=(("embeddings", 7),))
    assert parts.total == parts.fixed == 22
    filled = parts.with_total(100)
    assert (filled.total, filled.activations, filled.fixed) == (100, 78, 22)
    assert filled.named()["embeddings"] == 7
    # A program that does not hold all parts at once leaves nothing for temporaries.
    assert parts.with_total(15).activations == 0


def test_summary():
    assert make_plan().summary() == (
        "4096 = 6 passes of 683 (3.1 of 4.0 GiB), 2 compilations, 3.4 s"
    )


def test_summary_of_other_cases():
    one = make_plan(
        num_microbatches=1,
        microbatch=1024,
        devices=4,
        predicted_bytes=300 * 2**20,
        probes=(Probe(1, 1024, 300 * 2**20, 9.0, "remembered"),),
    )
    assert one.summary() == (
        "4096 = 1 pass of 1024 on 4 devices (300.0 MiB of 4.0 GiB), "
        "0 compilations, 0.0 s"
    )
    blind = make_plan(predicted_bytes=None)
    assert "(bytes unknown, limit 4.0 GiB)" in blind.summary()
    assert "no limit known" in replace(blind, limit_bytes=None).summary()


def test_table_shows_every_figure():
    text = str(make_plan())
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["parameters"].split() == "parameters 400.0 MiB 9.8 %".split()
    assert lines["optimizer"].split() == "optimizer 800.0 MiB 19.5 %".split()
    assert lines["accumulator"].split() == "accumulator 400.0 MiB 9.8 %".split()
    assert lines["batch"].split() == "batch 12.0 MiB 0.3 %".split()
    assert lines["activations"].split() == "activations 1.5 GiB 38.1 %".split()
    assert lines["embeddings"].split() == "embeddings 1.0 MiB 0.0 %".split()
    assert lines["predicted"].split() == "predicted 3.1 GiB 77.5 %".split()
    assert lines["limit"].split() == "limit 4.0 GiB 100.0 % given".split()
    assert "1.8 s  compiled, over the limit" in text
    assert "1.6 s  compiled, chosen" in text
    assert "memory analysis of cpu; a plan for this backend only" in text
    assert "2 rows of padding" in text


def test_advice_is_about_large_parts_largest_first():
    text = str(make_plan())
    advice = text[text.index("What would lower it") :]
    order = [advice.index(f"  {name}: ") for name in ("activations", "optimizer")]
    assert order == sorted(order)
    assert 'remat="auto"' in advice and "shard_optimizer=True" in advice
    assert "  batch: " not in advice
    assert "What would lower it" not in str(make_plan(parts=Parts()))


def test_table_of_a_plan_that_knows_nothing():
    text = str(
        make_plan(
            predicted_bytes=None, limit_bytes=None, parts=Parts(), probes=(), notes=()
        )
    )
    assert "predicted  " in text and "unknown" in text


def test_html_is_escaped():
    text = make_plan(limit_source="<b>given</b>")._repr_html_()
    assert "<table>" in text and "3.1 GiB" in text
    assert "&lt;b&gt;given&lt;/b&gt;" in text and "<b>" not in text


def test_dict_round_trip():
    for plan in (make_plan(), make_plan(predicted_bytes=None, limit_bytes=None)):
        data = plan.to_dict()
        assert Plan.from_dict(data) == plan
        assert json.loads(json.dumps(data)) == data
        assert Plan.from_dict(json.loads(json.dumps(data))) == plan


def _changed(**changes):
    return {**make_plan().to_dict(), **changes}


@pytest.mark.parametrize(
    "data, named",
    [
        (None, "kind"),
        ([], "kind"),
        ({}, "kind"),
        (_changed(kind="other"), "kind"),
        (_changed(version=2), "version 2"),
        (_changed(global_batch="4096"), "plan.global_batch"),
        (_changed(global_batch=True), "plan.global_batch"),
        (_changed(devices=0), "plan.devices"),
        (_changed(num_microbatches=5), "do not hold 4096"),
        (_changed(predicted_bytes=-1), "plan.predicted_bytes"),
        (_changed(limit_source=None), "plan.limit_source"),
        (_changed(parts=[]), "plan.parts"),
        (_changed(parts={}), "plan.parts lacks parameters"),
        (_changed(probes=[{}]), r"plan.probes\[0\] lacks"),
        (_changed(probes=[7]), r"plan.probes\[0\] is a int"),
        (_changed(notes=[1]), "plan.notes"),
        (_changed(surprise=1), "unknown surprise"),
    ],
)
def test_foreign_or_damaged_dict_is_refused(data, named):
    with pytest.raises(errors.InputError, match=named):
        Plan.from_dict(data)


def test_each_missing_entry_is_named():
    whole = make_plan().to_dict()
    for name in whole:
        data = {k: v for k, v in whole.items() if k != name}
        with pytest.raises(errors.InputError, match=name):
            Plan.from_dict(data)


@pytest.mark.parametrize("extra", [[["a"]], [["a", -1]], [[1, 1]], ["ab"], 7])
def test_damaged_extra_parts_are_refused(extra):
    data = make_plan().to_dict()
    data["parts"]["extra"] = extra
    with pytest.raises(errors.InputError, match=r"plan.parts.extra"):
        Plan.from_dict(data)


def test_seconds_must_be_finite():
    for seconds in (float("nan"), float("inf"), -1.0, True, "1"):
        data = make_plan().to_dict()
        data["probes"][1]["seconds"] = seconds
        with pytest.raises(errors.InputError, match=r"probes\[1\].seconds"):
            Plan.from_dict(data)


class FakeAxes:
    """Records what is drawn."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_plot_draws_probes_choice_and_limit():
    axes = FakeAxes()
    assert make_plan().plot(axes) is axes
    drawn = [args for name, args, _ in axes.calls if name == "plot"]
    chosen = 3328599654 / GIB
    assert drawn[0][:2] == ([683, 4096], [chosen, 17.0])
    assert drawn[1][:2] == ([683], [chosen])
    assert [args for name, args, _ in axes.calls if name == "axhline"] == [(4.0,)]


def test_plot_makes_its_own_figure():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = make_plan().plot()
    assert len(axes.get_lines()) == 3
    axes.figure.canvas.draw()
    matplotlib.pyplot.close(axes.figure)


def test_plot_without_matplotlib_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(errors.EqaccumError, match=r'pip install "eqaccum\[plot\]"'):
        make_plan().plot()
