"""Groups of the global batch, with and without a memory bank.

The reference is a Python loop over groups whose bank is a list of rows, newest first,
differentiated by `jax.grad`; no code of eqaccum is in it.
"""

import functools
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contrastive import (
    DIM,
    Towers,
    dropout_masks,
    embed,
    embed_with_dropout,
    full,
    head,
    rows_of,
)
from helpers import assert_trees_equal
from jax.sharding import Mesh
from reference import error, flat, recorder

import eqaccum

KEY = jax.random.key(3)
GROUP, BATCH = 3, 8
STATIC = eqx.filter(Towers(), eqx.is_array, inverse=True)


def weights_of(count, kind):
    index = np.arange(count)
    values = {"ones": np.ones(count), "zeros": np.where(index % 3 == 1, 0, 1 + index)}
    return values[kind].astype(np.float32)


def make_step(loss, microbatch, optimizer=None, rows=BATCH, **options):
    return eqaccum.make_step(
        loss,
        optimizer or recorder(),
        global_batch=rows,
        microbatch=microbatch,
        **options,
    )


# --- groups without a bank -------------------------------------------------------


def by_groups(model, batch, weights, group=GROUP):
    """The mean of the groups' losses by their weights; one group at a time."""
    value, leaves = 0.0, None
    for first in range(0, len(weights), group):
        part = slice(first, first + group)
        w = weights[part]
        if not w.any():
            continue
        one, gradient = full(model, tuple(x[part] for x in batch), w)
        value += w.sum() * one
        scaled = [
            w.sum() * np.asarray(g, np.float64) for g in jax.tree.leaves(gradient)
        ]
        leaves = scaled if leaves is None else list(map(np.add, leaves, scaled))
    total = weights.sum()
    return value / total, np.concatenate([g.ravel() for g in leaves]) / total


def careless_at_nothing(model, embeddings, weights):
    """As `head`, but 0 / 0 where a group has no row at all."""
    q, p, h = embeddings
    present = jnp.where(weights > 0, 0.0, -1e9)
    scores = q @ jnp.concatenate([p, h]).T / jnp.exp(model.log_t)
    logs = jax.nn.log_softmax(scores + jnp.concatenate([present, present])[None, :])
    return -jnp.sum(weights * jnp.diagonal(logs)) / jnp.sum(weights)


@pytest.mark.parametrize(
    "devices, microbatch, passes, taken",
    [
        (1, 2, 6, 2),  # each group in two passes, the second with a slot of padding
        (1, 8, 2, 6),  # two groups a pass
        (1, 100, 1, 9),  # all groups at once
        (2, 2, 4, 2),
        (4, 2, 2, 2),  # a device without a group
    ],
)
def test_groups(devices, microbatch, passes, taken):
    model = Towers()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    top = careless_at_nothing if (devices, microbatch) == (1, 2) else head
    loss = eqaccum.coupled(embed, top, group=GROUP)
    step = make_step(loss, microbatch, mesh=mesh)
    train = step.init(model, KEY)
    for rows, kind in ((8, "ones"), (8, "zeros"), (4, "zeros"), (8, "middle")):
        batch = rows_of(rows)
        weights = weights_of(rows, "zeros" if kind == "zeros" else "ones")
        if kind == "middle":
            weights[3:6] = 0  # a group that is not there
        train, metrics = step(train, batch, weights=weights)
        value, gradient = by_groups(model, batch, weights)
        assert float(metrics.loss) == pytest.approx(value, rel=1e-6)
        assert float(metrics.weight) == pytest.approx(weights.sum())
        difference = np.linalg.norm(flat(train.opt_state) - gradient)
        assert difference < 1e-6 * np.linalg.norm(gradient)
    assert (step.plan.num_microbatches, step.plan.microbatch) == (passes, taken)


def test_value_and_grad_of_groups():
    model, batch = Towers(), rows_of(7)
    loss = eqaccum.coupled(embed_with_dropout, head, group=GROUP)
    loss_and_grad = eqaccum.value_and_grad(loss, microbatch=2)
    got, grads = loss_and_grad(model, batch, key=KEY)
    masks = np.asarray(dropout_masks(KEY, 7), np.float64)
    wide = np.zeros(len(flat(grads)))
    value = 0.0
    for first in range(0, 7, GROUP):
        part = slice(first, first + GROUP)
        one = tuple(x[part] for x in batch)
        n = len(one[0])
        v, g = full(model, one, np.ones(n), masks=masks[part])
        value, wide = value + n * v, wide + n * flat(g)
    assert float(got) == pytest.approx(value / 7, rel=1e-6)
    assert np.linalg.norm(flat(grads) - wide / 7) < 1e-6 * np.linalg.norm(wide / 7)


