"""microbatch="fastest": tried on real steps, settled, remembered, nothing wasted."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

N = 64
X = np.random.default_rng(0).normal(size=(4 * N, 5)).astype(np.float32)


def loss(w, x, key):
    return jnp.sum((x @ w - 1) ** 2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import eqaccum._plan._cache

    monkeypatch.setenv("EQACCUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(eqaccum._plan._cache, "_process", {})


def run(trial, seconds):
    """Feeds a trial with times by microbatch until it settles; the steps it took."""
    steps = 0
    while not trial.settled:
        trial.note(seconds(trial.current.cut.microbatch))
        steps += 1
        assert steps < 200
    return steps


def begin():
    import eqaccum
    from eqaccum._step._fastest import start_trial

    step = eqaccum.make_step(loss, optax.sgd(0.1), global_batch=N)
    step(step.init(jnp.ones(5)), X[:N])
    (ready,) = step._ready.values()
    return ready, start_trial(ready)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (lambda n: 1.0 + n, 1),
        (lambda n: 1.0 / n, 64),
        (lambda n: 1.0 + abs(n - 16), 16),
    ],
)
def test_the_best_of_the_sizes_that_were_tried(seconds, best):
    ready, trial = begin()
    steps = run(trial, seconds)
    assert trial.current.cut.microbatch == best
    assert steps <= 7 * 5  # seven sizes from 64 to 1, five steps each
    assert f"settled on {best}" in trial.current.plan.notes[-1]


def test_a_slow_step_among_the_timed_ones_does_not_decide():
    ready, trial = begin()
    count = iter(range(1000))

    def noisy(n):
        return 100.0 if next(count) % 5 == 1 else 1.0 + abs(n - 8)

    run(trial, noisy)
    assert trial.current.cut.microbatch == 8


def test_two_clearly_slower_sizes_end_the_trial():
    ready, trial = begin()
    tried = set()

    def seconds(n):
        tried.add(n)
        return 1.0 + (64 - n)

    run(trial, seconds)
    assert tried == {64, 32, 16}


def test_what_was_found_is_remembered():
    ready, trial = begin()
    run(trial, lambda n: 1.0 + abs(n - 16))
    from eqaccum._step._fastest import start_trial

    again = start_trial(ready)
    assert again.settled and again.current.cut.microbatch == 16


def test_training_goes_on_through_the_trial(capsys):
    import eqaccum

    given = {"global_batch": N, "loss": loss, "optimizer": optax.sgd(1e-2)}
    given |= {"steps": 45, "progress": False}
    tried = eqaccum.fit(jnp.ones(5), X, epochs=50, microbatch="fastest", **given)
    plain = eqaccum.fit(jnp.ones(5), X, epochs=50, **given)
    assert tried.train.step == plain.train.step == 45
    np.testing.assert_allclose(
        tried.history["loss"], plain.history["loss"], rtol=1e-4, atol=1e-6
    )
    said = capsys.readouterr().err
    assert 'microbatch="fastest" tried 64: ' in said
    assert str(tried.plan.microbatch) in said.split("settled on ")[1]
    assert "settled on" in str(tried.plan)


def test_refused_where_the_result_depends_on_it():
    import eqaccum

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        5, axis_name="batch", mode="batch"
    )

    def stateful(model, state, x, key):
        out, state = model(x, state)
        return jnp.sum(out), state

    step = eqaccum.make_step(
        stateful, optax.sgd(0.1), global_batch=N, microbatch="fastest"
    )
    with pytest.raises(eqaccum.InputError, match="does not depend on the microbatch"):
        step.init(norm, state=state)
    for door in (eqaccum.evaluate, eqaccum.plan):
        more = {"global_batch": N} if door is eqaccum.plan else {}
        with pytest.raises(eqaccum.InputError, match="tried on steps of training"):
            door(jnp.ones(5), X, loss=loss, microbatch="fastest", **more)


def test_a_size_that_does_not_fit_is_passed_over():
    """Memory is not monotone: one row per pass may need more than eight."""
    from eqaccum._step._fastest import start_trial

    ready, _ = begin()
    tight = dataclasses.replace(ready.plan, limit_bytes=ready.plan.predicted_bytes // 2)
    trial = start_trial(dataclasses.replace(ready, plan=tight))
    run(trial, lambda n: 1.0 / (65 - n))
    for passes, used in trial._ready.items():
        if passes != 1:
            assert used.plan.predicted_bytes <= tight.limit_bytes
