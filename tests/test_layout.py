"""The layout's rules: packages, imports and their order, sizes, and what the wheel and the sdist hold."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("shapes", "baseline", "families", "dispatch", "eval")
# The order that dependencies point in: a package may use those before it.
ORDER = {name: place for place, name in enumerate(FOLDERS)}
# The rooms of eval: a room may use its own and those of a lower number. The plugin stands on the gate alone.
ROOMS = {
    "record": 0, "sandbox": 0, "check": 1, "stats": 2, "worker": 3, "report": 3, "campaign": 4, "device": 4,
    "submit": 4, "export": 5, "commands": 6, "pytest_plugin": 2,
}  # fmt: skip
# Each stands at the top of eval and may be used by every room.
COMMON = {"exit_codes"}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
CODE = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
MODULES = {
    ".".join(("rooflane", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCES
}
DATA_SUFFIXES = {".csv", ".toml", ".j2", ".html", ".css", ".js", ".cu", ".cpp", ".cuh"}
CODE_TOKENS = ("__global__", "#include", "__device__", "asm volatile", "PyObject")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    return ".".join(("rooflane", *path.relative_to(ROOT).parts[:-1]))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def used_modules(path: Path) -> list[tuple[int, str]]:
    """Return (line, module of ours) for each import, also where `from package import module` names it."""
    found = []
    for node in imported(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module or "" for name in inner]
        found += [(node.lineno, name) for name in dict.fromkeys(names) if name.split(".")[0] == "rooflane"]
    return found


def report(rule: str, offenders: list[str]) -> None:
    assert not offenders, f"{rule}:\n  " + "\n  ".join(offenders)


def test_listed_packages_are_those_on_disk():
    # A package missing from the list works in a clone and is missing from the wheel.
    assert sorted(SETUPTOOLS["packages"]) == sorted({package_of(path) for path in SOURCES})


def test_every_package_on_disk_is_a_package():
    lacking = [name_of(path.parent) for path in SOURCES if not (path.parent / "__init__.py").exists()]
    report("a folder with modules has an __init__.py", lacking)


def test_the_namespace_has_no_folder_or_init_of_its_own():
    assert not (ROOT / "rooflane").exists() and not (ROOT / "__init__.py").exists()


def test_no_import_is_relative_bare_or_hides_the_builtin_eval():
    wrong = []
    for path in CODE:
        for node in imported(path):
            if isinstance(node, ast.Import):
                modules, names = [alias.name for alias in node.names], []
            else:
                modules, names = [node.module or ""], [alias.name for alias in node.names]
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            # `import shapes` from the root makes a second copy of every class.
            bare = {module.split(".")[0] for module in modules} & set(FOLDERS)
            if relative or bare or (modules == ["rooflane"] and "eval" in names):
                wrong.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    report("import rooflane's modules by their full name, and never `from rooflane import eval`", wrong)


def test_packages_use_only_those_before_them():
    wrong = [
        f"{name_of(path)}:{line}: uses {module}"
        for path in SOURCES
        for line, module in used_modules(path)
        if module.count(".") and ORDER[module.split(".")[1]] > ORDER[path.relative_to(ROOT).parts[0]]
    ]
    report(f"packages may use only those before them in {' < '.join(FOLDERS)}", wrong)


def test_rooms_of_eval_use_only_those_before_them():
    """TYPE_CHECKING blocks and functions included: an import that is hidden is an import all the same."""
    wrong = []
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "eval" or parts[1] not in ROOMS:
            continue
        for line, module in used_modules(path):
            used = module.split(".")[2:3]
            if not module.startswith("rooflane.eval") or used == [parts[1]] or set(used) & COMMON:
                continue
            # `from rooflane.eval import name` may lead to any room, so only the last room may use it.
            if not used and parts[1] == "commands":
                continue
            if not used or used[0] not in ROOMS or ROOMS[used[0]] >= ROOMS[parts[1]]:
                wrong.append(f"{name_of(path)}:{line}: {parts[1]} uses {module}")
    rule = "record < check < stats < {worker, report} < {campaign, device, submit} < export < commands"
    report(f"rooms of eval may use only those before them: {rule}", wrong)


def test_import_cycles_are_few_and_stay_inside_one_folder():
    # Imports in functions and TYPE_CHECKING blocks close cycles too.
    edges = {
        name: {module for _, module in used_modules(path) if module in MODULES and module != name}
        for name, path in MODULES.items()
    }
    cycles = [sorted(group) for group in strong_components(edges) if len(group) > 1]
    across = [" ".join(group) for group in cycles if len({package_of(MODULES[name]) for name in group}) > 1]
    report("an import cycle stays inside one folder", across)
    assert len(cycles) <= 3, f"at most 3 import cycles: {cycles}"


def strong_components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (Kosaraju's two passes)."""
    order: list[str] = []
    back: dict[str, set[str]] = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets:
            back[target].add(name)

    def walk(start: str, graph: dict[str, set[str]], seen: set[str], done: list[str]) -> None:
        seen.add(start)
        for target in sorted(graph[start] - seen):
            if target not in seen:
                walk(target, graph, seen, done)
        done.append(start)

    seen: set[str] = set()
    for name in edges:
        if name not in seen:
            walk(name, edges, seen, order)
    groups, seen = [], set()
    for name in reversed(order):
        if name not in seen:
            groups.append([])
            walk(name, back, seen, groups[-1])
    return groups


