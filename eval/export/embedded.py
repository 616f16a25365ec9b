"""Import whole packages from texts that one file holds. An exported file carries this source; standard library only."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from types import ModuleType


class EmbeddedPackages:
    """The Python modules and data files in `files`, texts by path such as "rooflane/shapes/shape.py", importable.

    They are written to a folder of Triton's cache and imported from there, so Triton reads a kernel's source, and
    `importlib.resources` a data file, as from any package, and no import hook is left in the process. The packages get
    names of their own, so an installed package of the same name is neither used nor changed: the name in import
    statements and at the start of strings is replaced as a module is written.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        digest = hashlib.sha256("\0".join(part for item in files.items() for part in item).encode()).hexdigest()
        tops = {path.split("/")[0] for path in files}
        # The number tells files of one process apart that hold the same sources.
        names = (
            {top: f"{top}_{digest[:12]}{number}" for top in tops} for number in chain([""], map("_{}".format, count(2)))
        )
        self._names = next(found for found in names if not set(found.values()) & sys.modules.keys())
        either = "|".join(map(re.escape, sorted(tops)))
        start = rf"^[ \t]*(?:from|import)[ \t]+(?=(?:{either})[.\s])|[\"'](?=(?:{either})\.)"
        pattern = re.compile(f"({start})({either})", re.MULTILINE)
        texts = {}
        for path, text in files.items():
            top, _, rest = path.partition("/")
            if path.endswith(".py"):
                text = pattern.sub(lambda match: match[1] + self._names[match[2]], text)
            texts[f"{self._names[top]}/{rest}"] = text.encode()
        folder = _written(texts)
        importlib.invalidate_caches()
        for name in self._names.values():
            if f"{name}/__init__.py" not in texts:
                # The folder is given here; what lies below it, Python finds as in any package.
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = [str(folder / name)]
            else:
                spec = importlib.util.spec_from_file_location(name, folder / name / "__init__.py")
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])

    def import_module(self, name: str) -> ModuleType:
        """Return a module, named as in its own package, such as "rooflane.shapes"."""
        top, dot, rest = name.partition(".")
        return importlib.import_module(f"{self._names[top]}{dot}{rest}")


def _written(texts: Mapping[str, bytes]) -> Path:
    """Write the texts to a folder of the cache, or to a temporary one where the cache cannot be written; return it."""
    kept = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache") / "exported"
    try:
        _write(kept, texts)
        return kept
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="exported-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _write(folder, texts)
        return folder


def _write(folder: Path, texts: Mapping[str, bytes]) -> None:
    """Write the files that are missing or differ, each in one step: another process may be reading them."""
    for path, text in texts.items():
        target = folder / path
        if target.is_file() and target.read_bytes() == text:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.replace(name, target)
