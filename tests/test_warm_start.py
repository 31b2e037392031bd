"""A second process of the same run: what it compiles, and what it says."""

import json

from helpers import run_python

RUN = """
import json, sys
import jax
compiled, events = [], []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **more: compiled.append(more.get("fun_name"))
    if event == "/jax/core/compile/backend_compile_duration" else None
)
jax.monitoring.register_event_listener(lambda event, **more: events.append(event))
import jax.numpy as jnp, numpy as np, optax, eqaccum

def loss(w, x, key):
    return SIGN * jnp.sum(jnp.tanh(x * w) ** 2)

data = np.linspace(-1, 1, 64 * 100, dtype=np.float32).reshape(64, 100)
result = eqaccum.fit(jnp.ones(100), data, loss=loss, optimizer=optax.adam(0.1),
                     global_batch=64, memory_limit=55_000, epochs=2, progress=False)
hits = events.count("/jax/compilation_cache/cache_hits")
misses = events.count("/jax/compilation_cache/cache_misses")
names = [n for n in compiled if n and "eqaccum" in n]
print(json.dumps([names, hits, misses, result.plan.num_microbatches,
                  len(result.plan.probes)]))
"""


def run(sign="1", **environment):
    done = run_python(RUN.replace("SIGN", sign), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_warm_start_compiles_the_chosen_size_alone(tmp_path):
    plans = {"EQACCUM_CACHE_DIR": str(tmp_path / "plans")}
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    (cold, _, _, passes, probes), said = run(**plans)
    assert sum("accumulate" in name for name in cold) == probes >= 2
    assert "not from memory" not in said

    (warm, _, _, same, looked), said = run(**plans, **programs)
    assert same == passes and looked == probes
    for program in ("accumulate", "finish", "update"):
        assert sum(f"eqaccum_{program}" in name for name in warm) == 1, warm
    assert "not from memory" not in said

    # with JAX's own cache nothing at all is compiled
    (_, hits, misses, same, _), _ = run(**plans, **programs)
    assert same == passes
    assert hits >= 3 and misses == 0

    # another loss over the same shapes, in a later process
    _, said = run("2", **plans)
    assert "the program changed" in said
