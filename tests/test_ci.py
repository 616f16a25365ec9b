"""The Makefile's set-up and what `.ci/run` leaves out, with stand-ins for Python and make."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Answers as a Python with pip does, or, named old, as one that is too old; `-m venv` makes such a Python.
STANDIN = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$0" in *old*) test "$1" = -c && exit 1 ;; esac
test "$2" = venv || exit 0
for last; do :; done
rm -rf "$last" && mkdir -p "$last/bin" && cp "$0" "$last/bin/python"
"""


@pytest.fixture
def clone(root, tmp_path):
    """A folder with the Makefile and what it needs, and two stand-ins for Python: new and old."""
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt"):
        shutil.copy(root / name, tmp_path)
    for name in ("new", "old"):
        (tmp_path / name).write_text(STANDIN.format(log=tmp_path / "log"))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def setup(clone: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = ["make", "setup", *arguments]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=60)


def test_a_wrong_interpreter_leaves_no_environment_behind(clone):
    done = setup(clone, f"PYTHON={clone / 'old'}")
    assert done.returncode and "rooflane needs Python 3.11 or newer" in done.stdout
    assert not (clone / ".venv").exists()
    # The next call with a right one works.
    assert setup(clone, f"PYTHON={clone / 'new'}").returncode == 0


@pytest.mark.parametrize("stamped", [False, True])
def test_an_environment_that_is_too_old_is_made_again(clone, stamped):
    assert setup(clone, f"PYTHON={clone / 'new'}").returncode == 0
    shutil.copy(clone / "old", clone / ".venv" / "bin" / "python")
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    if not stamped:
        for stamp in (clone / ".venv").glob("installed-*"):
            stamp.unlink()
    done = setup(clone, f"PYTHON={clone / 'new'}")
    assert done.returncode == 0 and "it is made again" in done.stdout
    assert "made again" not in setup(clone, f"PYTHON={clone / 'new'}").stdout


def test_the_cpu_build_of_torch_can_be_asked_for(clone):
    done = setup(clone, f"PYTHON={clone / 'new'}", "DEVICE=cpu", "TORCH_INDEX=https://example.org/cpu")
    lines = (clone / "log").read_text().splitlines()
    (pinned,) = [line for line in (clone / "constraints-cpu.txt").read_text().splitlines() if "torch==" in line]
    assert done.returncode == 0 and any(
        line.endswith(f"--index-url https://example.org/cpu {pinned}") for line in lines
    )


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("README.md", {"wheel"}),
        ("eval/report/page/figure.py", {"browser", "wheel"}),  # a new file: the wheel's list changes
        ("families/spec.py", {"resources"}),
        ("briefs/host.md", set()),
        ("pyproject.toml", {"browser", "resources", "wheel"}),
    ],
)
def test_slow_groups_run_where_their_folders_changed(root, tmp_path, changed, runs):
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True)

    for name in ("chromium", "make"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    for name in (".ci/run", "families/spec.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text("before\n")

    def left_out() -> set[str]:
        done = subprocess.run([".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        words = {"browser": "test_page_browser", "resources": "test_resource_gate", "wheel": "test_the_wheel_holds"}
        return {name for name, word in words.items() if word in done.stdout}

    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "first")
    assert left_out() == set(), "without a commit to compare with all run"
    path = tmp_path / changed
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("after\n")
    git("add", ".")
    git("commit", "-qm", "second")
    assert left_out() == {"browser", "resources", "wheel"} - runs
