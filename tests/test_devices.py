"""The same run on one to four devices, and on meshes with other axes."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqaccum

KEY = jax.random.key(3)
ROWS = 22  # divides by no number of devices above two
STEPS = 20
COLLECTIVE = re.compile(r"\b(all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(")


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


class Net(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear
    seen: eqx.nn.StateIndex

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(6, 8, key=one)
        self.dropout = eqx.nn.Dropout(0.4)
        self.second = eqx.nn.Linear(8, 4, key=two)
        self.seen = eqx.nn.StateIndex(jnp.zeros(2))

    def hidden(self, x, key):
        return self.dropout(jnp.tanh(self.first(x)), key=key)


def many(model, example, key):
    """A sum of two `Mean`s, with auxiliary outputs of every kind."""
    x, y, tokens = example
    hidden = model.hidden(x, key)
    error = jnp.sum((model.second(hidden) - y) ** 2)
    aux = {
        "mask": hidden == 0,
        "negative": y[0] < 0,
        "tokens": eqaccum.Sum(tokens),
        "per token": eqaccum.Mean(error, tokens),
    }
    small = eqaccum.Mean(jnp.sum(hidden**2), 1)
    return eqaccum.Mean(error * tokens, tokens) + 0.1 * small, aux


def batched(model, state, batch, keys):
    x, y, _ = batch
    hidden = jax.vmap(model.hidden)(x, keys)
    state = state.set(model.seen, state.get(model.seen) * 0.9 + 1.0)
    return jnp.mean((jax.vmap(model.second)(hidden) - y) ** 2, axis=1), state


def embed(model, example, key):
    x, y, _ = example
    return model.second(model.hidden(x, key)), y


def head(model, embeddings, weights):
    one, other = embeddings
    scores = one @ other.T - jnp.where(weights > 0, 0.0, 1e9)[None]
    own = jnp.diag(jax.nn.log_softmax(scores, axis=1))
    return -jnp.sum(own * weights) / jnp.sum(weights)


KINDS: dict[str, dict[str, Any]] = {
    "several means, weights, aux": dict(
        loss=many, has_aux=True, penalty=lambda m: 1e-2 * jnp.sum(m.first.weight**2)
    ),
    "batched, state": dict(loss=eqaccum.batched(batched)),
    "coupled": dict(loss=eqaccum.coupled(embed, head)),
}


def batch_of(step, rows=ROWS):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 4))
    tokens = rng.integers(1, 5, rows)
    weights = rng.uniform(0.5, 2, rows).astype(np.float32)
    return (x.astype(np.float32), y.astype(np.float32), tokens), weights


def train(kind, mesh, *, model=None, steps=STEPS, **options):
    """The final state, every step's metrics, and the step itself."""
    options = KINDS[kind] | dict(microbatch=3, ema=0.9) | options
    made, state = eqx.nn.make_with_state(Net)(KEY)
    model = made if model is None else model
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step = eqaccum.make_step(
        options.pop("loss"), optimizer, global_batch=ROWS, mesh=mesh, **options
    )
    has_state = kind == "batched, state"
    now = step.init(model, KEY, state=state if has_state else None)
    told = []
    for number in range(steps):
        # the last but one is short
        batch, weights = batch_of(number, ROWS - 9 if number == steps - 2 else ROWS)
        now, metrics = step(now, batch, weights=weights)
        told.append(metrics)
    return now, told, step


def flat(leaves):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(leaves)])


def apart(one, other):
    """The norm of the difference over all leaves, relative to theirs."""
    one, other = flat(one), flat(other)
    return np.linalg.norm(one - other) / np.linalg.norm(one)


def programs(step):
    (ready,) = step._ready.values()
    return {
        program.name: program.compiled.as_text()
        for program in (ready.accumulate, ready.finish, ready.update)
    }


@functools.cache
def trained(kind, devices):
    return train(kind, mesh_of(devices))


CASES = [
    pytest.param("several means, weights, aux", 2, marks=pytest.mark.slow),
    pytest.param("several means, weights, aux", 3, marks=pytest.mark.slow),
    pytest.param("several means, weights, aux", 4, marks=pytest.mark.slow),
    pytest.param("batched, state", 4, marks=pytest.mark.slow),
    pytest.param("coupled", 2, marks=pytest.mark.slow),
    ("batched, state", 3),
    ("coupled", 3),
]


@pytest.mark.parametrize("kind, devices", CASES)
def test_twenty_steps(kind, devices):
    alone, expected, _ = trained(kind, 1)
    several, told, step = trained(kind, devices)
    assert step.plan.devices == devices and step.plan.num_microbatches > 1
    for here, there in zip(expected, told, strict=True):
        for name in ("loss", "grad_norm", "weight", "penalty"):
            want = pytest.approx(float(getattr(here, name)), rel=2e-6)
            assert float(getattr(there, name)) == want, name
    assert apart(alone.trainable_leaves, several.trainable_leaves) < 1e-6
    assert apart(alone.ema.first.weight, several.ema.first.weight) < 1e-6
    assert apart(alone.opt_state, several.opt_state) < 1e-6
    if alone.state is not None:  # each device's own moves, averaged
        assert several.state.get(several.model.seen).shape == (2,)
    if kind != "several means, weights, aux":
        return
    for here, there in zip(expected, told, strict=True):
        # in the order of the batch, whatever device drew them
        assert np.array_equal(here.aux["mask"], there.aux["mask"])
        assert int(here.aux["tokens"]) == int(there.aux["tokens"])
        assert float(there.aux["per token"]) == pytest.approx(
            float(here.aux["per token"]), rel=1e-5
        )
        assert float(there.aux["negative"]) == pytest.approx(
            float(here.aux["negative"]), rel=1e-6
        )


