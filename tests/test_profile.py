"""What a `jax.profiler` trace that the user starts shows of a run, by name."""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

DATA = np.arange(8, dtype=np.float32)


def loss(model, y, key):
    return (model - y) ** 2


def names_in(folder: Path) -> collections.Counter[str]:
    """How often each name of eqaccum's is in the newest trace."""
    (file,) = folder.rglob("*.xplane.pb")
    found: collections.Counter[str] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            found.update(e.name for e in line.events if e.name.startswith("eqaccum/"))
    return found


def test_the_regions_of_each_step_have_names(tmp_path):
    def run():
        return eqaccum.fit(
            jnp.float32(0),
            DATA,
            global_batch=4,
            loss=loss,
            optimizer=optax.sgd(0.1),
            validation=DATA,
            callbacks=[lambda info: None],
        )

    run()  # nothing is compiled within the trace
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # not every Python function as well
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        result = run()
    assert result.train.step == 2
    found = names_in(tmp_path)
    for name in ("finish", "wait", "update", "callback"):
        assert found[f"eqaccum/{name}"] == 2, (name, found)
    # The validation gathers rows and runs a forward program of the same name.
    for name in ("gather", "place", "accumulate"):
        assert found[f"eqaccum/{name}"] >= 2, (name, found)
    assert found["eqaccum/validate"] == 1
