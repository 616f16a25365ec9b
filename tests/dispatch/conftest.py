"""Shapes, profiles and stand-in families of the dispatch tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rooflane.dispatch import Profile, load_profile
from rooflane.families import FamilySpec, registry
from rooflane.shapes import Shape, load_shapes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def warnings_are_errors():
    """Fail a test on any warning but those with which torch's compiler, loaded on a GPU, names its own old parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"`torch\.jit\.")
        yield


@pytest.fixture(scope="session")
def published() -> dict[str, Shape]:
    return {shape.id: shape for shape in load_shapes(ROOT / "shapes" / "published.csv")}


@pytest.fixture(scope="session")
def h200() -> Profile:
    return load_profile("h200")


@pytest.fixture(scope="session")
def small() -> Shape:
    return Shape("small", batch_size=3, seq_len=5, d_model=16, num_heads=2, ffn_dim=24, num_layers=2)


class FakeFamily(FamilySpec):
    """A family that records what it builds; its forward doubles the model's output."""

    summary = ""

    def __init__(self, name: str, refuses: str | None = None, needs: int = 1, options: tuple[str, ...] = ()) -> None:
        self.name = name
        self.refuses = refuses
        self.needs = needs
        self.options = dict.fromkeys(options, "an option")
        self.builds: list[SimpleNamespace] = []

    def supports(self, shape: Shape, profile: Any) -> str | None:
        return self.refuses

    def peak_bytes(self, shape: Shape, profile: Any, **options: Any) -> int:
        return self.needs

    def predict_s(self, shape: Shape, profile: Any) -> float:
        return 0.25

    def build(self, model: Any, shape: Shape, device: Any, **options: Any) -> Callable[..., Any]:
        self.builds.append(SimpleNamespace(model=model, shape=shape, device=device, options=options))
        return lambda x, mask: 2 * model(x, mask)


@pytest.fixture
def fake_families(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, FakeFamily]]:
    """Return a function that puts stand-in families in the registry's place."""

    def install(**settings: dict[str, Any]) -> dict[str, FakeFamily]:
        families = {name: FakeFamily(name, **values) for name, values in settings.items()}
        monkeypatch.setattr(registry, "load_families", lambda: families)
        return families

    return install


@pytest.fixture
def write_rules(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, alone: bool = True) -> Path:
        path = tmp_path / "rules.toml"
        path.write_text("replace = true\n" + text if alone else text)
        return path

    return write
