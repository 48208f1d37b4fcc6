"""The ``paceline`` command, also as ``python -m paceline``."""

from __future__ import annotations

import signal
import sys

from paceline.core.built_in import COMMANDS
from paceline.core.standard_streams import open_closed_streams


def main() -> int:
    """Run the command line; return the exit code."""
    open_closed_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a parent has it ignored, exit codes of children are lost
    try:
        if sys.argv[1:2] and sys.argv[1] in COMMANDS and COMMANDS[sys.argv[1]].trains:
            from paceline.core.environment import restart_with_hash_seed

            restart_with_hash_seed()
        # Imported here, so that little is imported twice, and Ctrl-C meanwhile prints no traceback.
        from paceline.cli import main as run_command_line

        return run_command_line()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
