"""Prove the sandbox on this machine: a process tries what must be refused and what must work, without it and in it.

`python -m rooflane.eval.sandbox.check` prints the table; the status is 1 where something is not as wanted. A
campaign that runs a user's file makes the same trials before its first worker, in the process that forks the workers.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rooflane.eval.sandbox.confine import Confinement, Means, confine, find_means
from rooflane.eval.sandbox.seccomp import MACHINES, NUMBERS

REFUSED, WORKS, FAILED = "refused", "works", "failed"
# What a refusal looks like; EXDEV is Landlock's for a move between folders.
REFUSALS = (errno.EPERM, errno.EACCES, errno.EXDEV)
PTRACE_ATTACH = 16
PR_SET_PDEATHSIG = 1
CLONE_FS = 0x200
HEADER = ("action", "wanted", "without", "in the sandbox")


@dataclass(frozen=True)
class Trial:
    """One action: what is wanted of it in the sandbox, and what came of it without and in it.

    `without` and `inside` are "works" or the name of an error.
    """

    action: str
    wanted: str
    without: str
    inside: str

    @property
    def holds(self) -> bool:
        """Whether the sandbox does what is wanted."""
        if self.wanted == REFUSED:
            return self.inside in {errno.errorcode[code] for code in REFUSALS}
        return self.inside == WORKS or self.inside == self.without


@dataclass(frozen=True)
class Place:
    """What the trials work on: a folder to write to, one that is hidden, one outside, and a process outside."""

    temporary: Path
    caches: Path
    hidden: Path
    outside: Path
    victim: int


def system_call(name: str, *arguments: int | None) -> None:
    """Make a system call of the filter's table; raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = NUMBERS[name][MACHINES[platform.machine()][1]]
    wide = [value if value is None else ctypes.c_long(value) for value in arguments]
    if libc.syscall(ctypes.c_long(number), *wide) == -1:
        raise OSError(ctypes.get_errno(), name)


def _read_memory(place: Place) -> None:
    """Copy no byte at all from another process: the permission is checked all the same."""
    system_call("process_vm_readv", place.victim, None, 0, None, 0, 0)


def _open_memory(place: Place) -> None:
    os.close(os.open(f"/proc/{place.victim}/mem", os.O_RDONLY))


def _stop(place: Place) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(place.victim, number)


def _limit(place: Place) -> None:
    resource.prlimit(place.victim, resource.RLIMIT_CORE, resource.prlimit(place.victim, resource.RLIMIT_CORE))


def _open_socket(family: int, kind: int = socket.SOCK_STREAM) -> Callable[[Place], None]:
    return lambda place: socket.socket(family, kind).close()


def _run_program(place: Place) -> None:
    subprocess.run([sys.executable, "-S", "-c", ""], check=True, timeout=60, stderr=subprocess.DEVNULL)


def _end_child(place: Place) -> None:
    waiting, ending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ending)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        os.kill(child, signal.SIGKILL)
    finally:
        os.close(ending)  # it ends by itself where it could not be ended
        os.waitpid(child, 0)


def _run_thread(place: Place) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def _move(place: Place) -> None:
    """Write in one folder and move the file to another, as compilers do with what they cache."""
    for name in ("one", "other"):
        (place.caches / name).mkdir(exist_ok=True)
    made = place.caches / "one" / "file"
    made.write_text("made")
    made.replace(place.caches / "other" / "file")
    (place.caches / "other" / "file").unlink()


def _shared_memory(place: Place) -> None:
    from multiprocessing import Lock

    Lock()


FORBIDDEN: dict[str, Callable[[Place], object]] = {
    "write a file outside": lambda place: (place.outside / "file").open("r+").close(),
    "make a file outside": lambda place: (place.outside / "made").write_text("made"),
    "truncate a file outside": lambda place: os.truncate(place.outside / "file", 0),
    "remove a file outside": lambda place: (place.outside / "spare").unlink(),
    "link a file from outside": lambda place: os.link(place.outside / "file", place.temporary / f"link{os.getpid()}"),
    "read a hidden file": lambda place: (place.hidden / "file").read_text(),
    "open a socket (IPv4)": _open_socket(socket.AF_INET),
    "open a socket (IPv6)": _open_socket(socket.AF_INET6),
    "open a socket (netlink)": _open_socket(getattr(socket, "AF_NETLINK", 16), socket.SOCK_RAW),
    "trace another process": lambda place: system_call("ptrace", PTRACE_ATTACH, place.victim, None, None),
    "read another's memory": _read_memory,
    "open another's memory": _open_memory,
    "stop another process": lambda place: [
        os.kill(place.victim, signal.SIGSTOP),
        os.kill(place.victim, signal.SIGCONT),
    ],
    "end another process": lambda place: os.kill(place.victim, signal.SIGTERM),
    "move another to other cores": lambda place: os.sched_setaffinity(place.victim, os.sched_getaffinity(0)),
    "set another's priority": lambda place: os.setpriority(os.PRIO_PROCESS, place.victim, 0),
    "set another's limits": _limit,
    "make an io_uring": lambda place: system_call("io_uring_setup", 0, None),
    "load a BPF program": lambda place: system_call("bpf", 5, None, 0),
    "leave a namespace": lambda place: system_call("unshare", CLONE_FS),
}
NEEDED: dict[str, Callable[[Place], object]] = {
    "write a temporary file": lambda place: tempfile.TemporaryFile().close(),
    "move a file between folders": _move,
    "read a file that is shown": lambda place: (place.hidden / "spare").read_text(),
    "read the package": lambda place: Path(__file__).read_bytes(),
    "list a folder": lambda place: os.listdir("/"),
    "write to /dev/null": lambda place: Path("/dev/null").write_text("nothing"),
    "run a program": _run_program,
    "end a process of its own": _end_child,
    "start a thread": _run_thread,
    "choose its own cores": lambda place: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "make a pair of sockets": lambda place: [end.close() for end in socket.socketpair()],
    "make a shared lock": _shared_memory,
}


