"""`check`: silent on right losses, loud on wrong ones and right about the cause.

Whether a loss is right needs no reference here: each is right or wrong by its form.
"""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations

import eqaccum
from eqaccum import Mean, batched, coupled, shared_key

KEY = jax.random.key(3)
ROWS = 12


class Line(eqx.Module):
    """The smallest model with two leaves."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, dtype: Any = jnp.float32):
        self.weight = jax.random.normal(KEY, (2, 3)).astype(dtype)
        self.bias = jnp.array([0.3, -0.2], dtype)

    def __call__(self, x):
        return jnp.tanh(self.weight @ x + self.bias)


def data(rows: int = ROWS):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = rng.normal(size=(rows, 2)).astype(np.float32)
    return x, y


def error(model, example):
    x, y = example
    return jnp.mean((model(x) - y) ** 2)


def errors(model, batch):
    return jax.vmap(error, in_axes=(None, 0))(model, batch)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)


# --- Right losses: no false alarm ------------------------------------------------


def plain(model, example, key):
    return error(model, example)


def tokens(model, example, key):
    x, y = example
    valid = x > 0
    return Mean(jnp.sum(jnp.where(valid, x, 0.0)) * error(model, example), valid.sum())


def two_means(model, example, key):
    x, _ = example
    z = jnp.sum(model(x) ** 2)
    return Mean(error(model, example), jnp.abs(x[0])) + 0.1 * Mean(z, 1.0)


def dropout(model, example, key):
    x, y = example
    return error(model, (dropped(key, x), y))


def key_of_the_row(model, example, key):
    x, y = example
    seed = jax.lax.bitcast_convert_type(x[0], jnp.uint32)
    return error(model, (dropped(jax.random.key(seed), x), y))


def scanned_noise(model, example, key):
    def one(carry, _):
        carry, own = jax.random.split(carry)
        return carry, jax.random.normal(own, (3,))

    _, noise = jax.lax.scan(one, key, None, length=3)
    return error(model, (example[0] + noise[1], example[1]))


def rejection(model, example, key):
    def again(carry):
        number, _ = carry
        return number + 1, jax.random.uniform(jax.random.fold_in(key, number))

    start = (jnp.int32(0), jnp.float32(1.0))
    _, u = jax.lax.while_loop(lambda c: c[1] > 0.8, again, start)
    return error(model, example) * (1 + u)


def maybe_noise(model, example, key):
    x, y = example
    x = jax.lax.cond(x[0] > 0, lambda: dropped(key, x), lambda: x)
    return error(model, (x, y))


def step_noise(model, example, key, step_key):
    x, y = example
    return error(model, (x + jax.random.normal(step_key, x.shape), y))


def held_weight(model, example, key):
    sure = jax.lax.stop_gradient(jnp.sum(model(example[0]) ** 2))
    return Mean(sure * error(model, example), sure)


def counted_weight(model, example, key):
    hits = jnp.sum(model(example[0]) > 0) + 1
    return Mean(hits * error(model, example), hits)


def unused_draw(model, example, key):
    jax.random.normal(jax.random.key(0), (3,))
    return error(model, example)


def remembered(model, example, key):
    call = jax.checkpoint(error)
    return call(model, example)


def in_bfloat16(model, example, key):
    x, y = example
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model)
    return jnp.mean((narrow(x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)


def float32_by_name(model, example, key):
    def one(total, x):
        return total + x * jnp.sum(model.weight.astype(jnp.float32)), None

    total, _ = jax.lax.scan(one, jnp.float32(0), example[0].astype(jnp.float32))
    return error(model, example) + total**2


@batched
def per_row(model, batch, keys):
    return errors(model, batch)


@batched
def row_dropout(model, batch, keys):
    x, y = batch
    return errors(model, (jax.vmap(dropped)(keys, x), y))


@batched
def row_means(model, batch, keys):
    count = jnp.abs(batch[0][:, 0])
    return Mean(count * errors(model, batch), count)


def summed(model, batch, keys, weights):
    return Mean(jnp.sum(weights * errors(model, batch)), jnp.sum(weights))


def rows_squared(model, batch, keys, weights):
    return Mean(errors(model, batch) ** 2, jnp.ones_like(weights))


def embed(model, example, key):
    x, y = example
    return model(x), y


def head(model, embeddings, weights):
    a, b = embeddings
    return eqaccum.losses.info_nce(a, b, weights=weights)


RIGHT: dict[str, Any] = {
    "plain": plain,
    "tokens": tokens,
    "two_means": two_means,
    "dropout": dropout,
    "key_of_the_row": key_of_the_row,
    "scanned_noise": scanned_noise,
    "rejection": rejection,
    "maybe_noise": maybe_noise,
    "step_noise": shared_key(step_noise),
    "held_weight": held_weight,
    "counted_weight": counted_weight,
    "unused_draw": unused_draw,
    "remembered": remembered,
    "in_bfloat16": in_bfloat16,
    "float32_by_name": float32_by_name,
    "per_row": per_row,
    "row_dropout": row_dropout,
    "row_means": row_means,
    "summed": batched(summed, weighted=True),
    "rows_squared": batched(rows_squared, weighted=True),
    "contrastive": coupled(embed, head),
    "contrastive in groups": coupled(embed, head, group=2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_silent_on_a_right_loss(name):
    report = eqaccum.check(Line(), data(), RIGHT[name], key=KEY, examples=3)
    assert report.ok, report
    assert report.causes == report.remedies == ()
    assert set(report.errors) == {".weight", ".bias"}
    assert max(report.errors.values()) <= report.tolerance


# --- Wrong ones ------------------------------------------------------------------


@batched
def mean_of_means(model, batch, keys):
    return jnp.full(len(batch[0]), errors(model, batch).mean())


@batched
def divided_by_rows(model, batch, keys):
    return errors(model, batch) / len(batch[0])


def scalar_mean_of_means(model, batch, keys, weights):
    return Mean(jnp.mean(weights * errors(model, batch)), 1.0)


def square_of_mean(model, batch, keys, weights):
    w = jnp.sum(weights)
    z = jnp.sum(weights * errors(model, batch)) / w
    return Mean(w * z**2, w)


@batched
def square_of_row_mean(model, batch, keys):
    values = errors(model, batch)
    return values + jnp.mean(batch[0][:, 0] * values) ** 2


@batched
def centred(model, batch, keys):
    x, y = batch
    return errors(model, (x - x.mean(axis=0, keepdims=True), y))


@batched
def router_balance(model, batch, keys):
    x, y = batch
    share = jax.nn.softmax(jax.vmap(model)(x))
    chosen = jax.nn.one_hot(jnp.argmax(share, axis=-1), 2)
    balance = 2 * jnp.sum(chosen.mean(axis=0) * share.mean(axis=0))
    return errors(model, batch) + balance


@batched
def first_key(model, batch, keys):
    x, y = batch
    return errors(model, (dropped(keys[0], x), y))


@batched
def last_key_mask(model, batch, keys):
    x, y = batch
    keep = jax.random.bernoulli(keys[-1], 0.5, (1, 3))
    return errors(model, (jnp.where(keep, x, 0.0), y))


@batched
def step_key_for_rows(model, batch, keys, step_key):
    x, y = batch
    return errors(model, (dropped(step_key, x), y))


def pads_counted(model, batch, keys, weights):
    return Mean(jnp.sum(errors(model, batch)), jnp.sum(weights))


def ignores_key(model, example, key):
    x, y = example
    return error(model, (dropped(jax.random.key(0), x), y))


def ignores_key_in_scan(model, example, key):
    def one(carry, _):
        carry, own = jax.random.split(carry)
        return carry, jax.random.normal(own, (3,))

    _, noise = jax.lax.scan(one, jax.random.key(1), None, length=2)
    return error(model, (example[0] + noise[1], example[1]))


@batched
def ignores_keys(model, batch, keys):
    x, y = batch
    return errors(model, (dropped(jax.random.PRNGKey(0), x), y))


def weight_of_model(model, example, key):
    norm = jnp.sum(jnp.abs(model(example[0])))
    return Mean(norm * error(model, example), norm)


def pooled(model, example, key):
    out = model(example[0])
    return jnp.sum((out - jax.lax.pmean(out, "batch")) ** 2)


def embed_pooled(model, example, key):
    out = model(example[0])
    return out - jax.lax.pmean(out, "batch"), example[1]


WRONG: dict[str, tuple[Any, str]] = {
    "mean_of_means": (mean_of_means, "mean of means"),
    "divided_by_rows": (divided_by_rows, "mean of means"),
    "scalar": (batched(scalar_mean_of_means, weighted=True), "mean of means"),
    "square_of_mean": (batched(square_of_mean, weighted=True), "batch statistics"),
    "square_of_row_mean": (square_of_row_mean, "batch statistics"),
    "centred": (centred, "batch statistics"),
    "router_balance": (router_balance, "batch statistics"),
    "first_key": (first_key, "one key for several rows"),
    "last_key_mask": (last_key_mask, "one key for several rows"),
    "step_key_for_rows": (shared_key(step_key_for_rows), "shared key"),
    "pads_counted": (batched(pads_counted, weighted=True), "weight 0 are counted"),
    "ignores_key": (ignores_key, "do not come from key"),
    "ignores_key_in_scan": (ignores_key_in_scan, "do not come from key"),
    "ignores_keys": (ignores_keys, "do not come from key"),
    "weight_of_model": (weight_of_model, "weight of a Mean depends"),
    "pooled": (pooled, "over the axis 'batch'"),
    "embed_pooled": (coupled(embed_pooled, head), "embedding of an example"),
}


@pytest.mark.parametrize("name", WRONG)
def test_names_what_is_wrong(name):
    loss, cause = WRONG[name]
    report = eqaccum.check(Line(), data(), loss, key=KEY, examples=3)
    assert not report.ok
    assert len(report.causes) == len(report.remedies) == 1, report
    assert cause in report.causes[0]
    assert report.causes[0] in str(report) and report.remedies[0] in str(report)
    by_jaxpr = "ignores_key" in name or name == "weight_of_model"
    if not by_jaxpr or name == "ignores_keys":
        assert max(report.errors.values()) > report.tolerance
    else:  # each row has the same mask in every cut: no cut can show it
        assert max(report.errors.values()) <= report.tolerance


# --- State -----------------------------------------------------------------------


class Normed(eqx.Module):
    line: Line
    norm: eqx.nn.BatchNorm
    scale: jax.Array

    def __init__(self, axis_name: Any = "batch"):
        self.line = Line()
        self.norm = eqx.nn.BatchNorm(2, axis_name, mode="batch")
        self.scale = jnp.array([1.0, -0.5])

    def __call__(self, x, state):
        out, state = self.norm(self.line(x), state)
        return jnp.tanh(out * self.scale), state


class Running(eqx.Module):
    """A batch statistic of one's own: the loss reads what the pass before wrote."""

    line: Line
    index: eqx.nn.StateIndex
    reads: bool

    def __init__(self, reads: bool):
        self.line = Line()
        self.index = eqx.nn.StateIndex(jnp.zeros(2))
        self.reads = reads

    def __call__(self, x, state):
        out = self.line(x)
        old = state.get(self.index)
        new = 0.9 * old + 0.1 * jax.lax.pmean(jax.lax.stop_gradient(out), "batch")
        return out - (old if self.reads else 0.0), state.set(self.index, new)


