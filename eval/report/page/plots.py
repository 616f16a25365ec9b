"""Plots as files: which kinds there are, and how a file's name picks one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.page import charts, planes, roofs
from rooflane.eval.report.page.lanes import WIDE
from rooflane.eval.report.page.raster import write_png
from rooflane.eval.report.page.scene import Scene
from rooflane.eval.report.page.source import PageData
from rooflane.eval.report.page.svg import svg_file

PLOT_KINDS: dict[str, Callable[..., Scene | None]] = {
    "latency": charts.latency,
    "roofline": roofs.roofline,
    "regimes": planes.regimes,
    "tolerance": charts.tolerance,
    "fp64": charts.truth,
}
SUFFIXES = (".svg", ".png")


def plot_kind(path: Path) -> str:
    """Return the kind a plot's name asks for: its stem, or what follows the stem's last dash.

    Raises `EvaluationError` for another name or ending.
    """
    kind = path.stem.rpartition("-")[2]
    if kind not in PLOT_KINDS or path.suffix not in SUFFIXES:
        raise EvaluationError(
            f"{path}: a plot's file is named after its kind and ends in {' or '.join(SUFFIXES)}, as in latency.svg or "
            f"h200-roofline.png; the kinds are {', '.join(PLOT_KINDS)}"
        )
    return kind


def write_plot(data: PageData, path: Path) -> None:
    """Draw a run's plot into a file; the same records give the same bytes."""
    scene = PLOT_KINDS[plot_kind(path)](data, WIDE, titled=True)
    if scene is None:
        raise EvaluationError(f"{path}: run {data.run.meta.id} measured nothing that a {plot_kind(path)} plot shows")
    try:
        if path.suffix == ".svg":
            path.write_text(svg_file(scene), encoding="utf-8")
        else:
            write_png(scene, path)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error}); name another place") from None
