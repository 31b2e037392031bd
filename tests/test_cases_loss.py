"""Faults that others met in the weighting of losses, each with its right answer.

The numbers are worked out by hand or by `jax.grad` of all rows at once.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum


def one_step(loss, batch, *, n, w=0.0, rows=None, optimizer=None, **options):
    """(model, metrics) after one step of gradient descent with rate 1."""
    weights = options.pop("weights", None)
    step = eqaccum.make_step(
        loss,
        optimizer or optax.sgd(1.0),
        global_batch=rows or len(jax.tree.leaves(batch)[0]),
        microbatch=n,
        **options,
    )
    train = step.init(jnp.asarray(w, jnp.float32))
    train, metrics = step(train, batch, weights=weights)
    return train.model, metrics


def f32(*values):
    return np.array(values, np.float32)


def square(w, y, key):
    return (w - y) ** 2


def masked_square(w, example, key):
    y, mask = example
    return eqaccum.Mean(jnp.sum(mask * (w - y) ** 2), jnp.sum(mask))


# --- means over items --------------------------------------------------------------

FORMS = {
    "one example": masked_square,
    "batched": eqaccum.batched(
        lambda w, batch, keys: eqaccum.Mean(
            jnp.sum(batch[1] * (w - batch[0]) ** 2, axis=1), jnp.sum(batch[1], axis=1)
        )
    ),
    "weighted": eqaccum.batched(
        lambda w, batch, keys, weights: eqaccum.Mean(
            jnp.sum(weights[:, None] * batch[1] * (w - batch[0]) ** 2),
            jnp.sum(weights[:, None] * batch[1]),
        ),
        weighted=True,
    ),
}


@pytest.mark.parametrize("form,n", [*((form, 1) for form in FORMS), ("weighted", 2)])
def test_a_token_mean_is_over_all_tokens_of_the_global_batch(form, n):
    """Not a mean of the means of two sequences of different length, which is -6."""
    y = np.stack([f32(1, 0, 0), f32(5, 5, 5)])
    mask = np.stack([f32(1, 0, 0), f32(1, 1, 1)])
    model, metrics = one_step(FORMS[form], (y, mask), n=n)
    assert float(model) == 8
    assert float(metrics.loss) == 19
    assert float(metrics.weight) == 4
    assert float(metrics.grad_norm) == 8


@pytest.mark.parametrize("n", [1, 2, 8])
def test_neither_the_sum_nor_divided_twice(n):
    """-36 is the sum of the means of microbatches, -2.25 their mean over again."""
    model, metrics = one_step(square, np.arange(1, 9, dtype=np.float32), n=n)
    assert float(model) == 9
    assert (float(metrics.loss), float(metrics.grad_norm)) == (25.5, 9)


@pytest.mark.parametrize("n", [3, 4, 7, 16])
def test_a_remainder_weighs_what_its_rows_weigh(n):
    """-20/3 is the mean of the microbatches' means, -10/3 counts rows of zeros."""
    y = f32(*[0] * 8, 10, 10)
    model, metrics = one_step(square, y, n=n)
    assert float(model) == 4
    assert (float(metrics.loss), metrics.examples) == (20, 10)


