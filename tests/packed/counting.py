"""A proxy in front of an S3 server that counts the HTTP requests which reach it."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

SECONDS = 60
_OWN = {"transfer-encoding", "connection", "content-length"}


class CountingProxy:
    def __init__(self, port: int) -> None:
        self.seen: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.seen.append(f"{self.command} {self.headers.get('Range', '')}".strip())
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                try:
                    server.request(self.command, self.path, body or None, dict(self.headers))
                    answer = server.getresponse()
                    data = answer.read()
                finally:
                    server.close()
                self.send_response(answer.status)
                length = answer.getheader("Content-Length", str(len(data)))
                for name, value in answer.getheaders():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def requests(self) -> int:
        return len(self.seen)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SECONDS)
