"""A language model of 1.3 billion parameters on 8 to 2,048 devices, on paper.

    python benchmarks/scale.py [--devices 8 128 2048] [--figure docs/scale.svg]
                                                                   (make bench-scale)

Nothing is allocated and nothing runs: the model and the batch are abstract shapes, the
devices are faked, and all figures are read from the compiled programs of the step:
bytes per device from the compiler's analysis, bytes moved from the collectives in the
compiled text, products from the traced loss with the lengths of its loops. What a
machine would make of them takes two assumptions, `--flops` and `--network`. One process
per number of devices; a quarter of an hour on two cores. Prints Markdown.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, LETTERS = 24, 2048, 16, 50_304
TOKENS, SEQUENCES = 2048, 2048  # of a sequence; of a global batch: 4.2M tokens
WAYS = ("replicated", "shard_optimizer", "parameters over data")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Predicted:
    """What the compiled programs of one step say."""

    devices: int
    way: str
    passes: int
    bytes: int
    parts: dict[str, int]
    moved: int  # bytes that a device sends in one step
    moved_inside: int  # of those, in the loop over passes: there should be none
    flops: float  # products of one device in one step
    parameters: int
    seconds: float


def model_of_shapes() -> Any:
    """A transformer whose layers are one scan, each recomputed in the backward pass."""
    import equinox as eqx
    import jax

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        mix: eqx.nn.Linear
        out: eqx.nn.Linear
        widen: eqx.nn.Linear
        narrow: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            a, b, c, d = jax.random.split(key, 4)
            self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
            self.mix = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=a)
            self.out = eqx.nn.Linear(WIDTH, WIDTH, key=b)
            self.widen = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=c)
            self.narrow = eqx.nn.Linear(4 * WIDTH, WIDTH, key=d)

        def __call__(self, x: Any) -> Any:
            mixed = jax.vmap(self.mix)(jax.vmap(self.norms[0])(x))
            heads = mixed.reshape(len(x), 3, HEADS, WIDTH // HEADS)
            query, key, value = (heads[:, i] for i in range(3))
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            x = x + jax.vmap(self.out)(attended.reshape(len(x), WIDTH))
            wide = jax.nn.gelu(jax.vmap(self.widen)(jax.vmap(self.norms[1])(x)))
            return x + jax.vmap(self.narrow)(wide)

    class Model(eqx.Module):
        letters: Any
        places: Any
        blocks: Block  # each leaf (LAYERS, ...)
        norm: eqx.nn.LayerNorm

        def __init__(self, key: Any) -> None:
            a, b, c = jax.random.split(key, 3)
            self.letters = jax.random.normal(a, (LETTERS, WIDTH))
            self.places = jax.random.normal(b, (TOKENS, WIDTH))
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(c, LAYERS))
            self.norm = eqx.nn.LayerNorm(WIDTH)

        def __call__(self, tokens: Any) -> Any:
            arrays, rest = eqx.partition(self.blocks, eqx.is_array)

            @jax.checkpoint
            def layer(x: Any, arrays: Any) -> tuple[Any, None]:
                return eqx.combine(arrays, rest)(x), None

            x = self.letters[tokens] + self.places
            x, _ = jax.lax.scan(layer, x, arrays)
            return jax.vmap(self.norm)(x) @ self.letters.T

    return eqx.filter_eval_shape(Model, jax.random.key(0))


def predict(devices: int, way: str) -> Predicted:
    import equinox as eqx
    import jax
    import optax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    import time

    import eqaccum
    from eqaccum._data import open_source

    def loss(model: Any, tokens: Any, key: Any) -> Any:
        scores = model(tokens[:-1])
        nll = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[1:])
        return nll.mean()

    mesh = jax.make_mesh((devices,), ("data",))
    model = model_of_shapes()
    if way == "parameters over data":
        model = jax.tree.map(
            lambda leaf: (
                over_data(leaf, mesh)
                if isinstance(leaf, jax.ShapeDtypeStruct)
                else leaf
            ),
            model,
        )
    start = time.perf_counter()
    step = eqaccum.make_step(
        loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
        global_batch=SEQUENCES,
        microbatch=1,
        memory_limit="1TiB",
        mesh=mesh,
        shard_optimizer=way == "shard_optimizer",
        cache=False,
    )
    step.describe(model)
    tokens = jax.ShapeDtypeStruct((SEQUENCES, TOKENS + 1), "int32")
    ready = step.prepare(open_source(tokens).layout)
    moved = inside = 0
    for program in (ready.accumulate, ready.finish, ready.update):
        text = program.compiled.as_text()
        once, looped = bytes_moved(text, devices)
        moved += once + looped
        if program is ready.accumulate:
            inside = looped
    (gradient,) = ready.traced.jaxprs[-1:]
    plan = ready.plan
    leaves = jax.tree.leaves(eqx.filter(model, lambda x: hasattr(x, "shape")))
    return Predicted(
        devices,
        way,
        plan.num_microbatches,
        plan.predicted_bytes or 0,
        plan.parts.named(),
        moved,
        inside,
        plan.num_microbatches * products(gradient.jaxpr),
        sum(math.prod(leaf.shape) for leaf in leaves),
        time.perf_counter() - start,
    )


def over_data(leaf: Any, mesh: Any) -> Any:
    """The shape, cut over `data` along the first axis that divides, if one does."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    size = mesh.shape["data"]
    cut = [axis for axis, length in enumerate(leaf.shape) if length % size == 0]
    spec = [None] * len(leaf.shape)
    if cut:
        spec[cut[0]] = "data"
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def bytes_moved(text: str, devices: int) -> tuple[int, int]:
    """What a device sends in a ring: outside of loops, and inside of them (once)."""
    once = looped = 0.0
    for computation in text.split("\n\n"):
        for shapes, kind in _COLLECTIVE.findall(computation):
            size = sum(
                _BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
                for dtype, dims in _SHAPE.findall(shapes)
            )
            ring = (devices - 1) / devices
            if kind == "all-reduce":
                size *= 2 * ring
            elif kind == "reduce-scatter":  # the result is one part
                size *= devices - 1
            else:
                size *= ring
            if computation.lstrip().startswith("ENTRY"):
                once += size
            else:
                looped += size
    return round(once), round(looped)


