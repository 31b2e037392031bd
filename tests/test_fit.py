"""`fit`: how long it runs, in which order, what it says and what it gives back."""

import dataclasses
import fcntl
import html.parser
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum

ROWS = 10
Y = np.arange(ROWS, dtype=np.float32)
BITS = 2 ** np.arange(ROWS)
DATA = (Y, BITS)
SGD = optax.sgd(0.1)


def loss(model, example, key):
    """Squared error; the sum of the rows' bits tells which rows a batch had."""
    y, bit = example
    return (model - y) ** 2, {"rows": eqaccum.Sum(bit)}


def fit(data: Any = DATA, **more: Any) -> eqaccum.FitResult:
    arguments = {
        "global_batch": 4,
        "microbatch": 2,
        "loss": loss,
        "optimizer": SGD,
        "has_aux": True,
    }
    return eqaccum.fit(jnp.float32(0.0), data, **(arguments | more))


def by_hand(batches: list[list[int]], rate: float = 0.1) -> float:
    """SGD on the mean of (w - y)**2 over each batch of rows."""
    w = 0.0
    for rows in batches:
        w -= rate * float(np.mean([2 * (w - Y[row]) for row in rows]))
    return w


IN_ORDER = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# --- how long -------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, steps",
    [
        ({}, 3),
        ({"epochs": 2}, 6),
        ({"steps": 4}, 4),
        ({"epochs": 1, "steps": 100}, 3),
        ({"epochs": 5, "steps": 4}, 4),
        ({"epochs": np.int64(2), "steps": np.int32(5)}, 5),
        ({"epochs": 2, "drop_remainder": True}, 4),
    ],
)
def test_run_length(length, steps):
    result = fit(**length)
    assert result.train.step == result.train.batch_index == steps
    assert len(result.history["loss"]) == steps
    per_epoch = 2 if "drop_remainder" in length else 3
    np.testing.assert_array_equal(
        result.history["epoch"], np.arange(steps) // per_epoch
    )


def test_more_rows_than_there_are(capsys):
    y, bits = Y[:3], BITS[:3]
    result = fit((y, bits), epochs=2, shuffle=False)
    assert result.plan.global_batch == 3
    np.testing.assert_array_equal(result.history["examples"], [3, 3])
    np.testing.assert_allclose(result.model, by_hand([[0, 1, 2]] * 2), rtol=1e-5)
    said = capsys.readouterr().err
    assert "global_batch=4 is above the 3 rows" in said
    assert "2 epochs = 2 steps" in said
    # The plan alone says the same.
    arguments = {"loss": loss, "has_aux": True, "microbatch": 2}
    plan = eqaccum.plan(jnp.float32(0), (y, bits), global_batch=4, **arguments)
    assert (plan.global_batch, plan.num_microbatches, plan.microbatch) == (3, 2, 2)


def test_a_schedule_of_the_total_number_of_steps():
    totals = []

    def optimizer(total):
        totals.append(total)
        return optax.sgd(optax.linear_schedule(1.0, 0.0, total))

    def constant(model, example, key):
        return model * jnp.sign(example[0] + 1)  # gradient 1

    arguments = {"loss": constant, "optimizer": optimizer, "has_aux": False}
    result = fit(epochs=4, steps=4, **arguments)
    np.testing.assert_allclose(result.model, -(1 + 0.75 + 0.5 + 0.25), rtol=1e-6)
    fit(epochs=1, **arguments)
    fit(iter([DATA]), steps=2, **arguments)
    assert totals == [4, 3, 2]


# --- in which order ---------------------------------------------------------------


def test_rows_in_order_without_shuffling():
    result = fit(shuffle=False)
    sets = [sum(BITS[row] for row in rows) for rows in IN_ORDER]
    np.testing.assert_array_equal(result.history["rows"], sets)
    np.testing.assert_allclose(result.model, by_hand(IN_ORDER), rtol=1e-5)


