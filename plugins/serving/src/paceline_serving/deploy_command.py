"""``paceline deploy URL PACKAGE``: replace the package of a running server without losing a request."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from paceline.core.environment import is_loopback

_LOADING_TIMEOUT_S = 600.0


def deploy(
    url: str,
    package: str,
    *,
    model: str | None = None,
    allow_signature_change: Annotated[bool, Parameter(negative="")] = False,
    token_file: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Replace the package that the server at URL serves by PACKAGE; no request fails.

    Args:
        url: Address of the server, such as http://127.0.0.1:8000.
        package: A directory, or a reference such as fashion-mnist@prod; the server must be able to read it.
        model: The model's name on the server. Default: the package's.
        allow_signature_change: Replace the model also if inputs, outputs or labels differ, which may break its clients.
        token_file: File with the server's token; readable only by you. Default: that of your own server on this
            machine.
        json: Print the server's answer as one line of JSON.
    """
    from paceline_serving.client import Client

    token_file = token_file or _own_token_file(url)
    location = str(Path(package).absolute()) if Path(package).is_dir() else package
    # The server answers when the package's replicas have loaded it.
    with Client(url, token_file=token_file, timeout_s=_LOADING_TIMEOUT_S) as client:
        answer = client.swap(location, model, allow_signature_change=allow_signature_change)
    print(json_module.dumps(answer) if json else f"{answer['name']} is now version {answer['version']}.")
    return 0


def _own_token_file(url: str) -> Path | None:
    from paceline_serving.bearer_tokens import admin_token_path

    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        return None  # the client names what is wrong
    path = None if port is None or host is None or not is_loopback(host) else admin_token_path(port)
    return path if path is not None and path.exists() else None
