"""moto's S3 with faults, as a process: ``python s3_server.py``; it prints its address.

``PUT /faults`` sets ``{"kind": ..., "match": ..., "count": ...}`` for the next requests whose ``METHOD /path?query``
matches: ``error`` (500), ``denied`` and ``expired`` (403), ``silence`` (no answer for 30 s), ``cut`` (the connection
ends in the middle of the body). ``GET /faults`` returns how many of them are left.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_CODES = {
    "error": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "expired": ("403 Forbidden", "ExpiredToken", "The provided token has expired."),
}


class Faulty:
    """Answers as moto does, except for requests that shall fail."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._fault: dict[str, Any] = {"count": 0}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/faults":
            return self._control(environ, start_response)
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            hit = self._fault["count"] > 0 and re.search(self._fault["match"], request) is not None
            self._fault["count"] -= hit
            kind = self._fault.get("kind")
        if not hit:
            answer: Iterable[bytes] = self._moto(environ, start_response)
            return answer
        if kind == "silence":
            time.sleep(30)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if kind in ("silence", "cut"):
            environ["wsgi.input"].read(min(100, length))
            environ["werkzeug.socket"].shutdown(2)
            return []
        status, code, message = _CODES[str(kind)]
        environ["wsgi.input"].read(length)
        start_response(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]

    def _control(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            if environ["REQUEST_METHOD"] == "PUT":
                self._fault = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start_response("200 OK", [])
            return [json.dumps(self._fault).encode()]


if __name__ == "__main__":
    logging.disable()  # the test reads the address alone
    server = make_server("127.0.0.1", 0, Faulty(), threaded=True)  # type: ignore[arg-type]
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()
