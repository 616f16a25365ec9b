"""Whether the runtime compiler is said to be usable: by asking it, not by looking for files."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rooflane.families.runtime.host import host_compiler, missing_compiler


@pytest.fixture
def bindings(monkeypatch):
    """Put stand-ins in the bindings' place; `nvrtcVersion` answers as told."""

    def put(answer):
        for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=answer))
        return missing_compiler.__wrapped__()

    return put


def test_a_compiler_that_tells_its_version_is_usable(bindings):
    assert bindings(lambda: (0, 13, 0)) == ""


def test_bindings_without_the_library_are_told_from_a_compiler(bindings):
    def fail():
        raise RuntimeError("Failure finding libnvrtc.so.13")

    assert bindings(fail) == "RuntimeError: Failure finding libnvrtc.so.13"
    assert bindings(lambda: (7,)) == "nvrtcVersion returns 7"


def test_the_hosts_compiler_is_the_one_named_else_the_first_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "ccache g++ -pthread")
    assert host_compiler() == ["ccache", "g++", "-pthread"]
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    with pytest.raises(RuntimeError, match="CXX=.*No closing quotation.*unset it"):
        host_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_compiler() == []
    for name in ("c++", "clang++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert host_compiler() == [str(tmp_path / "clang++")]


def test_a_module_of_the_users_own_named_cuda_is_no_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    for name in ("cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "Error" in missing_compiler.__wrapped__()
