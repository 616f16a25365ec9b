"""The sandbox of a worker that runs a user's file: what it may read and write, and which system calls it may make.

The worker confines itself after the fork, before any other thread starts and before the file is imported. Landlock
binds the files, seccomp the system calls, and capabilities are dropped. Nothing can take the sandbox off again, and
every process that the worker starts is in it too. The parent, the fork server and the reference's worker are not.
Loads no torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import tempfile
from dataclasses import dataclass

from rooflane.eval.sandbox import landlock, seccomp

PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
# To read and write files whatever their owner: a container's root often runs code that belongs to somebody else.
KEPT_CAPABILITIES = 1 << 1 | 1 << 2

# Where compilers and libraries keep what they made, and the folder of the scratch folder that each gets.
CACHE_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton_home",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
    "CUPY_CACHE_DIR": "cupy",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUTE_DSL_CACHE_DIR": "cute",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}
TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")
HINT = "the sandbox lets a candidate write to its temporary folder alone; --no-sandbox runs it without"


@dataclass(frozen=True)
class Confinement:
    """What a worker is confined to: folders by absolute path; it travels to the fork server as JSON."""

    temporary: str
    caches: str
    hidden: tuple[str, ...]
    readable: tuple[str, ...]


@dataclass(frozen=True)
class Means:
    """What this system has to confine a process with; `landlock` is the version of its interface, 0 for none."""

    landlock: int
    seccomp: bool

    @property
    def any(self) -> bool:
        """Whether there is something."""
        return bool(self.landlock) or self.seccomp

    def describe(self) -> str:
        """Return the means in words."""
        parts = [f"Landlock version {self.landlock}"] if self.landlock else []
        return " and ".join([*parts, *(["seccomp"] if self.seccomp else [])]) or "neither Landlock nor seccomp"


def find_means() -> Means:
    """Ask the kernel what it has."""
    if sys.platform != "linux":
        return Means(0, False)
    version = landlock.version()
    return Means(version if version >= landlock.LEAST_VERSION else 0, seccomp.is_there())


def confine(wanted: Confinement, means: Means) -> None:
    """Confine this process, for good, by every means that the system has; raises `OSError` where one of them fails."""
    use_private_folders(wanted)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    _drop_capabilities(libc)
    if means.landlock:
        writable = (wanted.temporary, wanted.caches)
        landlock.restrict(means.landlock, wanted.hidden, wanted.readable, writable)
    if means.seccomp:
        rules = seccomp.make_rules(
            os.getpid(),
            signals=not landlock.scopes_signals(means.landlock),
            pinning=not seccomp.pinning_is_free(os.environ),
        )
        seccomp.install(seccomp.assemble(rules, platform.machine()))


def use_private_folders(wanted: Confinement) -> None:
    """Send temporary files and compiler caches to the worker's own folders, in its environment variables."""
    for name, folder in CACHE_VARIABLES.items():
        os.environ[name] = os.path.join(wanted.caches, folder)
        os.makedirs(os.environ[name], exist_ok=True)
    for name in TEMPORARY_VARIABLES:
        os.environ[name] = wanted.temporary
    # What was imported before may have asked for the folder.
    tempfile.tempdir = None


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up root's powers over other processes, the machine and the GPU's clocks; nothing changes for other users."""
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(24)
    if libc.capget(header, held):
        return
    # Two halves of effective, permitted and inheritable; the capabilities kept are all in the first half.
    permitted = struct.unpack("<6I", held.raw)[1] & KEPT_CAPABILITIES
    libc.capset(header, struct.pack("<6I", permitted, permitted, 0, 0, 0, 0))


def explain(reason: str, *, confined: bool) -> str:
    """Return the reason of a failure, with the way out where the sandbox may be what refused."""
    refused = confined and ("PermissionError" in reason or "Operation not permitted" in reason)
    return f"{reason} ({HINT})" if refused else reason
