"""Where the wall time of a run goes: what it is well spent on, and the rest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

from rooflane.eval.campaign.launch import Buffer, Crash, WorkerProcess, end_strays
from rooflane.eval.check.verify import CallFailed, WrongOutput
from rooflane.eval.record.records import EAGER_ARM, REFERENCE, ArmId
from rooflane.eval.sandbox.confine import Confinement
from rooflane.eval.worker.cpu_pinning import free_threads
from rooflane.eval.worker.protocol import BusyWait, Failed, Hello, Message, Request, Wrong, is_failure

WORK = ("warm-up", "measurement", "verification")


class Spent:
    """Seconds by what they were spent on, from a moment on; parts never overlap.

    `before` is the account of a run's earlier part, which an interruption ended.
    """

    def __init__(self, started: float | None = None, before: Mapping[str, float] | None = None) -> None:
        self._started = monotonic() if started is None else started
        self._before = before or {}
        self._seconds: dict[str, float] = {}
        self._at: str | None = None

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the seconds of a block; inside another block they count as the outer one's."""
        if self._at is not None:
            yield
            return
        self._at, before = what, monotonic()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + monotonic() - before
            self._at = None

    def account(self) -> dict[str, float]:
        """Return the seconds so far; what belongs to no block stands as "other"."""
        other = max(0.0, monotonic() - self._started - sum(self._seconds.values()))
        whole = Counter(self._before)
        whole.update(self._seconds | {"other": other})
        return {what: round(seconds, 3) for what, seconds in whole.items()}


def overhead_share(account: dict[str, float]) -> float:
    """Return the share of an account that was neither warm-up, measurement nor verification."""
    return 1 - sum(account.get(what, 0.0) for what in WORK) / max(1e-9, sum(account.values()))


A = TypeVar("A")


@dataclass(frozen=True)
class Doing:
    """What is done with which arm, as it stands in a reason or on a display."""

    what: str
    arm: ArmId = EAGER_ARM

    def __str__(self) -> str:
        return f"{self.what} of {self.arm}"


class ReferenceLost(Exception):
    """The worker that holds the reference is gone; nothing can be compared until another has taken its place.

    `arm` is the one that was being built, timed or judged; None where it was none.
    """

    def __init__(self, reason: str, arm: ArmId | None) -> None:
        super().__init__(reason)
        self.arm = arm


