"""A record of a data file as tokens, each with whether the model is trained to predict it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paceline.core.errors import TaskError

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

Messages = Sequence[Mapping[str, Any]]


class Encoded(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        labelled: for each token, whether it is a label; never the first, which nothing precedes.
        num_cut: tokens of the document beyond the context, which are left out.
    """

    tokens: list[int]
    labelled: list[bool]
    num_cut: int


class Encoder:
    """Encodes records: ``{"messages": ...}``, ``{"prompt": ..., "completion": ...}`` or ``{"text": ...}``.

    Labels are the assistant's answers in a chat, the completion, or the whole text. A chat is text of the tokenizer's
    chat template, in which ``{% generation %}`` marks the answers; without it, an answer is what the template appends
    to the text of the messages before it.

    Args:
        context: most tokens of a document. A longer text is divided: each piece begins with the last token of the one
            before, so that every token but the first is a label once. The rest of a longer chat or completion is cut
            off, since answers without their beginning would be learnt.

    Attributes:
        special: the tokenizer's special tokens, one of which ends an answer.

    Raises:
        TaskError: the tokenizer is a slow one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        if not tokenizer.is_fast:  # which does not say which characters a token is of
            raise TaskError(f"{type(tokenizer).__name__} has no tokenizer.json, which hf:MODEL needs to find labels.")
        self._tokenizer = tokenizer
        self._context = context
        controls = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(controls)
        self._controls = [str(token.content) for token in controls.values()]
        template = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        self._marks_answers = re.search(r"{%-?\s*generation\s*-?%}", template or "") is not None

    def __call__(self, record: Mapping[str, Any]) -> list[Encoded]:
        """Encode a record: one document, or the pieces of a text.

        Raises:
            TaskError: it has another form, or the chat template cannot render it.
        """
        match record:
            case {"messages": [*messages]}:
                self._check_is_rendered(messages, record.get("tools"))
                tokens, labelled = self._encode_chat(messages, record.get("tools"))
            case {"prompt": str(prompt), "completion": str(completion)}:
                tokens, labelled = self._encode_text(prompt + completion, (len(prompt), len(prompt + completion)))
            case {"prompt": [*prompt], "completion": [*completion]}:
                messages = [*prompt, *completion]
                self._check_is_rendered(messages, record.get("tools"))
                text = self._render(messages, record.get("tools"))
                start = len(self._start_of(len(prompt), messages, text, record.get("tools")))
                plain = self._asked(messages, text, record.get("tools"))
                tokens, labelled = self._mark(text, [(start, len(text))], special=False, plain=plain)
            case {"text": str(text)}:
                tokens, labelled = self._encode_text(text, (0, len(text)))
                return self._divide(tokens, labelled)
            case _:
                raise TaskError(
                    'a record needs "messages" (a list), "text" (a string), or "prompt" and "completion" (both '
                    f"strings, or both lists of messages); this one has {', '.join(map(repr, record)) or 'nothing'}."
                    + next((hint for name, hint in _OTHER_FORMATS.items() if name in record), "")
                )
        num_cut = max(0, len(tokens) - self._context)
        tokens, labelled = tokens[: self._context], labelled[: self._context]
        return [_without_first_label(tokens, labelled, num_cut)]

    def _divide(self, tokens: list[int], labelled: list[bool]) -> list[Encoded]:
        size = self._context
        starts = range(0, max(1, len(tokens) - 1), max(1, size - 1))
        return [_without_first_label(tokens[n : n + size], labelled[n : n + size]) for n in starts]

    def _encode_text(self, text: str, span: Span) -> tuple[list[int], list[bool]]:
        """Encode plain text with the tokenizer's special tokens, and one for its end, which is a label."""
        start = self._tokenizer.bos_token
        begins = start is not None and text.startswith(start)  # as the text of a chat does; no second one
        tokens, labelled = self._mark(text, [span], special=not begins)
        end = self._tokenizer.eos_token_id
        if end is not None and tokens and tokens[-1] == end:
            labelled[-1] = True
        elif end is not None:
            tokens, labelled = [*tokens, end], [*labelled, True]
        return tokens, labelled

    def _check_is_rendered(self, messages: Sequence[Any], tools: Any) -> None:
        """Refuse what the template would drop, or print as Python source, without an error."""
        known = [message for message in messages if isinstance(message, Mapping) and "role" in message]
        if len(known) < len(messages):
            raise TaskError('a message must be an object with "role" and "content".')
        if any(_is_answer(message) and not (message.get("content") or message.get("tool_calls")) for message in known):
            raise TaskError('an answer has no "content". Leave it out.')
        if any(message.get("weight") not in (None, 1) or message.get("train") is False for message in known):
            raise TaskError(
                'a message has "weight" or "train", which exclude an answer from training, and this is not supported. '
                'Write the messages before the answer to learn as "prompt", and the answer as "completion".'
            )
        parts = [message["content"] for message in known if isinstance(message.get("content"), list)]
        calls = any(message.get("tool_calls") for message in known)
        if not (parts or calls or tools):
            return
        text = self._render(messages, tools)
        if any(str(part) in text for part in parts):
            raise TaskError(
                'the chat template wants text: a message has a list of parts as "content". Join their text.'
            )
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in known]
        if calls and self._is_same(text, bare, tools):
            raise TaskError('the chat template ignores "tool_calls". Use one with tools, or write calls as text.')
        if tools and self._is_same(text, messages, None):
            raise TaskError('the chat template ignores "tools". Use one with tools, or remove them.')

    def _is_same(self, text: str, messages: Messages, tools: Any) -> bool:
        try:
            return self._render(messages, tools) == text
        except TaskError:  # the template needs what was taken away
            return False

    def _encode_chat(self, messages: Messages, tools: Any) -> tuple[list[int], list[bool]]:
        text = self._render(messages, tools)
        plain = self._asked(messages, text, tools)
        if not self._marks_answers:
            spans = [
                self._answer(n, messages, text, tools) for n, message in enumerate(messages) if _is_answer(message)
            ]
            return self._mark(text, spans, special=False, plain=plain)
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise _unrendered(error) from error
        marks = [bool(mark) for mark in encoded["assistant_masks"]]
        if not plain:
            return list(encoded["input_ids"]), marks
        bounds = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return self._as_text(text, list(encoded["input_ids"]), marks, bounds, plain)

    def _asked(self, messages: Messages, text: str, tools: Any) -> list[Span]:
        """Return where in a text the contents of messages are, but for answers, that name a control token.

        Raises:
            TaskError: the template rewrites such a content.
        """
        contents = {
            number: str(message["content"])
            for number, message in enumerate(messages)
            if not _is_answer(message) and any(token in str(message.get("content")) for token in self._controls)
        }
        if not contents:
            return []
        kept = [
            {**message, "content": f"\ue000{number}\ue000"} if number in contents else message
            for number, message in enumerate(messages)
        ]
        spans, start = [], 0
        for n, part in enumerate(re.split("\ue000(\\d+)\ue000", self._render(kept, tools))):
            content = contents[int(part)] if n % 2 else part
            inside = content if text.startswith(content, start) else content.strip()
            if not text.startswith(inside, start):
                break
            if n % 2:
                spans.append((start, start + len(inside)))
            start += len(inside)
        if start != len(text):
            found = next(token for token in self._controls if any(token in content for content in contents.values()))
            raise TaskError(
                f"a message contains {found!r}, which is a control token, and the chat template rewrites the message, "
                "so it cannot be made text. Remove it there."
            )
        return spans

    def _as_text(
        self,
        text: str,
        tokens: list[int],
        labelled: list[bool],
        bounds: Sequence[Span],
        plain: Sequence[Span],
    ) -> tuple[list[int], list[bool]]:
        """Replace control tokens in some spans of a text by the tokens of their characters."""
        found: list[tuple[int, bool]] = []
        for word, mark, (start, stop) in zip(tokens, labelled, bounds, strict=True):
            words = [word]
            if word in self.special and any(a <= start < b for a, b in plain):
                name = text[start:stop]
                words = self._tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            found += [(each, mark) for each in words]
        return [word for word, _ in found], [mark for _, mark in found]

    def _answer(self, number: int, messages: Messages, text: str, tools: Any) -> Span:
        """Return what the template appends for an answer to the text of the messages before it."""
        start = self._start_of(number, messages, text, tools)
        through = self._render(messages[: number + 1], tools)
        if not text.startswith(through):
            raise _ambiguous()
        return len(start), len(through)

    def _start_of(self, number: int, messages: Messages, text: str, tools: Any) -> str:
        """Return the text before the answer to some messages, with the header of an answer."""
        start = self._render(messages[:number], tools, add_generation_prompt=True)
        if not text.startswith(start):
            raise _ambiguous()
        return start

    def _render(self, messages: Messages, tools: Any, *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise _unrendered(error) from error
        return text

    def _mark(
        self, text: str, spans: Sequence[Span], *, special: bool, plain: Sequence[Span] = ()
    ) -> tuple[list[int], list[bool]]:
        """Encode a text; a token is a label if it begins in one of the spans, and has at least a character.

        Args:
            plain: where no control token is meant.
        """
        try:
            encoded = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except TypeError as error:
            raise TaskError("the text has half of a surrogate pair (\\ud800 to \\udfff). Remove it.") from error
        bounds = encoded["offset_mapping"]
        marks = [any(a <= start < b for a, b in spans) and start < stop for start, stop in bounds]
        return self._as_text(text, encoded["input_ids"], marks, bounds, plain)


_OTHER_FORMATS = {
    "conversations": ' Write a chat as messages: jq -c \'{messages: [.conversations[] | {role: ({human: "user", '
    'gpt: "assistant"}[.from] // .from), content: .value}]}\' FILE',
    "instruction": " Write prompts: jq -c '{prompt: \"\\(.instruction)\\n\\(.input)\\n\", completion: .output}' FILE",
    "chosen": " Preferences are for TRL, which paceline launch starts.",
}
"""What to do with records of some other libraries, by a key that they have."""


def _without_first_label(tokens: list[int], labelled: list[bool], num_cut: int = 0) -> Encoded:
    return Encoded(tokens, [False, *labelled[1:]] if labelled else [], num_cut)


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _unrendered(error: Exception) -> TaskError:
    return TaskError(f"the chat template cannot render the messages: {error}")


def _ambiguous() -> TaskError:
    return TaskError(
        "the chat template renders the beginning of this chat in another way than the whole, so which tokens are "
        "answers is not known. Put {% generation %} and {% endgeneration %} around answers in the template."
    )
