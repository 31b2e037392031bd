"""How often the user's loss is traced, and what is compiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations

import eqaccum

ROWS = 10
SGD = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def nothing_kept():
    """No program of an earlier test answers."""
    from eqaccum._step import forget

    forget()


class Linear(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.vdot(self.w, x)


class Loss:
    """Squared error that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, model, example, key):
        self.traces += 1
        x, y = example
        return (model(x) - y) ** 2


def model() -> Linear:
    return Linear(jnp.ones(3))


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3)).astype(np.float32)
    return x, x @ np.array([1.0, 2.0, 3.0], np.float32)


def programs(names: list[str]) -> list[str]:
    """eqaccum's own programs among those compiled, by their short names."""
    own = "jit(eqaccum_"
    return sorted(n.removeprefix(own)[:-1] for n in names if n.startswith(own))


def test_five_steps_and_a_tail_trace_once():
    loss = Loss()
    x, y = data(22)
    step = eqaccum.make_step(loss, SGD, global_batch=4, microbatch=2)
    train = step.init(model())
    with compilations() as first:
        train, _ = step(train, (x[:4], y[:4]))
    assert loss.traces == 1
    assert programs(first) == ["accumulate", "finish", "update"]
    with compilations() as later:
        for start in range(4, 20, 4):
            train, _ = step(train, (x[start : start + 4], y[start : start + 4]))
    assert later == []
    with compilations() as tail:
        train, _ = step(train, (x[20:], y[20:]))
        train, _ = step(train, (x[20:21], y[20:21]))
        train, _ = step(train, (x[:3], y[:3]))
    assert (loss.traces, train.step) == (1, 8)
    # The passes that hold only padding are left out, by one more program.
    assert tail == ["jit(eqaccum_accumulate)"]


def test_a_run_with_tails_traces_once():
    loss = Loss()
    with compilations() as names:
        result = eqaccum.fit(
            model(), data(), global_batch=4, microbatch=2, loss=loss, epochs=3
        )
    assert (loss.traces, result.train.step) == (1, 9)
    assert programs(names) == ["accumulate", "accumulate", "finish", "init", "update"]
    assert len(names) == 5, names


def test_a_whole_batch_needs_no_second_program_for_its_tail():
    loss = Loss()
    with compilations() as names:
        eqaccum.fit(model(), data(), global_batch=4, loss=loss, epochs=2)
    assert loss.traces == 1
    assert programs(names) == ["accumulate", "finish", "init", "update"]


def test_a_search_compiles_at_most_three_sizes():
    x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    mlp = Linear(jnp.eye(16))

    def loss(model, example, key):
        return jnp.sum(jnp.tanh(model.w @ jnp.tanh(model.w @ example)))

    whole = eqaccum.plan(mlp, x, global_batch=256, loss=loss, memory_limit="1GiB")
    assert whole.num_microbatches == 1
    limit = whole.predicted_bytes * 3 // 4
    with compilations() as names:
        result = eqaccum.fit(mlp, x, global_batch=256, loss=loss, memory_limit=limit)
    assert result.plan.num_microbatches > 1
    assert result.plan.predicted_bytes <= limit
    found = programs(names)
    assert 1 <= found.count("accumulate") <= 3
    assert [found.count(name) for name in ("finish", "update", "init")] == [0, 0, 1]
    assert result.plan.compilations == found.count("accumulate")
    with compilations() as again:
        second = eqaccum.fit(mlp, x, global_batch=256, loss=loss, memory_limit=limit)
    assert again == []
    assert second.plan.num_microbatches == result.plan.num_microbatches
    assert second.plan.compilations == 0


def test_a_second_fit_traces_once_and_compiles_nothing():
    loss = Loss()
    arguments = {"global_batch": 4, "microbatch": 2, "loss": loss, "epochs": 2}
    first = eqaccum.fit(model(), data(), **arguments)
    assert loss.traces == 1
    with compilations() as names:
        second = eqaccum.fit(model(), data(), **arguments)
    assert loss.traces == 2
    assert names == []
    np.testing.assert_array_equal(first.history["loss"], second.history["loss"])
    np.testing.assert_array_equal(first.model.w, second.model.w)


def test_a_new_closure_each_time_compiles_nothing():
    def run(scale):
        def loss(model, example, key):
            x, y = example
            return jnp.sum(scale * (model(x) - y) ** 2)

        return eqaccum.fit(
            model(), data(), global_batch=4, microbatch=2, loss=loss, optimizer=SGD
        )

    one = run(jnp.float32(1.0))
    with compilations() as names:
        two = run(jnp.float32(2.0))
    # The captured array is an argument: the same program, and its new value is seen.
    assert names == []
    np.testing.assert_allclose(two.history["loss"][0], 2 * one.history["loss"][0])


