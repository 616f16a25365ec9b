"""The registry: what an entry point may name, and how each fault is reported."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from rooflane.families import FamilyError, FamilySpec, load_families, registry
from rooflane.shapes import PUBLISHED, Form

FAMILIES = """
from rooflane.families import FamilySpec

class Whole(FamilySpec):
    name, summary = "whole", "a family"

    def supports(self, shape, profile):
        return None

    def peak_bytes(self, shape, profile, **options):
        return 1

    def predict_s(self, shape, profile):
        return 1.0

    def build(self, model, shape, device):
        return model

class Nameless(Whole):
    name = summary = None

class Foreign:
    name, summary = "foreign", "has the parts and not the base"
    supports = peak_bytes = predict_s = build = Whole.supports

whole, again, nameless, foreign = Whole(), Whole(), Nameless(), Foreign()
"""
PART = "from {0} import Whole\nclass Part(Whole):\n    build = Whole.__base__.build\npart = Part()\n"


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Return a function that loads the families of entry points that name these attributes of a module."""
    module = f"families_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(FAMILIES)
    (tmp_path / f"part_of_{module}.py").write_text(PART.format(module))
    monkeypatch.syspath_prepend(tmp_path)

    def run(*names: str):
        entries = [
            EntryPoint(name, f"part_of_{module}:{name}" if name == "part" else f"{module}:{name}", registry.GROUP)
            for name in names
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)
        return load_families.__wrapped__()

    return run


def test_a_family_needs_a_name_a_summary_and_four_methods(load):
    spec = load("whole")["whole"]
    assert (spec.contract, spec.options, spec.option_checks) == ("", {}, {})
    assert spec.refuse_form(PUBLISHED) is None and "post-norm" in spec.refuse_form(Form(norm_first=False))
    assert not spec.compiles and list(spec.kernel_cases()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("part", r"family 'part' .*cannot be loaded: .*abstract.* method '?build'?; fix or uninstall that package"),
        ("nameless", "family 'nameless' .*does not set name and summary"),
        ("foreign", "family 'foreign' .*is a Foreign; it must be an instance of a subclass of .*FamilySpec"),
        ("Whole", "family 'Whole' .*is the class Whole; it must be an instance"),
        ("absent", "family 'absent' .*cannot be loaded"),
    ],
)
def test_what_is_no_family_is_refused_by_name_on_one_line(load, name, reason):
    with pytest.raises(FamilyError, match=reason) as error:
        load(name)
    assert "\n" not in str(error.value)


def test_one_name_belongs_to_one_package(load):
    with pytest.raises(FamilyError, match="two packages register the family 'whole'"):
        load("whole", "again")
    assert list(load("whole", "whole")) == ["whole"]


def test_the_shipped_families_say_which_of_them_compiles():
    families = load_families()
    assert all(isinstance(spec, FamilySpec) for spec in families.values())
    assert [name for name, spec in families.items() if spec.compiles] == ["graph_compile"]
