"""Settings for all tests. No import of eqaccum: its annotation hook comes first."""

import os
import tempfile
from collections.abc import Callable

import hypothesis
import jax
import jax.random as jr
import pytest

# Four devices on one CPU, so that tests of several devices are ordinary tests.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compilations are counted: none may be answered from an earlier run's disk cache.
jax.config.update("jax_enable_compilation_cache", False)

hypothesis.settings.register_profile(
    "default", max_examples=10, derandomize=True, deadline=None
)
hypothesis.settings.register_profile(
    "nightly", max_examples=500, deadline=None, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def plan_cache():
    """Keeps the plans that tests remember away from the user's own cache."""
    with tempfile.TemporaryDirectory(prefix="eqaccum-") as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EQACCUM_CACHE_DIR", folder)
            yield


@pytest.fixture(autouse=True)
def job_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """One device is the job's, unless a test is marked `devices(n)`."""
    marker = request.node.get_closest_marker("devices")
    count = 1 if marker is None else marker.args[0]
    import eqaccum._mesh

    monkeypatch.setattr(eqaccum._mesh, "job_devices", lambda: jax.devices()[:count])


class _GetKey:
    """Fresh keys in a fixed order; its repr, in a failing test, tells how many."""

    def __init__(self, seed: int):
        self.seed = seed
        self.calls = 0

    def __call__(self) -> jax.Array:
        self.calls += 1
        return jr.fold_in(jr.key(self.seed), self.calls)

    def __repr__(self) -> str:
        return f"getkey(seed={self.seed}, calls={self.calls})"


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """A function that returns a new key at each call, the same ones in each run."""
    return _GetKey(seed=5678)
