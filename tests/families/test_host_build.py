"""How the C++ host path is built: once, by one process at a time, announced, and given up once with its reason."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import cache
from pathlib import Path

import pytest

from rooflane.families.runtime import host
from rooflane.families.runtime.host import find_ninja, host_build_pending, host_module

LOAD = "from rooflane.families.runtime.host import host_module; print(host_module().Watch(*[[]] * 8).sign())"
# Takes the compiler's place: notes its target, waits while a file is there, and copies the library built for the tests.
COMPILER = """#!{python}
import os, shutil, sys, time
log, go, good, fail = {paths!r}
target = sys.argv[sys.argv.index("-o") + 1]
with open(log, "a") as file:
    print(os.path.basename(target), file=file)
while os.path.exists(go):
    time.sleep(0.02)
if os.path.exists(fail):
    sys.exit(open(fail).read())
shutil.copy(good, target)
"""


class Builds:
    """An empty cache, and a stand-in for the compiler in it."""

    def __init__(self, folder: Path, good: Path) -> None:
        self.folder, self.log, self.held, self.fail = folder, folder / "log", folder / "held", folder / "fail"
        paths = tuple(map(str, (self.log, self.held, good, self.fail)))
        compiler = folder / "compiler.py"
        compiler.write_text(COMPILER.format(python=sys.executable, paths=paths))
        compiler.chmod(0o755)
        self.environment = {"TORCH_EXTENSIONS_DIR": str(folder), "CXX": str(compiler)}

    @property
    def targets(self) -> list[str]:
        """What the compiler has been asked for, in order."""
        return self.log.read_text().split() if self.log.exists() else []

    @property
    def cache(self) -> Path:
        (folder,) = self.folder.glob("rooflane_host_*")
        return folder

    def start(self) -> subprocess.Popen:
        """Start a process that builds, and return when its compiler has started."""
        process = subprocess.Popen(
            [sys.executable, "-c", LOAD], env=os.environ | self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not self.targets and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.targets, process.communicate(timeout=5)
        return process


@pytest.fixture
def builds(compiled, monkeypatch, tmp_path):
    name = compiled.__name__
    made = Builds(tmp_path, host.cache_root() / name / f"{name}.so")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    fresh_process(monkeypatch)
    return made


def fresh_process(monkeypatch):
    """Let the module be built as in a process that has built none: torch numbers what one process builds again."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", cpp_extension.ExtensionVersioner())
    monkeypatch.setattr(host, "_host_module", cache(host._host_module.__wrapped__))


def works(module) -> bool:
    return module is not None and module.Watch(*[[]] * 8).sign() == 0


def object_and_library(builds) -> list[str]:
    """What ninja asks a compiler for."""
    name = builds.cache.name
    return ["host.o", f"{name}.so"]


def test_the_first_build_is_announced_and_later_loads_are_not(builds, monkeypatch, capsys):
    assert host_build_pending() and not builds.targets
    assert works(host_module()) and not host_build_pending()
    assert builds.targets == object_and_library(builds)
    announced = capsys.readouterr().err.splitlines()
    assert len(announced) == 1 and "compiling the C++ host path" in announced[0]
    assert os.environ["CXX"] == builds.environment["CXX"], "the build leaves the environment as it was"
    fresh_process(monkeypatch)
    assert works(host_module()) and len(builds.targets) == 2 and not capsys.readouterr().err
    assert {path.name for path in builds.cache.iterdir()} == {"lock", f"{builds.cache.name}.so"}


@pytest.mark.slow
def test_a_second_process_waits_for_the_first_and_builds_nothing(builds, capsys):
    builds.held.touch()
    first = builds.start()
    found = []
    second = threading.Thread(target=lambda: found.append(host_module()))
    second.start()
    second.join(0.5)
    assert second.is_alive() and len(builds.targets) == 1
    builds.held.unlink()
    second.join(60)
    out, err = first.communicate(timeout=60)
    assert works(found[0]) and out == "0\n" and "compiling the C++ host path" in err
    assert builds.targets == object_and_library(builds) and not capsys.readouterr().err


@pytest.mark.slow
def test_a_wait_ends_and_a_killed_build_holds_nobody_up(builds, monkeypatch):
    builds.held.touch()
    process = builds.start()
    monkeypatch.setattr(host, "WAIT_S", 0.3)
    with pytest.warns(UserWarning, match=r"another process has held .*lock for 0\.3 s"):
        assert host_module() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    builds.held.unlink()
    fresh_process(monkeypatch)
    assert works(host_module())


