"""`coupled`: a loss of the whole global batch's embeddings, exactly, in two passes."""

from collections.abc import Callable
from typing import Any

from .. import _errors
from .._accumulate import (
    Form,
    LossSpec,
    Passes,
    PassInputs,
    signature_accepts,
)
from ._passes import trace_coupled


class Coupled(Form):
    """An embedding of each example and a head over all of them; see `coupled`."""

    embed: Any
    head: Any

    def check_arguments(self, *, has_state: bool) -> None:
        names = ["model", "state"] if has_state else ["model"]
        signature_accepts(self.embed, [*names, "example", "key"], has_state=has_state)
        signature_accepts(
            self.head, ["model", "embeddings", "weights"], has_state=False
        )

    def trace(
        self, spec: LossSpec, inputs: PassInputs, *, rows: int, **options: Any
    ) -> Passes:
        return trace_coupled(spec, inputs, rows=rows, **options)


def coupled(embed: Callable, head: Callable) -> Coupled:
    """A loss that couples the examples of the global batch, such as a contrastive one.

    The gradient is that of the whole global batch, whatever the microbatch: all
    examples are embedded by microbatches, the head's gradient is taken once at the
    embeddings, and a second sweep pulls it back through the encoder (gradient caching,
    Gao et al. 2021, arXiv:2101.06983). Both sweeps use the same keys and start from the
    same state; the first one's state is kept. With one pass there is no second sweep.

    **Arguments:**

    - `embed`: `(model, example, key)`, with `state` after the model where there is
        one; returns a pytree of arrays, or `(embeddings, state)`.
    - `head`: `(model, embeddings, weights)`; each embedding has the global batch in
        front, (N, ...), `weights` is float32 (N,). Returns a scalar, with `has_aux`
        `(scalar, aux)`. Rows of weight 0 (the missing rows of a short batch, filled
        with copies) must not count. The model's parameters that the head uses get their
        gradient once.

    **Returns:**

    A loss for `fit`, `make_step`, `plan` and `value_and_grad`.

    !!! Example

        ```python
        def embed(model, example, key):
            query, passage = example
            return model.query(query), model.passage(passage)

        def head(model, embeddings, weights):
            q, p = embeddings
            return eqaccum.losses.info_nce(q, p, weights=weights)

        eqaccum.fit(model, pairs, global_batch=8192, loss=eqaccum.coupled(embed, head))
        ```
    """
    for fn in (embed, head):
        if not callable(getattr(fn, "fn", fn)):
            raise _errors.loss_not_callable(fn)
    return Coupled(embed, head)
