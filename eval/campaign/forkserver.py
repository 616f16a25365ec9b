"""The fork server: one process that has paid for the imports, and forks every worker from there.

Importing torch and triton takes seconds; a campaign of eight processes and several workers in each would pay them
dozens of times. The server imports them once and forks a worker on request; the worker is a fresh process all the
same, with its own CUDA context, allocator, weights and captures, because the server creates none of these.

Why forking is safe here: the server runs one thread (numpy's linear algebra starts no pool, torch starts
its pools at the first parallel operation, which the server never runs), it never initialises CUDA (a context does
not survive a fork; `torch.cuda.is_available` asks the driver's management library instead), it imports no candidate
and it never receives a seed. It talks to the parent over one socket and ends when the parent does.

One server serves every `evaluate()` of its parent process: `fork_server()` keeps it and starts another only when the
environment variables have changed. `python -m rooflane.eval.campaign.forkserver FD` is started by the parent, never by
hand.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module

from rooflane.eval.campaign.package_files import loaded_package
from rooflane.eval.sandbox.check import check_sandbox
from rooflane.eval.sandbox.confine import Confinement, confine, find_means
from rooflane.eval.worker.process import add_working_folder, module_command

# Read by pytest's own children alone; it changes with every test and would cost a server each.
IGNORED_VARIABLES = ("PYTEST_CURRENT_TEST",)
START_TIMEOUT_S = 300
# What one message may carry on Linux (SCM_MAX_FD).
FDS_AT_MOST = 253

_server: ForkServer | None = None


class ForkServer:
    """The parent's end: asks for workers and for how they ended."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = _environment()
        # A file, not a pipe: nobody drains it while the server lives.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            module_command("rooflane.eval.campaign.forkserver", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        theirs.close()
        self._ready = False
        self._asked = 0

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server still runs."""
        return self._process.poll() is None

    def start(self, descriptors: tuple[int, ...], confinement: Confinement | None = None) -> int:
        """Fork a worker; it gets copies of the descriptors (channel, lifeline, output, buffers). Return its id.

        With a confinement it is in the sandbox before it does anything else.
        """
        self._await_imports()
        packed = array.array("i", descriptors)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
        confined = None if confinement is None else asdict(confinement)
        return self._ask({"op": "fork", "cwd": os.getcwd(), "confinement": confined}, rights)["pid"]

    def check_sandbox(self) -> str:
        """Try the sandbox in processes that the server forks; return one line on what it holds."""
        self._await_imports()
        return self._ask({"op": "check sandbox"})["sandbox"]

    def preload(self, modules: tuple[str, ...]) -> None:
        """Import modules in the server, so that workers forked from now on have them.

        What does not import there is left to the workers, whose rows say why it does not.
        """
        self._await_imports()
        self._ask({"op": "import", "modules": modules})

    def poll(self, pid: int, *, wait: bool = False) -> int | None:
        """Return how a worker ended (negative: by that signal), None while it runs."""
        return self._ask({"op": "wait" if wait else "poll", "pid": pid})["status"]

    def end_strays(self) -> list[str]:
        """End what workers that are gone have left running; return the names of these processes."""
        # Before its imports are done it has forked none.
        return self._ask({"op": "end strays"})["names"] if self._ready else []

    def close(self) -> None:
        """End the server; its workers end with their parent's other pipes."""
        self._socket.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._said.close()

    def _await_imports(self) -> None:
        """Wait, the first time, for what the server imports by itself; raises `ForkServerError` when it cannot."""
        if self._ready:
            return
        self._socket.settimeout(START_TIMEOUT_S)
        with suppress(OSError):
            self._ready = bool(self._socket.recv(1 << 16))
        if not self._ready:
            raise ForkServerError(self._last_words())
        self._socket.settimeout(None)

    def _ask(self, request: dict, rights: Sequence[tuple] = ()) -> dict:
        """Return the reply to a request; one to an earlier request, which Ctrl-C cut short, is passed over."""
        self._asked += 1
        self._socket.sendmsg([json.dumps({"number": self._asked, **request}).encode()], rights)
        while True:
            data = b""
            with suppress(OSError):  # reset, where it was killed with a request unread
                data = self._socket.recv(1 << 16)
            if not data:
                raise ForkServerError(self._last_words())
            reply = json.loads(data)
            if reply["number"] == self._asked:
                return reply

    def _last_words(self) -> str:
        """End a server that no longer answers; return the last lines it printed."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        self.close()
        return f"the workers' server ended: {' '.join(said.split())[-300:] or 'it printed nothing'}"


class ForkServerError(RuntimeError):
    """The fork server could not be started or is gone."""


def fork_server() -> ForkServer | None:
    """Return this process's server, started on first use; None where the system cannot fork with descriptors.

    It imports while the caller goes on; what is asked of it first waits for that.
    """
    global _server
    if not available():
        return None
    if _server is not None and not (_server.alive() and _server.environment == _environment()):
        close_fork_server()
    if _server is None:
        # The first server is started before any candidate; another one would load what lies on the disk by then.
        loaded_package().require_unchanged()
        _server = ForkServer()
    return _server


def running_server() -> ForkServer | None:
    """Return this process's server where one runs; starts none."""
    return _server if _server is not None and _server.alive() else None