def test_a_failed_build_is_quoted_once_and_not_tried_again(builds, monkeypatch):
    lines = [f"In file included from header{number}.h" for number in range(50)]
    builds.fail.write_text("\n".join((*lines, "x.cpp:1: fatal error: Python.h: not there")))
    with pytest.warns(UserWarning, match=r"failed: x.cpp:1: fatal error: Python.h: not there; .*rooflane doctor"):
        assert host_module() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host_module() is None
    assert len(builds.targets) == 1
    builds.fail.unlink()
    fresh_process(monkeypatch)
    assert works(host_module()), "another process may try again"
    assert len(builds.targets) == 3


def test_a_process_that_waited_for_a_failure_does_not_repeat_it(builds, monkeypatch):
    builds.fail.write_text("error: first")
    with pytest.warns(UserWarning, match="error: first"):
        host_module()
    fresh_process(monkeypatch)
    with open(builds.cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with pytest.warns(UserWarning, match="another process has just failed: .*error: first"):
            assert host_module() is None
    assert len(builds.targets) == 1


@pytest.mark.parametrize("why", ["no ninja", "two words"])
def test_without_ninja_or_with_two_words_the_compiler_is_called_directly(builds, monkeypatch, capsys, why):
    """As in an exported file on a machine without ninja, and where ccache stands before a compiler."""
    if why == "no ninja":
        monkeypatch.setattr(host, "find_ninja", lambda: None)
    else:
        monkeypatch.setenv("CXX", f"{sys.executable} {builds.folder / 'compiler.py'}")
    assert works(host_module())
    assert builds.targets == [f"{builds.cache.name}.so"] and len(capsys.readouterr().err.splitlines()) == 1
    builds.fail.write_text("x.cpp:1: error: no\nx.cpp:2: error: more")
    (builds.cache / f"{builds.cache.name}.so").unlink()
    fresh_process(monkeypatch)
    with pytest.warns(UserWarning, match=r"ended with status 1: x.cpp:1: error: no; calls"):
        assert host_module() is None


def test_ninja_is_found_in_an_environment_that_is_not_activated(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ninja()
    monkeypatch.setattr(host.sysconfig, "get_path", lambda *names: str(tmp_path / "scripts"))
    assert find_ninja() is None
    (tmp_path / "ninja").touch(0o755)
    assert find_ninja() == str(tmp_path / "ninja")


def test_without_a_compiler_nothing_is_announced(builds, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -O")
    with pytest.warns(UserWarning, match=r"no-such-compiler -O: not found.*apt-get install g\+\+"):
        assert host_module() is None
    fresh_process(monkeypatch)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(builds.folder))
    with pytest.warns(UserWarning, match=r"g\+\+, clang\+\+, c\+\+: not found"):
        assert host_module() is None
    assert not capsys.readouterr().err and not builds.targets


def test_a_library_that_does_not_load_is_built_again(builds, monkeypatch):
    assert works(host_module())
    library = builds.cache / f"{builds.cache.name}.so"
    whole = library.read_bytes()
    library.unlink()  # the one that this process has mapped
    library.write_bytes(whole[:100])
    fresh_process(monkeypatch)
    assert works(host_module()) and library.read_bytes() == whole and len(builds.targets) == 4


def test_two_texts_are_two_modules(monkeypatch, tmp_path):
    """pybind11 hands out the module it knows by a name: another version's must not be taken for ours."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(host, "files", lambda package: tmp_path)
    monkeypatch.setattr(host, "_build", lambda name, code, folder, library: name)
    names = set()
    for text in ("one", "another"):
        (tmp_path / "host.cpp").write_text(text)
        names.add(host._load_or_build())
    assert len(names) == 2


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/torch", "TRITON_CACHE_DIR": "/triton"}, "/torch"),
        ({"TRITON_CACHE_DIR": "/triton", "XDG_CACHE_HOME": "/cache"}, "/triton/torch_extensions"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/torch_extensions"),
        ({"HOME": "/home/one"}, "/home/one/.cache/torch_extensions"),
    ],
)
def test_the_cache_is_torchs_or_the_one_the_environment_names(monkeypatch, given, root):
    for name in ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert host.cache_root() == Path(root)


def test_a_pending_build_is_known_without_torch_and_only_with_a_compiler(tmp_path):
    code = (
        "import sys; from rooflane.families.runtime.host import host_build_pending; "
        "print(host_build_pending(), 'torch' in sys.modules)"
    )
    for compiler, pending in (("c++", True), ("'unclosed", False)):
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": compiler}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [str(pending), "False"], done.stderr
    assert not list(tmp_path.iterdir())
