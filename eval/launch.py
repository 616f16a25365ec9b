"""Start a worker, listen to it, and tell how it ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from rooflane.eval.channel import RESTART_STATUS
from rooflane.eval.records import Record
from rooflane.eval.settings import Job

POLL_S = 0.5
# What is kept of a worker's output for the reason of a crash; a candidate may print without end.
TAIL_BYTES = 8192
TAIL_CHARACTERS = 300


class Crash(Exception):
    """A worker that died or hung; carries the shape and arm it was busy with, "" when it never said."""

    def __init__(self, reason: str, shape: str, arm: str) -> None:
        super().__init__(reason)
        self.shape = shape
        self.arm = arm


def run_worker(
    job: Job,
    timeout_s: float,
    on_stage: Callable[[str, str, str], None],
    on_rows: Callable[[Sequence[Record]], None],
) -> None:
    """Run a job in a fresh process and hand over its rows as they come.

    Raises `Crash` when the worker dies, or says nothing for `timeout_s` and is ended. However this returns, the
    worker and every process it started are gone.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "rooflane.eval.worker", str(write_end)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end,),
        start_new_session=True,  # Ctrl-C reaches the parent alone, and the whole group can be ended
    )
    os.close(write_end)
    listener = _Listener(process, read_end, on_stage, on_rows)
    try:
        process.stdin.write(job.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        listener.listen(timeout_s)
    except BrokenPipeError:
        process.wait()
    finally:
        _end(process)
        listener.close()
    finished = listener.done or process.returncode == RESTART_STATUS
    if not finished or process.returncode not in (0, RESTART_STATUS) or listener.silent:
        raise Crash(listener.reason(timeout_s), listener.shape, listener.arm)


class _Listener:
    """Reads a worker's messages and the end of its output, whichever comes."""

    def __init__(
        self,
        process: subprocess.Popen,
        read_end: int,
        on_stage: Callable[[str, str, str], None],
        on_rows: Callable[[Sequence[Record]], None],
    ) -> None:
        self.process = process
        self.read_end = read_end
        self.on_stage = on_stage
        self.on_rows = on_rows
        self.shape = self.arm = self.stage = ""
        self.silent = self.done = False
        self.tail = b""
        self.partial = b""

    def listen(self, timeout_s: float) -> None:
        """Handle messages until the worker is gone or silent for too long."""
        last = monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.read_end, selectors.EVENT_READ)
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                # A compiler subprocess may hold the pipes open: the worker's own end decides, not theirs.
                gone = self.process.poll() is not None
                ready = selector.select(0 if gone else POLL_S)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fd == self.read_end:
                        last = monotonic()
                        self._messages(data)
                    else:
                        self.tail = (self.tail + data)[-TAIL_BYTES:]
                if gone and not ready:
                    return
                if monotonic() - last > timeout_s:
                    self.silent = True
                    return

    def reason(self, timeout_s: float) -> str:
        """Return one line on how the worker ended."""
        at = f" at {self.stage} of {self.arm}" if self.stage else " while it started"
        if self.silent:
            return f"the worker said nothing for {timeout_s:g} s{at} and was ended"
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        said = _without_frames(self.tail.decode(errors="replace"))[-TAIL_CHARACTERS:]
        return f"the worker {how}{at}" + (f"; it said: {said}" if said else "")

    def close(self) -> None:
        """Close the pipes."""
        os.close(self.read_end)
        self.process.stdout.close()

    def _messages(self, data: bytes) -> None:
        """Handle the whole lines among the bytes received."""
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "done" in message:
                self.done = True
            elif "rows" in message:
                self.on_rows([Record.model_validate(row) for row in message["rows"]])
            else:
                self.shape, self.arm, self.stage = message["shape"], message["arm"], message["stage"]
                self.on_stage(self.shape, self.arm, self.stage)


def _without_frames(text: str) -> str:
    """Return a worker's last lines as one, the frames of a traceback left out: the text may begin within them."""
    kept, framed = [], True
    for line in text.splitlines():
        framed = line.startswith("Traceback (most recent") or (framed and line.startswith(" "))
        if not framed and line.strip():
            kept.append(line.strip())
    return " ".join(kept)


def _end(process: subprocess.Popen) -> None:
    """End the worker's whole process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Only now: closing its standard input is the signal by which a worker notices that its parent is gone.
    with suppress(BrokenPipeError):
        process.stdin.close()
