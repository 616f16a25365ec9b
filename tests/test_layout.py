"""The mapped layout's known traps: bare imports, an unlisted package, a wheel that lacks something."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("shapes", "baseline", "families", "dispatch", "eval")
# The order dependencies point in: a package may use those before it.
ORDER = {name: place for place, name in enumerate(FOLDERS)}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
CODE = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]


def package_of(path: Path) -> str:
    return ".".join(("rooflane", *path.relative_to(ROOT).parts[:-1]))


def imported(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_listed_packages_are_those_on_disk():
    # A package missing from the list works in a clone and is missing from the wheel.
    assert sorted(SETUPTOOLS["packages"]) == sorted({package_of(path) for path in SOURCES})


def test_every_package_on_disk_is_a_package():
    assert [path for path in SOURCES if not (path.parent / "__init__.py").exists()] == []


def test_the_namespace_has_no_folder_or_init_of_its_own():
    assert not (ROOT / "rooflane").exists() and not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_or_builtin_hiding_import(path: Path):
    for node in imported(path):
        if isinstance(node, ast.Import):
            modules, names = [alias.name for alias in node.names], []
        else:
            modules, names = [node.module or ""], [alias.name for alias in node.names]
            # A relative import could leave the namespace unseen.
            assert node.level == 0, f"line {node.lineno}: import rooflane's own modules by their full name"
        # `import shapes` from the root makes a second copy of every class.
        assert not {module.split(".")[0] for module in modules} & set(FOLDERS), f"line {node.lineno}: a bare import"
        # `from rooflane import eval` hides the builtin.
        assert not (modules == ["rooflane"] and "eval" in names), f"line {node.lineno}: hides the builtin eval"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_one_way(path: Path):
    own = ORDER[path.relative_to(ROOT).parts[0]]
    for node in imported(path):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            if module.startswith("rooflane."):
                used = module.split(".")[1]
                assert ORDER[used] <= own, f"line {node.lineno}: {FOLDERS[own]} may not use {used}"


def test_importing_everything_makes_no_second_copy():
    modules = sorted(
        ".".join(("rooflane", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if path.name != "__main__.py"
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set({FOLDERS!r}) & sys.modules.keys()))"
    )
    # From the root, where the folders themselves could be imported by their bare names.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["shapes", "families", "dispatch", "eval.cli"])
def test_planning_packages_load_no_torch(folder: str):
    code = f"import sys, rooflane.{folder}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def data_files() -> set[str]:
    """Return what the wheel must hold besides Python, as paths inside it."""
    found = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / SETUPTOOLS["package-dir"][package]
        matches = [path for pattern in patterns for path in folder.glob(pattern)]
        assert matches, f"{package}: no file matches {patterns}"
        found |= {f"rooflane/{path.relative_to(ROOT).as_posix()}" for path in matches}
    return found


def test_data_files_on_disk_are_all_covered_by_package_data():
    suffixes = {".csv", ".toml", ".j2", ".html", ".css", ".js", ".cu", ".cpp", ".cuh"}
    on_disk = {
        f"rooflane/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    }
    assert on_disk <= data_files()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    # A copy is built: setuptools leaves build/ and egg-info behind, and a stale build/ would hide a missing file.
    source = tmp_path_factory.mktemp("source")
    names = [*FOLDERS, "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *(ROOT / name for name in names), source], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("rooflane-*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"rooflane/{path.relative_to(ROOT).as_posix()}" for path in SOURCES} | data_files()
    assert wanted <= names
    assert {name for name in names if name.startswith("rooflane/")} == wanted
    assert not any(name.split("/")[0] in FOLDERS for name in names)


@pytest.mark.slow
def test_installed_wheel_runs_from_its_own_files(wheel: Path, tmp_path: Path):
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel]
    subprocess.run(install, check=True, timeout=300)
    # -P keeps the working directory out, PYTHONPATH puts the wheel's files before the clone the suite runs from.
    environment = os.environ | {"PYTHONPATH": str(target)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", *command], cwd=empty, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    origins = run("-c", "import rooflane.shapes, rooflane.eval as e; print(rooflane.shapes.__file__, e.__file__)")
    assert all(Path(origin).is_relative_to(target) for origin in origins.split())
    out = run("-m", "rooflane.eval", "classify", "published.csv", "--profile", "h200", "--json")
    assert '"regime": "infeasible"' in out
    assert "does-not-fit" in run("-m", "rooflane.eval", "rules", "list")
