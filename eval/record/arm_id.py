"""Which arm: its name, its kind and its worker. The text of a record's `arm` field is made and read here alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rooflane.eval.record.records import ANCHOR, COPY_PREFIX, EAGER, NOOP, Kind

# The worker that holds eager, the controls and the judge.
REFERENCE = "reference"


@dataclass(frozen=True)
class ArmId:
    """One arm of a run. A copy has the name of its candidate and lives in the same worker."""

    name: str
    kind: Kind
    worker: str = REFERENCE

    def __str__(self) -> str:
        """Return the text that stands in a record."""
        return COPY_PREFIX + self.name if self.kind == "copy" else self.name


EAGER_ARM = ArmId(EAGER, "baseline")
_PROBES = {NOOP: ArmId(NOOP, "noop"), ANCHOR: ArmId(ANCHOR, "anchor")}


def parse_arm(text: str, candidates: Collection[str]) -> ArmId:
    """Return the arm that a record's text names in a run of these candidates."""
    # A candidate first: its file may be called as a copy or a probe is.
    if text in candidates:
        return ArmId(text, "candidate", text)
    base = text.removeprefix(COPY_PREFIX)
    if base != text and base in candidates:
        return ArmId(base, "copy", base)
    return EAGER_ARM if text == EAGER else _PROBES.get(text) or ArmId(text, "control")
