"""Encodings of texts: the ids of words, characters, or a tokenizer's tokens. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ConfigError, DataError
from paceline.core.inference import Encoding
from paceline.core.plugins import import_library
from paceline_serving.encodings import MAX_TEXT_LENGTH, EncodingError, compose

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORD = re.compile(r"\w+|[^\w\s]")
_SPACE_BEFORE_MARK = re.compile(r" (?=[,.;:!)])")  # not ?, which stands for an unknown token


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Encoding):
    """The ids of a text's tokens, padded to one length; of more tokens the first are used.

    Attributes:
        ids: by token.
        max_length: number of ids of a text.
        unknown: the id of a token that is not in ``ids``.
        padding: the id after the last token.
        split: what a token is: a word (a run of letters, digits and ``_``) or a punctuation mark; or a character.
        lowercase: whether texts are converted to lower case.
        composed: whether texts are first brought into Unicode's form NFC.
    """

    ids: Mapping[str, int]
    max_length: int
    unknown: int = 1
    padding: int = 0
    split: Literal["words", "characters"] = "words"
    lowercase: bool = False
    composed: bool = False

    def __post_init__(self) -> None:
        _check_length(self.max_length)
        if min([*self.ids.values(), self.unknown, self.padding]) < 0:
            raise ConfigError("the ids of a Vocabulary must be from 0.")

    @classmethod
    def observe(
        cls,
        texts: Iterable[str],
        *,
        max_length: int,
        max_size: int = 30_000,
        split: Literal["words", "characters"] = "words",
        lowercase: bool = False,
    ) -> Vocabulary:
        """Return the ids of the most frequent tokens of some texts; 0 is padding, 1 an unknown token.

        Args:
            texts: of the training data.
            max_length: number of ids of a text.
            max_size: number of ids, with the two.
            split: what a token is.
            lowercase: whether texts are converted to lower case.

        Raises:
            EncodingError: a value is not a text, such as a missing one; says which.
        """
        empty = cls(ids={}, max_length=max_length, split=split, lowercase=lowercase, composed=True)
        counts = Counter(token for text in _texts_of(list(texts)) for token in empty._tokens(text))
        frequent = sorted(counts, key=lambda token: (-counts[token], token))[: max_size - 2]
        ids = {token: number for number, token in enumerate(frequent, 2)}
        return replace(empty, ids=ids)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_length,)

    @property
    def size(self) -> int:
        return 1 + max([*self.ids.values(), self.unknown, self.padding])

    def _tokens(self, text: str) -> Sequence[str]:
        text = compose(text) if self.composed else text
        text = text.lower() if self.lowercase else text
        return text if self.split == "characters" else _WORD.findall(text)

    @cached_property
    def _words(self) -> Mapping[int, str]:
        return {number: token for token, number in self.ids.items()}

    def encode(self, values: Sequence[Any]) -> NDArray[np.int64]:
        import numpy as np

        rows = np.full((len(values), self.max_length), self.padding, np.int64)
        for row, text in zip(rows, _texts_of(values), strict=True):
            numbers = [self.ids.get(token, self.unknown) for token in self._tokens(text)[: self.max_length]]
            row[: len(numbers)] = numbers
        return rows

    def decode(self, numbers: Any) -> str:
        tokens = [self._words.get(int(number), "?") for number in numbers if int(number) != self.padding]
        return "".join(tokens) if self.split == "characters" else _SPACE_BEFORE_MARK.sub("", " ".join(tokens))


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Encoding):
    """The ids of a text's tokens by a ``tokenizer.json`` of Hugging Face's tokenizers, padded to one length.

    Attributes:
        json: the content of the file.
        max_length: number of ids of a text; of more tokens the first are used.
        padding: the id after the last token.
    """

    json: str
    max_length: int
    padding: int = 0

    def __post_init__(self) -> None:
        _check_length(self.max_length)

    @classmethod
    def read(cls, path: Path | str, *, max_length: int, padding: int = 0) -> Tokenizer:
        """Read a ``tokenizer.json``, as ``save_pretrained`` of transformers and ``save`` of tokenizers write it."""
        try:
            return cls(json=Path(path).read_text(encoding="utf-8"), max_length=max_length, padding=padding)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_length,)

    @property
    def size(self) -> int:
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return 1 + max([*ids.values(), self.padding])

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = import_library("tokenizers", "the encoding of this model's texts", "tokenizers")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:  # the library has no class for them
            raise ConfigError(f"tokenizers cannot read this tokenizer.json: {error!s:.300}") from error
        tokenizer.enable_truncation(self.max_length)
        tokenizer.enable_padding(length=self.max_length, pad_id=self.padding)
        return tokenizer

    def encode(self, values: Sequence[Any]) -> NDArray[np.int64]:
        import numpy as np

        tokenizer, texts, rows = self._tokenizer, _texts_of(values), []
        for index, text in enumerate(texts):
            try:
                rows.append(tokenizer.encode(text).ids)
            except Exception as error:  # such as an unknown word where the vocabulary has no token for it
                raise EncodingError(index, f"cannot be encoded: {error!s:.200}") from None
        return np.asarray(rows, np.int64).reshape(len(texts), self.max_length)

    def decode(self, numbers: Any) -> str:
        kept = [int(number) for number in numbers if int(number) != self.padding]
        return str(self._tokenizer.decode(kept))


def _texts_of(values: Sequence[Any]) -> list[str]:
    texts = list(values)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise EncodingError(index, f"must be a text, but is {text!r:.80}", "Give a missing one as an empty text.")
        if len(text) > MAX_TEXT_LENGTH:
            raise EncodingError(index, f"has {len(text):,} characters; at most {MAX_TEXT_LENGTH:,} are allowed")
    return texts


def _check_length(max_length: int) -> None:
    if not 1 <= max_length <= MAX_TEXT_LENGTH:
        raise ConfigError(f"max_length must be between 1 and {MAX_TEXT_LENGTH}, but is {max_length}.")
