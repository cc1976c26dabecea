"""A proxy in front of an S3 server: it counts what passes, and can spoil it."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Iterator


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on; the next puts may be answered 409, or carried out and not answered.

    Requests may be refused by what is in them, and parts of uploads made to wait for each other.
    """

    requests = 0
    conflicts = 0
    lost_answers = 0
    puts = 0
    refused = ""
    together: threading.Barrier | None = None

    def __init__(self, upstream_port: int) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.upstream_port = upstream_port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        put = self.command == "PUT"
        self.server.requests += 1
        self.server.puts += put
        if put and self.server.conflicts:
            self.server.conflicts -= 1
            answer = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
            self._answer(409, [], answer)
            return
        if self.server.refused and self.server.refused in f"{self.command} {self.path}":
            self._answer(403, [], b"")
            return
        if self.server.together is not None and "partNumber" in self.path:
            self.server.together.wait(30)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        response = upstream.getresponse()
        answer = response.read()
        upstream.close()
        if put and self.server.lost_answers:
            self.server.lost_answers -= 1
            self._answer(500, [], b"")
            return
        self._answer(response.status, response.getheaders(), answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815 the library's names

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def proxying(upstream_port: int) -> Iterator[Proxy]:
    with Proxy(upstream_port) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()
