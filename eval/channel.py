"""How a worker speaks to its parent: JSON lines over a pipe of their own, which a chatty candidate cannot flood."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable

from rooflane.eval.records import Record

# A worker ends with this status when it emitted what it could but its device no longer works: start another.
RESTART_STATUS = 75


class Channel:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Compiler subprocesses must not hold the pipe open when the worker is gone.
        os.set_inheritable(descriptor, False)

    def stage(self, shape: str, arm: str, stage: str) -> None:
        """Say what is at hand, so that the parent knows whose row a crash costs."""
        self._send({"stage": stage, "shape": shape, "arm": arm})

    def rows(self, records: Iterable[Record]) -> None:
        """Hand over finished rows, together: the parent writes them in one piece."""
        self._send({"rows": [record.model_dump(mode="json") for record in records]})

    def done(self) -> None:
        """Say that the job is finished: a candidate that exits with status 0 must not pass for the worker's end."""
        self._send({"done": True})

    def _send(self, message: dict) -> None:
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


def end_with_parent(descriptor: int) -> None:
    """End this process when the parent's end of its standard input closes, that is, when the parent is gone."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