def distance(model, embeddings, weights):
    """A head that compiles in no time."""
    q, p, _ = embeddings
    return jnp.sum(weights * jnp.sum((q - p) ** 2, axis=1)) / jnp.sum(weights)


def test_the_plan_looks_at_cuts_of_whole_groups():
    """For every limit the fewest passes that fit, as an exhaustive search finds."""
    loss = eqaccum.coupled(embed, distance, group=GROUP)

    def plan(**options):
        return eqaccum.plan(
            Towers(), rows_of(BATCH), global_batch=BATCH, loss=loss, **options
        )

    need = {}
    for microbatch in (9, 6, 3, 2, 1):
        made = plan(microbatch=microbatch, memory_limit="1GiB")
        assert made.microbatch == microbatch
        need[made.num_microbatches] = made.predicted_bytes
    assert list(need) == [1, 2, 3, 6, 9]
    for limit in sorted(set(need.values()))[::2]:
        fewest = min(k for k, size in need.items() if size <= limit)
        assert plan(memory_limit=limit).num_microbatches == fewest
    with pytest.raises(eqaccum.DoesNotFit):
        plan(memory_limit=min(need.values()) - 1)


def test_auxiliary_outputs_of_groups():
    def top(model, embeddings, weights):
        q, p, _ = embeddings
        aux = {
            "mean": jnp.sum(weights * q[:, 0]) / jnp.sum(weights),
            "ratio": eqaccum.Mean(jnp.sum(weights * p[:, 0]), jnp.sum(weights)),
            "count": eqaccum.Sum(jnp.sum(weights > 0)),
            "row": 2 * q,
        }
        return distance(model, embeddings, weights), aux

    model, batch = Towers(), rows_of(BATCH)
    q, p, _ = (np.asarray(x) for x in jax.vmap(lambda e: embed(model, e, None))(batch))
    for microbatch in (2, 6):
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        loss = eqaccum.coupled(embed, top, group=GROUP)
        step = make_step(loss, microbatch, mesh=mesh, has_aux=True)
        _, metrics = step(step.init(model, KEY), batch)
        assert float(metrics.aux["mean"]) == pytest.approx(q[:, 0].mean(), rel=1e-5)
        assert float(metrics.aux["ratio"]) == pytest.approx(p[:, 0].mean(), rel=1e-5)
        assert int(metrics.aux["count"]) == BATCH
        np.testing.assert_allclose(metrics.aux["row"], 2 * q, rtol=1e-6)


# --- with a bank: the plain loop -------------------------------------------------


@dataclass(frozen=True)
class Variant:
    rows: int
    queries: bool = True
    clear: bool = False
    start: int = 0
    dropout: bool = False

    @property
    def loss(self):
        bank = eqaccum.MemoryBank(
            self.rows, queries=self.queries, clear=self.clear, start=self.start
        )
        one = embed_with_dropout if self.dropout else embed
        return eqaccum.coupled(one, head, group=GROUP, bank=bank)


VARIANTS = {
    "carried over": Variant(4),
    "passages alone": Variant(4, queries=False),
    "nearly a batch, dropout": Variant(7, dropout=True),
    "cleared": Variant(4, clear=True),
    "read later": Variant(4, start=2),
    "smaller than a group": Variant(2),
}
STEPS = ((8, "ones"), (8, "zeros"), (5, "ones"), (8, "ones"))


@functools.partial(jax.jit, static_argnames="queries")
def group_gradient(arrays, batch, mask, w, old, *, queries):
    """One group's loss by `log_softmax`, its gradient, and its embeddings.

    `old` are the banked rows as (q, p, h, w); they are constants.
    """

    def loss(arrays):
        model = eqx.combine(arrays, STATIC)
        q, p, h = jax.vmap(lambda e: embed(model, e, None))(batch)
        q = q * mask
        now = (q, p, h)
        every = w
        if old is not None:
            q = jnp.concatenate([q, old[0]]) if queries else q
            p, h = jnp.concatenate([p, old[1]]), jnp.concatenate([h, old[2]])
            every = jnp.concatenate([w, old[3]]) if queries else w
        scores = q @ jnp.concatenate([p, h]).T / jnp.exp(model.log_t)
        logs = jnp.diagonal(jax.nn.log_softmax(scores))
        return -jnp.sum(every * logs) / jnp.sum(every), now

    return jax.value_and_grad(loss, has_aux=True)(arrays)


