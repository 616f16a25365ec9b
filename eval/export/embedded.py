"""Import whole packages from texts that one file holds. An exported file carries this source; standard library only."""

from __future__ import annotations

import hashlib
import importlib
import io
import linecache
import re
import sys
import zipfile
from collections.abc import Mapping
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import chain, count
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any


class EmbeddedPackages(MetaPathFinder, InspectLoader):
    """The importer of the Python modules and data files in `files`, texts by path such as "rooflane/shapes/shape.py".

    Their packages get names of their own, so an installed package of the same name is neither used nor changed: the
    name in import statements and at the start of strings is replaced as a module is read. `inspect.getsource`, by which
    Triton reads a kernel, finds the texts through `get_source`. Modules read data files by
    `importlib.resources.files(package)`.
    """

    def __init__(self, files: Mapping[str, str], file: str) -> None:
        self._files = files
        self._file = file
        digest = hashlib.sha256("\0".join(part for item in files.items() for part in item).encode()).hexdigest()
        tops = {path.split("/")[0] for path in files}
        # The number tells files of one process apart that hold the same sources.
        names = (
            {top: f"{top}_{digest[:12]}{number}" for top in tops} for number in chain([""], map("_{}".format, count(2)))
        )
        self._names = next(found for found in names if not set(found.values()) & sys.modules.keys())
        self._own = {name: top for top, name in self._names.items()}
        either = "|".join(map(re.escape, sorted(tops)))
        start = rf"^[ \t]*(?:from|import)[ \t]+(?=(?:{either})[.\s])|[\"'](?=(?:{either})\.)"
        self._name = re.compile(f"({start})({either})", re.MULTILINE)

    def import_module(self, name: str) -> ModuleType:
        """Return a module, named as in its own package, such as "rooflane.shapes"."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        top, dot, rest = name.partition(".")
        return importlib.import_module(f"{self._names[top]}{dot}{rest}")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of an embedded module or of a package's folder, None for any other name."""
        found = self._locate(fullname)
        if found is None:
            return None
        text_path, is_package = found
        spec = spec_from_loader(fullname, self, origin=f"{self._file}/{text_path}", is_package=is_package)
        spec.has_location = True
        return spec

    def is_package(self, fullname: str) -> bool:
        """Tell whether a module is a package."""
        return self._found(fullname)[1]

    def get_source(self, fullname: str) -> str:
        """Return a module's text with the packages' own names in it; "" for a folder without `__init__.py`."""
        text = self._files.get(self._found(fullname)[0], "")
        return self._name.sub(lambda match: match[1] + self._names[match[2]], text)

    def get_code(self, fullname: str) -> Any:
        """Return a module's compiled code; its file name leads `linecache` to `get_source`."""
        file = f"{self._file}/{self._found(fullname)[0]}"
        linecache.cache.pop(file, None)  # of an earlier text at this path
        return self.source_to_code(self.get_source(fullname), file)

    def get_resource_reader(self, fullname: str) -> _Resources:
        """Return the reader of a package's data files, for `importlib.resources.files`."""
        return _Resources(self._files, f"{PurePosixPath(self._found(fullname)[0]).parent}/")

    def _found(self, fullname: str) -> tuple[str, bool]:
        found = self._locate(fullname)
        if found is None:
            raise ImportError(f"{fullname} is not embedded in {self._file}", name=fullname)
        return found

    def _locate(self, fullname: str) -> tuple[str, bool] | None:
        """Return a module's path among the texts and whether it is a package."""
        name, _, rest = fullname.partition(".")
        if name not in self._own:
            return None
        stem = "/".join([self._own[name], *filter(None, rest.split("."))])
        if f"{stem}.py" in self._files:
            return f"{stem}.py", False
        inside = any(path.startswith(f"{stem}/") for path in self._files)
        return (f"{stem}/__init__.py", True) if inside else None


class _Resources:
    """One package's folder as `importlib.resources` reads it: a path inside a ZIP archive in memory."""

    def __init__(self, texts: Mapping[str, str], folder: str) -> None:
        self._texts, self._folder = texts, folder

    def files(self) -> zipfile.Path:
        """Return the folder."""
        kept = io.BytesIO()
        with zipfile.ZipFile(kept, "w") as archive:
            for path, text in self._texts.items():
                if path.startswith(self._folder):
                    archive.writestr(path, text)
        return zipfile.Path(zipfile.ZipFile(kept), self._folder)
