"""The pytest plugin: the gate as a fixture and an assertion, shape files as parameters. Loads no torch by itself.

In a test module: `from rooflane.eval.pytest_plugin import assert_close_gate`, or take the fixture `gate`.
`pytest -p no:rooflane` leaves the plugin out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from rooflane.eval.pytest_plugin.markers import (
    MARKER,
    current_tolerance,
    read_tolerance,
    shapes_of,
    tolerance_of,
    use_tolerance,
    uses_rooflane,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rooflane.eval.pytest_plugin.assertion import Gate

GPU = "gpu"
SHAPES = "shapes"
_gpu_is_ours = pytest.StashKey[bool]()

__all__ = ["assert_close_gate", "fp64", "pytest_addoption", "pytest_configure"]


def assert_close_gate(out: Tensor, ref: Tensor, atol: float | None = None, rtol: float | None = None) -> None:
    """Fail unless every element is finite and within `atol`, or within `rtol` of the reference's size.

    The rule and its defaults are those of `rooflane.eval.check_gate`; what is not given here comes from the test's
    `rooflane` marker, then from the command line. The failure names the worst element and the worst tile.
    """
    __tracebackhide__ = True
    from rooflane.eval.pytest_plugin.assertion import explain_failure

    failure = explain_failure(out, ref, current_tolerance().overridden(atol, rtol))
    if failure:
        pytest.fail(failure, pytrace=True)


def fp64(forward: Any, *inputs: Any, **named: Any) -> Any:
    """Return a module's or function's output in float64, a reference for both sides of a gate."""
    from rooflane.eval.pytest_plugin.assertion import run_in_fp64

    return run_in_fp64(forward, inputs, named)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rooflane", "the rooflane gate")
    for name, meaning in (("atol", "absolute error"), ("rtol", "error relative to the reference")):
        group.addoption(
            f"--rooflane-{name}",
            type=lambda text, name=name: read_tolerance(f"--rooflane-{name}", text),
            metavar="NUMBER",
            help=f"The {meaning} that passes, in tests whose marker does not say.",
        )


def pytest_configure(config: pytest.Config) -> None:
    marks = {line.split(":")[0].split("(")[0].strip() for line in config.getini("markers")}
    # A project that has a gpu marker of its own knows what it means by it.
    config.stash[_gpu_is_ours] = GPU not in marks
    ours = {
        MARKER: f"{MARKER}(atol=, rtol=): the tolerance of the gate in this test",
        SHAPES: f"{SHAPES}(file, ids=None): run with `shape` set to each shape of a shape file",
        GPU: f"{GPU}: needs a CUDA device; skips where there is none",
    }
    for name, line in ours.items():
        if name not in marks:
            config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker(SHAPES)
    if marker is not None and (shapes := shapes_of(marker, metafunc, ours=uses_rooflane(metafunc.definition))):
        metafunc.parametrize("shape", shapes, ids=[shape.id for shape in shapes])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    # For the whole test, so that fixtures may use the gate too; a wrong marker is reported at setup.
    with use_tolerance(tolerance_of(item, complain=False)):
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A project may have a marker of this name too: only a test that uses the gate is told what ours takes.
    tolerance_of(item, complain=uses_rooflane(item))
    if item.config.stash[_gpu_is_ours] and item.get_closest_marker(GPU):
        torch = pytest.importorskip("torch", reason="needs torch with a CUDA device")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def gate() -> Gate:
    """The gate with this test's tolerance: `gate(out, ref)` asserts, `gate.check(out, ref)` returns the figures."""
    from rooflane.eval.pytest_plugin.assertion import Gate

    return Gate(current_tolerance(), assert_close_gate)


@pytest.fixture
def fp64_reference() -> Callable[..., Any]:
    """A function `(module or function, *inputs)` that computes in float64 without changing what it was given."""
    return fp64
