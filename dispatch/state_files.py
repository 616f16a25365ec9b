"""Files that are kept between runs, or written while a candidate runs: opened only where they are regular files.

Another process may have put a FIFO, a device or a link in such a file's place. Opening a FIFO would wait for ever, and
writing through a link would change a file that nobody named. Loads no torch.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
LOCK_POLL_S = 0.05
# Systems without them have no FIFOs to wait for.
NONBLOCK, NOFOLLOW, CLOEXEC = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC"))


class NotRegular(OSError):
    """Something other than a regular file lies where one belongs."""


def open_regular(path: Path, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor; never waits, and follows a link only where `follow` says so.

    Raises `NotRegular` for anything else that lies there, and `OSError` as `os.open` does.
    """
    with suppress(FileNotFoundError):
        # Before the open too: opening some devices has effects of its own.
        _require_regular(os.stat(path, follow_symlinks=follow))
    flags |= NONBLOCK | CLOEXEC | (0 if follow else NOFOLLOW)
    number = os.open(path, flags, mode)
    try:
        _require_regular(os.fstat(number))
    except NotRegular:
        os.close(number)
        raise
    return number


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file, through a link too; raises as `open_regular` does."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow=True), "rb") as file:
        return file.read()


def replace_file(path: Path, text: str) -> None:
    """Write a file whole: to a new one beside it, which then takes its place. Raises `OSError`."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    number = open_regular(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def take_lock(descriptor: int, wait_s: float = 0.0) -> bool:
    """Take the lock of an open file for this process alone; return False where another holds it for `wait_s`."""
    import fcntl

    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)


def holders(path: Path) -> list[str]:
    """Return the other processes that have a file open, as "process 12 (python)"; only those this user may look at."""
    try:
        wanted = os.stat(path)
    except OSError:
        return []
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and any(_same(entry, wanted) for entry in (folder / "fd").iterdir()):
                found.append(f"process {folder.name} ({(folder / 'comm').read_text().strip()})")
    return found


def _same(entry: Path, wanted: os.stat_result) -> bool:
    """Return whether a descriptor's entry leads to a file."""
    try:
        return os.path.samestat(entry.stat(), wanted)
    except OSError:
        return False


def _require_regular(found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise NotRegular(f"it is {KINDS.get(kind, 'something else')} and must be a regular file; remove it")
