"""PRNG keys that depend on the batch and the example, never on the microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from .. import _errors
from .._tree import is_key

_IMPL = "threefry2x32"


def run_key(key: Any) -> np.ndarray:
    """The run's key as threefry key data, shape (2,).

    **Arguments:**

    - `key`: None (`jax.random.key(0)`), a typed key, or a legacy uint32 key. A key of
        another kind than threefry is converted once, and said: other kinds draw
        different masks under another cut of the batch.
    """
    if key is None:
        return np.array([0, 0], np.uint32)
    if not isinstance(key, jax.Array | np.ndarray):
        raise _errors.not_a_key(key)
    if is_key(key):
        if key.shape != ():
            raise _errors.not_a_key(key)
        impl = str(jax.random.key_impl(key))
        data = np.asarray(jax.random.key_data(key))
        if impl != _IMPL:
            _errors.say(f"the {impl} key was converted to threefry, once")
            folded = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl=_IMPL)
            for word in data.ravel():
                folded = jax.random.fold_in(folded, word)
            data = np.asarray(jax.random.key_data(folded))
        return data
    if key.dtype != np.uint32 or key.shape != (2,):
        raise _errors.not_a_key(key)
    return np.asarray(key)


def batch_keys(
    key_data: UInt32[Array, "2"], batch_index: Int[Array, ""] | None
) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """The key of a batch's rows and the one that its examples share.

    Without a `batch_index` the key is the batch's own already.
    """
    key = wrap_key(key_data)
    if batch_index is not None:
        key = jax.random.fold_in(key, batch_index)
    rows, shared = jax.random.split(key)
    return rows, shared


def wrap_key(data: UInt32[Array, "*n 2"]) -> Key[Array, "*n"]:
    return jax.random.wrap_key_data(data, impl=_IMPL)


def example_keys(rows: Key[Array, ""], positions: Int[Array, "n"]) -> Key[Array, "n"]:
    """One key for each position of the global batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rows, positions)