def test_the_order_depends_on_the_key_and_the_epoch_alone():
    def order(**more):
        return fit(epochs=3, **more).history["rows"].tolist()

    first = order()
    assert order(key=jax.random.key(0)) == first
    assert order(key=jax.random.PRNGKey(0)) == first  # a legacy key
    assert order(microbatch=4) == first
    assert order(key=jax.random.key(1)) != first
    # Epochs differ, and each has every row once.
    assert first[0:3] != first[3:6] != first[6:9]
    for epoch in range(3):
        assert sum(first[3 * epoch : 3 * epoch + 3]) == 2**ROWS - 1
    # A longer run begins as the shorter one.
    assert fit(steps=5).history["rows"].tolist() == first[:5]


def test_a_key_of_another_kind_is_converted_and_said(capsys):
    result = fit(key=jax.random.key(3, impl="rbg"))
    assert "rbg key was converted to threefry" in capsys.readouterr().err
    assert result.train.key.shape == (2,)
    again = fit(key=jax.random.key(3, impl="rbg"))
    np.testing.assert_array_equal(result.history["rows"], again.history["rows"])


# --- data of every kind -------------------------------------------------------------


class Dataset:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return Y[index], int(BITS[index])


class Loader:
    """Batches of other sizes than the global batch."""

    def __init__(self):
        self.started = 0

    def __iter__(self):
        self.started += 1
        for start, stop in ((0, 3), (3, 3), (3, 8), (8, 10)):
            yield Y[start:stop], BITS[start:stop]


def test_data_sets_are_trained_on_as_columns_are():
    columns = fit(epochs=2)
    dataset = Dataset()
    for data in (dataset, eqaccum.data.examples([dataset[i] for i in range(ROWS)])):
        result = fit(data, epochs=2)
        np.testing.assert_array_equal(result.history["rows"], columns.history["rows"])
        np.testing.assert_array_equal(result.model, columns.model)


def test_iterables_are_cut_again():
    columns = fit(epochs=2, shuffle=False)
    loader = Loader()
    result = fit(loader, epochs=2)
    np.testing.assert_array_equal(result.history["rows"], columns.history["rows"])
    np.testing.assert_array_equal(result.model, columns.model)
    assert loader.started == 2
    once = fit(iter(Loader()))
    np.testing.assert_array_equal(once.history["rows"], columns.history["rows"][:3])
    assert fit(Loader(), steps=5).train.step == 5


def test_an_iterable_is_not_read_further_than_needed():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield Y[:4], BITS[:4]

    fit(endless(), steps=3)
    assert len(read) == 3


# --- what it says -----------------------------------------------------------------


@pytest.fixture
def nothing_remembered(monkeypatch):
    """No figure of another run is there to be compared with."""
    monkeypatch.setenv("EQACCUM_CACHE", "0")
    monkeypatch.setattr("eqaccum._plan._cache._process", {})


SAID = re.compile(
    r"eqaccum: 10 rows \(columns\), 2 epochs = 6 steps; loss; 4 = 2 passes of 2 "
    r"\([\d.]+ \w+ of [\d.]+ \w+\), \d compilations?, [\d.]+ s\n"
)


