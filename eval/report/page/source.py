"""What the page and the plots take from a run beyond its summary: roofs, ragged masks and errors against fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rooflane.dispatch import Profile
from rooflane.eval.record.records import EAGER, RunMeta, TruthCheck
from rooflane.eval.report.tables import CONTROL_TITLES
from rooflane.eval.stats.figures import REFERENCE, Cell, ShapeRow, Summary
from rooflane.eval.stats.run import Run

ARM_TITLES = {**CONTROL_TITLES, REFERENCE: "chunked reference"}


@dataclass(frozen=True)
class PageData:
    """A run as the page shows it.

    `ragged` holds the largest use of the tolerance under ragged masks, `truth` the worst comparison with fp64 for each
    stress input; both by (shape, arm), over all processes.
    """

    run: Run
    summary: Summary
    ragged: Mapping[tuple[str, str], float]
    truth: Mapping[tuple[str, str], Mapping[str, TruthCheck]]

    @property
    def meta(self) -> RunMeta:
        """The run's settings, shapes and predictions."""
        return self.run.meta

    @property
    def device(self) -> str:
        """The name of the device."""
        facts = self.summary.environment
        return facts.get("gpu") or facts.get("cpu") or self.meta.device

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that some shape has: eager, the candidates, the controls, the reference."""
        names = (EAGER, *self.meta.candidates, *self.meta.controls, REFERENCE)
        return tuple(name for name in names if any(name in row.cells for row in self.summary.rows))

    @cached_property
    def profile(self) -> Profile:
        """The device profile that the predictions were made with."""
        return Profile.model_validate(self.meta.profile)

    @property
    def peaks(self) -> dict[str, tuple[str, float]]:
        """The name and value of each matrix rate, in FLOP/s, by dtype."""
        return matrix_rates(self.profile, {shape.dtype for shape in self.meta.shape_list()}, self.meta.device)

    def candidates(self, row: ShapeRow) -> list[Cell]:
        """Return the candidates' cells on a shape."""
        return [row.cells[name] for name in self.meta.candidates if name in row.cells]

    def predicted(self, row: ShapeRow) -> dict[str, float]:
        """Return the classification of a shape: `flops`, `bytes`, `launch_s`, `device_s` and more."""
        return self.meta.prediction(row.shape.id).classification


def read_page(run: Run, summary: Summary | None = None) -> PageData:
    """Return what the page shows of a run; `summary` is the run's own where it is already there."""
    ragged: dict[tuple[str, str], float] = {}
    truth: dict[tuple[str, str], dict[str, TruthCheck]] = {}
    for record in run.records():
        key = record.shape_id, record.arm
        for gate in record.verification.ragged.values() if record.verification else ():
            ragged[key] = max(gate.use, ragged.get(key, gate.use))
        for check in record.verification.truth if record.verification else ():
            known = truth.setdefault(key, {})
            known[check.name] = max(
                known.get(check.name, check), check, key=lambda one: (not one.passed, one.max_ratio)
            )
    return PageData(run, summary or run.summary(), ragged, truth)


def matrix_rates(profile: Profile, dtypes: set[str], device: str) -> dict[str, tuple[str, float]]:
    """Return the name and value of each dtype's matrix rate, and of float16 where that is the highest.

    Families use half precision in their matrix products, whatever the model's dtype. On CUDA the rate of float32
    models is the TF32 rate, unless the profile states that the card has none.
    """
    rates = {dtype: (dtype, profile.matmul_flops(dtype)) for dtype in sorted({*dtypes, "float16"})}
    if "float32" in rates and device == "cuda" and "no TF32" not in profile.matmul_float32.source:
        rates["float32"] = ("TF32", rates["float32"][1])
    if "float16" not in dtypes and rates["float16"][1] <= max(rates[dtype][1] for dtype in dtypes):
        del rates["float16"]
    return rates
