"""The workers of one process run: the reference's, and one for each candidate, started from one fork server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from rooflane.eval.campaign.launch import Buffer, Crash, WorkerProcess
from rooflane.eval.record.spent import Spent
from rooflane.eval.worker.channel import tells_failure

REFERENCE = "reference"


class ReferenceLost(Exception):
    """The worker that holds the reference is gone; nothing can be compared until another has taken its place."""

    def __init__(self, reason: str, arm: str) -> None:
        super().__init__(reason)
        self.arm = arm


class Team:
    """Workers by name; one that ended is started again by `ensure`, when the next shape begins."""

    def __init__(
        self, candidates: Sequence[str], hello: dict[str, Any], timeout_s: float, spent: Spent | None = None
    ) -> None:
        self._hello = hello
        self._timeout_s = timeout_s
        self._buffers = {name: Buffer() for name in (REFERENCE, *candidates)}
        self._workers: dict[str, WorkerProcess] = {}
        self._forged: dict[str, list[str]] = {}
        self.environment: dict[str, Any] = {}
        self.uuid: str | None = None
        self._spent = spent or Spent()

    def start(self) -> None:
        """Start every worker and set them up side by side: a CUDA context takes its time."""
        for name in self._buffers:
            # One that cannot be greeted is started again, and told of, when its shape begins.
            with suppress(Crash):
                self._start(name)
        for name in list(self._workers):
            try:
                self._greet(name)
            except Crash:
                self.end(name)

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def buffer(self, name: str) -> int:
        """Return the number of a worker's buffer among the reference's."""
        return list(self._buffers).index(name)

    def count(self) -> int:
        """Return how many workers live."""
        return len(self._workers)

    def forged(self, name: str) -> list[str]:
        """Return what a worker's channel carried beside answers, each line once."""
        if name in self._workers:
            self._keep_forged(name, self._workers[name])
        return list(dict.fromkeys(self._forged.pop(name, [])))

    def ask(self, name: str, op: str, stage: str = "", /, **values: Any) -> dict[str, Any]:
        """Ask a worker; raises `Crash` when a candidate's is lost by it, `ReferenceLost` when the reference's is."""
        try:
            if name not in self._workers:
                raise Crash("the worker it lived in had ended")
            answer = self._workers[name].ask(op, stage, **values)
            if name != REFERENCE and tells_failure(answer) and (printed := self._workers[name].printed()):
                answer["reason"] = f"{answer.get('reason', '')}; it printed: {printed}"
            return answer
        except Crash as crash:
            self.end(name)
            if name == REFERENCE:
                raise ReferenceLost(str(crash), stage.rpartition(" of ")[2]) from None
            raise

    def ask_all(self, names: Sequence[str], op: str, stage: str, /, **values: Any) -> dict[str, dict[str, Any]]:
        """Ask several workers the same at once and wait for all; those that are lost by it have no answer."""
        asked = []
        for name in names:
            with suppress(Crash):
                self.ensure(name)
                self._workers[name].send(op, **values)
                asked.append(name)
        answers = {}
        for name in asked:
            try:
                answers[name] = self._workers[name].receive(stage)
            except Crash as crash:
                self.end(name)
                if name == REFERENCE:
                    raise ReferenceLost(str(crash), stage.rpartition(" of ")[2]) from None
        return answers

    def ensure(self, name: str) -> None:
        """Start a worker that has ended; raises like `ask`."""
        if name in self._workers:
            return
        try:
            self._start(name)
            self._greet(name)
        except Crash as crash:
            self.end(name)
            if name == REFERENCE:
                raise ReferenceLost(str(crash), "") from None
            raise

    def end(self, name: str) -> None:
        """End a worker."""
        worker = self._workers.pop(name, None)
        if worker:
            self._keep_forged(name, worker)
            worker.end()

    def close(self) -> None:
        """End every worker and let go of the memory between them."""
        for name in list(self._workers):
            self.end(name)
        for buffer in self._buffers.values():
            buffer.close()

    def spending(self, what: str) -> AbstractContextManager[None]:
        """Count the seconds of a block."""
        return self._spent.on(what)

    def _keep_forged(self, name: str, worker: WorkerProcess) -> None:
        """Note what a worker's channel carried; it is told of even when the worker has ended."""
        self._forged.setdefault(name, []).extend(worker.forged)
        worker.forged.clear()

    def _start(self, name: str) -> None:
        buffers = tuple(self._buffers.values()) if name == REFERENCE else (self._buffers[name],)
        worker = self._workers[name] = WorkerProcess(name, buffers, self._timeout_s)
        worker.send("hello", describe=name == REFERENCE, **self._hello)

    def _greet(self, name: str) -> None:
        answer = self._workers[name].receive("its start")
        if "failed" in answer:
            raise Crash(f"its worker cannot be set up: {answer['reason']}")
        if name == REFERENCE:
            self.environment, self.uuid = answer["environment"], answer["uuid"]