def stateful(model, state, example, key):
    out, state = model(example[0], state)
    return jnp.sum((out - example[1]) ** 2), state


def test_batch_norm_is_named_and_inference_mode_is_fine():
    model, state = eqx.nn.make_with_state(Normed)(("data", "batch"))
    report = eqaccum.check(model, data(), stateful, state=state, examples=3)
    assert len(report.causes) == 1 and "BatchNorm (norm)" in report.causes[0]
    assert "GroupNorm" in report.remedies[0]
    moded = eqx.nn.inference_mode(model)
    assert eqaccum.check(moded, data(), stateful, state=state, examples=3).ok


def test_state_that_the_loss_reads_and_one_that_it_only_writes():
    for reads in (True, False):
        model, state = eqx.nn.make_with_state(Running)(reads)
        report = eqaccum.check(model, data(), stateful, state=state, examples=3)
        assert report.ok is not reads
        if reads:
            assert "reads the state" in report.causes[0]


# --- The report ------------------------------------------------------------------


def test_report_is_a_small_table_and_computed_in_float64():
    report = eqaccum.check(Line(), data(), plain)
    assert report.dtype == "float64" and report.cuts == ("2+2", "3+1")
    assert max(report.errors.values()) < 1e-12
    lines = str(report).splitlines()
    assert lines[0] == "check: nothing wrong was found"
    assert {line.split()[0] for line in lines[2:]} == {".weight", ".bias"}
    with pytest.raises(AttributeError):
        report.ok = False
    with pytest.raises(TypeError):
        report.errors[".weight"] = 0.0


