"""How parent and worker speak: one JSON line each way, every answer carrying the number of its request.

The worker's standard output is another pipe, so a chatty candidate cannot flood this one. A line that answers no
request was written by something else than the harness: it is counted, and reported as tampering.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading

from rooflane.eval.worker.protocol import Message, Request, decode_request, encode_answer

# What a worker's line may measure: window answers carry fingerprints, a few hundred kB at most.
LINE_BYTES = 64 << 20


class Channel:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._read = self._socket.makefile("rb")
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._socket, selectors.EVENT_READ)

    def receive(self, *, awake: bool = False) -> tuple[int, Request] | None:
        """Wait for the next request and its number; None when the parent is gone.

        `awake` busy-waits, which keeps the core.
        """
        while awake and not self._waiting.select(0):
            pass
        line = self._read.readline()
        return decode_request(line) if line.endswith(b"\n") else None

    def answer(self, number: int, answer: Message) -> None:
        """Answer the request of a number."""
        self._socket.sendall(encode_answer(answer, number))


def end_with_parent(descriptor: int) -> None:
    """End this process when the parent's end of the lifeline closes, that is, when the parent is gone."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
