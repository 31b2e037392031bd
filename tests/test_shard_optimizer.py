"""`shard_optimizer=True`: the same run, with a part of the optimizer on each device."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import eqaccum

KEY = jax.random.key(5)
DEVICES = 4


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def loss(model, example, key):
    x, y = example
    return jnp.mean((model(x) + 0.1 * jax.random.normal(key, y.shape) - y) ** 2)


def data(rows=30):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))
    return x.astype(np.float32), y.astype(np.float32)


MODEL = eqx.nn.MLP(6, 3, 8, 2, key=KEY)  # the last bias, (3,), divides by nothing
ADAMW = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))


def train(shard, optimizer=ADAMW, *, steps=8, model=MODEL, batch=None, **options):
    options = dict(mesh=mesh_of(DEVICES), microbatch=2, ema=0.9) | options
    step = eqaccum.make_step(
        loss, optimizer, global_batch=30, shard_optimizer=shard, **options
    )
    now = step.init(model, KEY)
    metrics = None
    for _ in range(steps):
        now, metrics = step(now, data() if batch is None else batch)
    return now, metrics, step


def flat(leaves):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(leaves)])


def apart(one, other):
    one, other = flat(one), flat(other)
    return np.linalg.norm(one - other) / np.linalg.norm(one)


@pytest.fixture(scope="module")
def sharded():
    return train(True)


def test_same_result_with_a_clipped_global_norm(sharded):
    """Against one device: a norm taken over a part would clip otherwise."""
    alone, expected, _ = train(False, mesh=mesh_of(1))
    now, metrics, _ = sharded
    assert float(expected.grad_norm) > 0.05
    assert float(metrics.grad_norm) == pytest.approx(float(expected.grad_norm), 1e-6)
    assert apart(alone.trainable_leaves, now.trainable_leaves) < 1e-6
    assert apart(alone.opt_state, now.opt_state) < 1e-6
    assert apart(alone.ema.layers[0].weight, now.ema.layers[0].weight) < 1e-6


def test_each_device_holds_its_part(sharded):
    now, _, step = sharded
    leaves = now.opt_state[1][0]
    for moment in (leaves.mu, leaves.nu):
        assert moment.layers[0].weight.addressable_shards[0].data.shape == (2, 6)
        assert moment.layers[2].weight.addressable_shards[0].data.shape == (3, 2)
        assert moment.layers[2].bias.addressable_shards[0].data.shape == (3,)
    assert now.ema.layers[0].weight.addressable_shards[0].data.shape == (2, 6)
    for leaf in now.trainable_leaves:
        assert leaf.addressable_shards[0].data.shape == leaf.shape
    (note,) = (n for n in step.plan.notes if "shard_optimizer" in n)
    assert note.startswith("shard_optimizer: 5 of 6 leaves over 4 devices")
    assert note.endswith("divides by 4: layers[2].bias")


def test_programs_scatter_and_gather(sharded):
    _, _, step = sharded
    (ready,) = step._ready.values()
    text = ready.finish.compiled.as_text()
    assert "reduce-scatter" in text
    # summed whole: the one leaf that does not divide, and scalars
    summed = re.findall(r"= f32\[([\d,]*)\]\S* all-reduce", text)
    assert set(summed) <= {"", "3"}
    assert "all-gather" in ready.update.compiled.as_text()
    assert "all-" not in ready.accumulate.compiled.as_text()


def test_plan_counts_the_parts():
    big = eqx.nn.MLP(6, 3, 256, 2, key=KEY)
    plans = [
        eqaccum.plan(
            big,
            data(),
            loss=loss,
            optimizer=optax.adamw(1e-3),
            global_batch=30,
            microbatch=2,
            mesh=mesh_of(DEVICES),
            shard_optimizer=shard,
        )
        for shard in (False, True)
    ]
    whole, cut = plans
    assert whole.parts.optimizer == pytest.approx(2 * whole.parts.parameters, rel=0.01)
    assert cut.parts.optimizer == pytest.approx(whole.parts.optimizer / 4, rel=0.01)
    assert cut.parts.parameters == whole.parts.parameters
    # two moments less three quarters, of the program with the most bytes
    saved = whole.predicted_bytes - cut.predicted_bytes
    assert saved > 1.2 * whole.parts.parameters


OTHERS = {
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "trust ratio": optax.lamb(1e-2),
    "block norm": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
}


@pytest.mark.parametrize(
    "name",
    ["factored", *(pytest.param(n, marks=pytest.mark.slow) for n in list(OTHERS)[1:])],
)
def test_not_elementwise(name):
    """What a transformation sees are whole arrays, so norms and means are right."""
    whole, _, _ = train(False, OTHERS[name], mesh=mesh_of(1), ema=None)
    cut, _, _ = train(True, OTHERS[name], ema=None)
    assert apart(whole.trainable_leaves, cut.trainable_leaves) < 1e-6


def test_penalty_metrics_and_skip():
    """The penalty's gradient is cut as the other; a skipped batch changes no bit."""
    more = dict(
        penalty=lambda model: 0.1 * jnp.sum(model.layers[0].weight ** 2),
        grad_metrics=lambda g: {"first": optax.tree.norm(g.layers[0])},
        nonfinite="skip",
    )
    alone, expected, _ = train(False, mesh=mesh_of(1), steps=3, **more)
    now, metrics, step = train(True, steps=3, **more)
    assert apart(alone.trainable_leaves, now.trainable_leaves) < 1e-6
    assert float(metrics.grad_metrics["first"]) == pytest.approx(
        float(expected.grad_metrics["first"]), rel=1e-6
    )
    before = flat((now.trainable_leaves, now.opt_leaves))
    x, y = data()
    x[3] = np.nan
    now, metrics = step(now, (x, y))
    assert metrics.skipped
    assert np.array_equal(before, flat((now.trainable_leaves, now.opt_leaves)))


def test_checkpoints_go_from_one_to_the_other(tmp_path):
    options = dict(
        loss=loss,
        optimizer=optax.adamw(1e-2),
        global_batch=10,
        key=KEY,
        microbatch=2,
        mesh=mesh_of(DEVICES),
        epochs=4,
    )
    calm = eqaccum.fit(MODEL, data(), steps=12, **options)
    kept = dict(options, checkpoint=tmp_path, resume=True)
    eqaccum.fit(MODEL, data(), steps=4, shard_optimizer=True, **kept)
    eqaccum.fit(MODEL, data(), steps=8, **kept)
    last = eqaccum.fit(MODEL, data(), steps=12, shard_optimizer=True, **kept)
    moment = last.opt_state[0].mu.layers[0].weight
    assert moment.addressable_shards[0].data.shape == (2, 6)
    assert apart(calm.train.trainable_leaves, last.train.trainable_leaves) < 1e-6