class Team:
    """Workers by name; one that ended is started again by `ensure`, when the next shape begins."""

    def __init__(
        self,
        candidates: Sequence[str],
        hello: Hello,
        timeout_s: float,
        spent: Spent | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        confine: Callable[[str], Confinement | None] = lambda name: None,
    ) -> None:
        self._confine = confine
        self._held: dict[str, set[int]] = {}
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_note = on_note
        self._buffers = {name: Buffer() for name in (REFERENCE, *candidates)}
        self._workers: dict[str, WorkerProcess] = {}
        self._forged: dict[str, list[str]] = {}
        self.environment: dict[str, Any] = {}
        self.uuid: str | None = None
        self._spent = spent or Spent()

    def start(self) -> None:
        """Start every worker and set them up side by side: a CUDA context takes its time."""
        for name in self._buffers:
            # A worker that cannot be set up is started again when its shape begins, which also reports it.
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

    def pid(self, name: str) -> int | None:
        """Return a worker's process id; None where it has ended."""
        return self._workers[name].pid if name in self._workers else None

    def count(self) -> int:
        """Return how many workers live."""
        return len(self._workers)

    def forged(self, name: str) -> list[str]:
        """Return what a worker's channel carried beside answers, each line once."""
        if name in self._workers:
            self._keep_forged(name, self._workers[name])
        return list(dict.fromkeys(self._forged.pop(name, [])))

    def ask(self, name: str, request: Request[A], doing: Doing, limit_s: float | None = None) -> A:
        """Ask a worker and return its answer; one that has not come after `limit_s` seconds is a crash.

        Raises `Crash` when a candidate's worker is lost by it, `ReferenceLost` when the reference's is, `CallFailed`
        and `WrongOutput` where the answer says so.
        """
        try:
            if name not in self._workers:
                raise Crash("the worker it lived in had ended")
            worker = self._workers[name]
            on_wait = (
                None
                if name == REFERENCE
                else lambda waited, limit: self._on_note(
                    f"{doing}: no answer for {waited:.0f} s; its worker is ended at {limit:.0f} s"
                )
            )
            answer = worker.ask(request, str(doing), limit_s, on_wait)
            if name != REFERENCE and is_failure(answer) and (printed := worker.printed()):
                answer = replace(answer, reason=f"{answer.reason}; it printed: {printed}")
        except Crash as crash:
            raise self._lost(name, crash, doing.arm) from None
        if isinstance(request, BusyWait):
            self._follow_cores(name, request)
        return unwrap(answer)

    def _follow_cores(self, name: str, request: BusyWait) -> None:
        """Let the threads run anywhere again that a worker started on the cores it was kept to.

        A worker in the sandbox may set its own cores, but not those of a thread by its id.
        """
        if request.on:
            self._held[name] = set(request.cores)
        elif held := self._held.pop(name, None):
            with suppress(OSError):  # it has ended
                threads = os.listdir(f"/proc/{self._workers[name].pid}/task")
                free_threads(map(int, threads), held, os.sched_getaffinity(0))

    def ask_all(self, names: Sequence[str], request: Request[A], doing: Doing) -> dict[str, A | CallFailed]:
        """Ask several workers the same at once and wait for all; those that are lost by it have no answer."""
        asked = []
        for name in names:
            with suppress(Crash):
                self.ensure(name)
                self._workers[name].send(request, str(doing))
                asked.append(name)
        answers = {}
        for name in asked:
            try:
                answers[name] = unwrap(self._workers[name].receive(str(doing)))
            except CallFailed as error:
                answers[name] = error
            except Crash as crash:
                lost = self._lost(name, crash, doing.arm)
                if name == REFERENCE:
                    raise lost from None
        return answers

    def _lost(self, name: str, crash: Crash, arm: ArmId | None) -> Crash | ReferenceLost:
        """End a worker that crashed; return what that means."""
        self.end(name)
        return ReferenceLost(str(crash), arm) if name == REFERENCE else crash

    def ensure(self, name: str) -> None:
        """Start a worker that has ended; raises like `ask`."""
        if name in self._workers:
            return
        try:
            self._start(name)
            self._greet(name)
        except Crash as crash:
            raise self._lost(name, crash, None) from None

    def end(self, name: str) -> None:
        """End a worker."""
        worker = self._workers.pop(name, None)
        if worker:
            self._keep_forged(name, worker)
            worker.end()

    def close(self) -> None:
        """End every worker and close the shared memory."""
        for name in list(self._workers):
            self.end(name)
        # Only now: which worker a process that detached itself belonged to is not known any more.
        if left := end_strays():
            self._on_note(f"ended what candidates had left running: {', '.join(left)}")
        for buffer in self._buffers.values():
            buffer.close()

    def spending(self, what: str) -> AbstractContextManager[None]:
        """Count the seconds of a block."""
        return self._spent.on(what)

    def _keep_forged(self, name: str, worker: WorkerProcess) -> None:
        """Keep what a worker's channel carried beside answers, so that it is reported after the worker has ended."""
        self._forged.setdefault(name, []).extend(worker.forged)
        worker.forged.clear()

    def _start(self, name: str) -> None:
        buffers = tuple(self._buffers.values()) if name == REFERENCE else (self._buffers[name],)
        confinement = None if name == REFERENCE else self._confine(name)
        worker = self._workers[name] = WorkerProcess(name, buffers, self._timeout_s, confinement)
        worker.send(replace(self._hello, describe=name == REFERENCE), "its start")

    def _greet(self, name: str) -> None:
        try:
            answer = unwrap(self._workers[name].receive("its start"))
        except CallFailed as error:
            raise Crash(f"its worker cannot be set up: {error}") from None
        if name == REFERENCE:
            self.environment, self.uuid = answer.environment, answer.uuid


def unwrap(answer: Message) -> Any:
    """Return an answer; raises what it says went wrong."""
    if isinstance(answer, Wrong):
        raise WrongOutput(answer.reason)
    if isinstance(answer, Failed):
        raise CallFailed(answer.status, answer.reason)
    return answer
