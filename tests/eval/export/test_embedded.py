"""Whole modules in one file: which are collected, how the file imports them, and what cannot be exported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys

import pytest

from rooflane.dispatch import load_profile, load_rules
from rooflane.eval.export import write
from rooflane.eval.export.collect import ExportError, _locate, collect_files
from rooflane.eval.export.embedded import EmbeddedPackages
from rooflane.eval.export.write import export, text_literal
from rooflane.eval.worker.candidates import parse_candidate
from rooflane.families import registry
from rooflane.shapes import Shape


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a function that writes a package `toy`, texts by path, and returns its folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    _locate.cache_clear()

    def make(files: dict[str, str]):
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "toy" / name
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)
        return tmp_path / "toy"

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        del sys.modules[name]
    _locate.cache_clear()


@pytest.fixture
def embed(monkeypatch, tmp_path):
    """Return a function that embeds texts by path, in a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return EmbeddedPackages


FILES = {
    "__init__.py": "",
    "a.py": "from toy import b\nfrom toy.deep import c as near\nimport toy.d as third\n\ndef root():\n"
    "    from toy.late import value\n    return b.value(), near.value(), third.VALUE, value\n",
    "b.py": "from . import d\nfrom .deep.c import *\nBASE = d.VALUE\n",
    "d.py": "VALUE = 3\n",
    "late.py": "value = 4\n",
    "unused.py": "import numpy\n",
    "types.py": "import numpy\n",
    "deep/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.types import x\n",
    "deep/c.py": "from importlib.resources import files\n\ndef value():\n"
    "    return files(__package__).joinpath('k.cuh').read_text() + files('toy.deep').joinpath('k.cuh').name\n",
    "deep/k.cuh": "// \\ and ''' and \"\"\"\n",
    "deep/notes.txt": "not code",
}


def test_whole_modules_are_collected_by_their_imports(toy):
    folder = toy(FILES)
    files = collect_files(["toy.a"])
    wanted = ("__init__", "a", "b", "d", "deep/__init__", "deep/c", "late")
    assert files == {
        **{f"toy/{name}.py": (folder / f"{name}.py").read_text() for name in wanted},
        "toy/deep/k.cuh": FILES["deep/k.cuh"],
    }
    assert list(files) == sorted(files)


def test_embedded_modules_import_each_other_and_not_the_installed_package(toy, embed):
    toy(FILES)
    packages = embed(collect_files(["toy.a"]))
    module = packages.import_module("toy.a")
    text = FILES["deep/k.cuh"] + "k.cuh"
    assert module.root() == (text, text, 3, 4)
    assert "toy" not in sys.modules and module.__name__.startswith("toy_")


def test_a_package_that_is_installed_stays_as_it_is(toy, embed):
    toy({"a.py": "VALUE = 'installed'\n"})
    import toy.a as installed

    other = embed({"toy/a.py": "VALUE = 'embedded'\n", "toy/b.py": "from toy.a import VALUE\n"})
    assert other.import_module("toy.b").VALUE == "embedded" and installed.VALUE == "installed"
    with pytest.raises(ModuleNotFoundError):
        other.import_module("toy.missing")


def test_no_import_hook_is_left_and_a_changed_file_is_written_again(embed, tmp_path):
    """An import hook in a candidate's process is evidence of manipulation, so an exported file must do without."""
    hooks = list(sys.meta_path), list(sys.path_hooks), list(sys.path)
    files = {"toy/__init__.py": "", "toy/a.py": "VALUE = 1\n"}
    module = embed(files).import_module("toy.a")
    assert module.VALUE == 1 and (list(sys.meta_path), list(sys.path_hooks), list(sys.path)) == hooks
    path = tmp_path / "cache" / "exported" / f"{module.__name__.replace('.', '/')}.py"
    path.write_text("VALUE = 2\n")
    for name in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[name]
    assert embed(files).import_module("toy.a").VALUE == 1 and path.read_text() == "VALUE = 1\n"


