"""Check the prose of the documentation and of the code for phrases that hide the meaning.

Without arguments, checks the pages and the Python files that ``[tool.paceline.prose]`` of pyproject.toml lists. Prints
``file:line: phrase -> suggestion`` for each finding, and exits with 1 if there is one.

In Markdown, prose is what stands outside of code blocks, code spans, link targets, comments and quotations. In Python,
prose is comments, docstrings and strings of several words, such as help texts and errors.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEOPLE = ("people", "user", "users", "readers", "riders", "engineers", "authors", "colleagues", "anyone", "someone")
PURPOSES = ("aim", "goal", "way", "idea", "point", "purpose", "alternative", "up")
NAME_THE_ACTOR = "name it: the rank, process, node or user that ..."
NAME_THE_THING = "name it: the options that ..., if something ..."


def _not_after(words: Iterable[str]) -> str:
    """A pattern that matches where none of the words comes before."""
    return "".join(f"(?<!{word} )" for word in words)


RULES = {
    # Pronouns without an antecedent, and pronouns for people where a process is meant.
    _not_after(PEOPLE) + r"\bwho\b": NAME_THE_ACTOR,
    r"\b(?:whoever|whomever|whom)\b": NAME_THE_ACTOR,
    r"\b(?:nobody|everybody|somebody)\b": "no rank, every process, another user",
    r"\b(?-i:he|him|his)\b": "it, its; for people: they, their",
    r"(?:^|(?<=[a-z)][.;:] ))what\b(?![^.;]*\?)": NAME_THE_THING,
    r"(?<!there )\b(?:is|are|was|were) (?-i:none)\b": "there is no ...",
    r"\bsuch (?:a one|ones?)\b": "repeat the noun",
    # Idioms for which the field has a word.
    r"\banew\b": "again",
    r"\bat work\b": "active, running, at runtime",
    r"\b(?:go|goes|going|gone|went) on\b": "continue",
    r"\bbeside\b": "next to, in addition to, together with",
    r"\btold\b": "an actor and a verb: gets, receives, a message says",
    r"\b(?:send|sends|sent|sending) home\b": "reject, remove",
    r"\b(?:make|makes|made|making) (?:\w+ ){0,2}good\b": "repair, recover from",
    r"\b(?:make|makes|made|making) up for\b": "retry, repeat",
    r"\b(?:let|lets|letting) go\b": "release, free",
    r"\b(?:hold|holds|held|holding) (?:\w+ ){0,2}up\b": "block, delay",
    r"\b(?:look|looks|looked|looking) (?:at|after|into|through)\b": "check, inspect, read",
    r"\b(?:come|comes|came|coming) about\b": "succeed, happen",
    r"\b(?:share|shares|shared|deal|deals|dealt) (?:\w+ )?out\b": "distribute",
    r"\bcomputed? again\b": "recompute",
    r"\b(?:done|made) again\b": "repeated, rebuilt",
    r"\b(?:start|starts|started) again\b": "restart",
    r"\bin vain\b": "without success",
    r"\bon another day\b": "later",
    r"\bin good order\b": "cleanly",
    r"\bseldom\b": "rarely",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair",
    r"\btill\b": "until",
    r"\b(?:that|which) (?:is|are) there\b": "existing",
    r"\bknows? (?:nothing|no|neither)\b": "does not depend on, does not support",
    r"\bbears? with\b": "tolerate, retry",
    r"\bhold(?:s|ing)? on to\b": "keep a reference to",
    r"\bwithout a word\b": "silently, without an error",
    r"\bnow and then\b": "occasionally",
    r"\b(?:thereby|thereof|whence|whereof|whereupon|lest|unto)\b": "a plainer word",
    r"\bwhereabouts\b": "location",
    r"\b(?-i:(?:im)?patien(?:ce|t))\b(?! (?:in )?evaluations)": "timeout, timed out",
    r"\bwhy it is (?:so|as it is)\b": "name the decision",
    # Obligations and identities.
    _not_after(PURPOSES)
    + r"\b(?:is|are|was|were) to (?!the |a |an |one |its |this |that |rank |node )[a-z]+\b": "must, will",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer |more |less |(?:larg|fast|slow|bett)er )[a-z]+\b": "is not a",
    # Verbs for people.
    r"\b(?:believe|believes|believed|believing)\b": "trust, verify, treat as",
    r"\b(?:machine|node|process|processes|rank|worker|scheduler|disk|agent|server)s? wants?\b": "needs, requests",
    r"\bdo(?:es)? not like\b": "is slow at, rejects",
    r"\binsists?\b": "repeats, claims",
    # Old names. A node is called a machine only where its hardware is meant.
    r"\b(?:several|two|many|lost|all) machines\b|\b(?:first|lost|leading|whole) machine\b": "node",
    r"\bculprits?\b": "root-cause rank, failed rank",
    r"\bvictims?\b": "blocked rank, survivor",
    r"\b(?:a pin|pins)\b": "numerics fingerprint, or a field of it",
    _not_after(("etcd", "etcd's")) + r"\b(?-i:leases?)\b": "quorum witness",
    r"\brosters?\b": "node set",
    r"\bzygotes?\b": "fork server",
    r"\binner launchers?\b": "rank launcher",
    r"\bcontrol words?\b": "control flags",
    r"\b(?:next|first|new|last|each|every|whole) views?\b": "worker group",
    r"\brecipes?\b": "built-in task",
    r"\bspare rounds?\b": "dummy micro-step",
}
"""Patterns, ignoring case, and what to write instead. A space also stands for the end of a line within a paragraph."""
PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in RULES.items()]

HIDDEN_IN_MARKDOWN = re.compile(
    r"^[ \t]*(?P<fence>```+|~~~+).*?^[ \t]*(?P=fence)[ \t]*$"  # a code block
    r"|<!--.*?-->"
    r"|<[a-z/][^<>]*>"  # an HTML tag
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"  # a code span
    r"|(?<=\])\([^()\s]*\)"  # the target of a link
    r"|\"[^\"\n]*(?:\n[^\"\n]+)?\"|“[^”]*”",  # a quotation
    re.DOTALL | re.MULTILINE,
)
HIDDEN_IN_STRINGS = re.compile(
    r"(?P<ticks>`+).+?(?P=ticks)|\"[^\"\n]*\"|“[^”]*”|https?://\S+|\{[^{}]*\}"
    r"|^ {4,}\w+(?:, \w+)*:(?= )",  # the name of an argument or attribute in a docstring
    re.MULTILINE,
)
STRING = re.compile(r"(?P<prefix>[A-Za-z]*)(?P<quote>'''|\"\"\"|'|\")(?P<body>.*)(?P=quote)", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A phrase to replace: its line, from 1, the words as they stand there, and what to write instead."""

    line: int
    phrase: str
    advice: str