def test_state_is_averaged_over_devices():
    """Each device runs its own passes; a whole number is the first device's."""

    class Counting(eqx.Module):
        scale: jax.Array
        total: eqx.nn.StateIndex
        passes: eqx.nn.StateIndex

        def __init__(self):
            self.scale = jnp.ones(())
            self.total = eqx.nn.StateIndex(jnp.zeros(()))
            self.passes = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def loss(model, state, batch, keys):
        state = state.set(model.total, state.get(model.total) + jnp.sum(batch))
        state = state.set(model.passes, state.get(model.passes) + 1)
        return model.scale * batch, state

    model, state = eqx.nn.make_with_state(Counting)()
    step = eqaccum.make_step(
        eqaccum.batched(loss),
        optax.sgd(0.1),
        global_batch=8,
        microbatch=2,
        mesh=mesh_of(2),
    )
    now = step.init(model, state=state)
    now, _ = step(now, np.arange(8, dtype=np.float32))
    # device 0 has rows 0, 1, 4, 5 in two passes, device 1 the others
    assert float(now.state.get(now.model.total)) == (10 + 18) / 2
    assert int(now.state.get(now.model.passes)) == 2


def test_compiled_programs_communicate_once():
    """The rows stay on their device, and so do the sums until finish."""
    _, _, step = trained("several means, weights, aux", 4)
    texts = programs(step)
    assert COLLECTIVE.findall(texts["accumulate"]) == []
    assert set(COLLECTIVE.findall(texts["finish"])) == {"all-reduce"}
    assert COLLECTIVE.findall(texts["update"]) == []
    assert "while(" in texts["accumulate"]
    _, _, step = trained("coupled", 3)
    text = programs(step)["accumulate"]
    # embeddings (N, 4) twice and the weights, outside of both sweeps
    gathered = re.findall(r"= \S+?\[([\d,]*)\]\S* all-gather\(", text)
    assert 0 < len(gathered) <= 3
    inside = [c for c in computations(text) if "all-gather(" in c]
    assert all(c.startswith("ENTRY") for c in inside)


def computations(text):
    return [part.strip() for part in text.split("\n\n")]


# --- other axes --------------------------------------------------------------------


def sharded(model, mesh, spec_of):
    def put(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, spec_of(leaf)))

    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.tree.map(put, arrays), rest)


def over(axis, size):
    def spec(leaf):
        whole = leaf.ndim == 0 or leaf.shape[0] % size
        return PartitionSpec() if whole else PartitionSpec(axis)

    return spec


def test_parameters_over_another_axis():
    """`jax.make_mesh` as it comes, with explicit axes."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    model, _ = eqx.nn.make_with_state(Net)(KEY)
    model = sharded(model, mesh, over("model", 2))
    kind = "several means, weights, aux"
    now, told, step = train(kind, mesh, model=model)
    alone, expected, other = trained(kind, 1)
    assert apart(alone.trainable_leaves, now.trainable_leaves) < 1e-6
    assert float(told[-1].loss) == pytest.approx(float(expected[-1].loss), rel=1e-6)
    assert np.array_equal(told[-1].aux["mask"], expected[-1].aux["mask"])
    weight = now.model.first.weight
    assert weight.addressable_shards[0].data.shape == (4, 6)
    moment = now.opt_state[1][0].mu.first.weight
    assert moment.addressable_shards[0].data.shape == (4, 6)
    assert now.ema.first.weight.addressable_shards[0].data.shape == (4, 6)
    assert step.plan.devices == 2
    assert step.plan.parts.parameters < 0.6 * other.plan.parts.parameters
    assert model.first.weight.shape == (8, 6)  # the user's is still there
    np.asarray(model.first.weight)


def test_parameters_over_data_are_gathered_once():
    mesh = jax.make_mesh((4,), ("data",))
    model, _ = eqx.nn.make_with_state(Net)(KEY)
    model = sharded(model, mesh, over("data", 4))
    kind = "several means, weights, aux"
    now, _, step = train(kind, mesh, model=model)
    alone, _, other = trained(kind, 1)
    assert apart(alone.trainable_leaves, now.trainable_leaves) < 1e-6
    text = programs(step)["accumulate"]
    inside = [c for c in computations(text) if "all-gather" in c]
    assert len(inside) == 1 and inside[0].startswith("ENTRY")
    assert "reduce-scatter" in programs(step)["finish"]
    assert now.model.first.weight.addressable_shards[0].data.shape == (2, 6)
    moment = now.opt_state[1][0].mu.first.weight
    assert moment.addressable_shards[0].data.shape == (2, 6)
    assert step.plan.parts.parameters == other.plan.parts.parameters / 4


def test_evaluation_of_sharded_parameters():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    model = eqx.nn.Linear(6, 4, key=KEY)
    (x, y, _), _ = batch_of(0)
    plain = eqaccum.evaluate(model, (x, y), mesh=mesh_of(1))
    cut = sharded(model, mesh, over("model", 2))
    assert eqaccum.evaluate(cut, (x, y), mesh=mesh)["loss"] == pytest.approx(
        plain["loss"], rel=1e-6
    )


def test_another_mesh_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    model = sharded(eqx.nn.Linear(6, 4, key=KEY), mesh, over("model", 2))
    (x, y, _), _ = batch_of(0)
    with pytest.raises(eqaccum.InputError, match=r"weight is sharded .* Pass the mesh"):
        eqaccum.fit(model, (x, y), global_batch=ROWS)
