"""Encodings of categories, dates and texts: how these become the whole numbers that a model takes. No torch.

A task builds its data with the object that it declares in its inference signature, and a package keeps that object as
data: so a server encodes as the training did, without the task's code.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.core.errors import ConfigError, DataError
from paceline.core.inference import Encoding
from paceline.core.plugins import import_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TEXT_LENGTH = 65_536
"""Characters of a text that is encoded."""

EXAMPLE_DATE, EXAMPLE_TIME = "2026-01-31", "2026-01-31T08:30"

DatePart = Literal["days", "year", "month", "day", "weekday", "hour", "minute"]

_EPOCH = datetime(1970, 1, 1)
_CENTURY = 2000
_CYCLE_YEARS = 28  # after which days fall on the same weekdays
_MOST_OF_PART = 59
_MAX_NAMED = 10  # categories in a message
_WORD = re.compile(r"\w+|[^\w\s]")
_SPACE_BEFORE_MARK = re.compile(r" (?=[,.;:!)])")  # not ?, which stands for an unknown token


class EncodingError(DataError):
    """A value that an encoding does not take.

    Args:
        advice: for the task's author, after the problem.
    """

    def __init__(self, index: int, problem: str, advice: str = "") -> None:
        super().__init__(f"value {index} {problem}.{advice and ' '}{advice}")
        self.index = index
        self.problem = problem


@dataclass(frozen=True)
class Categories(Encoding):
    """The codes of a column's values: a whole number for each.

    Spellings of one text that Unicode calls equal are one value (NFC): an accented letter may be one character or two.

    Attributes:
        codes: by value.
        unknown: the code of a value that is not in ``codes``; None: it is an error.
        missing: the code of a missing value (None, NaN or an empty text); None: it is an error.
    """

    codes: Mapping[str, int]
    unknown: int | None = None
    missing: int | None = None

    def __post_init__(self) -> None:
        others = [code for code in (self.unknown, self.missing) if code is not None]
        if not self.codes or min([*self.codes.values(), *others]) < 0:
            raise ConfigError("Categories need at least one value, and codes from 0.")

    @classmethod
    def observe(cls, values: Iterable[Any], *, unknown: bool = False, missing: bool = False) -> Categories:
        """Return codes of the values of a column, in their alphabetical order.

        Args:
            values: of the training data.
            unknown: add a code for any other value.
            missing: add a code for missing values.
        """
        texts = sorted({compose(text) for value in values if (text := _text_of(value))})
        codes = {text: code for code, text in enumerate(texts)}
        code_of_missing = len(codes) + unknown if missing else None
        return cls(codes, len(codes) if unknown else None, code_of_missing)

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def size(self) -> int:
        return 1 + max(*self.codes.values(), self.unknown or 0, self.missing or 0)

    @property
    def takes_missing(self) -> bool:
        return self.missing is not None

    @cached_property
    def _values(self) -> Mapping[int, str]:
        return {code: value for value, code in self.codes.items()}

    @cached_property
    def _composed_codes(self) -> Mapping[str, int]:
        return {compose(value): code for value, code in self.codes.items()}

    def encode(self, values: Sequence[Any]) -> NDArray[np.int64]:
        import numpy as np

        numbers = np.empty(len(values), np.int64)
        for index, value in enumerate(values):
            text = _text_of(value)
            code = self.codes.get(text)
            if code is None:
                code = self._composed_codes.get(compose(text), self.unknown if text else self.missing)
            if code is None:
                option = "unknown" if text else "missing"
                raise EncodingError(index, self._describe(text), f"Categories with a code {option}= take it.")
            numbers[index] = code
        return numbers

    def decode(self, numbers: Any) -> str:
        return self._values.get(int(numbers), "" if int(numbers) == self.missing else "unknown")

    def _describe(self, text: str) -> str:
        named = ", ".join(f"{value!r:.80}" for value in list(self.codes)[:_MAX_NAMED])
        more = len(self.codes) - _MAX_NAMED
        allowed = f"{named} and {more} more" if more > 0 else named
        return f"must be one of {allowed}, but is " + (f"{text!r:.80}" if text else "empty")


@dataclass(frozen=True)
class Dates(Encoding):
    """The numbers of a date, or of a date and a time, in the form of ISO 8601: 2026-01-31, 2026-01-31T08:30.

    Times are taken as they are written; a time zone changes nothing.

    Attributes:
        parts: which numbers, in this order: "days" since 1970-01-01, "year", "month" (1 to 12), "day" (of the month, 1
            to 31), "weekday" (0 is Monday), "hour" and "minute".
        missing: whether a date may be missing. Then there is one more number, the last one: 1 if the date is missing,
            which has 0 in all parts, and 0 otherwise.
    """

    parts: tuple[DatePart, ...]
    missing: bool = False

    def __post_init__(self) -> None:
        known = get_args(DatePart)
        if not self.parts or len(set(self.parts)) < len(self.parts) or not set(self.parts) <= set(known):
            raise ConfigError(f"the parts of Dates must be some of {', '.join(known)}, but are {self.parts!r:.200}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts) + self.missing,)

    @property
    def size(self) -> int:
        return 1 + max(*(_parts_of(datetime.max)[part] for part in self.parts), _MOST_OF_PART)

    @property
    def takes_missing(self) -> bool:
        return self.missing

    @property
    def has_time(self) -> bool:
        """Whether the time of the day is among the parts."""
        return bool({"hour", "minute"} & set(self.parts))

    def encode(self, values: Sequence[Any]) -> NDArray[np.int64]:
        import numpy as np

        rows = np.zeros((len(values), *self.shape), np.int64)
        for index, value in enumerate(values):
            text = _text_of(value).strip()
            if not text and self.missing:
                rows[index, -1] = 1
                continue
            try:
                numbers = _parts_of(datetime.fromisoformat(text))
            except ValueError:
                example = EXAMPLE_TIME if self.has_time else EXAMPLE_DATE
                what = f"{text!r:.80}" if text else "empty"
                advice = "" if text else "Dates with missing=True take it."
                raise EncodingError(index, f"must be a date such as {example}, but is {what}", advice) from None
            rows[index, : len(self.parts)] = [numbers[part] for part in self.parts]
        return rows

    def decode(self, numbers: Any) -> str:
        if self.missing and int(numbers[-1]):
            return ""
        known = self._known(numbers)
        try:
            found = _first_date(known)
        except (ValueError, OverflowError):  # such as a year 0
            found = None
        if found is None:
            return self._list(known)
        return found.isoformat(timespec="minutes") if self.has_time else found.date().isoformat()

    def describe(self, numbers: Any) -> str:
        if "days" in self.parts or {"year", "month", "day"} <= set(self.parts):
            return self.decode(numbers)
        is_missing = self.missing and int(numbers[-1])
        return "" if is_missing else self._list(self._known(numbers))

    def _known(self, numbers: Any) -> dict[DatePart, int]:
        return {part: int(number) for part, number in zip(self.parts, numbers, strict=False)}

    def _list(self, known: Mapping[DatePart, int]) -> str:
        return ", ".join(f"{part} {number}" for part, number in known.items())


def _parts_of(moment: datetime) -> dict[DatePart, int]:
    return {
        "days": moment.toordinal() - _EPOCH.toordinal(),
        "year": moment.year,
        "month": moment.month,
        "day": moment.day,
        "weekday": moment.weekday(),
        "hour": moment.hour,
        "minute": moment.minute,
    }


def _first_date(known: Mapping[DatePart, int]) -> datetime | None:
    """Return the first date with these parts, in this century if they leave it open; None if there is none."""
    if "days" in known:
        days = [_EPOCH + timedelta(days=known["days"])]
    else:
        first, years = datetime(known.get("year", _CENTURY), 1, 1), 1 if "year" in known else _CYCLE_YEARS
        days = [first + timedelta(days=number) for number in range(366 * years)]
    for day in days:
        moment = day.replace(hour=known.get("hour", 0), minute=known.get("minute", 0))
        parts = _parts_of(moment)
        if all(parts[part] == number for part, number in known.items()):
            return moment
    return None


def compose(text: str) -> str:
    """Return a text in Unicode's form NFC, by which equal texts have the same characters."""
    return unicodedata.normalize("NFC", text)


def show_category(value: str) -> str:
    """Return a category for people: in quotes if its ends, or its place in a list, could not be seen."""
    return repr(value) if value != value.strip() or "," in value else value


def _text_of(value: Any) -> str:
    """Return a category's text; empty if it is missing, as None, NaN and pandas' NA are."""
    try:
        is_missing = value is None or bool(value != value)
    except TypeError:  # pandas' NA is neither
        is_missing = True
    return "" if is_missing else str(value)


# --- Texts: the ids of words, characters, or a tokenizer's tokens ---


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
        _check_max_length(self.max_length)
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
            max_size: number of ids, with the two.

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
        _check_max_length(self.max_length)

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


def _check_max_length(max_length: int) -> None:
    if not 1 <= max_length <= MAX_TEXT_LENGTH:
        raise ConfigError(f"max_length must be between 1 and {MAX_TEXT_LENGTH}, but is {max_length}.")
