"""``paceline dashboard``: a local page that shows runs and jobs live."""

from __future__ import annotations

import json as json_module
import os
import secrets
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.core.access import TOKEN_BYTES
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.signals import handle_signals, wait_for

Flag = Annotated[bool, Parameter(negative="")]
_DEFAULT_ROOT = Path("runs")
_PORT = 8899
_ENDING = (signal.SIGINT, signal.SIGTERM)


def dashboard(
    *roots: Path,
    port: int = _PORT,
    host: str = "127.0.0.1",
    token_file: Path | None = None,
    open: Flag = False,
    json: Flag = False,
) -> int:
    """Serve a local page that shows runs and jobs live: state, curves, ranks, recoveries and alerts.

    Reads run directories and changes nothing. Press Ctrl-C to stop it.

    Args:
        roots: Folders of runs, or runs. Default: runs.
        port: Port to listen on; 0 picks a free one.
        host: Address to listen on. Addresses that other machines can reach need --token-file.
        token_file: File with the token that visitors must enter; created if missing. Only its owner may read it.
            Default: a new
            token, in the address on a terminal, else in a file that is named.
        open: Open the page in a browser.
        json: Print the address as JSON.
    """
    from paceline_pages.dashboard import DashboardAccess, DashboardServer, read_or_create_token

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, but is {port}.")
    for root in roots:
        if not root.is_dir() and root != _DEFAULT_ROOT:
            raise RunDirectoryError(f"the folder {root} does not exist. Give folders that contain runs.")
    if token_file is None:
        DashboardAccess(host, port, None)  # a token that is known here only suits loopback
    token = secrets.token_bytes(TOKEN_BYTES) if token_file is None else read_or_create_token(token_file)
    ended = threading.Event()
    with (
        ExitStack() as stack,
        handle_signals(_ENDING, lambda *_: ended.set()),
        DashboardServer(list(roots) or [_DEFAULT_ROOT], host=host, port=port, token=token) as server,
    ):
        address = f"{server.url}?token={token.hex()}"
        if token_file is None and (json or not sys.stdout.isatty()):  # a log may have other readers
            token_file = _private_file(stack, f"{token.hex()}\n", ".token")
        if json:
            document = {"url": server.url, "port": server.port, "token_file": str(token_file)}
            print(json_module.dumps(document), flush=True)
        elif token_file is None:
            print(f"The dashboard is at {address} (Ctrl-C stops it)", flush=True)
        else:
            secret = f"\nVisitors must enter the token in {token_file}."
            print(f"The dashboard is at {server.url} (Ctrl-C stops it){secret}", flush=True)
        if open:
            import webbrowser

            # Every user of this machine can read a browser's arguments.
            page = f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">'
            webbrowser.open(_private_file(stack, page, ".html").as_uri())
        wait_for(ended)
    return 0


def _private_file(stack: ExitStack, content: str, suffix: str) -> Path:
    """Make a file of mode 600, which is removed with the stack."""
    descriptor, name = tempfile.mkstemp(suffix, "paceline-dashboard-")
    stack.callback(Path(name).unlink, missing_ok=True)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    return Path(name)