def test_a_cache_that_cannot_be_written_is_no_obstacle(embed, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert embed({"toy/__init__.py": "", "toy/b.py": "VALUE = 5\n"}).import_module("toy.b").VALUE == 5


def test_the_text_is_found_as_python_tools_look_for_it(embed):
    text = '"""Say."""\n\ndef say():\n    # why\n    return "toy.a"\n\ndef fail():\n    raise ValueError(say())\n'
    module = embed({"toy/__init__.py": "", "toy/a.py": text}).import_module("toy.a")
    assert inspect.getsource(module.say) == 'def say():\n    # why\n    return "' + module.__name__ + '"\n'
    assert module.__file__.endswith(f"exported/{module.__name__.replace('.', '/')}.py")
    with pytest.raises(ValueError) as caught:
        module.fail()
    assert str(caught.traceback[-1].statement).strip() == "raise ValueError(say())"


@pytest.mark.parametrize(
    "text",
    ["", "a", "a\n", "\\\n", "'''\n", '"""\n', "'''\"\"\"\\\n", "a\\", "\t\u00e9\n", "\r\n", "\0\f\n", "\u2028"],
    ids=ascii,
)
def test_a_literal_is_exactly_its_text(text):
    # Through a file's text, as an exported file is read.
    assert ast.literal_eval(f"x = {text_literal(text)}\n".split("= ", 1)[1]) == text
    names: dict = {}
    exec(compile(f"x = {text_literal(text)}\n".encode(), "literal", "exec"), names)
    assert names["x"] == text


def test_sources_stand_as_they_are_where_a_raw_string_can_hold_them():
    assert text_literal('x = """\\n"""\n') == "r'''x = \"\"\"\\n\"\"\"\n'''"
    assert text_literal("x = '''a'''\n").startswith('r"""x')


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import numpy as np\n", "a.py:1: needs numpy"),
        ("def root():\n    import numpy\n", "a.py:2: needs numpy"),
        ("from scipy.stats import t\n", "a.py:1: needs scipy"),
        ("import toy.b\n", "a.py:1: write `from ... import ...`"),
        ("import torch as t, toy.b as b\n", "a.py:1: write `from ... import ...`"),
        ("from toy.missing import x\n", "toy.missing: has no Python source"),
    ],
)
def test_what_cannot_be_exported_is_named_with_its_place(toy, source, words):
    toy({"a.py": source})
    with pytest.raises(ExportError) as error:
        collect_files(["toy.a"])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_module_named_for_resolve_name_is_collected_and_found(toy, embed):
    name = "from pkgutil import resolve_name\nNAMED = 'toy.b:value'\n\ndef root():\n    return resolve_name(NAMED)\n"
    toy({"a.py": name, "b.py": "value = 7\n", "c.py": "TEXT = 'toy.d: not a module'\n"})
    files = collect_files(["toy.a", "toy.c"])
    assert set(files) == {"toy/__init__.py", "toy/a.py", "toy/b.py", "toy/c.py"}
    assert embed(files).import_module("toy.a").root() == 7


def test_a_library_that_a_module_runs_without_may_be_missing(toy):
    guarded = "try:\n    import ninja\nexcept ImportError:\n    ninja = None\n"
    toy({"a.py": guarded + "with suppress(ImportError):\n    import ninja\n"})
    assert "toy/a.py" in collect_files(["toy.a"])


FAMILY = """
from rooflane.families.runtime.call_checks import check_call

class Toy:
    name = "toy"
    summary = contract = ""
    options = {}

    def supports(self, shape, profile):
        return None

    def refuse_form(self, form):
        return None

    def peak_bytes(self, shape, profile, **options):
        return 1

    def predict_s(self, shape, profile):
        return 1.0

    def build(self, model, shape, device):
        def forward(x, mask=None):
            check_call(x, mask, shape)
            return model(x, mask) + 1

        return forward

SPEC = Toy()
"""


def test_a_family_of_another_package_is_exported_from_its_own_source(toy, tmp_path, monkeypatch):
    import torch

    from rooflane.baseline import config_of

    toy({"spec.py": FAMILY})
    from toy.spec import SPEC

    families = {**registry.load_families(), "toy": SPEC}
    monkeypatch.setattr(registry, "load_families", lambda: families)
    monkeypatch.setattr(write, "_entry_point", lambda family: ("toy.spec", "SPEC"))
    shape = Shape("a", 2, 8, 16, 2, 16, 1)
    found = export([shape], parse_candidate("toy"), load_profile("cpu"), load_rules())
    path = tmp_path / "submission.py"
    path.write_text(found.text)
    spec = importlib.util.spec_from_file_location("exported_toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILES["toy/spec.py"] == FAMILY
    model = module.UserOptimizedTransformer(config_of(shape)).eval()
    x = torch.randn(2, 8, 16)
    with torch.inference_mode():
        assert torch.equal(model(x), model.__dict__["_plain"](x) + 1)
