"""A real S3 server over HTTP for tests: `ministack`, which settles conditional puts atomically."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

READY_SECONDS = 60


@dataclass
class S3Server:
    """One server process and one bucket; `uri` gives a location nobody else uses."""

    bucket: str = "penstock"
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, str]:
        """As Lance takes them."""
        return {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    def uri(self, name: str = "place") -> str:
        return f"s3://{self.bucket}/{name}-{next(self._names)}"

    def unfinished_uploads(self) -> int:
        """How many multipart uploads were begun in the bucket and neither completed nor aborted."""
        with urllib.request.urlopen(f"{self.endpoint}/{self.bucket}?uploads", timeout=30) as answer:
            return int(answer.read().count(b"<Upload>"))

    def start(self, log: Path) -> S3Server:
        self.port = _free_port()
        environment = os.environ | {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "SERVICES": "s3",
            "IOT_MTLS_ENABLED": "0",
        }
        command = Path(sys.executable).with_name("ministack")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [command], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + READY_SECONDS
        while not self._has_bucket():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{command} did not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _has_bucket(self) -> bool:
        request = urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
