"""Run the script once in a fresh process, with a time limit, and keep what the script prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict

from rooflane.eval.worker.process import module_command

# The script prints a few kilobytes; a candidate may print without end.
KEPT_BYTES = 1 << 18
READER_WAIT_S = 5.0


class SubmitJob(BaseModel):
    """The request that the worker of one run reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    organiser: str
    sha256: str
    arguments: list[str]
    candidate: str
    plan: dict[str, Any]
    shape: dict[str, Any]
    memory_bytes: int | None


@dataclass(frozen=True)
class End:
    """How a run ended. `status` is None at the time limit; `cut` marks printed text that was too long to keep."""

    status: int | None
    stdout: str
    stderr: str
    wall_s: float
    cut: bool
    environment: dict[str, Any]


class _Reader(threading.Thread):
    """Keeps the first `KEPT_BYTES` of a pipe and drains the rest."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(daemon=True)
        self.pipe, self.kept, self.cut = pipe, bytearray(), False

    def run(self) -> None:
        with suppress(OSError, ValueError):
            while data := self.pipe.read1(1 << 16):
                room = KEPT_BYTES - len(self.kept)
                self.kept += data[:room]
                self.cut = self.cut or len(data) > room

    def text(self) -> str:
        return bytes(self.kept).decode(errors="replace")


def run_once(job: SubmitJob, time_limit_s: float) -> End:
    """Run the script once. The worker and every process that it started have ended when this returns or raises."""
    start = monotonic()
    facts_end, write_end = os.pipe()
    process = subprocess.Popen(
        module_command("rooflane.eval.submit.worker", str(write_end)),
        pass_fds=(write_end,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the parent alone, and the whole group can be ended
    )
    os.close(write_end)
    facts = os.fdopen(facts_end, "rb")
    readers = [_Reader(process.stdout), _Reader(process.stderr), _Reader(facts)]
    status = None
    try:
        for reader in readers:
            reader.start()
        with suppress(BrokenPipeError):
            process.stdin.write(job.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(time_limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for reader in readers:
            reader.join(READER_WAIT_S)
        # The worker ends itself when this pipe closes, so it must stay open until the worker has ended.
        with suppress(BrokenPipeError):
            process.stdin.close()
    out, err, reported = readers
    try:
        environment = json.loads(reported.text())
    except ValueError:
        environment = {}
    return End(status, out.text(), err.text(), monotonic() - start, out.cut or err.cut, environment)
