"""Landlock: which files a process may read, and where it may write; by system calls, no library and no root.

Landlock (Linux 5.13 and later) refuses everything that it handles and no rule allows. A rule names a folder and holds
for everything beneath it, so a folder cannot be taken out of one that is allowed. What is hidden here is left out by
name: each folder on the way to it is opened up into its entries, and those are allowed one by one.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_SYM = 1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
# All rights over files, by the version of the kernel's interface that brought the last of them.
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
NET = 0b11  # to bind and to connect by TCP
SCOPES = 0b11  # abstract Unix sockets and signals
NET_VERSION, SCOPE_VERSION = 4, 6
# Version 1 refuses each rename between folders, which compilers need for their caches.
LEAST_VERSION = 2

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = (
    WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE
    | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE | EXECUTE
)  # fmt: skip
# What may be allowed on something that is no folder.
ON_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

DEVICES = Path("/dev")
# Harmless devices, and those of a GPU. Disks and memory are devices too, which root could read.
DEVICE_NAMES = ("null", "zero", "full", "random", "urandom", "tty", "shm", "dri", "kfd", "dxg")
DEVICE_PREFIX = "nvidia"


def version() -> int:
    """Return the version of the kernel's Landlock, 0 where it has none or has it switched off."""
    try:
        return max(0, _call(CREATE_RULESET, None, 0, ASK_VERSION))
    except OSError:
        return 0


def scopes_signals(version: int) -> bool:
    """Return whether this version keeps signals to other processes back."""
    return version >= SCOPE_VERSION


def file_rights(version: int) -> int:
    """Return every right over files that a version handles."""
    return max((rights for least, rights in RIGHTS_BY_VERSION.items() if least <= version), default=0)


def restrict(version: int, hidden: Iterable[str], readable: Iterable[str], writable: Iterable[str]) -> None:
    """Bind this thread, and every thread and process it starts from now on; needs `PR_SET_NO_NEW_PRIVS`.

    Everything is readable and executable but what lies under `hidden`; `readable` is so all the same. Only what lies
    under `writable` can be written, with GPU devices, shared memory and this process's own entries in /proc. Names of
    files can be listed everywhere: Python finds no module in a folder that it cannot list. Raises `OSError` where the
    kernel refuses.
    """
    attributes = struct.pack("<Q", file_rights(version))
    if version >= NET_VERSION:
        attributes += struct.pack("<Q", NET)
    if version >= SCOPE_VERSION:
        attributes += struct.pack("<Q", SCOPES)
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    try:
        _allow(ruleset, version, "/", READ_DIR)
        for path in visible("/", {os.path.realpath(path) for path in (*hidden, DEVICES)}):
            _allow(ruleset, version, path, READ)
        for path in readable:
            _allow(ruleset, version, path, READ)
        for path in (*writable, f"/proc/{os.getpid()}"):
            _allow(ruleset, version, path, WRITE)
        for path in _devices():
            _allow(ruleset, version, path, WRITE | IOCTL_DEV)
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def visible(folder: str, hidden: set[str]) -> Iterator[str]:
    """Yield paths that cover a folder without what is hidden in it; links are left out, not what they point to."""
    if folder in hidden:
        return
    beneath = folder.rstrip("/") + "/"
    if not any(path.startswith(beneath) for path in hidden):
        yield folder
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                yield from visible(beneath + entry.name, hidden)


def _devices() -> Iterator[str]:
    with suppress(OSError), os.scandir(DEVICES) as entries:
        for entry in entries:
            if entry.name in DEVICE_NAMES or entry.name.startswith(DEVICE_PREFIX):
                yield entry.path


def _allow(ruleset: int, version: int, path: str, rights: int) -> None:
    """Allow rights on a path and beneath it; one that cannot be opened stays refused."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ON_A_FILE
        rights &= file_rights(version)
        # Some file systems of the kernel's own take no rule.
        with suppress(OSError):
            _call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("<Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; the numbers are the same on every machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