def plain_loop(variant, model, batches, rate):
    """SGD as written by hand; yields (loss, model, bank) after each step."""
    arrays = eqx.filter(model, eqx.is_array)
    bank = []  # rows (q, p, h, w), newest first
    for step, (batch, weights) in enumerate(batches):
        masks = np.ones((len(weights), DIM), np.float32)
        if variant.dropout:
            key = jax.random.fold_in(KEY, step)
            masks = np.asarray(dropout_masks(key, len(weights)))
        value, gradient = 0.0, None
        for first in range(0, len(weights), GROUP):
            here = [
                i
                for i in range(first, min(first + GROUP, len(weights)))
                if weights[i] > 0
            ]
            old = None
            if bank and step >= variant.start:
                old = tuple(np.stack(column) for column in zip(*bank, strict=True))
            (one, now), slopes = group_gradient(
                arrays,
                tuple(x[here] for x in batch),
                masks[here],
                weights[here],
                old,
                queries=variant.queries,
            )
            total = weights[here].sum()
            value += total * float(one)
            scaled = jax.tree.map(lambda g, total=total: total * np.asarray(g), slopes)
            gradient = (
                scaled if gradient is None else jax.tree.map(np.add, gradient, scaled)
            )
            columns = [np.asarray(x) for x in now]
            new = list(zip(*columns, weights[here], strict=True))
            bank = (new + bank)[: variant.rows]
        total = weights.sum()
        arrays = jax.tree.map(
            lambda a, g, total=total: np.asarray(a) - rate * g / total, arrays, gradient
        )
        bank = [] if variant.clear else bank
        yield value / total, arrays, list(bank)


@functools.cache
def expected(name):
    batches = [(rows_of(n, seed=i), weights_of(n, k)) for i, (n, k) in enumerate(STEPS)]
    return batches, list(plain_loop(VARIANTS[name], Towers(), batches, rate=0.5))


