"""``paceline dashboard``: a local page that shows runs and jobs live."""

from __future__ import annotations

import json as json_module
import signal
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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

    Parameters
    ----------
    roots
        Folders of runs, or runs. Default: runs.
    port
        Port to listen on; 0 picks a free one.
    host
        Address to listen on. Addresses that other machines can reach need --token-file.
    token_file
        File with the token that visitors must enter; created if missing. Only its owner may read it.
    open
        Open the page in a browser.
    json
        Print the address as JSON.
    """
    from paceline_pages.dashboard import DashboardServer, read_or_create_token

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, but is {port}.")
    for root in roots:
        if not root.is_dir() and root != _DEFAULT_ROOT:
            raise RunDirectoryError(f"the folder {root} does not exist. Give folders that contain runs.")
    token = None if token_file is None else read_or_create_token(token_file)
    ended = threading.Event()
    with (
        handle_signals(_ENDING, lambda *_: ended.set()),
        DashboardServer(list(roots) or [_DEFAULT_ROOT], host=host, port=port, token=token) as server,
    ):
        if json:
            print(json_module.dumps({"url": server.url, "port": server.port}), flush=True)
        else:
            secret = "" if token_file is None else f"\nVisitors must enter the token in {token_file}."
            print(f"The dashboard is at {server.url} (Ctrl-C stops it){secret}", flush=True)
        if open:
            import webbrowser

            webbrowser.open(server.url)
        wait_for(ended)
    return 0
