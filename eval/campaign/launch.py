"""Workers as the parent sees them: started, asked, listened to, and ended with everything they started."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from rooflane.eval.campaign.forkserver import ForkServerError, fork_server, running_server
from rooflane.eval.campaign.package_files import loaded_package
from rooflane.eval.sandbox.confine import Confinement
from rooflane.eval.worker.process import LINE_BYTES, module_command
from rooflane.eval.worker.protocol import InvalidMessage, Message, Request, decode_answer, encode_request

POLL_S = 0.5
# An answer that takes longer is reported while it is waited for.
LONG_WAIT_S = 30.0
# What is kept of a worker's output for the reason of a crash; a candidate may print without end.
TAIL_BYTES = 8192
TAIL_CHARACTERS = 300


class Crash(Exception):
    """A worker that died, hung or spoke nonsense; the text is one line on how, `silent` tells that it hung."""

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


class Buffer:
    """Memory two processes see: outputs travel through it as raw bytes. The parent only holds its descriptor."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rooflane", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def close(self) -> None:
        """Close the descriptor; the memory is freed when the workers have ended too."""
        os.close(self.descriptor)


class WorkerProcess:
    """One worker: `ask` sends a request and waits for its answer."""

    def __init__(
        self, name: str, buffers: tuple[Buffer, ...], timeout_s: float, confinement: Confinement | None = None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.forged: list[str] = []
        self._tail = b""
        self._heard = 0
        self._partial = b""
        self._asked: int | None = None
        self._request: type[Request] = Request
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._output, output = os.pipe()
        descriptors = (theirs.fileno(), lifeline, output, *(buffer.descriptor for buffer in buffers))
        try:
            self._handle = start_process(descriptors, confinement)
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(output)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """The worker's process id, which is also its group's."""
        return self._handle.pid

    def send(self, request: Request, stage: str) -> None:
        """Send a request without waiting; `receive` gets its answer."""
        self._asked = secrets.randbits(48)
        self._request = type(request)
        self._heard = 0
        try:
            self._socket.sendall(encode_request(request, self._asked))
        except OSError:
            raise self._crash("gone", stage) from None

    def receive(
        self, stage: str, limit_s: float | None = None, on_wait: Callable[[float, float], None] | None = None
    ) -> Message:
        """Wait for the answer to the request sent, `limit_s` seconds or the worker's own limit.

        `on_wait` is called once, with the seconds waited and the limit, when the answer takes long.
        Raises `Crash` when the worker dies, is silent for too long, or gives an answer that the request does not have.
        """
        started = monotonic()
        limit_s = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        while True:
            answer = self._take_line(stage)
            if answer is not None:
                return answer
            waited = monotonic() - started
            left = limit_s - waited
            if left <= 0:
                self._kill()
                raise Crash(f"the worker gave no answer for {limit_s:.3g} s at {stage} and was ended", silent=True)
            if on_wait and waited >= LONG_WAIT_S:
                on_wait(waited, limit_s)
                on_wait = None
            ready = self._selector.select(min(POLL_S, left))
            for key, _ in ready:
                data = os.read(key.fd, 1 << 20) if key.fd == self._output else self._receive_bytes()
                if key.fd == self._output:
                    self._hear(data)
                    if not data:
                        self._selector.unregister(key.fileobj)
                elif data:
                    self._partial += data
                    if len(self._partial) > LINE_BYTES:
                        raise self._crash("nonsense", stage)
                else:
                    raise self._crash("gone", stage)
            # A process that the worker started may hold its pipes open: the worker's own end decides.
            if not ready and self._handle.poll() is not None:
                raise self._crash("gone", stage)

    def ask(
        self,
        request: Request,
        stage: str,
        limit_s: float | None = None,
        on_wait: Callable[[float, float], None] | None = None,
    ) -> Message:
        """Send a request and wait for its answer, as `receive` does."""
        self.send(request, stage)
        return self.receive(stage, limit_s, on_wait)

    def printed(self) -> str:
        """Return the end of what the worker printed since it was last asked, on one line."""
        self._drain()
        heard = self._tail[-self._heard :] if self._heard else b""
        return _without_frames(heard.decode(errors="replace"))[-TAIL_CHARACTERS:]

    def end(self) -> None:
        """End the worker's whole process group and close the pipes."""
        self._kill()
        self._selector.close()
        self._socket.close()
        os.close(self._output)
        os.close(self._lifeline)

    def _kill(self) -> None:
        # The process too: one that was just forked is not its group's leader yet.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        self._handle.wait()

    def _receive_bytes(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except OSError:
            return b""

    def _take_line(self, stage: str) -> Message | None:
        """Return the answer asked for when it has arrived whole; lines that answer nothing are noted."""
        while b"\n" in self._partial:
            line, _, self._partial = self._partial.partition(b"\n")
            try:
                answer = json.loads(line)
                number = answer.pop("answers")
            except (ValueError, AttributeError, KeyError, TypeError):
                self.forged.append(f"a line that is no answer came out of the worker's channel at {stage}")
                continue
            if number != self._asked:
                self.forged.append(f"an answer to nothing that was asked came out of the worker's channel at {stage}")
                continue
            self._asked = None
            try:
                return decode_answer(answer, self._request)
            except InvalidMessage as error:
                self.forged.append(f"the answer at {stage} is not what the harness writes: {error}")
                raise self._crash("invalid", stage) from None
        return None

    def _crash(self, kind: str, stage: str) -> Crash:
        """End the worker and return how it went."""
        at = f" at {stage}"
        if kind == "invalid":
            self._kill()
            return Crash(f"the worker's answer{at} is not what was asked for, and it was ended")
        if kind == "nonsense":
            self._kill()
            return Crash(f"the worker sent {LINE_BYTES >> 20} MB without an end of line{at} and was ended")
        # Its channel may be closed while it lives: then it is ended here, and that is how it ended.
        deadline = monotonic() + POLL_S
        code = self._handle.poll()
        while code is None and monotonic() < deadline:
            self._selector.select(POLL_S / 10)
            code = self._handle.poll()
        if code is None:
            self._kill()
            return Crash(f"the worker closed its channel{at} and was ended")
        self._drain()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        said = _without_frames(self._tail.decode(errors="replace"))[-TAIL_CHARACTERS:]
        return Crash(f"the worker {how}{at}" + (f"; it printed: {said}" if said else ""))

    def _drain(self) -> None:
        os.set_blocking(self._output, False)
        with suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._hear(data)

    def _hear(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._heard += len(data)


class _Forked:
    """A worker forked by the server."""

    def __init__(self, server: Any, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._ask(wait=False)

    def wait(self) -> int:
        return self._ask(wait=True)

    def _ask(self, *, wait: bool) -> int | None:
        if self._status is None:
            try:
                self._status = self._server.poll(self.pid, wait=wait)
            except (OSError, ForkServerError):
                # Its server was ended, and its workers with it.
                self._status = -signal.SIGKILL
        return self._status


def start_process(descriptors: tuple[int, ...], confinement: Confinement | None = None) -> Any:
    """Start a worker over these descriptors: forked where that is possible, else from the beginning.

    Only a forked worker can be confined.
    """
    server = fork_server()
    if server is not None:
        return _Forked(server, server.start(descriptors, confinement))
    loaded_package().require_unchanged()
    command = module_command("rooflane.eval.worker.worker", *map(str, descriptors))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True)


def end_strays() -> list[str]:
    """End what workers of earlier have left running, where workers are forked; return the names of these processes."""
    if server := running_server():
        with suppress(OSError, ForkServerError):
            return server.end_strays()
    return []


def _without_frames(text: str) -> str:
    """Return a worker's last lines as one, the frames of a traceback left out: the text may begin within them."""
    kept, framed = [], True
    for line in text.splitlines():
        framed = line.startswith("Traceback (most recent") or (framed and line.startswith(" "))
        if not framed and line.strip():
            kept.append(line.strip())
    return " ".join(kept)
