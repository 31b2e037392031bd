"""What several tests share and what is no fixture."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent


def leaves_with_names(tree: Any) -> dict[str, np.ndarray]:
    """The numbers of a pytree as numpy arrays, by their path; keys as their data."""
    return {
        jax.tree_util.keystr(path): _as_numpy(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array | np.ndarray | float | int)
    }


def _as_numpy(leaf: Any) -> np.ndarray:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_trees_close(got: Any, want: Any, *, rtol: float = 1e-5, atol: float = 1e-6):
    """Same leaves under the same names, with the same dtypes and close values."""
    got, want = leaves_with_names(got), leaves_with_names(want)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype, name
        np.testing.assert_allclose(
            got[name], expected, rtol=rtol, atol=atol, err_msg=name
        )


def assert_trees_equal(got: Any, want: Any):
    """Same leaves under the same names, bit for bit (NaNs included)."""
    got, want = leaves_with_names(got), leaves_with_names(want)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype, name
        assert got[name].shape == expected.shape, name
        assert got[name].tobytes() == expected.tobytes(), name


def run_python(
    code: str, *arguments: str, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python process of its own, in the repository's root."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the names of the programs that XLA compiles inside the block."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