@pytest.mark.parametrize(
    "name, microbatch",
    [
        ("carried over", 1),
        ("nearly a batch, dropout", 2),
        ("passages alone", 2),
        *(
            pytest.param(name, 2, marks=pytest.mark.slow)
            for name in VARIANTS
            if name not in ("nearly a batch, dropout", "passages alone")
        ),
        pytest.param("read later", 3, marks=pytest.mark.slow),
    ],
)
def test_several_steps_are_those_of_the_plain_loop(name, microbatch):
    variant = VARIANTS[name]
    batches, wanted = expected(name)
    step = make_step(variant.loss, microbatch, optax.sgd(0.5))
    train = step.init(Towers(), KEY)
    for (batch, weights), (loss, arrays, bank) in zip(batches, wanted, strict=True):
        train, metrics = step(train, batch, weights=weights)
        assert float(metrics.loss) == pytest.approx(loss, rel=1e-5)
        got = eqx.filter(train.model, eqx.is_array)
        assert error(got, arrays) < 2e-6
        check_bank(train.bank_leaves, bank, variant)
    assert step.plan.num_microbatches == 3 * -(-GROUP // microbatch)
    assert step.plan.devices == 1


def check_bank(leaves, bank, variant):
    """The bank's rows in order, what is empty behind them."""
    *leaves, weights = leaves
    held = np.zeros(variant.rows, np.float32)
    held[: len(bank)] = [row[3] for row in bank]
    np.testing.assert_array_equal(weights, held)
    assert len(leaves) == (3 if variant.queries else 2)
    for place, leaf in enumerate(leaves, start=3 - len(leaves)):
        want = [row[place] for row in bank]
        got = np.asarray(leaf)[: len(bank)]
        np.testing.assert_allclose(got, np.reshape(want, got.shape), atol=1e-5)


# --- against the paper -----------------------------------------------------------


@pytest.mark.parametrize("queries", [True, False])
def test_the_published_gradients(queries):
    """Equations 8 and 9, the parameters being the representations themselves."""
    local, banked = 4, 8
    rng = np.random.default_rng(0)
    q, p = rng.normal(size=(2, local + banked, DIM))

    def pick(model, i, key):
        return model[0][i], model[1][i]

    def top(model, embeddings, weights):
        return eqaccum.losses.info_nce(*embeddings, weights=weights)

    with jax.enable_x64(True):
        bank = eqaccum.MemoryBank(banked, queries=queries)
        loss = eqaccum.coupled(pick, top, group=local, bank=bank)
        step = make_step(loss, 2, rows=local)
        train = step.init((jnp.asarray(q), jnp.asarray(p)))
        for first in (
            8,
            4,
            0,
        ):  # the bank holds rows 4 to 11, the local ones are 0 to 3
            train, _ = step(train, np.arange(first, first + local, dtype=np.int32))
        gradient = [np.asarray(g)[:local] for g in train.opt_state]
    scores = (q if queries else q[:local]) @ p.T
    s = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    rows = len(scores)
    for i in range(local):
        by_query = -(p[i] - sum(s[i, j] * p[j] for j in range(local + banked))) / rows
        by_passage = -(q[i] - sum(s[k, i] * q[k] for k in range(rows))) / rows
        np.testing.assert_allclose(gradient[0][i], by_query, atol=1e-12)
        np.testing.assert_allclose(gradient[1][i], by_passage, atol=1e-12)


@pytest.mark.parametrize(
    "queries, loss, gradient",
    [(True, 1.120316, 0.328914), (False, 0.940760, 0.404326)],
)
def test_published_numbers(queries, loss, gradient):
    def one(w, example, key):
        return (w * example[0])[None], (w * example[1])[None]

    def top(w, embeddings, weights):
        return eqaccum.losses.info_nce(*embeddings, weights=weights)

    bank = eqaccum.MemoryBank(1, queries=queries)
    coupled = eqaccum.coupled(one, top, group=2, bank=bank)
    two = np.array([1, 2], np.float32), np.array([1, 0.5], np.float32)
    step = make_step(coupled, 1, rows=2)
    train, metrics = step(step.init(jnp.float32(1)), two)  # the bank is empty
    np.testing.assert_allclose(metrics.loss, 0.893669, atol=2e-6)
    np.testing.assert_allclose(train.opt_state, 0.542288, atol=2e-6)
    old = np.array([0.3], np.float32), np.array([-1], np.float32)
    train, _ = step(step.init(jnp.float32(1)), old)
    train, metrics = step(train, two)
    np.testing.assert_allclose(metrics.loss, loss, atol=2e-6)
    np.testing.assert_allclose(train.opt_state, gradient, atol=2e-6)


# --- where the bank lives --------------------------------------------------------


def products(model, embeddings, weights):
    """All pairs count, the banked ones too, by a head that compiles in no time."""
    q, p, _ = embeddings
    pairs = weights[:, None] * weights[None, :] * (q @ p.T) ** 2
    return jnp.sum(pairs) / jnp.sum(weights) ** 2


BANKED = eqaccum.coupled(embed, products, group=GROUP, bank=eqaccum.MemoryBank(4))


def test_a_skipped_step_leaves_the_bank():
    step = make_step(BANKED, 2, optax.sgd(0.1), nonfinite="skip")
    train = step.init(Towers(), KEY)
    bad = tuple(np.where(np.arange(3) == 1, np.nan, x) for x in rows_of(BATCH))
    bad = tuple(x.astype(np.float32) for x in bad)
    train, metrics = step(train, bad)  # before there is any bank
    assert metrics.skipped
    train, _ = step(train, rows_of(BATCH))
    before = jax.tree.map(np.array, (train.bank_leaves, train.trainable_leaves))
    train, metrics = step(train, bad)
    assert metrics.skipped
    assert_trees_equal((train.bank_leaves, train.trainable_leaves), before)
    good = step.init(Towers(), KEY)
    for seed in (0, 1):
        good, want = step(good, rows_of(BATCH, seed=seed))
    train, metrics = step(train, rows_of(BATCH, seed=1))
    assert float(metrics.loss) == float(want.loss)
    assert_trees_equal(train.bank_leaves, good.bank_leaves)


def test_the_bank_is_in_the_state_and_its_file(tmp_path):
    step = make_step(BANKED, 3, optax.sgd(0.1))
    train, _ = step(step.init(Towers(), KEY), rows_of(BATCH))
    assert len(train.bank_leaves) == 4
    held = jax.tree.leaves(train)
    assert all(any(leaf is x for x in held) for leaf in train.bank_leaves)
    eqx.tree_serialise_leaves(tmp_path / "train.eqx", train)
    like = step.init(Towers(), KEY)  # planned by now, so it has an empty bank
    back = eqx.tree_deserialise_leaves(tmp_path / "train.eqx", like)
    assert_trees_equal(jax.tree.leaves(back), jax.tree.leaves(train))
    one, _ = step(train, rows_of(BATCH, seed=1))
    other, _ = step(back, rows_of(BATCH, seed=1))
    assert_trees_equal(jax.tree.leaves(one), jax.tree.leaves(other))


def test_fit_goes_on_with_the_bank(tmp_path):
    def fit(epochs, **options):
        return eqaccum.fit(
            Towers(),
            rows_of(20),
            global_batch=BATCH,
            loss=BANKED,
            optimizer=optax.sgd(0.1),
            epochs=epochs,
            microbatch=2,
            **options,
        )

    whole = fit(2)
    fit(1, checkpoint=tmp_path)
    rest = fit(2, checkpoint=tmp_path, resume=True)
    assert_trees_equal(jax.tree.leaves(rest.train), jax.tree.leaves(whole.train))


def test_evaluate_uses_no_bank():
    model, batch = Towers(), rows_of(BATCH)
    bank = eqaccum.MemoryBank(4, queries=False)
    loss = eqaccum.coupled(embed, head, group=GROUP, bank=bank)
    got = eqaccum.evaluate(model, batch, loss=loss, global_batch=BATCH)
    value, _ = by_groups(model, batch, np.ones(BATCH))
    assert got["loss"] == pytest.approx(value, rel=1e-6)


# --- what cannot work ------------------------------------------------------------


@pytest.mark.devices(4)
def test_one_device_of_several_is_said(capsys):
    bank = eqaccum.MemoryBank(4)
    step = make_step(eqaccum.coupled(embed, distance, group=GROUP, bank=bank), 3)
    assert "a memory bank: groups run in order, so one of the 4 devices is used" in (
        capsys.readouterr().err
    )
    train, _ = step(step.init(Towers(), KEY), rows_of(BATCH))
    assert step.plan.devices == 1


def test_a_head_that_reads_empty_slots_is_refused():
    def top(model, embeddings, weights):
        q, p, _ = embeddings
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(q @ p.T)))

    bank = eqaccum.MemoryBank(4)
    step = make_step(eqaccum.coupled(embed, top, group=4, bank=bank), 4)
    with pytest.raises(eqaccum.InputError, match="head ignores weights"):
        step(step.init(Towers(), KEY), rows_of(BATCH))


