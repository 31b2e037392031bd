"""Fashion-MNIST from the files of Debian's package."""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from .. import _errors

_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_UNSIGNED_BYTE = 8


@dataclasses.dataclass(frozen=True)
class Images:
    """Grey images of 28 x 28 pixels, 0 to 255, and their classes, 0 to 9."""

    train_images: UInt8[np.ndarray, "train height width"]
    train_labels: UInt8[np.ndarray, " train"]
    test_images: UInt8[np.ndarray, "test height width"]
    test_labels: UInt8[np.ndarray, " test"]


def fashion_mnist(folder: str | Path | None = None) -> Images:
    """Reads Fashion-MNIST: 60,000 training and 10,000 test images of clothes.

    **Arguments:**

    - `folder`: where the four gzipped IDX files lie; None is the place of the Debian
        package `dataset-fashion-mnist`.

    **Raises:** `MissingError`, with the package to install, where a file is missing.

    !!! Example

        ```python
        images = fashion_mnist()
        x = images.train_images.reshape(-1, 784).astype("float32") / 255
        ```
    """
    place = _FOLDER if folder is None else Path(folder)
    return Images(
        train_images=read_idx(place / "train-images-idx3-ubyte.gz"),
        train_labels=read_idx(place / "train-labels-idx1-ubyte.gz"),
        test_images=read_idx(place / "t10k-images-idx3-ubyte.gz"),
        test_labels=read_idx(place / "t10k-labels-idx1-ubyte.gz"),
    )


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Reads a gzipped IDX file: two zero bytes, the type, the rank, the lengths (big
    endian, four bytes each), then the values."""
    if not path.is_file():
        raise _errors.no_fashion(path.parent, path.name)
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise _errors.idx_file(path, str(error)) from error
    if len(data) < 4 or data[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise _errors.idx_file(path, f"it begins with the bytes {data[:3].hex()}")
    header = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:header], ">u4").astype(int)
    values = np.frombuffer(data, np.uint8, offset=header)
    if values.size != shape.prod():
        raise _errors.idx_file(path, f"{values.size} values for the shape {shape}")
    return values.reshape(shape)