def products(jaxpr: Any) -> float:
    """Floating-point operations of the matrix products, loops by their lengths."""
    total = 0.0
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shared = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * shared * math.prod(eqn.outvars[0].aval.shape)
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * products(inner)
    return total


def table(found: list[Predicted], *, flops: float, network: float) -> str:
    """The figures, and what a machine of such devices would make of them."""
    gib = 2**30
    lines = [
        "| devices | way | passes | GiB per device | optimizer | activations | "
        "GiB sent per step | in the loop | computing | sending | sending / computing |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        computing, sending = one.flops / flops, one.moved / network
        lines.append(
            f"| {one.devices:,} | {one.way} | {one.passes} | {one.bytes / gib:.1f} | "
            f"{one.parts['optimizer'] / gib:.2f} | "
            f"{one.parts['activations'] / gib:.1f} | {one.moved / gib:.2f} | "
            f"{one.moved_inside / gib:.2f} | {computing:.2f} s | {sending:.2f} s | "
            f"{sending / computing:.3f} |"
        )
    return "\n".join(lines)


def draw(file: Path, found: list[Predicted], *, flops: float, network: float) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained"
    )
    for way in WAYS:
        those = [one for one in found if one.way == way]
        devices = [one.devices for one in those]
        left.plot(devices, [one.bytes / 2**30 for one in those], "o-", label=way)
        ratio = [one.moved / network / (one.flops / flops) for one in those]
        right.plot(devices, ratio, "o-", label=way)
    left.set(xlabel="devices", ylabel="GiB per device", xscale="log", ylim=0)
    right.set(xlabel="devices", ylabel="sending / computing", xscale="log")
    right.set(yscale="log")
    right.axhline(1, color="grey", linewidth=0.8)
    left.legend()
    figure.savefig(file)


def main(options: argparse.Namespace) -> None:
    found = []
    for devices in options.devices:
        for way in WAYS:
            words = ["--one", str(devices), way]
            done = subprocess.run(
                [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                raise SystemExit(f"{devices} devices, {way}: failed")
            found.append(Predicted(**json.loads(done.stdout.splitlines()[-1])))
            print(f"# {devices} {way}: {found[-1].seconds:.0f} s", file=sys.stderr)
    assumed = dict(flops=options.flops * 1e12, network=options.network * 1e9)
    print(
        f"{found[0].parameters:,} parameters, float32; {SEQUENCES:,} sequences of "
        f"{TOKENS:,} tokens per update, one sequence per device and pass; a device "
        f"computes {options.flops:g} TFLOP/s and sends {options.network:g} GB/s.\n"
    )
    print(table(found, **assumed))
    if options.figure:
        draw(Path(options.figure), found, **assumed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 128, 2048])
    parser.add_argument("--flops", type=float, default=200, help="TFLOP/s reached")
    parser.add_argument("--network", type=float, default=25, help="GB/s sent")
    parser.add_argument("--figure")
    parser.add_argument("--one", nargs=2, help="(of one process)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(predict(int(options.one[0]), options.one[1]))))
    else:
        main(options)
