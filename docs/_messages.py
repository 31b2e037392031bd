"""Writes the list of all messages into `docs/errors.md`, out of `eqaccum/_errors/`.

Run it after a message has changed: `python docs/_messages.py`. A test compares.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "errors.md"
ROOM = REPOSITORY / "eqaccum" / "_errors"
START, END = "<!-- messages: start -->", "<!-- messages: end -->"

# The files of the room in the order of the page, and what each is about.
TITLES = {
    "_data": "Data",
    "_loss": "The loss, the model, the state",
    "_step": "The step: arguments, optimizer, what happens while it runs",
    "_plan": "The plan and the memory",
    "_checkpoint": "Checkpoints",
    "_check": "The self-test",
    "_losses": "Ready-made losses",
    "_callbacks": "Callbacks and frames",
    "_cli": "The command line",
    "_conv": "Convolutions on CPU",
}
_NO_MESSAGES = ("__init__", "_exceptions", "_frames", "_say")
_CLASSES = (
    *("InputError", "LossShapeError", "PlanError", "DoesNotFit", "CannotTell"),
    *("CheckpointError", "NonFiniteError", "StepError", "EqaccumError"),
)


@dataclass(frozen=True)
class Message:
    """One message: what makes it, the exception it comes with, and its text."""

    name: str
    raised: str
    text: str


def messages_of(source: str) -> Iterator[Message]:
    """The messages that the functions of a file make."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found = _texts(node)
            if found:
                raised, text = found
                yield Message(node.name, raised, text)


def _texts(function: ast.FunctionDef) -> tuple[str, str] | None:
    """The exception's name ("" for a line that is said) and all text in it."""
    texts, raised = [], ""
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            raised = call.func.id if call.func.id in _CLASSES else raised
            texts += [_text(argument) for argument in call.args]
        else:
            texts.append(_text(call))
    words = " ".join(filter(None, texts))
    return (raised, words) if words else None


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{_subject(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def _subject(node: ast.AST) -> str:
    """What a placeholder stands for: the last name in its expression."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "len"):
        return f"{ast.unparse(node.func)} of {_subject(node.args[0])}"
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    known = [n for n in names if n not in ("map", "repr", "str", "type", "len", "n")]
    if isinstance(node, ast.Attribute):
        if node.attr == "__name__":
            return _subject(node.value)
        return f"{_subject(node.value)}'s {node.attr}"
    return known[-1] if known else "..."


def _escaped(text: str) -> str:
    """The text as Markdown: what stands between backticks is code already."""
    parts = re.sub(r"\s+", " ", text).split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_{}\[\]<>#|])", r"\\\1", parts[i])
    return "`".join(parts)


def written() -> str:
    """The list, by what it is about."""
    lines = [START, ""]
    files = {path.stem: path for path in sorted(ROOM.glob("_*.py"))}
    for name in [*TITLES, *(name for name in files if name not in TITLES)]:
        if name in _NO_MESSAGES:
            continue
        source = files[name].read_text()
        title = TITLES.get(name, name.strip("_").replace("_", " ").capitalize())
        lines += [f"### {title}", ""]
        for message in messages_of(source):
            raised = f" (`{message.raised}`)" if message.raised else ""
            name = message.name.replace("_", " ")
            lines.append(f"- **{name}**{raised}: {_escaped(message.text)}")
        lines.append("")
    return "\n".join([*lines, END])


def page(text: str) -> str:
    """The page with the list as it is now."""
    before, _, rest = text.partition(START)
    return before + written() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
