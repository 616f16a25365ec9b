"""The sandboxes of a run: which candidates are confined, to which folders, and the line that the report prints.

A candidate that is a user's file is confined. A family of the package is not: its code is as trusted as the harness,
and what it compiles belongs in the user's own caches, where the next run finds it.

Each confined candidate has two folders. The temporary one is made anew for each worker. The one of compiler caches
starts as a copy of the user's own, is kept from one process of the run to the next, so that only the first compiles,
and is removed with the run. So what a candidate writes is loaded by that candidate's own workers alone.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from heapq import nlargest
from itertools import islice
from pathlib import Path

from rooflane.dispatch.device import profiles_dir, state_dir
from rooflane.eval.campaign.forkserver import ForkServerError, fork_server
from rooflane.eval.sandbox.confine import CACHE_VARIABLES, Confinement
from rooflane.families.runtime.host import cache_root

NOT_WANTED = "off: --no-sandbox was given"
NOT_HERE = "off: only Linux has the means for it"
# What is copied of each of the user's caches: the newest files. 50 MB in 1,000 files take a second.
SEED_BYTES = 50 << 20
SEED_FILES = 2_000
# A cache of more files is searched no further.
FILES_SEEN = 50_000
LOCKS = (".lock", "lock", "locks")


class Sandboxes:
    """A run's confinements by the name of a candidate that is a file.

    `line` says what they hold, and is empty where nobody needs one.
    """

    def __init__(self, files: Mapping[str, Path], root: Path, hidden: Iterable[Path], *, wanted: bool) -> None:
        self._root = root
        self._hidden = tuple(os.path.realpath(path) for path in (*hidden, state_dir(), root))
        self._files = dict(files)
        self.line = self._check(wanted) if self._files else ""
        self._on = self.line.startswith("on")

    @staticmethod
    def _check(wanted: bool) -> str:
        if not wanted:
            return NOT_WANTED
        server = fork_server()
        if server is None:
            return NOT_HERE
        try:
            return server.check_sandbox()
        except ForkServerError as error:
            return f"off: its trial failed ({error})"

    def confine(self, name: str) -> Confinement | None:
        """Return what a candidate's next worker is confined to, its folders made ready; None where it is not."""
        if not self._on or name not in self._files:
            return None
        own = self._root / str(list(self._files).index(name))
        temporary, caches = own / "temporary", own / "caches"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, exist_ok=True)
        if not caches.exists():
            caches.mkdir()
            seed_caches(caches)
        # `optimize` reads the profile of the device; of the state folder that is no secret.
        readable = (str(self._files[name]), os.path.realpath(profiles_dir()))
        return Confinement(str(temporary), str(caches), self._hidden, readable)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield the folder of a run's scratch folders; it is removed at the end, whatever candidates left in it."""
    folder = Path(tempfile.mkdtemp(prefix="rooflane-scratch-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seed_caches(caches: Path) -> None:
    """Copy the newest files of the user's compiler caches into a candidate's own."""
    for variable, folder in _sources().items():
        target = caches / CACHE_VARIABLES[variable]
        copied = 0
        for _, size, path in _newest(folder):
            if copied + size > SEED_BYTES:
                continue  # a compiled header alone has 100 MB
            copied += size
            to = target / path.relative_to(folder)
            # Another process may replace a file meanwhile; the compiler makes again what is not there.
            with suppress(OSError):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to, follow_symlinks=False)


def _sources() -> dict[str, Path]:
    """Return the user's own compiler caches by the variable that names each."""
    with suppress(OSError, KeyError):  # a container's user may have no name
        inductor = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        defaults = {"TRITON_CACHE_DIR": Path.home() / ".triton" / "cache", "TORCHINDUCTOR_CACHE_DIR": inductor}
        named = {name: Path(os.environ.get(name) or folder) for name, folder in defaults.items()}
        return {**named, "TORCH_EXTENSIONS_DIR": cache_root()}
    return {"TORCH_EXTENSIONS_DIR": cache_root()}


def _newest(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the newest files of a folder, newest first: time, bytes and path; locks and links are left out."""
    return nlargest(SEED_FILES, islice(_files(folder), FILES_SEEN), key=lambda found: found[0])


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(LOCKS) or entry.is_symlink():
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path))
            elif entry.is_file():
                found = entry.stat()
                yield found.st_mtime, found.st_size, Path(entry.path)
