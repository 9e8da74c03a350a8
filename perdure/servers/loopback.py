"""An HTTP server on loopback, in a thread of this process: the models of `perdure demo` and `perdure certify`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Loopback:
    """Listens on a free port, and serves each request in a thread of its own. `url` has no path.

    `handler` makes the handler of a connection.
    """

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        make: Any = handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), make)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self, closing: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Serve requests during the block. Its end calls `closing`, so that no request waits any longer."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
