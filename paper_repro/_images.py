"""Images as rows of numbers: Fashion-MNIST, or made-up ones for a tiny run."""

import numpy as np
from jaxtyping import Float, Int

from .data import fashion_mnist


def image_rows(
    rows: int, *, synthetic: bool
) -> tuple[Float[np.ndarray, "rows pixels"], Int[np.ndarray, " rows"]]:
    """The first so many training images from 0 to 1, and their classes, 0 to 9.

    **Arguments:**

    - `rows`: how many.
    - `synthetic`: a blurred class in 12 pixels, which needs no file.
    """
    if not synthetic:
        images = fashion_mnist()
        x = images.train_images[:rows].reshape(rows, -1).astype(np.float32) / 255
        return x, images.train_labels[:rows].astype(np.int32)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, rows)
    x = rng.normal(size=(rows, 12)) + y[:, None] / 5
    return x.astype(np.float32), y.astype(np.int32)
