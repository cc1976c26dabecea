"""The parent's end of the streaming demo's driver: starts it, listens to it, kills it.

Whatever ends the parent ends the driver: it is killed with its Java, or notices that its standard
input has ended. What Spark has to say goes to a log, which is shown only if the driver fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.demo_stream import Job
from penstock.errors import PenstockError

_LOG_LINES = 20
_LISTEN_SECONDS = 10.0


@dataclass(slots=True)
class Reports:
    """What the drivers have said so far."""

    batches: list[tuple[int, int, float]] = field(default_factory=list)
    firsts: set[int] = field(default_factory=set)
    """Ids of the first batch of each driver."""
    rounds: int = 0
    jobs: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


class Driver:
    """A process with Spark in it, and what it reports."""

    def __init__(self, job: Job, reports: Reports) -> None:
        self.reports = reports
        self.events: set[str] = set()
        self._log_path = Path(job.scratch, "driver.log")
        with self._log_path.open("ab") as log:
            # A session of its own: Ctrl-C is for the parent, which ends the driver with its Java.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.demo_stream", job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._listener = threading.Thread(
            target=self._listen, name="penstock-demo-driver", daemon=True
        )
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        is_first = True
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # cut short by the kill
            report = json.loads(line)
            event = report["event"]
            if event == "batch":
                self.reports.batches.append((report["id"], report["rows"], report["ms"]))
                if is_first:
                    self.reports.firsts.add(report["id"])
                is_first = False
            elif event == "stopped":
                self.reports.rounds = report["rounds"]
            elif event == "maintained":
                self.reports.jobs = report["jobs"]
            elif event in ("failed", "unavailable"):
                self.reports.failure = report.get("error") or report["reason"]
            self.events.add(event)

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
        except OSError as error:
            raise self.failed() from error

    def failed(self) -> PenstockError:
        self._listener.join(_LISTEN_SECONDS)
        log = self._log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        said = self.reports.failure or "\n".join(log) or "it said nothing"
        return PenstockError(f"the demo's Spark driver ended by itself: {said}")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the driver and to its Java, which is in the same group."""
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a command that nobody took any more
                pipe.close()
