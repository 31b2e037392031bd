"""The largest arrays that a compiled program makes, read from its text.

A guide to where the bytes are, and no sum: arrays that are not needed at the same time
share their place, and which do is not in the text.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_FUSED = re.compile(r" fusion\(.*?calls=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LINE = re.compile(r'source_file="([^"]*)".*?source_line=(\d+)')
# Their results are others' places, or no work of the program's.
_NO_ARRAYS = frozenset(
    "parameter constant get-tuple-element tuple bitcast while call conditional "
    "after-all opt-barrier".split()
)
# jit(eqaccum_accumulate)/while/body/eqaccum/microbatch/...: the scopes of a pass
_OURS = re.compile(r"^.*\beqaccum/\w+/")
_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class LargeArray:
    """One of the largest arrays of a pass.

    **Arguments:**

    - `bytes`: of one such array, on one device.
    - `shape`: as XLA writes it: `"f32[128,256]"`.
    - `count`: how many of this shape, name and place the program makes.
    - `name`: the operation that makes it, behind the names of its scopes.
    - `source`: `file:line` of the user's own line that leads to it, where there is
        one, else of a library's; `""` where the compiler does not tell.

    !!! Example

        ```python
        for array in eqaccum.plan(model, data, global_batch=4096).arrays:
            print(array.bytes, array.name, array.source)
        ```
    """

    bytes: int
    shape: str
    count: int
    name: str
    source: str


def largest_arrays(text: str, *, most: int = 5) -> tuple[LargeArray, ...]:
    """The largest arrays that a program's text names, the largest first.

    **Arguments:**

    - `text`: `compiled.as_text()`; a text without names gives none.
    - `most`: how many are wanted.
    """
    lines = text.splitlines()
    fused = {match[1] for line in lines for match in _FUSED.finditer(line)}
    sources = _Sources(lines)
    found: Counter[LargeArray] = Counter()
    inside = ""
    for line in lines:
        if computation := _COMPUTATION.match(line):
            inside = computation[1]
        elif inside not in fused:  # what a fusion makes on its way has no place
            found.update(_made_by(line, sources))
    largest = sorted(found, key=lambda array: -array.bytes)[:most]
    return tuple(replace(array, count=found[array]) for array in largest)


def _made_by(line: str, sources: "_Sources") -> Iterator[LargeArray]:
    instruction, name = _INSTRUCTION.match(line), _NAME.search(line)
    if instruction is None or name is None or instruction[2] in _NO_ARRAYS:
        return
    if not _OURS.match(name[1]):  # the sums and the rows, which are parts of their own
        return
    for dtype, dims in _SHAPE.findall(instruction[1]):
        size = _itemsize(dtype)
        for dim in dims.split(",") if dims else ():
            size *= int(dim)
        shape, where = f"{dtype}[{dims}]", sources.of(line)
        yield LargeArray(int(size), shape, 1, _OURS.sub("", name[1]), where)


def _itemsize(dtype: str) -> float:
    """Bytes of an element, of `f32`, `bf16`, `f8e4m3fn`, `pred`, `s4`."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0


class _Sources:
    """The tables of files and stack frames at a text's head."""

    def __init__(self, lines: list[str]) -> None:
        self._files = _table(lines, "FileNames", r'^(\d+) "(.*)"$')
        places = _table(
            lines, "FileLocations", r"^(\d+) (\{file_name_id=\d+.*? line=\d+)"
        )
        self._places = {
            key: tuple(re.findall(r"(?:file_name_id| line)=(\d+)", place))
            for key, place in places.items()
        }
        frames = _table(lines, "StackFrames", r"^(\d+) (\{.*\})$")
        self._frames = {
            key: tuple(re.findall(r"=(\d+)", frame)) for key, frame in frames.items()
        }
        # jaxlib 0.10 prints a parent's number one too high, and so a frame's own.
        self._off = any(key == parent for key, (_, parent) in self._frames.items())

    def of(self, line: str) -> str:
        frame = _FRAME.search(line)
        known = list(self._chain(frame[1])) if frame else _LINE.findall(line)
        theirs = [place for place in known if not place[0].startswith(_PACKAGE)]
        own = [p for p in theirs if not any(name in p[0] for name in _LIBRARIES)]
        for file, number in (own or theirs)[:1]:
            return f"{'/'.join(Path(file).parts[-2:])}:{number}"
        return ""

    def _chain(self, frame: str) -> Iterator[tuple[str, str]]:
        """(file, line) from the innermost frame outwards."""
        while frame in self._frames:
            place, parent = self._frames[frame][:2]
            file, number = self._places.get(place, ("", ""))[:2]
            if file in self._files:
                yield self._files[file], number
            frame = str(int(parent) - self._off)


def _table(lines: list[str], title: str, row: str) -> Mapping[str, str]:
    """The rows under a title, by their number."""
    if title not in lines:
        return {}
    found = {}
    for line in lines[lines.index(title) + 1 :]:
        match = re.match(row, line)
        if match is None:
            break
        found[match[1]] = match[2]
    return found
