"""Messages of the ready-made losses."""

from typing import Any

from ._exceptions import InputError


def loss_rows(loss: str, name: str, value: Any) -> InputError:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    got = type(value).__name__ if shape is None else f"{dtype}{shape}"
    return InputError(
        f"{loss} got {name}: {got}; expected a floating array of shape (n, d), one "
        "vector for each row. Reshape or convert what embed returns."
    )


def loss_weights(loss: str, shape: tuple[int, ...], rows: int) -> InputError:
    return InputError(
        f"{loss} got weights of shape {shape} for {rows} rows; expected ({rows},). "
        "Pass on the weights that the head is given, whole."
    )


def loss_sides(loss: str, q: tuple[int, ...], p: tuple[int, ...]) -> InputError:
    return InputError(
        f"{loss} got q of shape {q} and p of shape {p}; expected vectors of one length "
        "and at least as many rows in p as in q, row i of both belonging together. "
        "Swap the sides, or pass further negatives in p."
    )


def loss_hard_negatives(got: tuple[int, ...], p: tuple[int, ...]) -> InputError:
    rows, dim = p
    return InputError(
        f"info_nce got hard_negatives of shape {got} beside p of shape {p}; expected "
        f"({rows}, {dim}) or ({rows}, k, {dim}): those of each row of p. Return them "
        "from embed as an embedding of their own."
    )


def loss_views(loss: str, a: tuple[int, ...], b: tuple[int, ...]) -> InputError:
    return InputError(
        f"{loss} got views of shapes {a} and {b}; expected the same shape, row i of "
        "both from one example."
    )


def loss_probabilities(shape: tuple[int, ...], dtype: Any) -> InputError:
    return InputError(
        f"load_balance got probabilities of dtype {dtype} and shape {shape}; expected "
        "the router's softmax, floating, (n, experts) or (n, tokens, experts)."
    )


def loss_assigned(got: tuple[int, ...], expected: tuple[int, ...]) -> InputError:
    return InputError(
        f"load_balance got assigned of shape {got}; expected that of the "
        f"probabilities, {expected}: 1 for each expert that a token is sent to, else 0."
    )


def bad_top_k(top_k: Any, experts: int) -> InputError:
    return InputError(
        f"load_balance got top_k={top_k!r}; expected an int from 1 to {experts}, the "
        "number of experts."
    )


def bad_block_rows(value: Any) -> InputError:
    return InputError(
        f"block_rows={value!r} ({type(value).__name__}); expected a positive int, the "
        "rows of the score matrix to hold at a time, or None for all."
    )