def test_one_line_says_what_was_decided(nothing_remembered, capsys):
    fit(epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert SAID.fullmatch(err), err


@pytest.mark.parametrize(
    "data, more, parts",
    [
        (DATA, {"steps": 4}, ["10 rows (columns), 4 steps; loss; 4 = 2 passes"]),
        (Dataset(), {}, ["10 rows (data set Dataset), 1 epoch = 3 steps;"]),
        (Loader(), {}, ["batches of 3 rows (iterable Loader), 1 epoch; loss;"]),
        (Loader(), {"epochs": 2, "steps": 9}, ["2 epochs", "at most 9 steps"]),
        (DATA, {"optimizer": None}, ["loss, adamw(1e-3);"]),
    ],
)
def test_the_line_in_other_cases(data, more, parts, capsys):
    fit(data, **more)
    said = capsys.readouterr().err
    assert [part for part in parts if part not in said] == [], said


class Terminal:
    """Standard error on a pseudo terminal, 120 columns wide."""

    def __enter__(self):
        self.reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.file = os.fdopen(writer, "w")
        return self

    def __exit__(self, *_):
        self.file.close()
        os.close(self.reader)

    def text(self):
        self.file.flush()
        read = b""
        while select.select([self.reader], [], [], 0)[0]:
            read += os.read(self.reader, 1 << 16)  # a terminal gives 4 KiB at a time
        return read.decode()


def test_a_bar_in_a_terminal(nothing_remembered, monkeypatch):
    with Terminal() as terminal:
        monkeypatch.setattr(sys, "stderr", terminal.file)
        assert sys.stderr.isatty()
        result = fit(epochs=2)
        shown = terminal.text()
        fit(epochs=2, progress=False)
        silent = terminal.text()
    assert "6/6" in shown
    assert "2 passes/step" in shown
    assert f"loss {result.history['loss'][-1]:.4f}" in shown
    assert "examples/s" in shown
    assert SAID.fullmatch(silent.replace("\r\n", "\n")), silent


def test_a_bar_on_demand_where_there_is_no_terminal(capsys):
    fit(progress=True)
    assert "3/3" in capsys.readouterr().err
    fit(Loader(), progress=True)  # the number of steps is not known
    assert "3step" in capsys.readouterr().err.replace(" ", "")


def as_shown(text: str) -> list[str]:
    """The lines of a terminal: what follows a return is written over the line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_what_is_said_has_a_line_of_its_own(monkeypatch):
    data = (np.where(Y == 5, np.inf, Y).astype(np.float32), BITS)

    def warn(info):
        if info.step == 2:
            eqaccum._errors.warn("mind the step")

    with Terminal() as terminal, warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings; a user's terminal shows them
        monkeypatch.setattr(
            warnings, "showwarning", lambda text, *_, **__: print(text, file=sys.stderr)
        )
        monkeypatch.setattr(sys, "stderr", terminal.file)
        fit(data, shuffle=False, nonfinite="skip", callbacks=[warn])
        lines = as_shown(terminal.text())
    said = [line for line in lines if "the loss is inf" in line]
    warned = [line for line in lines if "mind the step" in line]
    assert len(said) == len(warned) == 1
    assert said[0].startswith("eqaccum: skipped") and "passes/step" not in said[0]
    assert warned == ["mind the step"]
    assert "3/3" in lines[-2]  # the bar is below them, and drawn to its end


@pytest.mark.parametrize("kernel", [object(), None])
def test_a_bar_in_a_notebook(kernel, monkeypatch, capsys):
    shell = types.SimpleNamespace(kernel=kernel, config={})
    fake = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    fit()
    assert ("3/3" in capsys.readouterr().err) == (kernel is not None)


# --- what it gives back -----------------------------------------------------------


def test_history_has_an_entry_for_each_batch():
    history = fit(epochs=2).history
    assert set(history) == {
        *("loss", "penalty", "grad_norm", "weight", "examples", "skipped"),
        *("seconds", "step", "epoch", "rows"),
    }
    assert {len(history[name]) for name in history} == {6}
    assert all(isinstance(history[name], np.ndarray) for name in history)
    np.testing.assert_array_equal(history["step"], np.arange(1, 7))
    np.testing.assert_array_equal(history["examples"], [4, 4, 2] * 2)
    np.testing.assert_array_equal(history["weight"], [4, 4, 2] * 2)
    np.testing.assert_array_equal(history["skipped"], [False] * 6)
    np.testing.assert_array_equal(history["penalty"], np.zeros(6))
    assert (history["seconds"] > 0).all()
    assert history.last("loss") == history["loss"][-1]
    assert "6 batches: loss" in repr(history)
    with pytest.raises(KeyError):
        history["accuracy"]


def test_long_histories_are_read_in_blocks():
    result = fit((Y[:4], BITS[:4]), steps=270)
    assert result.history["loss"].shape == (270,)
    np.testing.assert_array_equal(result.history["step"], np.arange(1, 271))


def test_names_of_auxiliary_outputs():
    def named(model, example, key):
        y, _ = example
        aux = {"accuracy": y > 4, "parts": {"a": y}, "loss": y, "each": y[None]}
        return (model - y) ** 2, aux

    history = fit(loss=named, shuffle=False, steps=2).history
    np.testing.assert_allclose(history["accuracy"], [0, 0.75])
    np.testing.assert_allclose(history["parts.a"], [1.5, 5.5])
    np.testing.assert_allclose(history["aux.loss"], [1.5, 5.5])
    assert history["loss"][0] != 1.5
    assert "each" not in history  # one row for each example: in metrics.aux only

    def alone(model, example, key):
        return (model - example[0]) ** 2, example[0]

    assert "aux" in fit(loss=alone, steps=1).history


def test_the_result_holds_everything():
    result = fit(optimizer=optax.adam(0.1))
    assert result.model is not None and result.state is None
    reference = optax.adam(0.1).init(jnp.float32(0))
    assert jax.tree.structure(result.opt_state) == jax.tree.structure(reference)
    assert int(result.opt_state[0].count) == result.train.step == 3
    assert result.plan.num_microbatches == 2
    text = repr(result)
    assert "steps=3" in text and "loss" in text and "2 passes of 2" in text
    assert "step=3" in repr(result.train)


def test_a_plan_pins_the_passes():
    first = fit()
    second = fit(plan=first.plan, microbatch="largest")
    assert second.plan.num_microbatches == 2
    np.testing.assert_array_equal(first.model, second.model)
    # Without it all rows go at once.
    assert fit(microbatch="largest").plan.num_microbatches == 1


def test_fit_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(fit()))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results[0].model, fit().model)


def test_a_plot_of_the_loss():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = fit()
    ax = result.plot()
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), result.history["loss"])
    assert [line.get_label() for line in ax.lines] == ["loss"]
    result = fit(epochs=2, validation=DATA)
    assert result.plot(ax) is ax
    drawn = ax.lines[-1]
    np.testing.assert_array_equal(drawn.get_xdata(), [3, 6])  # the epochs' ends
    np.testing.assert_array_equal(drawn.get_ydata(), result.history["validation_loss"])
    pyplot.close(ax.figure)


# --- in a notebook ------------------------------------------------------------------


class _Tables(html.parser.HTMLParser):
    """The rows of the tables in some HTML, and the tags that were left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def tables(text: str) -> list[list[str]]:
    parser = _Tables()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.tags <= {"table", "caption", "thead", "tbody", "tr", "td", "th"}
    return parser.rows


def test_a_result_is_a_small_table():
    result = fit(epochs=2, validation=DATA)
    told = dict(tables(result._repr_html_()))
    loss, validation = result.history["loss"], result.history["validation_loss"]
    assert told["steps"] == "6" and told["epochs"] == "2"
    assert told["loss"] == f"{loss[0]:.4g} -> {loss[-1]:.4g}"
    assert told["validation_loss"] == f"{validation[0]:.4g} -> {validation[-1]:.4g}"
    assert "2 passes of 2" in told["plan"] and told["time"].endswith(" s")
    assert "skipped batches" not in told


def test_text_in_a_table_is_escaped():
    plan = dataclasses.replace(fit().plan, limit_source="<script>&</script>")
    rows = tables(plan._repr_html_())
    assert ["limit", "<script>&</script>"] == [rows[-1][0], rows[-1][-1]]
    assert rows[0][:2] == ["part", "bytes"]
