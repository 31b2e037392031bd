"""Texts to word pieces of one fixed length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Int

from .. import _errors
from .._minilm import minilm_folder
from .._optional import optional_module

_PAD, _UNKNOWN, _FIRST, _LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_BLOCK = 4096  # texts at a time: what the tokenizer returns is large


class Tokens(eqx.Module):
    """Word pieces, padded to one length; a pytree, so it can be the data of a fit.

    **Attributes:**

    - `ids`: their numbers in the vocabulary.
    - `mask`: which of them are the text's; the rest is padding.
    """

    ids: Int[np.ndarray | Array, "*texts T"]
    mask: Bool[np.ndarray | Array, "*texts T"]

    def __getitem__(self, rows: Any) -> "Tokens":
        return Tokens(self.ids[rows], self.mask[rows])

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """Splits texts into lower-case word pieces, as BERT's uncased models do.

    **Arguments:**

    - `tokenizer`: a `tokenizers.Tokenizer` with BERT's special tokens.

    !!! Example

        ```python
        tokenize = Tokenizer.minilm()
        tokens = tokenize(["A happy person"], length=32)
        ```
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads the `tokenizer.json` of a checkpoint's folder."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise _errors.no_file(path, "the tokenizer of a checkpoint")
        return cls(_library().Tokenizer.from_file(str(path)))

    @classmethod
    def minilm(cls) -> "Tokenizer":
        """The tokenizer of all-MiniLM-L6-v2: BERT's uncased English vocabulary."""
        return cls.from_folder(minilm_folder())

    @classmethod
    def trained(cls, texts: Sequence[str], *, vocab_size: int) -> "Tokenizer":
        """A vocabulary made from the texts, where there is no checkpoint at hand."""
        library = _library()
        special = [_PAD, _UNKNOWN, _FIRST, _LAST]
        tokenizer = library.Tokenizer(library.models.WordPiece(unk_token=_UNKNOWN))
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        trainer = library.trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f"{_FIRST} $A {_LAST}",
            special_tokens=[
                (token, tokenizer.token_to_id(token)) for token in (_FIRST, _LAST)
            ],
        )
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """How many word pieces there are, special ones included."""
        return self._tokenizer.get_vocab_size()

    def __call__(self, texts: Sequence[str], *, length: int) -> Tokens:
        """Encodes texts, cut or padded to `length` word pieces.

        **Arguments:**

        - `texts`: the texts.
        - `length`: word pieces of each, the first (`[CLS]`) and the last (`[SEP]`)
            included.

        **Returns:** `Tokens`.

        **Raises:** `FormatError` for a length below 3.
        """
        if length < 3:
            raise _errors.token_length(length)
        self._tokenizer.enable_truncation(length)
        pad = self._tokenizer.token_to_id(_PAD)
        self._tokenizer.enable_padding(length=length, pad_id=pad, pad_token=_PAD)
        ids = np.empty((len(texts), length), np.int32)
        mask = np.empty((len(texts), length), bool)
        for start in range(0, len(texts), _BLOCK):
            block = list(texts[start : start + _BLOCK])
            for row, encoding in enumerate(self._tokenizer.encode_batch(block), start):
                ids[row] = encoding.ids
                mask[row] = encoding.attention_mask
        return Tokens(ids, mask)


def _library() -> Any:
    return optional_module("tokenizers", "Splitting texts into word pieces")