def close_fork_server() -> None:
    """End this process's server, if there is one."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def available() -> bool:
    """Return whether workers can be forked here: Linux; elsewhere each starts a new interpreter."""
    return sys.platform == "linux" and hasattr(os, "fork")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


atexit.register(close_fork_server)


def import_everything() -> None:
    """Import what workers need, and leave this process with one thread and no CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Read once, when numpy loads: its pool would be a second thread. torch brings its own library and must not see it.
    kept = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(ImportError):
        import numpy  # noqa: F401
    if kept is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = kept
    import torch

    with suppress(ImportError):
        import triton  # noqa: F401
    import rooflane.eval.worker.worker  # noqa: F401
    from rooflane.families import load_families

    load_families()
    gc.collect()
    if torch.cuda.is_initialized():
        raise RuntimeError("importing the package initialised CUDA, which no fork survives")


def serve(channel: socket.socket) -> None:
    """Fork on request until the parent is gone."""
    adopt_orphans()
    strays = Strays()
    channel.send(b"ready")
    while True:
        data, ancillary, _, _ = socket_receive(channel)
        if not data:
            strays.end()
            return
        message = json.loads(data)
        reply = {"number": message["number"]}
        if message["op"] == "fork":
            # A worker's collector would otherwise visit, and so copy, every page of what was imported here.
            gc.freeze()
            strays.note_own()
            descriptors = array.array("i")
            for _, _, packed in ancillary:
                descriptors.frombytes(packed[: len(packed) - len(packed) % descriptors.itemsize])
            pid = os.fork()
            if pid == 0:
                channel.close()
                become_worker(list(descriptors), message["cwd"], message["confinement"])
            for descriptor in descriptors:
                os.close(descriptor)
            strays.workers.add(pid)
            reply["pid"] = pid
        elif message["op"] == "import":
            for module in message["modules"]:
                with suppress(Exception):
                    import_module(module)
        elif message["op"] == "check sandbox":
            reply["sandbox"] = check_sandbox()[0]
        elif message["op"] == "end strays":
            reply["names"] = strays.end()
        else:
            reply["status"] = _status(message["pid"], message["op"] == "wait")
            if reply["status"] is not None:
                strays.workers.discard(message["pid"])
        channel.send(json.dumps(reply).encode())


# Ending one may hand its own children over; each round ends all that are there.
STRAY_ROUNDS = 100
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let what outlives its parent become this process's child, however far it detached itself (Linux 3.4)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Strays:
    """Children of the server's that are no workers: candidates left them behind."""

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self._own: set[int] | None = None

    def note_own(self) -> None:
        """Note, ahead of the first worker, what the imports themselves have started."""
        if self._own is None:
            self._own = _children()

    def end(self) -> list[str]:
        """End them and their children; return "NAME (process PID)" of those that still ran."""
        names = []
        for _ in range(STRAY_ROUNDS):
            strays = _children() - self.workers - (self._own or set())
            if not strays:
                break
            for pid in sorted(strays):
                state, name = _state_of(pid)
                if state != "Z":  # one that has ended only waits to be asked how
                    names.append(f"{name} (process {pid})")
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        return list(dict.fromkeys(names))


def _children() -> set[int]:
    """Return this process's children; it has one thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()


def _state_of(pid: int) -> tuple[str, str]:
    """Return a process's state, "Z" where it has ended, and its name."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        return rest.split()[0], name
    except (OSError, IndexError):
        return "Z", ""


def socket_receive(channel: socket.socket) -> tuple:
    """Return one message with the descriptors that came along."""
    return channel.recvmsg(1 << 16, socket.CMSG_SPACE(FDS_AT_MOST * array.array("i").itemsize))


def become_worker(descriptors: list[int], folder: str, confinement: dict | None) -> None:
    """Turn this fresh fork into a worker, in the sandbox where a confinement is given; never returns."""
    code = 1
    try:
        import random

        from rooflane.eval.worker.worker import run

        os.setsid()  # so that the whole group can be ended
        os.chdir(folder)
        add_working_folder()
        channel, lifeline, output, *buffers = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        random.seed()  # a fork repeats its parent's state
        if confinement is not None:
            # Before the first thread: Landlock binds the calling thread and what it starts.
            confine(Confinement(**confinement), find_means())
        for descriptor in (channel, lifeline, *buffers):
            os.set_inheritable(descriptor, False)
        code = run(channel, lifeline, buffers, confined=confinement is not None)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Compiler pools and CUDA contexts may hang in their destructors; everything is out already.
        os._exit(code)


def _status(pid: int, wait: bool) -> int | None:
    try:
        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    """Import, then serve the descriptor named on the command line."""
    import_everything()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