def test_strong_components_are_what_a_small_graph_has():
    groups = strong_components({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()})
    assert sorted(sorted(group) for group in groups) == [["a", "b", "c"], ["d"], ["e"]]


def test_folders_and_the_package_keep_to_their_size():
    top = [path.name for path in SOURCES if path.parent == ROOT / "eval"]
    assert len(top) <= 6, f"at most 6 files directly in eval/, not {len(top)}: {top}"
    counts = Counter(package_of(path) for path in SOURCES)
    report("at most 20 .py files in a folder", [f"{name}: {count}" for name, count in counts.items() if count > 20])
    assert len(SOURCES) <= 255, f"the package has {len(SOURCES)} files; at most 255"
    lines = sum(path.read_text().count("\n") for path in SOURCES)
    assert lines <= 37_500, f"the package has {lines:,} lines of Python; at most 37,500"


def test_c_and_cuda_stand_in_files_of_their_own():
    long = [
        f"{name_of(path)}:{node.lineno}: {node.value.count(chr(10))} lines"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.count("\n") > 20
        and any(token in node.value for token in CODE_TOKENS)
    ]
    report("C++ or CUDA in a Python string of more than 20 lines belongs in a .cuh or .cpp file", long)


@pytest.mark.slow
def test_importing_everything_makes_no_second_copy():
    modules = sorted(name for name in MODULES if not name.endswith("__main__"))
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
def test_planning_packages_load_no_torch_and_no_pandas(folder: str):
    code = f"import sys, rooflane.{folder}; sys.exit(bool({{'torch', 'pandas'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def data_files() -> set[str]:
    """Return what the wheel must hold besides Python, as paths inside it."""
    found = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / SETUPTOOLS["package-dir"][package]
        found |= {f"rooflane/{path.relative_to(ROOT).as_posix()}" for item in patterns for path in folder.glob(item)}
    return found


def test_data_files_on_disk_are_all_covered_by_package_data():
    on_disk = {
        f"rooflane/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in DATA_SUFFIXES
    }
    assert on_disk <= data_files()


def test_both_pinned_sets_hold_every_dependency():
    wanted = PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["dev"]
    names = {item.split(";")[0].split(">")[0].split("[")[0].strip().lower() for item in wanted} - {"rooflane"}
    for device in ("cpu", "gpu"):
        lines = (ROOT / f"constraints-{device}.txt").read_text().splitlines()
        pinned = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
        assert names <= pinned, f"constraints-{device}.txt lacks {sorted(names - pinned)}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an sdist, and the wheel that is built from it."""
    target = tmp_path_factory.mktemp("built")
    # A copy is built: setuptools leaves egg-info behind, and a stale build folder would hide a missing file.
    source = tmp_path_factory.mktemp("source")
    names = [*FOLDERS, "tests", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"]
    subprocess.run(["cp", "-r", *(ROOT / name for name in names), source], check=True)
    # Without --wheel or --sdist the wheel is made from the sdist.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = target.glob("rooflane-*.tar.gz"), target.glob("rooflane-*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_sdist_holds_the_package_and_no_tests(built: tuple[Path, Path]):
    with tarfile.open(built[0]) as archive:
        names = {item.name.partition("/")[2] for item in archive.getmembers() if item.isfile()}
    code = {name_of(path) for path in SOURCES} | {name.removeprefix("rooflane/") for name in data_files()}
    made = {"PKG-INFO", "setup.cfg"}
    # A few stray test files without their helpers helped nobody: the tests are in the repository.
    extra = {name for name in names - code - made if not name.startswith("rooflane.egg-info/")}
    assert code <= names and extra == {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file(built: tuple[Path, Path]):
    names = set(zipfile.ZipFile(built[1]).namelist())
    wanted = {f"rooflane/{name_of(path)}" for path in SOURCES} | data_files()
    assert {name for name in names if name.startswith("rooflane/")} == wanted
    assert not any(name.split("/")[0] in FOLDERS for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_installed_wheel_runs_from_its_own_files(built: tuple[Path, Path], tmp_path: Path):
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, built[1]]
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


def test_every_name_that_a_module_imports_exists():
    """Imports inside functions too: one that names a moved module fails only when a user calls the function."""
    wrong = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
                continue
            if not (node.module or "").startswith("rooflane."):
                continue
            for alias in node.names:
                try:
                    if not hasattr(import_module(node.module), alias.name):
                        import_module(f"{node.module}.{alias.name}")
                except ImportError as error:
                    wrong.append(f"{name_of(path)}:{node.lineno}: {error}")
    report("what a module imports from rooflane exists", wrong)