@pytest.mark.parametrize("n", [2, 3])
def test_padding_reaches_no_row_of_an_embedding(n):
    """Ids that were padded with 0 would give row 0 a gradient."""
    ids = np.array([1, 2, 3], np.int32)
    table, _ = one_step(
        lambda table, i, key: table[i] ** 2, ids, n=n, w=np.ones(4), rows=4
    )
    np.testing.assert_allclose(1 - table, [0, 2 / 3, 2 / 3, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize("form,n", [*((form, 1) for form in FORMS), ("batched", 2)])
def test_a_microbatch_without_a_valid_token(form, n):
    y = np.stack([f32(9, 9), f32(2, 4)])
    mask = np.stack([f32(0, 0), f32(1, 1)])
    model, metrics = one_step(FORMS[form], (y, mask), n=n)
    assert float(model) == 6
    assert (float(metrics.loss), float(metrics.weight)) == (10, 2)


@pytest.mark.parametrize("n", [1])
def test_a_global_batch_without_a_valid_token(n):
    """An error or a skipped step: never a NaN in the parameters."""
    good = (np.ones((2, 2), np.float32), np.ones((2, 2), bool))
    empty = (good[0], np.zeros((2, 2), bool))

    def steps(nonfinite):
        return eqaccum.make_step(
            masked_square,
            optax.adam(0.1),
            global_batch=2,
            microbatch=n,
            nonfinite=nonfinite,
        )

    step = steps("raise")
    train, _ = step(step.init(jnp.float32(0)), good)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(train)]
    with pytest.raises(eqaccum.NonFiniteError, match="step 2.*weight"):
        step(train, empty)
    for old, leaf in zip(before, jax.tree.leaves(train), strict=True):
        np.testing.assert_array_equal(leaf, old)  # valid still, and the same
    after, _ = step(train, good)
    assert after.step == 2

    step = steps("skip")
    train, _ = step(step.init(jnp.float32(0)), good)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(train)]
    skipped, metrics = step(train, empty)
    assert metrics.skipped and float(metrics.weight) == 0
    assert (skipped.step, skipped.batch_index) == (1, 2)
    for old, leaf in zip(before[:-1], jax.tree.leaves(skipped)[:-1], strict=True):
        np.testing.assert_array_equal(leaf, old)


@pytest.mark.parametrize("n", [1])
def test_one_of_two_means_without_a_valid_item(n):
    """It has no mean, which is said; the other one alone would be another loss."""

    def loss(w, example, key):
        y, mask = example
        first = eqaccum.Mean((w - y) ** 2, 1)
        return first + eqaccum.Mean(mask * w, mask)

    empty = (f32(1, 2), f32(0, 0))
    with pytest.raises(eqaccum.NonFiniteError, match="weight"):
        one_step(loss, empty, n=n)
    model, _ = one_step(loss, (f32(1, 2), f32(0, 1)), n=n)
    assert float(model) == 3 - 1