def on_two_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    make_step(VARIANTS["carried over"].loss, 3, mesh=mesh)


def of_another_bank():
    bank = eqaccum.MemoryBank(3)
    small = make_step(eqaccum.coupled(embed, products, group=GROUP, bank=bank), 3)
    large = make_step(BANKED, 3)
    train, _ = small(small.init(Towers(), KEY), rows_of(BATCH))
    large.init(Towers(), KEY)
    large(train, rows_of(BATCH))


def without_a_tuple():
    bank = eqaccum.MemoryBank(4)
    loss = eqaccum.coupled(
        lambda m, e, k: m(e[0], side=0),
        lambda m, z, w: jnp.sum(z),
        group=2,
        bank=bank,
    )
    step = make_step(loss, 2)
    step(step.init(Towers(), KEY), rows_of(BATCH))


REFUSED = {
    "rows": (lambda: eqaccum.MemoryBank(0), "MemoryBank got rows=0"),
    "start": (lambda: eqaccum.MemoryBank(4, start=-1), "MemoryBank got start=-1"),
    "queries": (
        lambda: eqaccum.MemoryBank(4, queries="no"),
        "MemoryBank got queries='no'",
    ),
    "group": (lambda: eqaccum.coupled(embed, head, group=0), "group=0"),
    "no group": (
        lambda: eqaccum.coupled(embed, head, bank=eqaccum.MemoryBank(4)),
        "needs group=",
    ),
    "no bank": (
        lambda: eqaccum.coupled(embed, head, group=2, bank=4),
        "bank=4 is a int; expected an eqaccum.MemoryBank",
    ),
    "large group": (
        lambda: make_step(eqaccum.coupled(embed, head, group=9), 3),
        "group=9 is above the global batch of 8 rows",
    ),
    "devices": (on_two_devices, "a memory bank on 2 devices"),
    "value_and_grad": (
        lambda: eqaccum.value_and_grad(VARIANTS["cleared"].loss, microbatch=2),
        "value_and_grad got a loss with a memory bank",
    ),
    "another bank": (of_another_bank, "this TrainState holds a memory bank"),
    "no tuple": (without_a_tuple, "must return a tuple whose first entry"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(eqaccum.InputError, match=message):
        call()
