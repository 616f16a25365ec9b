"""The collector on a toy package: what is kept, what is renamed, what cannot be exported and how it is said."""

from __future__ import annotations

import sys

import pytest

from rooflane.eval.export.collect import Collector
from rooflane.eval.export.emit import emit_imports, emit_units, undefined_names
from rooflane.eval.export.sources import ExportError, Sources, _locate


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a function that writes a package `toy`: the text of its modules by name, or by path for deeper ones."""
    monkeypatch.syspath_prepend(str(tmp_path))
    _locate.cache_clear()

    def make(deeper: dict[str, str] | None = None, **modules: str) -> None:
        for name, text in {"__init__": "", **modules, **(deeper or {})}.items():
            path = tmp_path / "toy" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        del sys.modules[name]
    _locate.cache_clear()


def flatten(root: tuple[str, str], specs: set[tuple[str, str]] = frozenset()) -> str:
    sources = Sources({"toy"})
    collector = Collector(sources, specs)
    collector.require(*root)
    collection = collector.collect()
    return "\n".join(
        ["from __future__ import annotations", emit_imports(collection), emit_units(collection, sources, specs)]
    )


def run(text: str) -> dict:
    assert undefined_names(text) == []
    names: dict = {"__name__": "flat"}
    exec(compile(text, "flat", "exec"), names)
    return names


def test_only_what_is_needed_is_kept_with_the_comment_above_it(toy):
    toy(
        a="from toy.b import used\n\nLIMIT = 3\nOTHER = 4\n\ndef root():\n    return used() + LIMIT\n",
        b="# Why it is used.\ndef used():\n    return 1\n\ndef unused():\n    return 2\n",
    )
    text = flatten(("toy.a", "root"))
    assert "# Why it is used.\ndef used" in text and "unused" not in text and "OTHER" not in text
    assert run(text)["root"]() == 4


def test_names_that_clash_are_told_apart_everywhere_they_are_used(toy):
    toy(
        a="from toy.b import SIZE as B, step as other\n"
        "SIZE = 10\n_hidden = 1\n\n"
        "def step(x):\n    return x + SIZE\n\n"
        "def root(x):\n    return f'{step(x)} {other(x)} {SIZE} {B} {[SIZE for _ in range(1)]}', _hidden\n",
        b="SIZE = 20\n_hidden = 2\n_count = 0\n\n"
        "def step(x):\n    global _count\n    _count += _hidden\n    return x + SIZE + _count\n",
    )
    names = run(flatten(("toy.a", "root")))
    assert names["root"](1) == ("11 23 10 20 [10]", 1)
    assert names["root"](1) == ("11 25 10 20 [10]", 1)  # the counter of the other module counts on


def test_a_local_of_the_final_name_is_not_captured(toy):
    toy(
        a="from toy.b import weight as get\n\ndef root():\n    weight = 5\n    return weight + get()\n",
        b="def weight():\n    return 1\n",
    )
    assert run(flatten(("toy.a", "root")))["root"]() == 6


def test_imports_inside_functions_are_resolved_and_taken_out(toy):
    toy(
        a="def root(x):\n    from toy.b import build\n    import math\n\n    return build(x) + math.floor(0.5)\n\n"
        "def build(x):\n    return 0\n",
        b="def build(x):\n    if x:\n        from toy.c import deep\n    return deep(x) if x else 0\n",
        c="def deep(x):\n    return x * 2\n",
    )
    text = flatten(("toy.a", "root"))
    assert "toy.b import" not in text and "    import math" in text
    assert run(text)["root"](4) == 8


def test_a_module_of_ours_is_reached_through_its_name(toy):
    toy(
        {"deep/c": "def value():\n    return 10\n"},
        a="from toy import b\nfrom toy.deep import c as near\n\ndef root():\n    return b.value() + near.value()\n",
        b="def value():\n    return 1\n",
    )
    assert run(flatten(("toy.a", "root")))["root"]() == 11


def test_names_are_followed_through_packages_that_pass_them_on(toy):
    toy(
        {
            "sub/__init__": "from toy.sub.inner import thing\n\n__all__ = ['thing']\n",
            "sub/inner": "def thing():\n    return 7\n",
        },
        a="from toy.sub import thing\n\ndef root():\n    return thing()\n",
    )
    text = flatten(("toy.a", "root"))
    assert "__all__" not in text and run(text)["root"]() == 7


def test_definitions_come_before_what_runs_at_import(toy):
    toy(
        a="from toy.b import Base, make\n\nclass Root(Base):\n    made = make()\n\nTABLE = {'x': Root}\n"
        "def root():\n    return TABLE['x'].made\n",
        b="from toy.c import CONSTANT\nclass Base:\n    pass\n\ndef make():\n    return CONSTANT\n",
        c="CONSTANT = 9\n",
    )
    assert run(flatten(("toy.a", "root")))["root"]() == 9


def test_what_a_module_does_on_import_is_kept_with_its_functions(toy):
    toy(a="SEEN = []\n\nSEEN.append(1)\n\ndef root():\n    return SEEN\n\nif __name__ == '__main__':\n    root()\n")
    text = flatten(("toy.a", "root"))
    assert run(text)["root"]() == [1] and "__main__" not in text


def test_class_names_are_not_taken_for_the_modules(toy):
    toy(
        a="name = 'module'\n\nclass Root:\n    name = 'class'\n    again = name\n\n"
        "    def method(self, default=name):\n        return name, default\n\n"
        "def root():\n    return Root().method()\n",
    )
    assert run(flatten(("toy.a", "root")))["root"]() == ("module", "class")


def test_type_checking_blocks_become_part_of_the_file(toy):
    toy(
        a="from typing import TYPE_CHECKING\nfrom collections.abc import Callable\n\nif TYPE_CHECKING:\n"
        "    from toy.b import Kind\n\n    Maker = Callable[[int], int]\n\n"
        "def root(x: Kind) -> Maker:\n    return lambda y: y + x\n",
        b="class Kind:\n    pass\n",
    )
    text = flatten(("toy.a", "root"))
    assert "class Kind" in text and "\nMaker = Callable" in text and run(text)["root"](1)(2) == 3


def test_a_familys_class_loses_what_only_the_router_asks(toy):
    toy(
        a="from toy.b import cost\n\nclass Spec:\n    name = 'x'\n\n    def supports(self, shape):\n"
        "        return cost()\n\n    def build(self):\n        return 1\n\nSPEC = Spec()\n",
        b="def cost():\n    return 1\n",
    )
    text = flatten(("toy.a", "SPEC"), {("toy.a", "Spec")})
    assert "supports" not in text and "cost" not in text and "SPEC = Spec()" in text
    assert run(text)["Spec"]().build() == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import numpy as np\n\ndef root():\n    return np.zeros(1)\n", "needs numpy"),
        ("def root():\n    import numpy\n    return numpy.zeros(1)\n", "needs numpy"),
        ("def root():\n    return open(__file__)\n", "reads files beside its module"),
        ("from . import b\n\ndef root():\n    return b\n", "relative or star import"),
        ("from toy.b import *\n\ndef root():\n    return value\n", "relative or star import"),
        ("from toy import b\n\ndef root():\n    return b\n", "uses a module as a value"),
        ("def root():\n    return nowhere\n", "'nowhere' is defined by no statement"),
        ("from toy.missing import x\n\ndef root():\n    return x\n", "toy.missing: has no Python source"),
        ("def root():\n    import toy.b\n    return toy.b.value\n", "to be exportable"),
    ],
)
def test_what_cannot_be_exported_is_said_with_its_place(toy, source, words):
    toy(a=source, b="value = 1\n")
    with pytest.raises(ExportError) as error:
        flatten(("toy.a", "root"))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert words.startswith("toy.missing") or "a.py" in str(error.value)


def test_undefined_names_are_found():
    assert undefined_names("def f(x):\n    return x + y + len([z for z in x])\n") == ["y"]


FAMILY = """
from rooflane.families.runtime.call_checks import check_call

class Toy:
    name = "toy"
    summary = contract = ""
    options = {}

    def supports(self, shape, profile):
        return None

    def peak_bytes(self, shape, profile, **options):
        return 1

    def predict_s(self, shape, profile):
        return 1.0

    def build(self, model, shape, device):
        def forward(x, mask=None):
            check_call(x, mask, shape)
            return model(x, mask)

        return forward

SPEC = Toy()
"""


def test_a_family_of_another_package_is_exported_from_its_own_source(toy, monkeypatch):
    from rooflane.dispatch import load_profile, load_rules
    from rooflane.eval.export import export, write
    from rooflane.eval.worker.candidates import parse_candidate
    from rooflane.families import registry
    from rooflane.shapes import Shape

    toy(spec=FAMILY)
    from toy.spec import SPEC

    families = {**registry.load_families(), "toy": SPEC}
    monkeypatch.setattr(registry, "load_families", lambda: families)
    monkeypatch.setattr(write, "_entry_point", lambda family: ("toy.spec", "SPEC"))
    found = export([Shape("a", 2, 8, 16, 2, 16, 1)], parse_candidate("toy"), load_profile("cpu"), load_rules())
    assert "class Toy" in found.text and "def check_call" in found.text and "predict_s" not in found.text
