"""What cannot work is refused at the door: by name, at once, before anything runs.

Each entry tells which parts of the message it is about: what was passed, what was
expected, what to do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations

import eqaccum
from eqaccum import Mean, batched, callbacks, fit, make_step, plan, value_and_grad

SGD = optax.sgd(0.1)


class Linear(eqx.Module):
    w: Any

    def __call__(self, x):
        return self.w @ x


class Stateful(eqx.Module):
    """Counts its calls in an `eqx.nn.State`."""

    linear: Linear
    count: eqx.nn.StateIndex

    def __init__(self):
        self.linear = Linear(jnp.ones((2, 3)))
        self.count = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        return self.linear(x), state.set(self.count, state.get(self.count) + 1)


MODEL = Linear(jnp.ones((2, 3)))
X = np.ones((8, 3), np.float32)
Y = np.zeros((8, 2), np.float32)
LABELS = np.arange(8) % 2


def loss(model, example, key):
    x, y = example
    return jnp.sum((model(x) - y) ** 2)


def state_loss(model, state, example, key):
    x, y = example
    prediction, state = model(x, state)
    return jnp.sum((prediction - y) ** 2), state


def fitted(**changed: Any) -> Any:
    """`fit` with arguments that work, some of them changed."""
    arguments = {
        "model": MODEL,
        "data": (X, Y),
        "global_batch": 4,
        "loss": loss,
        "optimizer": SGD,
        "progress": False,
    }
    return fit(**(arguments | changed))


def stepped(batch=(X, Y), weights=None, train=None, **changed: Any) -> Any:
    """One step with arguments that work, some of them changed."""
    arguments = {"loss": loss, "optimizer": SGD, "global_batch": 8} | changed
    step = make_step(**arguments)
    fresh = step.init(MODEL)
    return step(fresh if train is None else train, batch, weights=weights)


def graded(batch=(X, Y), key=None, weights=None, **changed: Any) -> Any:
    """A gradient with arguments that work, some of them changed."""
    f = value_and_grad(**({"loss": loss, "microbatch": 4} | changed))
    return f(MODEL, batch, key=key, weights=weights)


def planned(**changed: Any) -> Any:
    """`plan` with arguments that work, some of them changed."""
    arguments = {"model": MODEL, "data": (X, Y), "global_batch": 4, "loss": loss}
    return plan(**(arguments | changed))


def evaluated(**changed: Any) -> Any:
    """`evaluate` with arguments that work, some of them changed."""
    return eqaccum.evaluate(
        **({"model": MODEL, "data": (X, Y), "loss": loss} | changed)
    )


def predicted(**changed: Any) -> Any:
    """`predict` with arguments that work, some of them changed."""
    return eqaccum.predict(**({"model": MODEL, "x": X} | changed))


def losing(value: Callable[[Any], Any], **changed: Any) -> Any:
    """`fit` with a loss of one example that returns `value(prediction)`."""
    return fitted(loss=lambda model, example, key: value(model(example[0])), **changed)


def default(**changed: Any) -> Any:
    """`fit` without a loss."""
    return fitted(**({"loss": None, "data": (X, LABELS)} | changed))


@dataclass(frozen=True)
class Bad:
    call: Callable[[], Any]
    passed: str
    expected: str
    remedy: str
    error: type[Exception] = eqaccum.InputError
    may_compile: str = ""


# The programs that have to be compiled before the input can be seen to be bad.
INIT = "init"
PROBES = "accumulate finish update"


class Endless:
    def __len__(self):
        return 2**62

    def __getitem__(self, index):
        return X[0], Y[0]


class Every:
    every = 0

    def __call__(self, info):
        pass


class Empty:
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


ARRAY64 = np.full((8, 3), 2**40)
STRUCTS = (jax.ShapeDtypeStruct((8, 3), "float32"), jax.ShapeDtypeStruct((8, 2), "f4"))
INTEGERS = Linear(np.ones((2, 3), int))
FOREIGN_PLAN = eqaccum.Plan(
    8, 1, 2, 4, 1000, None, "unknown", eqaccum.Parts(parameters=1000), (), "a test"
)
WITH_STATE, STATE = eqx.nn.make_with_state(Stateful)()


DATA = {
    "no leading axis in common": Bad(
        lambda: fitted(data=(X, Y[:6])), "[0] has 8, [1] has 6", "Axis 0", "`in_axes`"
    ),
    "empty data": Bad(
        lambda: fitted(data=(X[:0], Y[:0])), "no rows", "at least one", "example"
    ),
    "a list": Bad(
        lambda: fitted(data=[X, Y]),
        "a list of ndarray with 2 items",
        "tuple of arrays",
        "eqaccum.data.examples(data)",
    ),
    "an empty list": Bad(
        lambda: fitted(data=[]), "a list with 0 items", "tuple", "examples(data)"
    ),
    "None": Bad(
        lambda: fitted(data=None), "None (NoneType)", "axis 0", "iterable of batches"
    ),
    "a number": Bad(lambda: fitted(data=3), "3 (int)", "pytree of arrays", "iterable"),
    "text": Bad(lambda: fitted(data="a.npz"), "'a.npz' (str)", "arrays", "iterable"),
    "a generator function": Bad(
        lambda: fitted(data=lambda: iter([X])), "a function", "what it returns", "pass"
    ),
    "only shapes": Bad(
        lambda: fitted(data=STRUCTS), "ShapeDtypeStruct", "values", "Pass arrays"
    ),
    "an int64 value out of range": Bad(
        lambda: fitted(data=(ARRAY64, Y)), str(2**40), "int32", "jax_enable_x64"
    ),
    "strings": Bad(
        lambda: fitted(data=(np.array(["a"] * 8), Y)), "dtype <U1", "numbers", "ids"
    ),
    "objects": Bad(
        lambda: fitted(data=(np.array([None] * 8), Y)), "dtype object", "numbers", "out"
    ),
    "lists of other lengths": Bad(
        lambda: fitted(data=({"a": [[1, 2], [3]]}, Y)), "['a']", "differ", "Pad them"
    ),
    "typed keys": Bad(
        lambda: fitted(data=(jax.random.split(jax.random.key(0), 8), Y)),
        "typed PRNG keys",
        "key_data",
        "wrap_key_data",
    ),
    "nothing but a number": Bad(
        lambda: fitted(data={"a": 3.0}), "No array", "axis 0 counts", "batches"
    ),
    "another axis": Bad(
        lambda: fitted(in_axes=1), "in_axes holds 1", "0 (axis 0", "moveaxis"
    ),
    "in_axes of another structure": Bad(
        lambda: fitted(in_axes=(0, 0, 0)), "(0, 0, 0)", "prefix", "jax.vmap"
    ),
    "nothing with an example axis": Bad(
        lambda: fitted(in_axes=None), "No array", "in_axes=None", "axis 0"
    ),
    "an empty data set": Bad(
        lambda: fitted(data=Empty()), "(Empty)", "at least one", "example"
    ),
    "an endless data set": Bad(
        lambda: fitted(data=Endless()), f"{2**62:,}", "repetition", "epochs="
    ),
    "an empty iterable": Bad(
        lambda: fitted(data=iter([])), "list_iterator", "at least one", "example"
    ),
    "an iterable of numbers": Bad(
        lambda: fitted(data=iter([1, 2])), "No array", "axis 0", "must give batches"
    ),
    "an iterator for two epochs": Bad(
        lambda: fitted(data=iter([(X, Y)]), epochs=2),
        "epochs=2",
        "read once",
        "`__iter__`",
    ),
    "shuffle=True for an iterable": Bad(
        lambda: fitted(data=iter([(X, Y)]), shuffle=True),
        "shuffle=True",
        "cannot be indexed",
        "Shuffle in the",
    ),
    "examples() of a number": Bad(
        lambda: eqaccum.data.examples(3), "3 (int)", "`__getitem__`", "list"
    ),
    "examples() of an iterator": Bad(
        lambda: eqaccum.data.examples(iter([X])), "list_iterator", "`__len__`", "list("
    ),
}

WEIGHTS = {
    "negative": Bad(
        lambda: fitted(example_weights=[1, 1, -1, 1, 1, 1, 1, 1]),
        "row 2 is -1",
        "not negative",
        "0 for a row",
    ),
    "NaN": Bad(
        lambda: fitted(example_weights=np.array([1, np.nan] * 4)),
        "row 1 is nan",
        "finite",
        "0 for a row",
    ),
    "of another length": Bad(
        lambda: fitted(example_weights=np.ones(7)), "(7,)", "(8,)", "one weight"
    ),
    "one number": Bad(
        lambda: fitted(example_weights=1.0), "shape ()", "(8,)", "one weight"
    ),
    "all zero": Bad(
        lambda: fitted(example_weights=np.zeros(8)), "All 8", "positive", "At least"
    ),
    "complex": Bad(
        lambda: fitted(example_weights=np.ones(8) * 1j), "complex128", "real", "one"
    ),
    "of an iterable": Bad(
        lambda: fitted(data=iter([(X, Y)]), example_weights=np.ones(8)),
        "example_weights",
        "cannot be numbered",
        "Mean(w * value, w)",
    ),
    "of a step": Bad(
        lambda: stepped(weights=-np.ones(8)),
        "-1",
        "not negative",
        "0 for a row",
        may_compile=INIT,
    ),
    "of value_and_grad": Bad(
        lambda: graded(weights=-np.ones(8)), "-1", "not negative", "0 for a row"
    ),
    "of value_and_grad, too few": Bad(
        lambda: graded(weights=np.ones(3)), "(3,)", "(8,)", "one weight"
    ),
}

NUMBERS = {
    f"{name}={value!r}": Bad(
        lambda door=door, name=name, value=value: door(**{name: value}),
        f"{name}={value!r}",
        expected,
        remedy,
    )
    for door, name, values, expected, remedy in [
        (fitted, "global_batch", (0, -4, 2.5, 4.0, "4", True, None), "int", "examples"),
        (stepped, "global_batch", (0, "all"), "positive int", "examples"),
        (planned, "global_batch", (0, 1.5), "positive int", "examples"),
        (fitted, "epochs", (0, -1, 1.5, True, "all"), "positive int", "None"),
        (fitted, "steps", (0, -3, 2.0, False), "positive int", "None"),
        (fitted, "microbatch", (0, -2, 2.5, True, None), "'largest'", "int of at"),
        (fitted, "microbatch", ("biggest", "8"), "'largest'", "int of at least 1"),
        (planned, "microbatch", (0,), "'largest'", "int of at least 1"),
        (
            graded,
            "microbatch",
            (0, "largest", True),
            "int of at least 1",
            "eqaccum.plan",
        ),
        (evaluated, "global_batch", (0, 1.5, "all"), "positive int", "examples"),
        (predicted, "global_batch", (0, True), "positive int", "examples"),
        (evaluated, "microbatch", (0, "biggest"), "'largest'", "int of at least 1"),
        (predicted, "microbatch", (0, 2.5), "'largest'", "int of at least 1"),
        (evaluated, "memory_limit", ("much",), "bytes above zero", "None to ask"),
        (predicted, "memory_limit", (0,), "bytes above zero", "None to ask"),
        (evaluated, "compute_dtype", (int,), "floating", "jnp.bfloat16"),
        (predicted, "compute_dtype", ("float99",), "floating", "jnp.bfloat16"),
        (evaluated, "has_aux", ("yes",), "bool", "expected"),
        (predicted, "inference", ("no",), "bool", "expected"),
        (fitted, "validate_every", (0, 2.5, True), "positive int", "None"),
        (fitted, "mesh", (8, "data"), "expected Mesh or None", "fit got"),
        (fitted, "cache", ("no",), "bool", "expected"),
        (fitted, "callbacks", (print, 3, None), "list", "callbacks=[callback]"),
        (fitted, "memory_limit", ("lots", "10", 0, -5, True, 1.5), "bytes", "'10GiB'"),
        (stepped, "memory_limit", ("10 GB!",), "bytes above zero", "MiB"),
        (planned, "memory_limit", ("much",), "bytes above zero", "None to ask"),
        (fitted, "nonfinite", ("stop", None, True), "'raise', 'skip'", "'ignore'"),
        (fitted, "compute_dtype", ("float99", jnp.int32), "floating", "jnp.bfloat16"),
        (fitted, "has_aux", ("yes", 1, None), "bool", "expected"),
        (fitted, "shuffle", ("yes", 1), "bool", "expected"),
        (fitted, "drop_remainder", ("no",), "bool", "expected"),
        (fitted, "axis_name", (3, None), "str", "expected"),
        (fitted, "progress", ("bar",), "bool", "expected"),
        (fitted, "plan", ({"microbatch": 4},), "Plan", "expected"),
        (fitted, "compiler_options", ("fast",), "Mapping", "expected"),
        (fitted, "penalty", (0.1,), "a function of the model", "float"),
    ]
    for value in values
}

LOSS = {
    "not callable": Bad(
        lambda: fitted(loss="mse"), "loss='mse'", "loss(model, example, key)", "Mean"
    ),
    "too few arguments": Bad(
        lambda: fitted(loss=lambda model, example: 0.0),
        "(model, example)",
        "(model, example, key)",
        "in this order",
    ),
    "too many arguments": Bad(
        lambda: fitted(loss=lambda model, x, y, key: 0.0),
        "(model, x, y, key)",
        "(model, example, key)",
        "exactly these",
    ),
    "too few for shared_key": Bad(
        lambda: fitted(loss=eqaccum.shared_key(loss)),
        "(model, example, key)",
        "step_key",
        "exactly these",
    ),
    "too few for weighted": Bad(
        lambda: fitted(loss=batched(loss, weighted=True)),
        "(model, example, key)",
        "(model, batch, keys, weights)",
        "exactly these",
    ),
    "a vector": Bad(
        lambda: losing(lambda p: p), "shape (2,)", "a scalar", "jnp.mean(...)"
    ),
    "a shape of one": Bad(
        lambda: losing(lambda p: p[:1]), "shape (1,)", "a scalar", "jnp.mean(...)"
    ),
    "an integer": Bad(
        lambda: losing(lambda p: jnp.argmax(p)), "int32", "floating", ".astype"
    ),
    "complex": Bad(
        lambda: losing(lambda p: p[0] * 1j), "complex64", "real floating", "jnp.real"
    ),
    "None": Bad(lambda: losing(lambda p: None), "None (None", "scalar", "Mean("),
    "text": Bad(lambda: losing(lambda p: "0.1"), "'0.1' (str)", "scalar", "Mean("),
    "a pair": Bad(
        lambda: losing(lambda p: (p[0], p)), "a tuple of 2", "value alone", "has_aux="
    ),
    "no pair under has_aux": Bad(
        lambda: losing(lambda p: p[0], has_aux=True),
        "has_aux=True",
        "(value, aux)",
        "drop has_aux=True",
    ),
    "an integer as aux": Bad(
        lambda: losing(lambda p: (p[0], {"hits": jnp.argmax(p)}), has_aux=True),
        "['hits'] is a scalar of dtype int32",
        "eqaccum.Sum(x)",
        "count) for a ratio",
    ),
    "text as aux": Bad(
        lambda: losing(lambda p: (p[0], {"name": "p"}), has_aux=True),
        "['name'] is 'p'",
        "an array",
        "Leave it out",
    ),
    "Mean of two shapes": Bad(
        lambda: losing(lambda p: Mean(p[0], jnp.ones(2))), "(2,)", "same", "Sum both"
    ),
    "Mean of vectors": Bad(
        lambda: losing(lambda p: Mean(p, jnp.ones(2))), "(2,)", "scalar", "jnp.sum"
    ),
    "Mean plus a number": Bad(
        lambda: losing(lambda p: Mean(p[0], 1.0) + p[1]),
        "a Mean and an array of dtype float32 and shape ()",
        "weight is unknown",
        "Mean(value, 1.0)",
    ),
    "Mean times Mean": Bad(
        lambda: losing(lambda p: Mean(p[0], 1.0) * Mean(p[1], 1.0)),
        "two Means were multiplied",
        "a sum of Means",
        "by a number",
    ),
    "written for a batch": Bad(
        lambda: fitted(loss=batch_loss), "batch_loss", "one example", "batched(fn)"
    ),
    "batched to a scalar": Bad(
        lambda: fitted(loss=batched(batch_loss)), "scalar", "(n,)", "weighted=True"
    ),
    "batched to a matrix": Bad(
        lambda: fitted(loss=batched(lambda m, b, k: b[0])),
        "(4, 3)",
        "(n,)",
        ".mean(axis=-1)",
    ),
    "batched to other rows": Bad(
        lambda: fitted(loss=batched(lambda m, b, k: jnp.ones(1))),
        "(1,) for 4 rows",
        "(4,)",
        "one value for each row",
    ),
    "batched() of a number": Bad(
        lambda: batched(3), "loss=3", "loss(model, example, key)", "function"
    ),
    "shared_key() of a number": Bad(
        lambda: eqaccum.shared_key(3), "loss=3", "loss(model, example, key)", "function"
    ),
    "of value_and_grad": Bad(
        lambda: graded(loss=3), "loss=3", "loss(model, example, key)", "function"
    ),
    "of value_and_grad, a vector": Bad(
        lambda: graded(loss=lambda m, e, k: m(e[0])), "(2,)", "a scalar", "jnp.mean"
    ),
    "of make_step": Bad(
        lambda: stepped(loss=None), "loss=None", "loss(model, example, key)", "function"
    ),
}


def batch_loss(model, batch, keys):
    x, y = batch
    return jnp.mean((x @ model.w.T - y) ** 2, axis=(0, 1))


STATES = {
    "for a stateless loss": Bad(
        lambda: fitted(model=WITH_STATE, state=STATE),
        "(model, example, key)",
        "(model, state, example, key)",
        "where state= is given",
    ),
    "missing for a stateful loss": Bad(
        lambda: fitted(model=WITH_STATE, loss=state_loss),
        "(model, state, example, key)",
        "(model, example, key)",
        "needs state=",
    ),
    "not returned": Bad(
        lambda: fitted(
            model=WITH_STATE,
            state=STATE,
            loss=lambda m, s, e, k: jnp.sum(m.linear(e[0])),
        ),
        "expected (value, state)",
        "a state",
        "drop state=",
    ),
    "returned under has_aux": Bad(
        lambda: fitted(model=WITH_STATE, state=STATE, loss=state_loss, has_aux=True),
        "a tuple of 2",
        "(value, state, aux)",
        "drop has_aux=True",
    ),
    "returned without state=": Bad(
        lambda: losing(lambda p: (p[0], STATE), has_aux=True),
        "eqx.nn.State",
        "auxiliary",
        "state=",
    ),
    "that is a model": Bad(
        lambda: fitted(model=WITH_STATE, state=MODEL, loss=state_loss),
        "state=Linear",
        "eqx.nn.State",
        "make_with_state",
    ),
    "of init": Bad(
        lambda: make_step(state_loss, SGD, global_batch=4).init(WITH_STATE),
        "(model, state, example, key)",
        "(model, example, key)",
        "needs state=",
    ),
}

MODELS = {
    "without floating leaves": Bad(
        lambda: fitted(model=INTEGERS), "int64", "floating or complex", "jnp.float32"
    ),
    "without arrays": Bad(
        lambda: fitted(model=jnp.sin), "no arrays", "floating or complex", "Convert"
    ),
    "without trained leaves": Bad(
        lambda: fitted(trainable=False),
        "trainable= leaves out",
        "floating",
        "Mark at least one",
    ),
    "of shapes only": Bad(
        lambda: fitted(model=Linear(jax.ShapeDtypeStruct((2, 3), "float32"))),
        "ShapeDtypeStruct",
        "plan",
        "Pass arrays",
    ),
    "of shapes only, in init": Bad(
        lambda: make_step(loss, SGD, global_batch=4).init(
            Linear(jax.ShapeDtypeStruct((2, 3), "float32"))
        ),
        "ShapeDtypeStruct",
        "plan",
        "Pass arrays",
    ),
    "trainable by name": Bad(
        lambda: fitted(trainable="w"), "'w' (str)", "True or False", "predicate"
    ),
    "trainable of another structure": Bad(
        lambda: fitted(trainable={"w": True}),
        "trainable=PyTreeDef({'w': *})",
        "prefix",
        "eqx.tree_at",
    ),
    "trainable by value": Bad(
        lambda: fitted(trainable=lambda leaf: (leaf > 0).all()),
        "an array of dtype bool and shape ()",
        "True or False",
        "shapes and dtypes",
    ),
    "trainable integers": Bad(
        lambda: fitted(model={"n": np.arange(3)}, trainable={"n": True}),
        "int64",
        "floating and complex",
        "Mark it False",
    ),
}

OPTIMIZERS = {
    "a name": Bad(
        lambda: fitted(optimizer="adam"), "'adam'", "optax.adamw(1e-3)", "total number"
    ),
    "a number": Bad(
        lambda: fitted(optimizer=1e-3), "0.001", "optax.adamw(1e-3)", "total number"
    ),
    "not called": Bad(
        lambda: fitted(optimizer=optax.adamw), "optax.adamw", "learning rate", "Call it"
    ),
    "not called in make_step": Bad(
        lambda: stepped(optimizer=optax.sgd), "optax.sgd", "learning rate", "Call it"
    ),
    "not called in plan": Bad(
        lambda: planned(optimizer=optax.adam), "optax.adam", "learning rate", "Call it"
    ),
    "MultiSteps": Bad(
        lambda: fitted(optimizer=optax.MultiSteps(SGD, 4)),
        "optax.MultiSteps",
        "accumulates already",
        "Pass the inner optimizer",
    ),
    "MultiSteps inside": Bad(
        lambda: fitted(
            optimizer=optax.chain(
                optax.clip(1.0), optax.MultiSteps(SGD, 4).gradient_transformation()
            )
        ),
        "optax.MultiSteps",
        "accumulates already",
        "Pass the inner optimizer",
    ),
    "lbfgs": Bad(
        lambda: fitted(optimizer=optax.lbfgs()),
        "lbfgs",
        "(updates, state, params, value)",
        "first-order",
    ),
    "per-example gradients": Bad(
        lambda: fitted(
            optimizer=optax.contrib.differentially_private_aggregate(1.0, 1.0, 0)
        ),
        "differentially_private_aggregate",
        "each example",
        "jax_privacy",
    ),
    "a function that returns none": Bad(
        lambda: fitted(optimizer=lambda total: total), "2", "optax.adamw", "function of"
    ),
    "a function in make_step": Bad(
        lambda: stepped(optimizer=lambda total: optax.sgd(1 / total)),
        "a function of the total",
        "do not know",
        "Pass the optimizer itself",
    ),
    "a function where the total is unknown": Bad(
        lambda: fitted(data=iter([(X, Y)]), optimizer=lambda n: optax.sgd(1 / n)),
        "a function of the total",
        "not known",
        "Pass steps=",
    ),
}

OTHERS = {
    "a number as key": Bad(
        lambda: fitted(key=0), "key= is 0 (int)", "one PRNG key", "jax.random.key(0)"
    ),
    "many keys": Bad(
        lambda: fitted(key=jax.random.split(jax.random.key(0), 3)),
        "(3,)",
        "one PRNG key",
        "jax.random.key(0)",
    ),
    "key of floats": Bad(
        lambda: graded(key=np.ones(2)),
        "(2,)",
        "one PRNG key",
        "uint32",
    ),
    "a penalty of two arguments": Bad(
        lambda: fitted(penalty=lambda model, x: 0.0),
        "(model, x)",
        "of the model alone",
        "loss",
    ),
    "a penalty of a vector": Bad(
        lambda: fitted(penalty=lambda model: model.w),
        "float32(2, 3)",
        "a float scalar",
        "jnp.sum",
    ),
    "a plan for another global batch": Bad(
        lambda: fitted(plan=FOREIGN_PLAN),
        "global_batch=8",
        "has global_batch=4",
        "leave plan= out",
    ),
    "a limit that nothing fits": Bad(
        lambda: fitted(memory_limit="100B", global_batch=1),
        "100 B",
        "at microbatch 1",
        "What would help",
        eqaccum.DoesNotFit,
        may_compile=PROBES,
    ),
    "a microbatch over a given limit": Bad(
        lambda: fitted(memory_limit="100B", microbatch=4),
        "microbatch=4 needs",
        "the limit is 100 B",
        "a smaller microbatch",
        eqaccum.DoesNotFit,
        may_compile=PROBES,
    ),
    "a batch above global_batch": Bad(
        lambda: stepped(global_batch=4), "8 rows", "global_batch is 4", "at most"
    ),
    "another step's train": Bad(
        lambda: stepped(
            train=make_step(loss, optax.adam(1.0), global_batch=4).init(MODEL)
        ),
        "not made for this step",
        "optimizer",
        "step.init(model, key)",
        may_compile=INIT,
    ),
    "a model as train": Bad(
        lambda: stepped(train=MODEL), "Linear", "TrainState", "step.init(model, key)"
    ),
    "a step inside jit": Bad(
        lambda: jax.jit(lambda x: stepped(batch=(x, Y)))(X),
        "inside jax.jit",
        "programs of its own",
        "value_and_grad",
    ),
    "an unknown argument of plan": Bad(
        lambda: planned(batch_size=4), "batch_size", "fit", "help(eqaccum.fit)"
    ),
    "a list for evaluate": Bad(
        lambda: evaluated(data=[X, Y]), "a list of ndarray", "tuple", "examples(data)"
    ),
    "a list for predict": Bad(
        lambda: predicted(x=[X]), "a list of ndarray", "tuple", "examples(data)"
    ),
    "shapes for evaluate": Bad(
        lambda: evaluated(data=STRUCTS), "ShapeDtypeStruct", "values", "Pass arrays"
    ),
    "shapes for predict": Bad(
        lambda: predicted(x=STRUCTS[0]), "ShapeDtypeStruct", "values", "Pass arrays"
    ),
    "a model of shapes for evaluate": Bad(
        lambda: evaluated(model=Linear(jax.ShapeDtypeStruct((2, 3), "float32"))),
        "ShapeDtypeStruct",
        "plan",
        "Pass arrays",
    ),
    "a model of shapes for predict": Bad(
        lambda: predicted(model=Linear(jax.ShapeDtypeStruct((2, 3), "float32"))),
        "ShapeDtypeStruct",
        "plan",
        "Pass arrays",
    ),
    "a key for evaluate": Bad(
        lambda: evaluated(key=1), "key= is 1 (int)", "one PRNG key", "jax.random.key(0)"
    ),
    "a key for predict": Bad(
        lambda: predicted(key=1), "key= is 1 (int)", "one PRNG key", "jax.random.key(0)"
    ),
    "a loss for evaluate": Bad(
        lambda: evaluated(loss=3), "loss=3", "loss(model, example, key)", "function"
    ),
    "a vector for evaluate": Bad(
        lambda: evaluated(loss=lambda m, e, k: m(e[0])), "(2,)", "a scalar", "jnp.mean"
    ),
    "weights for evaluate": Bad(
        lambda: evaluated(example_weights=-np.ones(8)), "-1", "not negative", "0 for"
    ),
    "a state for evaluate": Bad(
        lambda: evaluated(state=MODEL),
        "state=Linear",
        "eqx.nn.State",
        "make_with_state",
    ),
    "a model that cannot be called": Bad(
        lambda: predicted(model={"w": MODEL.w}), "dict", "cannot be called", "Pass"
    ),
    "something else among callbacks": Bad(
        lambda: fitted(callbacks=[print, None]), "holds None", "functions", "every"
    ),
    "a callback's every": Bad(
        lambda: fitted(callbacks=[Every()]), "Every", "every", "a positive int of steps"
    ),
    "a class among callbacks": Bad(
        lambda: fitted(callbacks=[callbacks.EarlyStopping]),
        "the class EarlyStopping",
        "expected what it makes",
        "EarlyStopping(...)",
    ),
    "a callback without its validation": Bad(
        lambda: fitted(callbacks=[callbacks.EarlyStopping()]),
        "EarlyStopping('validation_loss')",
        "validation=",
        "watch a name of training",
    ),
    "a name to watch": Bad(
        lambda: callbacks.EarlyStopping(3), "3 (int)", "a name of the history", "'vali"
    ),
    "a patience": Bad(
        lambda: callbacks.EarlyStopping(patience=0), "patience=0", "positive int", "3"
    ),
    "a margin": Bad(
        lambda: callbacks.EarlyStopping(margin=-1), "margin=-1", "at least 0", "0.0"
    ),
    "maximize": Bad(
        lambda: callbacks.EarlyStopping(maximize="yes"),
        "maximize='yes' (str)",
        "True",
        "False",
    ),
    "every of a log": Bad(
        lambda: callbacks.CSV("log.csv", every=0), "every=0", "positive int", "every=1"
    ),
    "a path of a log": Bad(
        lambda: callbacks.JSONL(3), "the path 3 (int)", "a file", "pathlib.Path"
    ),
    "a folder as a log": Bad(
        lambda: callbacks.CSV("."), "the path '.'", "a file", "pathlib.Path"
    ),
    "a path of a best checkpoint": Bad(
        lambda: callbacks.BestCheckpoint(3), "path=3", "int", "the path of a directory"
    ),
    "workers": Bad(
        lambda: eqaccum.data.examples([X], workers=2.5),
        "workers=2.5 (float)",
        "a number of threads",
        "0 for none",
    ),
    "a run of W&B and what starts one": Bad(
        lambda: callbacks.WandB(object(), project="digits"),
        "a run and project",
        "one of them",
        "leave the run out",
    ),
    "a list as validation": Bad(
        lambda: fitted(validation=[X, Y]),
        "a list of ndarray",
        "tuple",
        "examples(data)",
    ),
    "validate_every without validation": Bad(
        lambda: fitted(validate_every=2), "validate_every=2", "validation=", "Pass"
    ),
    "a mesh without a data axis": Bad(
        lambda: fitted(mesh=jax.make_mesh((1,), ("model",))),
        "('model',)",
        "'data'",
        "jax.make_mesh",
    ),
    "shapes for value_and_grad": Bad(
        lambda: graded(batch=STRUCTS), "ShapeDtypeStruct", "values", "Pass arrays"
    ),
    "a plan that is no plan": Bad(
        lambda: eqaccum.Plan.from_dict({}), "kind", "to_dict()", "eqaccum.plan"
    ),
}

TABLE = {
    f"{kind}: {name}": bad
    for kind, entries in {
        "data": DATA,
        "weights": WEIGHTS,
        "argument": NUMBERS,
        "loss": LOSS,
        "state": STATES,
        "model": MODELS,
        "optimizer": OPTIMIZERS,
        "other": OTHERS,
    }.items()
    for name, bad in entries.items()
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_refused(name, capsys):
    bad = TABLE[name]
    start, busy = time.perf_counter(), time.process_time()
    with compilations() as compiled, pytest.raises(bad.error) as caught:
        bad.call()
    # A machine that is busy with something else is not counted.
    seconds = min(time.perf_counter() - start, time.process_time() - busy)
    text = str(caught.value)
    missing = [p for p in (bad.passed, bad.expected, bad.remedy) if p not in text]
    assert missing == [], text
    assert len(text) < 900, text
    assert seconds < 3
    allowed = {f"jit(eqaccum_{program})" for program in bad.may_compile.split()}
    assert {n for n in compiled if "eqaccum" in n} <= allowed
    # Nothing was announced before it was refused.
    assert "eqaccum:" not in capsys.readouterr().err


def test_the_table_is_long():
    assert len(TABLE) >= 60