def test_falls_back_where_float64_cannot_be():
    report = eqaccum.check(Line(), data(), float32_by_name)
    assert report.tolerance > 1e-4  # that of float32
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("examples", [4, 5])
def test_number_of_examples(examples):
    assert eqaccum.check(Line(), data(), per_row, examples=examples).ok
    assert not eqaccum.check(Line(), data(), centred, examples=examples).ok


def test_a_wrong_term_counts_beside_a_large_right_one():
    """A leaf is compared with its own norm, not with that of all."""

    @batched
    def small(model, batch, keys):
        x, y = batch
        off = jnp.mean(model.bias[0] * batch[0][:, 0]) ** 2
        return jnp.sum(jax.vmap(lambda a: model.weight @ a)(x) ** 2, -1) + 0.01 * off

    report = eqaccum.check(Line(), data(), small)
    assert report.errors[".weight"] < 1e-9 and report.errors[".bias"] > 0.1


def test_default_loss_frozen_leaves_aux_and_in_axes():
    assert eqaccum.check(Line(), data()).ok
    report = eqaccum.check(
        Line(),
        (*data(), np.float32([0.5, 2.0])),
        lambda m, e, k: (error(m, e[:2]) * e[2][0], {"z": e[2][1]}),
        has_aux=True,
        in_axes=(0, 0, None),
        trainable=lambda leaf: leaf.ndim == 2,
    )
    assert report.ok and set(report.errors) == {".weight"}


