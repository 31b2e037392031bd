"""Reads the safetensors format: the format is simple, and one more package is not."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from .. import _errors

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name, mapped from disk and not yet read.

    The file is: the header's length (8 bytes), the header (JSON: dtype, shape and place
    of each tensor), the values.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 2 <= length <= size - 8:
            raise _errors.safetensors(path, f"a header of {length} in {size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise _errors.safetensors(path, str(error)) from error
    header.pop("__metadata__", None)
    values = np.memmap(path, np.uint8, mode="r", offset=8 + length)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise _errors.safetensors(path, f"{name} has dtype {entry['dtype']}")
        start, end = entry["data_offsets"]
        if end > values.size:
            raise _errors.safetensors(path, f"it ends before {name} does")
        flat = values[start:end].view(_DTYPES[entry["dtype"]])
        tensors[name] = np.asarray(flat.reshape(entry["shape"]))
    return tensors