@pytest.mark.parametrize("n", [2, 4])
def test_a_penalty_counts_once(n):
    """2.2 counts it twice, 1.3 half."""
    model, metrics = one_step(
        square, f32(1, 2, 3, 4), n=n, w=3, penalty=lambda w: 0.1 * w**2
    )
    np.testing.assert_allclose(3 - model, 1.6, rtol=1e-6)
    np.testing.assert_allclose(metrics.loss, 1.5)
    np.testing.assert_allclose(metrics.penalty, 0.9)
    np.testing.assert_allclose(metrics.grad_norm, 1.6, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_clipped_once_on_the_finished_gradient(n):
    """Clipped in each microbatch it would be [0.5, 0.5]."""
    model, metrics = one_step(
        lambda w, c, key: jnp.dot(c, w),
        np.stack([f32(3, 0), f32(0, 4)]),
        n=n,
        w=np.zeros(2),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    )
    np.testing.assert_allclose(model, [-0.6, -0.8], rtol=1e-6)
    assert float(metrics.grad_norm) == 2.5  # before clipping


# --- dtypes ------------------------------------------------------------------------


def test_the_accumulator_is_wider_than_bfloat16():
    """Summed in bfloat16, 512 ones stop at 256, which is a mean of one half."""
    step = eqaccum.make_step(
        lambda w, x, key: w * x, optax.sgd(1.0), global_batch=512, microbatch=1
    )
    train = step.init(jnp.bfloat16(0))
    train, metrics = step(train, np.ones(512, np.float32))
    assert (train.model.dtype, float(train.model)) == (jnp.bfloat16, -1)
    assert step.plan.parts.accumulator == 4  # what the plan counts is its real dtype
    assert step.plan.parts.parameters == 2


@pytest.mark.parametrize("name", ["adafactor", "adamw", "sgd"])
def test_bfloat16_parameters_keep_all_dtypes(name):
    step = eqaccum.make_step(
        lambda w, x, key: jnp.sum((w @ x) ** 2),
        getattr(optax, name)(0.125),
        global_batch=4,
        microbatch=2,
    )
    train = step.init(jnp.ones((2, 3), jnp.bfloat16))
    dtypes = [[x.dtype for x in jax.tree.leaves(train)]]
    for _ in range(2):
        train, _ = step(train, np.ones((4, 3), jnp.bfloat16))
        dtypes.append([x.dtype for x in jax.tree.leaves(train)])
    assert dtypes[0] == dtypes[1] == dtypes[2]
    assert train.model.dtype == jnp.bfloat16


# --- dropout -----------------------------------------------------------------------


def test_every_example_has_a_mask_of_its_own_whatever_the_cut():
    dropout = eqx.nn.Dropout(0.5)

    def loss(w, x, key):
        kept = dropout(x, key=key)
        return jnp.sum(w * kept), kept > 0

    key = jax.random.key(42)
    masks, models = {}, {}
    for n in (1, 2, 4, 8):
        step = eqaccum.make_step(
            loss, optax.sgd(1.0), global_batch=8, microbatch=n, has_aux=True
        )
        train = step.init(jnp.zeros(64), key)
        seen = []
        for _ in range(2):
            train, metrics = step(train, np.ones((8, 64), np.float32))
            seen.append(np.asarray(metrics.aux))
        masks[n], models[n] = np.stack(seen), np.asarray(train.model)

    @jax.jit
    def reference(index):
        rows, _ = jax.random.split(jax.random.fold_in(key, index))
        keys = jax.vmap(lambda i: jax.random.fold_in(rows, i))(jnp.arange(8))
        return jax.vmap(lambda k: dropout(jnp.ones(64), key=k) > 0)(keys)

    wanted = np.array([reference(0), reference(1)])
    for n in masks:
        np.testing.assert_array_equal(masks[n], wanted)
        np.testing.assert_allclose(
            models[n], -2 * wanted.mean(axis=1).sum(axis=0), rtol=1e-6
        )
    assert len({row.tobytes() for row in wanted.reshape(16, 64)}) == 16


# --- auxiliary outputs -------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_auxiliary_outputs(n):
    """3 rows of 1, 3 and 2 valid tokens; accuracies 1, 1/3 and 1/2: 3 of 6 tokens."""
    mask = np.array([[1, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    hit = np.array([[1, 1, 1], [0, 1, 0], [1, 0, 1]], bool)
    weights = f32(2, 1, 0.5)
    y = f32(1, 2, 3)

    def loss(w, example, key):
        y, mask, hit = example
        right = jnp.sum(mask & hit)
        value = (w - y) ** 2
        return value, {
            "accuracy": eqaccum.Mean(right, jnp.sum(mask)),
            "right": eqaccum.Sum(right),
            "value": value,
            "big": y > 1.5,
            "prediction": jnp.stack([w, y]),
            "hits": eqaccum.Sum(mask & hit),
            "nothing": None,
        }

    for given in (None, weights):
        w = np.ones(3) if given is None else given
        _, metrics = one_step(
            loss, (y, mask, hit), n=n, rows=4, has_aux=True, weights=given
        )
        aux, right, tokens = metrics.aux, (mask & hit).sum(1), mask.sum(1)
        assert float(metrics.loss) == pytest.approx(np.sum(w * y**2) / w.sum())
        assert float(aux["value"]) == pytest.approx(np.sum(w * y**2) / w.sum())
        assert float(aux["accuracy"]) == pytest.approx(w @ right / (w @ tokens))
        assert float(aux["big"]) == pytest.approx(w @ (y > 1.5) / w.sum())
        assert int(aux["right"]) == 3 and aux["right"].dtype == jnp.int32
        np.testing.assert_array_equal(aux["hits"], (mask & hit).sum(0))
        np.testing.assert_array_equal(aux["prediction"], np.stack([0 * y, y], 1))
        assert aux["nothing"] is None


def test_auxiliary_rows_of_weight_zero_are_zeros_and_count_nowhere():
    def loss(w, y, key):
        aux = {"rows": y[None], "sum": eqaccum.Sum(1), "mean": y, "nan": y * y}
        return w * y, aux

    _, metrics = one_step(
        loss, f32(3, np.nan, 5, 7), n=3, has_aux=True, weights=f32(1, 0, 3, 0)
    )
    aux = metrics.aux
    np.testing.assert_array_equal(aux["rows"], [[3], [0], [5], [0]])
    assert (int(aux["sum"]), float(aux["mean"]), float(aux["nan"])) == (2, 4.5, 21)


def test_an_integer_auxiliary_scalar_is_refused_with_the_choices():
    def loss(w, y, key):
        return w * y, {"count": jnp.int32(1)}

    with pytest.raises(eqaccum.InputError, match=r"\['count'\].*Sum.*Mean"):
        one_step(loss, f32(1, 2), n=1, has_aux=True)


@pytest.mark.parametrize("n", [2])
def test_auxiliary_outputs_of_batched_losses(n):
    y, tokens = f32(1, 2, 3), f32(5, 1, 2)
    weights = f32(2, 1, 0.5)

    def per_row(w, batch, keys):
        y, tokens = batch
        aux = {
            "value": y,
            "mean": eqaccum.Mean(y * tokens, tokens),
            "count": eqaccum.Sum(tokens.astype(jnp.int32)),
            "rows": jnp.stack([y, tokens], 1),
        }
        return (w - y) ** 2, aux

    def per_batch(w, batch, keys, weights):
        y, tokens = batch
        _, aux = per_row(w, batch, keys)
        items = weights * tokens
        value = eqaccum.Mean(jnp.sum(items * (w - y) ** 2), jnp.sum(items))
        return value, aux | {"in": eqaccum.Mean(jnp.sum(items * y), jnp.sum(items))}

    for loss in (
        eqaccum.batched(per_row),
        eqaccum.batched(per_batch, weighted=True),
    ):
        _, metrics = one_step(
            loss, (y, tokens), n=n, rows=4, has_aux=True, weights=weights
        )
        aux = metrics.aux
        assert float(aux["value"]) == pytest.approx(weights @ y / weights.sum())
        items = weights * tokens
        assert float(aux["mean"]) == pytest.approx(items @ y / items.sum())
        assert int(aux["count"]) == 8
        np.testing.assert_array_equal(aux["rows"], np.stack([y, tokens], 1))
        if "in" in aux:
            assert float(aux["in"]) == pytest.approx(items @ y / items.sum())


@pytest.mark.parametrize(
    "aux",
    [
        lambda y: eqaccum.Sum(jnp.sum(y)),
        lambda y: eqaccum.Mean(jnp.sum(y), jnp.float32(3)),
        lambda y: jnp.sum(y),
        lambda y: jnp.ones((1, 2)),
        lambda y: jnp.ones((5, 2)),
        lambda y: eqaccum.Sum(jnp.ones(5)),
    ],
)
def test_a_batched_auxiliary_output_has_one_value_per_row(aux):
    """A sum over the microbatch would be counted once for each of its rows."""

    def loss(w, y, keys):
        return (w - y) ** 2, {"it": aux(y)}

    with pytest.raises(eqaccum.InputError, match=r"\['it'\].*each row"):
        one_step(eqaccum.batched(loss), f32(1, 2, 3), n=3, has_aux=True)


def test_auxiliary_sums_keep_integers_exact():
    """Beyond float32's 2**24, of every integer dtype."""

    def loss(w, x, key):
        return w * 1.0, [eqaccum.Sum(v) for v in x]

    values = [
        np.full(3, 2**24 + 1, np.int32),
        np.full(3, 2**24 + 1, np.uint32),
        np.full(3, 255, np.uint8),
        np.full(3, -128, np.int8),
        np.array([True, False, True]),
    ]
    _, metrics = one_step(loss, values, n=1, has_aux=True)
    assert [int(x) for x in metrics.aux] == [50331651, 50331651, 765, -384, 2]


@pytest.mark.parametrize("n", [1, 4])
def test_the_reported_loss_is_the_full_batch_s_in_fit(n, capsys):
    result = eqaccum.fit(
        jnp.float32(0),
        f32(1, 2, 3, 4, 5, 6, 7, 8),
        global_batch=4,
        loss=lambda w, y, key: ((w - y) ** 2, {"first": y, "n": eqaccum.Sum(1)}),
        optimizer=optax.sgd(0.0),
        has_aux=True,
        shuffle=False,
        microbatch=n,
    )
    np.testing.assert_allclose(result.history["loss"], [7.5, 43.5])
    np.testing.assert_allclose(result.history["first"], [2.5, 6.5])
    np.testing.assert_array_equal(result.history["n"], [4, 4])