def test_bad_arguments():
    with pytest.raises(eqaccum.InputError, match="examples=2 "):
        eqaccum.check(Line(), data(), plain, examples=2)
    with pytest.raises(eqaccum.InputError, match="with 1 row; it needs at least 3"):
        eqaccum.check(Line(), data(1), plain)
    with pytest.raises(ZeroDivisionError):  # the loss's own exception
        eqaccum.check(Line(), data(), lambda m, e, k: 1 / 0)


def test_not_finite():
    x, y = data()
    report = eqaccum.check(Line(), (x * np.inf, y), plain)
    assert not report.ok and "not finite" in report.causes[0]
    assert report.errors == {}


def test_an_iterator_is_told_that_it_lost_a_batch():
    batches = iter([data()])
    with pytest.warns(eqaccum.EqaccumWarning, match="took the first batch"):
        assert eqaccum.check(Line(), batches, plain).ok


# --- Before the first step of `fit` ----------------------------------------------


def fit(loss, model: Any = None, **kwargs: Any):
    kwargs = {"global_batch": 8, "microbatch": 4, "steps": 1} | kwargs
    return eqaccum.fit(
        Line() if model is None else model,
        data(8),
        loss=loss,
        optimizer=optax.sgd(0.1),
        progress=False,
        **kwargs,
    )


@pytest.mark.parametrize(
    "loss, cause",
    [(mean_of_means, "mean of means"), (first_key, "one key"), (centred, "statistics")],
)
def test_fit_warns_before_the_first_step(loss: Callable, cause: str):
    with pytest.warns(eqaccum.EqaccumWarning, match=f"self-test.*{cause}") as caught:
        fit(loss)
    assert len(caught) == 1


def test_fit_warns_again_of_the_same_program_without_compiling_the_test():
    for _ in range(2):
        with compilations() as names:
            with pytest.warns(eqaccum.EqaccumWarning, match="self-test"):
                fit(divided_by_rows)
    assert names == []


def test_fit_is_silent_on_right_batched_losses():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(row_dropout)
        fit(batched(summed, weighted=True), microbatch=8)


def test_fit_tests_nothing_where_nothing_can_go_wrong(monkeypatch):
    from eqaccum._doors import _check

    monkeypatch.setattr(_check, "compare", None)  # calling it would raise
    fit(plain)
    fit(dropout)
    fit(per_row, microbatch=1)  # one row cannot be cut
    fit(coupled(embed, head))


def test_fit_tests_a_state_that_the_loss_reads():
    model, state = eqx.nn.make_with_state(Running)(True)
    with pytest.warns(eqaccum.EqaccumWarning, match="reads the state"):
        fit(stateful, model, state=state)
    model, state = eqx.nn.make_with_state(Running)(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(stateful, model, state=state)


def test_fit_passes_rows_of_positive_weight_to_the_test():
    weights = np.ones(8, np.float32)
    weights[::2] = 0
    x, y = data(8)
    x[::2] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eqaccum.fit(
            Line(),
            (x, y),
            global_batch=8,
            loss=per_row,
            example_weights=weights,
            progress=False,
        )


@pytest.mark.devices(4)
def test_fit_tests_on_several_devices():
    with pytest.warns(eqaccum.EqaccumWarning, match="mean of means"):
        fit(mean_of_means, global_batch=8, microbatch=2)