def _hide(text: str) -> str:
    """Replace all characters but line ends, so that positions stay the same."""
    return re.sub(r"[^\n]", "\N{MIDDLE DOT}", text)


def markdown_prose(text: str) -> str:
    """Return the page with everything hidden that is not prose."""
    return HIDDEN_IN_MARKDOWN.sub(lambda found: _hide(found[0]), text)


def _string_prose(token: str) -> str:
    """Return a string literal with quotes, code spans, quotations and replacement fields hidden."""
    found = STRING.fullmatch(token)
    if found is None or "b" in found["prefix"].lower():
        return _hide(token)
    body = found["body"]
    if body.count(" ") < 2:  # a name or a format, not a sentence
        return _hide(token)
    before = " " * (len(found["prefix"]) + len(found["quote"]))
    return before + HIDDEN_IN_STRINGS.sub(lambda hidden: _hide(hidden[0]), body) + " " * len(found["quote"])


def python_prose(source: str) -> str:
    """Return the module with everything hidden but comments, docstrings and strings of several words."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    result: list[str] = []
    position = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        name = tokenize.tok_name[token.type]
        text = source[start:end]
        result.append(source[position:start])
        position = max(position, end)
        if name == "COMMENT":
            result.append(" " + HIDDEN_IN_STRINGS.sub(lambda found: _hide(found[0]), text[1:]))
        elif name == "STRING":
            result.append(_string_prose(text))
        elif name == "FSTRING_MIDDLE":
            result.append(HIDDEN_IN_STRINGS.sub(lambda found: _hide(found[0]), text))
        elif name in ("FSTRING_START", "FSTRING_END"):
            result.append(" " * len(text))
        else:
            result.append(text if text.isspace() else _hide(text))
    return "".join(result)


def check(path: Path) -> list[Finding]:
    """Return the phrases to replace in a page or a Python file, in the order of its lines."""
    text = path.read_text(encoding="utf-8")
    prose = python_prose(text) if path.suffix == ".py" else markdown_prose(text)
    findings: list[Finding] = []
    words: list[tuple[str, int]] = []
    for number, line in enumerate([*prose.split("\n"), ""], 1):
        words += [(word, number) for word in line.split()]
        if not line.strip():
            findings += _check_paragraph(words)
            words = []
    return sorted(findings, key=lambda finding: finding.line)


def _check_paragraph(words: list[tuple[str, int]]) -> list[Finding]:
    """Return the phrases to replace in a paragraph, given as words and their lines."""
    text = " ".join(word for word, _ in words)
    return [
        Finding(words[text.count(" ", 0, found.start())][1], found[0], advice)
        for pattern, advice in PATTERNS
        for found in pattern.finditer(text)
    ]


def configured_files(root: Path) -> list[Path]:
    """Return the files that pyproject.toml lists: pages, and Python files that are clean and must stay so."""
    with (root / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["paceline"]["prose"]
    excluded = {root / name for name in settings["exclude"]}
    files: list[Path] = []
    for pattern in [*settings["pages"], *settings["code"]]:
        found = [path for path in sorted(root.glob(pattern)) if path.suffix in (".md", ".py")]
        if not found:
            raise SystemExit(
                f"pyproject.toml, [tool.paceline.prose]: {pattern!r} matches no file; correct or remove it."
            )
        files += [path for path in found if path not in excluded]
    return files


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check prose for phrases that hide the meaning.")
    parser.add_argument("files", nargs="*", type=Path, help="pages and Python files; default: those of pyproject.toml")
    files = parser.parse_args(arguments).files or configured_files(ROOT)
    count = 0
    for path in files:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for finding in check(path):
            count += 1
            print(f"{name}:{finding.line}: {finding.phrase} -> {finding.advice}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
