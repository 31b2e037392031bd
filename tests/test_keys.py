"""The keys that examples get: of the batch and the position, never of the cut.

The formula is written out here with `jax.random` alone.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum

KEY = jax.random.key(2024)


def expected(key, batch_index, rows):
    """(keys of the rows, the step's key) as key data."""
    rows_key, shared = jax.random.split(jax.random.fold_in(key, batch_index))
    keys = [jax.random.fold_in(rows_key, i) for i in range(rows)]
    return (
        np.stack([jax.random.key_data(k) for k in keys]),
        np.asarray(jax.random.key_data(shared)),
    )


def shows_its_keys(w, x, key, step_key):
    """A loss whose auxiliary outputs are the keys that it was given."""
    aux = {"key": jax.random.key_data(key), "step": jax.random.key_data(step_key)}
    return w * x, aux


def shows_its_keys_batched(w, x, keys, step_key):
    step = jnp.broadcast_to(jax.random.key_data(step_key), (len(x), 2))
    return w * x, {"key": jax.random.key_data(keys), "step": step}


FORMS = {
    "one example": eqaccum.shared_key(shows_its_keys),
    "batched": eqaccum.shared_key(eqaccum.batched(shows_its_keys_batched)),
}


def make_step(form, rows, microbatch, **options):
    return eqaccum.make_step(
        FORMS[form],
        optax.sgd(0.0),
        global_batch=rows,
        microbatch=microbatch,
        has_aux=True,
        **options,
    )


def assert_keys(aux, key, batch_index, rows):
    keys, shared = expected(key, batch_index, rows)
    np.testing.assert_array_equal(aux["key"], keys)
    np.testing.assert_array_equal(aux["step"], np.tile(shared, (rows, 1)))


@pytest.mark.parametrize(
    "form,microbatch",
    [("one example", 1), ("one example", 3), ("one example", 8), ("batched", 3)],
)
def test_the_formula(form, microbatch):
    """For every cut, in full batches and in short ones."""
    step = make_step(form, 8, microbatch)
    train = step.init(jnp.float32(1), KEY)
    for index, rows in enumerate((8, 5, 1, 8)):
        train, metrics = step(train, np.ones(rows, np.float32))
        assert_keys(metrics.aux, KEY, index, rows)


def test_rows_of_weight_zero_do_not_shift_the_keys():
    step = make_step("one example", 6, 2)
    train = step.init(jnp.float32(1), KEY)
    weights = np.array([0, 1, 0, 0, 2, 1], np.float32)
    _, metrics = step(train, np.ones(6, np.float32), weights=weights)
    keys, _ = expected(KEY, 0, 6)
    np.testing.assert_array_equal(metrics.aux["key"], keys * (weights > 0)[:, None])


def test_a_skipped_batch_uses_its_keys_up():
    step = make_step("one example", 4, 2, nonfinite="skip")
    train = step.init(jnp.float32(1), KEY)
    good, bad = np.ones(4, np.float32), np.array([1, np.inf, 1, 1], np.float32)
    for index, batch in enumerate((good, bad, good)):
        train, metrics = step(train, batch)
        assert metrics.skipped == (batch is bad)
        assert_keys(metrics.aux, KEY, index, 4)
    assert (train.step, train.batch_index) == (2, 3)


def test_no_key_comes_twice_in_a_run():
    """Neither of two positions, nor of a position and a batch's number."""
    step = make_step("one example", 12, 5)
    train = step.init(jnp.float32(1), KEY)
    seen = []
    for _ in range(12):
        train, metrics = step(train, np.ones(12, np.float32))
        seen += [*np.asarray(metrics.aux["key"]), np.asarray(metrics.aux["step"][0])]
    assert len({key.tobytes() for key in seen}) == 12 * 13


def test_no_key_is_key_zero_and_legacy_keys_are_keys():
    step = make_step("one example", 2, 1)
    batch = np.ones(2, np.float32)
    legacy = np.asarray(jax.random.PRNGKey(7))
    for given, key in (
        (None, jax.random.key(0)),
        (jax.random.PRNGKey(7), jax.random.key(7)),
        (legacy, jax.random.key(7)),
    ):
        _, metrics = step(step.init(jnp.float32(1), given), batch)
        assert_keys(metrics.aux, key, 0, 2)


def test_a_key_of_another_kind_is_converted_once_and_said(capsys):
    """An rbg key would give other masks under another cut."""
    key = jax.random.key(5, impl="rbg")
    seen = []
    for microbatch in (1, 3):
        step = make_step("one example", 4, microbatch)
        train = step.init(jnp.float32(1), key)
        said = capsys.readouterr().err
        assert said.count("rbg") == 1 and "threefry" in said
        for _ in range(2):
            train, metrics = step(train, np.ones(4, np.float32))
        assert capsys.readouterr().err == ""
        seen.append(np.asarray(metrics.aux["key"]))
    np.testing.assert_array_equal(seen[0], seen[1])
    assert len({row.tobytes() for row in seen[0]}) == 4


@pytest.mark.parametrize(
    "key",
    [
        7,
        "seed",
        jnp.float32(1),
        jax.random.split(jax.random.key(0)),
        np.zeros(3, np.uint32),
        np.zeros(2, np.int32),
    ],
    ids=["int", "text", "float", "two keys", "three words", "signed"],
)
def test_what_is_no_key_is_refused(key):
    step = make_step("one example", 2, 1)
    with pytest.raises(eqaccum.InputError, match="key"):
        step.init(jnp.float32(1), key)
    fn = eqaccum.value_and_grad(lambda w, x, key: w * x, microbatch=1)
    with pytest.raises(eqaccum.InputError, match="key"):
        fn(jnp.float32(1), np.ones(2, np.float32), key=key)


@pytest.mark.parametrize("microbatch", [1, 2])
def test_fit_gives_each_row_the_key_of_its_place_in_its_batch(microbatch):
    """Three epochs of two batches: the batch's number goes on from epoch to epoch."""

    def loss(w, x, key):
        noise = jax.random.normal(key)
        return w * x * noise, {"noise": noise}

    result = eqaccum.fit(
        jnp.float32(1),
        np.ones(5, np.float32),
        global_batch=3,
        loss=loss,
        optimizer=optax.sgd(0.5),
        epochs=3,
        key=KEY,
        has_aux=True,
        microbatch=microbatch,
    )
    sizes = [3, 2] * 3

    @jax.jit
    def noise(index):
        rows_key, _ = jax.random.split(jax.random.fold_in(KEY, index))
        at = jnp.arange(3)
        return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(rows_key, i)))(
            at
        )

    means = [noise(i)[:rows].mean() for i, rows in enumerate(sizes)]
    np.testing.assert_allclose(result.history["noise"], means, rtol=1e-5)
    np.testing.assert_allclose(result.model, 1 - 0.5 * np.sum(means), rtol=1e-5)


def test_noise_of_the_step_is_the_same_for_all_rows_and_differs_between_steps():
    """Shared noise moves the whole batch: its variance does not shrink with N."""

    def loss(w, x, key, step_key):
        noise = jax.random.normal(step_key)
        return w * noise, {"noise": noise, "square": noise**2}

    step = eqaccum.make_step(
        eqaccum.shared_key(loss),
        optax.sgd(0.0),
        global_batch=4,
        microbatch=2,
        has_aux=True,
    )
    train = step.init(jnp.float32(1), KEY)
    noises = []
    for _ in range(3):
        train, metrics = step(train, np.ones(4, np.float32))
        aux = metrics.aux
        np.testing.assert_allclose(aux["noise"] ** 2, aux["square"], rtol=1e-6)
        noises.append(float(aux["noise"]))
    assert all(a != b for a, b in itertools.combinations(noises, 2))
