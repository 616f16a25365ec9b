"""How parent and worker speak: one JSON line each way, every answer carrying the number of its request.

The worker's standard output is another pipe, so a chatty candidate cannot flood this one. A line that answers no
request was written by something else than the harness: it is counted, and reported as tampering.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from typing import Any

# What a worker's line may measure: window answers carry fingerprints, a few hundred kB at most.
LINE_BYTES = 64 << 20


class Channel:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._read = self._socket.makefile("rb")
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._socket, selectors.EVENT_READ)

    def receive(self, *, awake: bool = False) -> dict[str, Any] | None:
        """Wait for the next request; None when the parent is gone. `awake` waits without letting go of the core."""
        while awake and not self._waiting.select(0):
            pass
        line = self._read.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def answer(self, request: dict[str, Any], values: dict[str, Any]) -> None:
        """Answer a request."""
        self._socket.sendall(json.dumps({**values, "answers": request["nonce"]}).encode() + b"\n")


def tells_failure(answer: dict[str, Any]) -> bool:
    """Tell whether an answer says that something raised, in a call or in the build of an arm."""
    return "failed" in answer or answer.get("status") in ("error", "oom")


def end_with_parent(descriptor: int) -> None:
    """End this process when the parent's end of the lifeline closes, that is, when the parent is gone."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