def make_trials(means: Means) -> list[Trial]:
    """Try everything without the sandbox and in it, in processes of their own; forks, so call it with one thread."""
    with tempfile.TemporaryDirectory(prefix="rooflane-sandbox-") as folder:
        names = ("temporary", "caches", "hidden", "outside")
        folders = [Path(folder, name) for name in names]
        for path in folders:
            path.mkdir()
            for name in ("file", "spare"):
                (path / name).write_text("something")
        victim = _start_victim()
        try:
            place = Place(*folders, victim)
            without = _outcomes(place, None)
            for name in ("file", "spare"):
                (place.outside / name).write_text("something")
            inside = _outcomes(place, means)
        finally:
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    wanted = {**dict.fromkeys(FORBIDDEN, REFUSED), **dict.fromkeys(NEEDED, WORKS)}
    return [Trial(action, what, without[action], inside[action]) for action, what in wanted.items()]


def _start_victim() -> int:
    """Start a process that no trial ends, so that each of them finds it."""
    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    victim = os.fork()
    if victim == 0:
        # Nothing else would end it were this process killed in the middle of a trial.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        while True:
            signal.pause()
    signal.signal(signal.SIGTERM, kept)
    return victim


def _outcomes(place: Place, means: Means | None) -> dict[str, str]:
    """Return what comes of each action in a process of its own, confined where means are given."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.setsid()
            found = _attempt_all(place, means)
            os.write(writing, json.dumps(found).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        raise OSError("the trial's process ended before it had tried everything")
    found = json.loads(said)
    if FAILED in found:
        raise OSError(found[FAILED])
    return found


def _attempt_all(place: Place, means: Means | None) -> dict[str, str]:
    actions = FORBIDDEN | NEEDED
    if means is not None:
        try:
            shown = str(place.hidden / "spare")
            confine(Confinement(str(place.temporary), str(place.caches), (str(place.hidden),), (shown,)), means)
        except OSError as error:
            return {FAILED: str(error)}
    return {name: _attempt(action, place) for name, action in actions.items()}


def _attempt(action: Callable[[Place], object], place: Place) -> str:
    try:
        action(place)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except Exception as error:
        return type(error).__name__
    return WORKS


def summarise(means: Means, trials: list[Trial]) -> str:
    """Return one line on the trials: "on: ...", "on in part: ... not refused ..." or "off: ..."."""
    if not means.any:
        return f"off: this system has {means.describe()}"
    open_ways = [trial.action for trial in trials if trial.wanted == REFUSED and not trial.holds]
    broken = [trial.action for trial in trials if trial.wanted == WORKS and not trial.holds]
    if broken:
        return f"off: in it a candidate could not {', '.join(broken)}"
    if open_ways:
        return f"on in part: {means.describe()}; it does not keep a candidate from these: {', '.join(open_ways)}"
    refused = sum(trial.wanted == REFUSED for trial in trials)
    return f"on: {means.describe()} refused each of {refused} forbidden actions in a trial"


def check_sandbox() -> tuple[str, list[Trial]]:
    """Return the line on this system's sandbox and its trials; none where there is nothing to confine with."""
    means = find_means()
    try:
        trials = make_trials(means) if means.any else []
    except OSError as error:
        return f"off: its trial failed ({error})", []
    return summarise(means, trials), trials


def check_in_new_process() -> tuple[str, list[Trial]]:
    """Return the same from a new interpreter, for a caller with threads."""
    command = [sys.executable, "-P", "-m", "rooflane.eval.sandbox.check", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"off: its trial failed ({error})", []
    return found["sandbox"], [Trial(**trial) for trial in found["trials"]]


def main(arguments: list[str]) -> int:
    """Print the table, or JSON; return the exit status."""
    line, trials = check_sandbox()
    if "--json" in arguments:
        print(json.dumps({"sandbox": line, "trials": [asdict(trial) for trial in trials]}))
        return 0
    rows = [HEADER, *((trial.action, trial.wanted, trial.without, trial.inside) for trial in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    marks = ["", *("" if trial.holds else "  <- not as wanted" for trial in trials)]
    for row, mark in zip(rows, marks, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + mark)
    print(f"sandbox {line}")
    return int(not line.startswith("on:"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
