"""Files that are made once: the user's cache folder."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs


def cache_path(name: str) -> Path:
    """Where the cached file or folder `name` lies, whether or not it exists.

    The folder is the user's cache folder, or the one that `EQACCUM_CACHE_DIR` names.
    """
    folder = os.environ.get("EQACCUM_CACHE_DIR") or platformdirs.user_cache_dir(
        "eqaccum"
    )
    return Path(folder) / "paper_repro" / name


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file or folder `name`; where it is missing, `make(path)` writes it.

    It appears under its name when it is complete and not before, so that a run which is
    killed leaves no half of it, and two runs at once do not disturb each other.
    """
    path = cache_path(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        new = Path(folder) / path.name
        make(new)
        try:
            new.rename(path)
        except OSError:  # another run made the folder first
            if not path.exists():
                raise
    return path
