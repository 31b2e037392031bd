"""What Griffe is told about the package, for the pages of the API."""

from typing import Any

import griffe


class Own(griffe.Extension):
    """Shows `Own[int | None, ...]`, a type that eqaccum checks itself, as that type."""

    def on_function_instance(self, *, func: griffe.Function, **more: Any) -> None:
        del more
        for parameter in func.parameters:
            annotation = parameter.annotation
            if not isinstance(annotation, griffe.ExprSubscript):
                continue
            inside = annotation.slice
            if str(annotation.left) == "Own" and isinstance(inside, griffe.ExprTuple):
                parameter.annotation = inside.elements[0]
