"""A second process: does to a table what its parent sends down a pipe, and answers.

A message is a method of `Handle` and its arguments; `begin` makes the handle. The answer is
whether it failed, and the result or the traceback.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection

from tests.model.handle import Handle, shrink


def main() -> None:
    pipe: Connection = Connection(int(sys.argv[1]))
    handle: Handle | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if method == "begin":
                uri, name, written_rows = arguments
                shrink(written_rows)
                handle = Handle(uri, name)
                result = None
            else:
                result = getattr(handle, method)(*arguments)
            pipe.send((False, result))
        except Exception:
            pipe.send((True, traceback.format_exc()))


if __name__ == "__main__":
    main()
