"""Debian's package descriptions: the short one is a query, the long one its passage."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from .._cache import made_once
from ._apt import Record, fetched_index, this_release
from ._pairs import Pairs, one_line, read_pairs, unique, write_pairs

_MIN_WORDS = 12


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of one binary package, each text on one line."""

    source: str
    short: str
    long: str


def debian_pairs(*, codename: str | None = None) -> Pairs:
    """Pairs of the short and long descriptions of Debian's packages.

    Built from apt's own index at the first call (some 15 MB are fetched; no root is
    needed), and read from the user's cache folder afterwards. The texts belong to the
    packages and are under their licences.

    **Arguments:**

    - `codename`: the release, which must be among apt's sources; None is this
        machine's. Figures of two releases cannot be compared (nor quite those of two
        architectures, which lack some packages each).

    **Returns:** `Pairs`, in the order of the sources' names. A pair is kept if its
    passage has at least 12 words and no other package has its query or its passage
    (letter case aside: a word-piece vocabulary has none); of the packages built from
    one source, which describe the same thing, the longest passage is kept.

    **Raises:** `MissingError` without apt, or if the index cannot be fetched.

    !!! Example

        ```python
        pairs = debian_pairs()
        rows = split(pairs)
        ```
    """
    release = codename or this_release()

    def make(path: Path) -> None:
        with fetched_index(release) as index:
            sources = source_names(index.packages())
            write_pairs(path, clean(descriptions(index.translations(), sources)))

    return read_pairs(made_once(f"debian-{release}.tsv.gz", make))


def source_names(packages: Iterable[Record]) -> dict[str, str]:
    """The source package of each binary package; one without the field is its own."""
    return {
        # "Source: name (version)" where the versions differ.
        record["Package"]: record.get("Source", record["Package"]).split(" ")[0]
        for record in packages
    }


def descriptions(
    translations: Iterable[Record], sources: dict[str, str]
) -> Iterator[Description]:
    """The descriptions of the packages that this architecture has."""
    for record in translations:
        source = sources.get(record["Package"])
        if source is not None:
            short, _, rest = record["Description-en"].partition("\n")
            # A line of one dot stands for an empty one.
            lines = (line for line in rest.split("\n") if line.strip() != ".")
            yield Description(source, one_line(short), one_line(" ".join(lines)))


def clean(found: Iterable[Description]) -> Pairs:
    """Drops short passages and shared texts, then keeps one pair per source."""
    kept = [one for one in found if one.short and len(one.long.split()) >= _MIN_WORDS]
    queries = unique(one.short for one in kept)
    passages = unique(one.long for one in kept)
    best: dict[str, Description] = {}
    for one in kept:
        if one.short.casefold() in queries and one.long.casefold() in passages:
            before = best.get(one.source)
            if before is None or len(one.long) > len(before.long):
                best[one.source] = one
    rows = [best[source] for source in sorted(best)]
    return Pairs([row.short for row in rows], [row.long for row in rows])