def test_numpy_then_device_arrays():
    loss = Loss()
    x, y = data()
    step = eqaccum.make_step(loss, SGD, global_batch=4, microbatch=2)
    train = step.init(model())
    train, first = step(train, (x[:4], y[:4]))
    elsewhere = jax.devices()[1]
    others = [
        (jnp.asarray(x[:4]), jnp.asarray(y[:4])),
        (jax.device_put(x[:4], elsewhere), jax.device_put(y[:4], elsewhere)),
        (x[:4].astype(np.float64), list(map(float, y[:4]))),
    ]
    with compilations() as names:
        for batch in others:
            train, _ = step(train, batch)
    assert loss.traces == 1
    assert names == []


@pytest.mark.parametrize("leaf", ["weak", "numpy", "numpy64", "other device"])
def test_parameters_of_every_origin(leaf):
    made = {
        "weak": lambda: jnp.asarray(0.5),
        "numpy": lambda: np.float32(0.5) * np.ones(()),
        "numpy64": lambda: np.asarray(0.5),
        "other device": lambda: jax.device_put(np.float32(0.5), jax.devices()[1]),
    }
    traces = []

    def loss(model, example, key):
        traces.append(model)
        return (model["w"] - example) ** 2

    y = np.arange(4, dtype=np.float32)
    step = eqaccum.make_step(loss, SGD, global_batch=4, microbatch=2)
    train = step.init({"w": made[leaf]()})
    train, _ = step(train, y)
    with compilations() as names:
        train, _ = step(train, y)
    assert (len(traces), names) == (1, [])
    # Two steps of sgd(0.1) on the mean of (w - y)**2, by hand.
    np.testing.assert_allclose(train.model["w"], 1.5 - 0.8**2 * 1.0, rtol=1e-6)
    assert train.model["w"].dtype == np.float32


def counting(start) -> optax.GradientTransformation:
    """sgd(0.1 * count) whose count starts as a Python number, or weakly typed."""

    def init(parameters):
        return start()

    def update(updates, count, parameters=None):
        return jax.tree.map(lambda g: -0.1 * count * g, updates), count + 1

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("start", [lambda: 1, lambda: 1.0, lambda: jnp.asarray(1.0)])
def test_an_optimizer_seeded_by_a_python_number(start):
    y = np.zeros(4, np.float32)

    def loss(model, example, key):
        return (model - example) ** 2

    step = eqaccum.make_step(loss, counting(start), global_batch=4, microbatch=2)
    train = step.init(jnp.float32(1.0))
    train, _ = step(train, y)
    with compilations() as names:
        train, _ = step(train, y)
    assert names == []
    # w (1 - 0.2 * 1) (1 - 0.2 * 2)
    np.testing.assert_allclose(train.model, 0.48, rtol=1e-6)
    assert float(train.opt_state) == 3


def test_a_new_trailing_shape_shares_finish_and_update():
    def loss(model, example, key):
        return jnp.mean((model - example) ** 2)

    step = eqaccum.make_step(loss, SGD, global_batch=2, microbatch=1)
    train = step.init(jnp.float32(1.0))
    train, _ = step(train, np.ones((2, 3), np.float32))
    with compilations() as names:
        train, _ = step(train, np.ones((2, 5), np.float32))
        train, _ = step(train, np.ones((2, 3), np.float32))
    assert programs(names) == ["accumulate"]


def test_programs_have_names_in_a_profile():
    from eqaccum._step._compile import _programs

    eqaccum.fit(model(), data(), global_batch=4, microbatch=2, loss=Loss())
    texts = {p.name: p.compiled.as_text() for p in _programs.values()}
    assert set(texts) == {"init", "accumulate", "finish", "update"}
    for name, text in texts.items():
        assert text.startswith(f"HloModule jit_eqaccum_{name},"), text[:60]
    assert "eqaccum/microbatch" in texts["accumulate"]


def test_host_callbacks_are_those_of_this_loss():
    # A program's text does not tell which Python function it calls.
    def run(factor):
        def loss(model, example, key):
            scale = jax.pure_callback(
                lambda _: np.float32(factor),
                jax.ShapeDtypeStruct((), jnp.float32),
                example[1],
                vmap_method="sequential",
            )
            return scale * jnp.sum(model.w)

        return eqaccum.fit(
            model(), data(4), global_batch=4, microbatch=2, loss=loss, optimizer=SGD
        )

    for factor in (1, 2):
        np.testing.assert_allclose(run(factor).history["loss"], [3 * factor])
