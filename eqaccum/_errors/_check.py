"""Messages of the self-test: what is wrong with a loss, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from ._exceptions import InputError


@dataclass(frozen=True)
class Finding:
    """Something that makes a result depend on the microbatch, and the remedy."""

    cause: str
    remedy: str


def saw_batch_norm(names: Sequence[str]) -> Finding:
    return Finding(
        f"BatchNorm ({', '.join(names)}) takes the statistics of each microbatch",
        "use eqx.nn.GroupNorm or LayerNorm, put the layers into inference mode, or "
        "accept it and pin microbatch=",
    )


def saw_state() -> Finding:
    return Finding(
        "the loss reads the state, which each pass changes",
        "let the loss depend on the state at the beginning of the step only, keep the "
        "state out of the loss, or accept it and pin microbatch=",
    )


def saw_collective(axis_name: object) -> Finding:
    return Finding(
        f"the examples of a microbatch exchange values over the axis {axis_name!r} "
        "(pmean, psum, all_gather): batch statistics",
        "compute them over the whole global batch with eqaccum.coupled(embed, head), "
        "or leave them out",
    )


def saw_mean_of_means() -> Finding:
    return Finding(
        "a mean of means: the batched loss divides by the rows of the microbatch "
        "itself",
        "return one value for each row, shape (n,), undivided, or Mean(total, weight) "
        "of two (n,) arrays: eqaccum divides once, by the global batch",
    )


def saw_batch_statistics() -> Finding:
    return Finding(
        "batch statistics: in the batched loss a row's value depends on the other "
        "rows of its microbatch",
        "compute what couples rows (balance terms, normalisation, contrast) over the "
        "whole global batch with eqaccum.coupled(embed, head)",
    )


def saw_one_key() -> Finding:
    return Finding(
        "one key for several rows: in the batched loss a row's value depends on "
        "another row's key, as with keys[0]",
        "use each row's own key: jax.vmap(fn)(rows, keys)",
    )


def saw_shared_draw() -> Finding:
    return Finding(
        "random numbers for the rows of a microbatch are drawn from the step's shared "
        "key, so the passes draw the same ones",
        "draw what belongs to a row from its own key, jax.vmap(draw)(keys); draw from "
        "the shared key what is one for the whole step",
    )


def saw_counted_padding() -> Finding:
    return Finding(
        "rows of weight 0 are counted: the batched loss with weighted=True does not "
        "leave them out",
        "multiply each row's total and weight by its weight before adding up",
    )


def saw_coupled_embedding() -> Finding:
    return Finding(
        "the embedding of an example depends on the other examples of its microbatch",
        "let embed look at one example; what couples examples belongs into the head",
    )


def saw_not_finite() -> Finding:
    return Finding(
        "the gradient of these examples is not finite, so nothing can be compared",
        "pass other data, or guard the operation that overflows",
    )


def saw_foreign_draws(shapes: Sequence[str]) -> Finding:
    return Finding(
        f"random bits that do not come from key (drawn with shape "
        f"{', '.join(dict.fromkeys(shapes))}): they are the same for all examples and "
        "steps, or not what the run's key says",
        "draw from the key that the loss is given; where one fixed draw is meant, make "
        "it once outside of the loss and pass it as an array",
    )


def saw_weight_of_model() -> Finding:
    return Finding(
        "the weight of a Mean depends on the model, and no gradient flows through it",
        "divide inside the loss of the example, or say that it is held constant: "
        "Mean(total, jax.lax.stop_gradient(weight))",
    )


def depends_on_cut(findings: Sequence[Finding]) -> str:
    """The warning of `fit` before its first step."""
    told = "; ".join(f"{f.cause}. Remedy: {f.remedy}" for f in findings)
    return (
        f"the self-test before the first step failed: {told}. The result would depend "
        "on the microbatch, or is not the loss that is meant; eqaccum.check(model, "
        "data, loss) shows it leaf by leaf"
    )


def bad_examples(value: object) -> InputError:
    return InputError(
        f"examples={value!r} ({type(value).__name__}); expected an int of at least 3, "
        "the rows that are taken whole and cut."
    )


def too_few_to_check(rows: int, needed: int) -> InputError:
    return InputError(
        f"check got data with {rows} row{'s' * (rows != 1)}; it "
        f"needs at least {needed} to cut them. Pass more rows."
    )


def check_took_rows(description: str) -> str:
    return (
        f"check took the first batch out of the data, {description}: a later fit will "
        "not see it. Check with arrays, or with a loader that starts afresh"
    )
