"""Variables that must not stand in a job that others can read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import ConfigError

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|(ACCESS|API|PRIVATE|SECRET)_?KEY)$")

IN_HOROVODS_SHELL = (
    "horovodrun starts each rank by a shell command with all its variables in it. Have the program read it "
    "from a file."
)


def refuse_secrets(env: Mapping[str, str], instead: str) -> None:
    """Refuse variables that look like secrets: whoever may look at the job can read its variables.

    Raises:
        ConfigError: one does; the message says what to do instead.
    """
    for name in env:
        if _SECRET.search(name.upper()):
            raise ConfigError(f"--env {name}: whoever sees the job can read its variables. {instead}")
