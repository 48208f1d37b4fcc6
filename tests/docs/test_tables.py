"""The commands in the tables of "what you type today, and what you type here" are accepted as they stand."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from tests.processes import Processes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "coming-from").glob("*.md"))]
PLACEHOLDERS = {
    "--image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "--role": "arn:aws:iam::123456789012:role/training",
    "--instance-type": "ml.p4d.24xlarge",
    "--s3": "s3://bucket/training",
}
"""What the tables write as one capital letter."""
ACCEPT = """
import json
import sys

import paceline.cli.launch  # as another program than paceline: with the options of all launchers

refused = []
for words in json.load(open("commands.json")):
    sys.argv = ["paceline", *words]
    if paceline.cli.main() != 0:
        refused.append(words)
        print("refused:", *words, file=sys.stderr)
sys.exit(len(refused))
"""
"""One process for all commands: a process for each would take half a minute."""


def launches(markdown: str) -> list[list[str]]:
    """The whole ``paceline launch`` commands of a page's tables, each with ``--dry-run``."""
    rows = [line.replace(r"\|", "|") for line in markdown.splitlines() if line.startswith("|")]
    spans = [span for row in rows for span in re.findall(r"`(paceline launch [^`]* -- [^`]+)`", row)]
    found: list[list[str]] = []
    for span in spans:
        if "…" in span:
            continue
        options, _, command = span.removeprefix("paceline ").partition(" -- ")
        words = shlex.split(options)
        for number, word in enumerate(words):
            if word in PLACEHOLDERS:
                words[number + 1] = PLACEHOLDERS[word]
        found.append([*words, "--dry-run", "--", *("train.py" if w == "S" else w for w in shlex.split(command))])
    return found


def test_commands_are_found_in_tables_alone() -> None:
    page = "`paceline launch --on a -- b`\n| `x` | `paceline launch --on y --s3 S -- S \\| z` or `paceline … -- c` |\n"
    assert launches(page) == [
        ["launch", "--on", "y", "--s3", "s3://bucket/training", "--dry-run", "--", "train.py", "|", "z"]
    ]


def test_the_tables_commands_are_accepted(run_processes: Processes, tmp_path: Path) -> None:
    found = {page.name: launches(page.read_text(encoding="utf-8")) for page in PAGES}
    assert len(found["index.md"]) >= 15
    commands = sorted({tuple(words) for each in found.values() for words in each})
    for words in commands:
        for word in words[words.index("--") :]:
            if word.endswith(".py") or "/example-" in word:
                (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / word).touch(mode=0o755)
    (tmp_path / "accept.py").write_text(ACCEPT)
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    state = {"XDG_STATE_HOME": str(tmp_path)}
    done = run_processes.run([sys.executable, "accept.py"], cwd=tmp_path, env=state, timeout_s=240)
    assert done.returncode == 0, done.stderr[-4000:]
