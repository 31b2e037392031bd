"""The optimizer: once per step, on the finished gradient, as bare Optax would.

The losses are linear in the parameters with small integers as their slopes, so that
the gradient of the global batch is the same number whatever the order of its sum.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_close

import eqaccum

ROWS = 8


class Model(eqx.Module):
    """A matrix and a vector to train; a buffer, a function and a number beside them."""

    matrix: jax.Array
    vector: jax.Array
    buffer: jax.Array
    count: jax.Array
    function: object

    def __init__(self):
        self.matrix = jnp.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])
        self.vector = jnp.array([2.0, -1.0, 0.5, 4.0])
        self.buffer = jnp.ones(3)
        self.count = jnp.array(3)
        self.function = jnp.tanh


def trained(tree=None):
    """Which leaves are trained."""
    tree = jax.tree.map(lambda _: False, Model()) if tree is None else tree
    return eqx.tree_at(lambda m: (m.matrix, m.vector), tree, (True, True))


def loss(model, slopes, key):
    matrix, vector = slopes
    return jnp.sum(model.matrix * matrix) + jnp.sum(model.vector * vector) + 50.0


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(
            (rng.integers(1, 9, (ROWS, *shape)) * rng.choice([-1, 1], shape)).astype(
                np.float32
            )
            for shape in ((2, 3), (4,))
        )


def by_hand(optimizer, steps, *, takes_value):
    """(parameters, optimizer state) with bare Optax on what `eqx.partition` gives."""
    parameters, rest = eqx.partition(Model(), trained())
    if takes_value:
        optimizer = optax.with_extra_args_support(optimizer)

    def full(parameters, batch):
        model = eqx.combine(parameters, rest)
        return jnp.mean(jax.vmap(lambda slopes: loss(model, slopes, None))(batch))

    @jax.jit
    def update(parameters, state, batch):
        value, gradient = jax.value_and_grad(full)(parameters, batch)
        more = {"value": value} if takes_value else {}
        updates, state = optimizer.update(gradient, state, parameters, **more)
        return optax.apply_updates(parameters, updates), state

    state = jax.jit(optimizer.init)(parameters)
    for batch in batches(steps):
        parameters, state = update(parameters, state, batch)
    return parameters, state


def by_eqaccum(optimizer, steps, *, microbatch=3):
    step = eqaccum.make_step(
        loss, optimizer, global_batch=ROWS, microbatch=microbatch, trainable=trained()
    )
    train = step.init(Model(), jax.random.key(0))
    for batch in batches(steps):
        train, _ = step(train, batch)
    return train


def check(optimizer, *, takes_value, steps=3, rtol=2e-6):
    train = by_eqaccum(optimizer, steps)
    parameters, state = by_hand(optimizer, steps, takes_value=takes_value)
    got = eqx.filter(train.model, trained())
    assert_trees_close(got, parameters, rtol=rtol, atol=1e-6)
    assert jax.tree.structure(train.opt_state) == jax.tree.structure(state)
    assert_trees_close(train.opt_state, state, rtol=rtol, atol=1e-6)
    assert not np.array_equal(train.model.matrix, Model().matrix)
    np.testing.assert_array_equal(train.model.buffer, Model().buffer)
    assert (int(train.model.count), train.model.function) == (3, jnp.tanh)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 3)
SIMPLE = {
    "adadelta": optax.adadelta(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adagrad": optax.adagrad(0.1),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "adan": optax.adan(0.1, weight_decay=0.1),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1),
    "lion": optax.lion(0.1, weight_decay=0.1),
    "nadamw": optax.nadamw(0.1),
    "noisy_sgd": optax.noisy_sgd(0.1, eta=0.1, key=jax.random.key(3)),
    "novograd": optax.novograd(0.1),
    "radam": optax.radam(0.1, threshold=1.0),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9, centered=True),
    "rprop": optax.rprop(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": optax.sign_sgd(0.1),
    "ademamix": optax.contrib.ademamix(0.1),
    "adopt": optax.contrib.adopt(0.1),
    "cocob": optax.contrib.cocob(),
    "muon": optax.contrib.muon(0.1),
}
# Which look at all leaves at once, at the loss, or wrap another transformation.
WHOLE = {
    "clip": optax.chain(
        optax.clip_by_global_norm(1.0), optax.clip(0.4), optax.adaptive_grad_clip(0.5)
    ),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    ),
    "polyak": optax.polyak_sgd(),
    "prodigy": optax.contrib.prodigy(0.1),
    "mechanize": optax.contrib.mechanize(optax.sgd(0.1)),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=SCHEDULE, weight_decay=0.1
    ),
    "masked": optax.masked(
        optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "ema": optax.chain(optax.ema(0.9), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}


def each_on_its_own_leaf():
    """All simple ones in one transformation, each with a model of its own."""
    return optax.partition(SIMPLE, {name: name for name in SIMPLE})


def test_simple_transformations_equal_bare_optax():
    optimizer = each_on_its_own_leaf()
    step = eqaccum.make_step(
        lambda models, slopes, key: sum(loss(m, slopes, key) for m in models.values()),
        optimizer,
        global_batch=ROWS,
        microbatch=3,
        trainable={name: trained() for name in SIMPLE},
    )
    models = {name: Model() for name in SIMPLE}
    train = step.init(models)
    parameters, _ = eqx.partition(models, {name: trained() for name in SIMPLE})

    @jax.jit
    def update(parameters, state, batch):
        means = [x.mean(axis=0) for x in batch]
        gradient = {
            name: eqx.tree_at(lambda m: (m.matrix, m.vector), model, means)
            for name, model in parameters.items()
        }
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = jax.jit(optimizer.init)(parameters)
    for batch in batches(3):
        train, _ = step(train, batch)
        parameters, state = update(parameters, state, batch)
    got = eqx.filter(train.model, {name: trained() for name in SIMPLE})
    assert_trees_close(got, parameters, rtol=2e-6, atol=1e-6)
    assert jax.tree.structure(train.opt_state) == jax.tree.structure(state)
    assert_trees_close(train.opt_state, state, rtol=2e-6, atol=1e-6)
    for name, model in got.items():
        assert not np.array_equal(model.matrix, Model().matrix), name


@pytest.mark.parametrize("name", WHOLE)
def test_the_others_equal_bare_optax(name):
    check(WHOLE[name], takes_value=name != "sam")


@pytest.mark.parametrize("name", ["lbfgs", "MultiSteps", "dpsgd", "sophia"])
def test_what_cannot_work_is_refused_by_name(name):
    made = {
        "lbfgs": optax.lbfgs,
        "MultiSteps": lambda: optax.chain(
            optax.clip(1.0),
            optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(),
        ),
        "dpsgd": lambda: optax.chain(
            optax.contrib.differentially_private_aggregate(
                1.0, 1.0, key=jax.random.key(0)
            ),
            optax.sgd(0.1),
        ),
        "sophia": lambda: optax.contrib.sophia(0.1),
    }[name]()
    with pytest.raises(eqaccum.InputError) as caught:
        eqaccum.make_step(loss, made, global_batch=ROWS).init(Model())
    words = {
        "lbfgs": "line search",
        "MultiSteps": "MultiSteps",
        "dpsgd": "differentially_private",
        "sophia": "obj_fn",
    }[name]
    assert words in str(caught.value)


# --- the clock of the optimizer --------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, 2, 8])
def test_a_schedule_counts_steps(microbatch):
    """-(1 + 0.75 + 0.5), for every number of passes."""
    step = eqaccum.make_step(
        lambda w, x, key: w * x,
        optax.sgd(optax.linear_schedule(1, 0, 4)),
        global_batch=8,
        microbatch=microbatch,
    )
    train = step.init(jnp.float32(0))
    for _ in range(3):
        train, _ = step(train, np.ones(8, np.float32))
    assert float(train.model) == -2.25
    counts = [int(x) for x in jax.tree.leaves(train.opt_state)]
    assert counts == [3] and train.step == 3


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_decay_is_applied_once_per_step(microbatch):
    """0.9, not 0.9**4."""
    step = eqaccum.make_step(
        lambda w, x, key: 0 * w * x,
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0)),
        global_batch=4,
        microbatch=microbatch,
    )
    train, _ = step(step.init(jnp.float32(1)), np.ones(4, np.float32))
    assert float(train.model) == np.float32(1) - np.float32(0.1)


@pytest.mark.parametrize("microbatch", [2, 4])
def test_the_optimizers_value_is_the_whole_loss(microbatch):
    """The full batch's loss and the penalty, not the last microbatch's."""

    def init(parameters):
        del parameters
        return jnp.zeros(())

    def update(gradient, state, parameters=None, *, value, **more):
        del state, parameters, more
        return jax.tree.map(jnp.zeros_like, gradient), value

    step = eqaccum.make_step(
        lambda w, x, key: w * x,
        optax.GradientTransformationExtraArgs(init, update),
        global_batch=4,
        microbatch=microbatch,
        penalty=lambda w: 10.0 * w,
    )
    train = step.init(jnp.float32(2))
    train, metrics = step(train, np.array([1, 2, 3, 6], np.float32))
    assert float(train.opt_state) == 2 * 3 + 20
    assert (float(metrics.loss), float(metrics.penalty)) == (6, 20)


def test_a_complex_gradient_descends():
    """JAX gives the conjugate of what to subtract."""
    target = np.complex64(3 - 4j)
    step = eqaccum.make_step(
        lambda w, x, key: x * jnp.abs(w - target) ** 2,
        optax.adam(0.5),
        global_batch=4,
        microbatch=3,
    )
    train = step.init(jnp.complex64(1 + 1j))
    losses = []
    for _ in range(60):
        train, metrics = step(train, np.ones(4, np.float32))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.01 * losses[0]


# --- memory ----------------------------------------------------------------------


@functools.cache
def mlp_step(passes, *, width=64, rows=4):
    model = eqx.nn.MLP(16, 1, width, 2, key=jax.random.key(0))
    step = eqaccum.make_step(
        lambda m, x, key: jnp.sum(m(x) ** 2),
        optax.adam(1e-3),
        global_batch=passes * rows,
        microbatch=rows,
    )
    train = step.init(model)
    train, _ = step(train, np.ones((passes * rows, 16), np.float32))
    return step, train


def parameter_bytes(train):
    return sum(leaf.nbytes for leaf in train.trainable_leaves)


def test_temporaries_do_not_grow_with_the_number_of_passes():
    """At a fixed microbatch only the rows of the batch grow."""
    totals, parts = [], []
    for passes in (2, 4, 16):
        step, train = mlp_step(passes)
        assert step.plan.num_microbatches == passes
        totals.append(step.plan.predicted_bytes - step.plan.parts.batch)
        parts.append(step.plan.parts)
    size = parameter_bytes(train)
    assert max(totals) - min(totals) <= 0.02 * size
    # Parameters, two moments, one accumulator; a microbatch's gradient and activations.
    for part, total in zip(parts, totals, strict=True):
        assert (part.parameters, part.accumulator) == (size, size)
        assert 2 * size <= part.optimizer <= 2 * size + 64
        assert total <= 5.5 * size


def test_no_accumulator_is_carried_in_the_state():
    _, train = mlp_step(2)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(train))
    assert held <= 3 * parameter_bytes(train) + 64


def analysed(passes):
    """XLA's own figures of the accumulate program."""
    step, _ = mlp_step(passes)
    (ready,) = step._ready.values()
    return ready.accumulate.compiled.memory_analysis()


def test_the_arguments_grow_by_the_rows_alone():
    two, four = analysed(2), analysed(4)
    more = 2 * 4 * (16 * 4 + 4)  # two passes of 4 rows of 16 numbers and a weight
    grown = four.argument_size_in_bytes - two.argument_size_in_bytes
    assert grown == more
    assert abs(four.temp_size_in_bytes - two.temp_size_in_bytes) <= 1024
    assert four.alias_size_in_bytes == two.alias_size_in_bytes > 0
