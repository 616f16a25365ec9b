"""The doctor reports what is here and what is missing, whatever is missing."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from rooflane.eval.device import doctor


def by_topic(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.topic: finding for finding in findings}


def test_every_package_is_found_beside_the_doctor():
    findings = by_topic(doctor.examine())
    home = Path(doctor.__file__).parents[2]
    for package in doctor.PACKAGES:
        # The suite runs one installation, so a second copy of any package would be the shadowing doctor warns of.
        assert findings[f"rooflane.{package}"] == doctor.Finding(f"rooflane.{package}", "ok", str(home / package))


def test_what_is_not_ok_says_what_to_do():
    assert all(finding.remedy for finding in doctor.examine() if finding.status != "ok")


def test_missing_compilers_are_told_with_their_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "python_header", lambda: tmp_path / "Python.h")
    findings = by_topic(doctor.examine())
    assert findings["c++ compiler"].status == "missing" and "g++" in findings["c++ compiler"].remedy
    assert findings["python headers"].status == "missing" and "python3-dev" in findings["python headers"].remedy


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("no-such-compiler", "no-such-compiler does not compile"),
        ("false", "ends with status 1"),
        ("g++ 'unclosed", "No closing quotation"),
    ],
)
def test_a_compiler_that_does_not_compile_is_missing(monkeypatch: pytest.MonkeyPatch, named: str, reason: str):
    monkeypatch.setenv("CXX", named)
    finding = by_topic(doctor.examine())["c++ compiler"]
    assert finding.status == "missing" and reason in finding.detail and "CXX" in finding.remedy


def test_the_compiler_is_the_one_the_environment_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "echo ccache g++")
    assert by_topic(doctor.examine())["c++ compiler"].detail == "ccache g++ --version at echo"


def test_a_missing_runtime_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch):
    """Only compute capability 9.0 has kernels for it, and others stand in."""
    monkeypatch.setattr(doctor, "missing_compiler", lambda: "ModuleNotFoundError: No module named 'cuda'")
    finding = by_topic(doctor.examine())["nvrtc"]
    assert finding.status == "note" and "rooflane[hopper]" in finding.remedy
    assert "No module named 'cuda'" in finding.detail


def test_ninja_is_found_off_the_path_and_its_absence_is_a_note(monkeypatch: pytest.MonkeyPatch):
    """The C++ host path is then compiled without it."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert by_topic(doctor.examine())["ninja"].status == "ok"
    monkeypatch.setattr(doctor, "find_ninja", lambda: None)
    finding = by_topic(doctor.examine())["ninja"]
    assert finding.status == "note" and "pip install ninja" in finding.remedy


def test_a_package_from_elsewhere_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real = doctor.importlib.util.find_spec

    def find_spec(name: str):
        spec = copy.copy(real(name))  # the module's own otherwise, which other tests read
        if name == "rooflane.shapes":
            spec.origin = str(tmp_path / "shapes" / "__init__.py")
        return spec

    monkeypatch.setattr(doctor.importlib.util, "find_spec", find_spec)
    finding = by_topic(doctor.examine())["rooflane.shapes"]
    assert finding.status == "note" and str(tmp_path) in finding.detail


def test_it_works_where_torch_cannot_be_imported():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "from rooflane.eval.cli import main; main(['doctor', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    # Exit 1: something is missing. The report itself is whole.
    assert done.returncode == 1, done.stderr
    assert '"not importable"' in done.stdout and '"rooflane.eval"' in done.stdout
