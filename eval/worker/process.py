"""What a worker process needs: its command line, its channel to the parent, and an end when the parent ends.

Each message is one JSON line, and every answer carries the number of its request. The worker's standard output is
another pipe, so a candidate that prints much cannot flood the channel. A line that answers no request was not written
by the harness: it is counted, and reported as tampering.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
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

    def receive(self, *, busy: bool = False) -> tuple[int, Request] | None:
        """Wait for the next request and its number; None when the parent is gone.

        `busy` waits without sleeping, which keeps the core.
        """
        while busy and not self._waiting.select(0):
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


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package.

    Without `-P` the working folder would come first on the path: a candidate called `random.py` or `types.py` in it
    would be imported wherever the standard library means its own.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def add_working_folder() -> None:
    """Let a candidate import its neighbours in the working folder, behind everything that is installed."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
