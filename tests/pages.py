"""Programs in Markdown pages, and how they are run.

A fenced block of `python` is a program; all blocks of a page are one. What a reader
need not see stands in comments: `<!-- setup ... -->` before it, `<!-- test ... -->`
after it. Classes (```` ``` { .python .keras } ````, `<!-- test .keras`) say what else
must be installed; blocks without them run all the same.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_FENCE = (
    r"^(?P<fence>```)\s*(?P<info>python|\{ \.python[^}]*\})[^\n]*\n"
    r"(?P<block>.*?)^```$"
)
_COMMENT = r"^<!-- (?:setup|test)(?P<needs>[^\n]*)\n(?P<hidden>.*?)^-->$"
_PROGRAM = re.compile(f"{_FENCE}|{_COMMENT}", re.DOTALL | re.MULTILINE)
# Said to readers, nothing to install: the block is run elsewhere.
_NOT_HERE = {"readme"}


@dataclass(frozen=True)
class Block:
    """A piece of a page's program, and the line it begins at (from 0)."""

    code: str
    line: int
    classes: frozenset[str]


@dataclass(frozen=True)
class Page:
    """A Markdown file and the programs in it."""

    path: Path

    @property
    def peers(self) -> set[str]:
        """The modules that some blocks need."""
        return {name for block in self.blocks for name in block.classes} - _NOT_HERE

    @cached_property
    def blocks(self) -> list[Block]:
        text = self.path.read_text()
        found = []
        for match in _PROGRAM.finditer(text):
            group = "block" if match["fence"] else "hidden"
            classes = re.findall(r"\.(\w+)", match["info"] or match["needs"] or "")
            line = text.count("\n", 0, match.start(group))
            found.append(Block(match[group], line, frozenset(classes) - {"python"}))
        return found


def run(page: Page, *, peers: bool = False) -> dict[str, Any]:
    """Runs a page's program; a line in a traceback is the page's line.

    **Arguments:**

    - `peers`: with the blocks that need other libraries, which must be installed;
        otherwise those are left out.
    """
    names: dict[str, Any] = {"__name__": page.path.stem}
    for block in page.blocks:
        if block.classes & _NOT_HERE or (block.classes and not peers):
            continue
        padded = "\n" * block.line + block.code
        exec(compile(padded, str(page.path), "exec"), names)
    return names
