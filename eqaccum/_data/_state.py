"""Where an iterator is, for those that can say it: `get_state` and `set_state`.

It is Grain's protocol. A state is kept as text, so that a checkpoint can hold it.
"""

import base64
import json
from typing import Any

_BYTES = "base64:"


def has_state(iterator: Any) -> bool:
    """Whether it can say where it is, in a form that a checkpoint can hold."""
    return get_state(iterator) is not None


def get_state(iterator: Any) -> str | None:
    """Where the iterator is, None where it cannot say."""
    ask = getattr(iterator, "get_state", None)
    if not callable(ask) or not callable(getattr(iterator, "set_state", None)):
        return None
    state = ask()
    if isinstance(state, bytes):
        return _BYTES + base64.b64encode(state).decode()
    try:
        text = json.dumps(state)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == state else None  # tuples, keys that are no text


def set_state(iterator: Any, text: str) -> None:
    """Takes the iterator to where it was when `get_state` gave this text."""
    if text.startswith(_BYTES):
        iterator.set_state(base64.b64decode(text.removeprefix(_BYTES)))
    else:
        iterator.set_state(json.loads(text))
