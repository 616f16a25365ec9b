"""The page's tables, grouped by section; every figure comes from the report's own tables or from `PageData`."""

from __future__ import annotations

from rooflane.eval.report.page.source import EAGER, NONE, PageData, Truth, number, report_tables, size
from rooflane.eval.report.page.tabular import Column, PageCell, PageTable, make_table, page_table

REGIMES = ("launch", "bandwidth", "compute")
UNMEASURED = "not measured"


# Which section shows a table of the report, by how its title begins; what no line names stands with the clocks.
_PLACES = (
    ("event time", "results"),
    ("verdict", "results"),
    ("Ranking", "results"),
    ("Too large", "results"),
    ("Prediction", "predictions"),
    ("set-up and price", "price"),
    ("Failures", "outcomes"),
    ("Findings", "outcomes"),
    ("Not run", "outcomes"),
)
ELSEWHERE = "clocks"
SECTIONS = ("results", "predictions", "price", ELSEWHERE, "outcomes")


def report_sections(data: PageData) -> dict[str, list[PageTable]]:
    """Return every table of the report by section, in the report's order."""
    found: dict[str, list[PageTable]] = {name: [] for name in SECTIONS}
    for title, table in report_tables(data.summary):
        section = next((place for start, place in _PLACES if title.startswith(start)), ELSEWHERE)
        found[section].append(page_table(f"{section}-{len(found[section])}", table))
    return found


def integrity_table(data: PageData) -> PageTable | None:
    """Return the evidence of manipulation that records carry; None when there is none."""
    if not data.integrity:
        return None
    return make_table("integrity", "Integrity", ("id", "arm", "evidence"), data.integrity, 3)


def truth_table(data: PageData) -> PageTable | None:
    """Return each candidate's error against fp64 in units of eager's own, a column for each stress input."""
    inputs = list(
        dict.fromkeys(check.name for shape in data.shapes for arm in shape.arms.values() for check in arm.truth)
    )
    rows = []
    for shape in data.shapes:
        for name in data.candidates:
            arm = shape.arms.get(name)
            if arm is None or not arm.truth:
                continue
            by_name = {check.name: check for check in arm.truth}
            rows.append((shape.id, name, *(_ratio(by_name.get(text)) for text in inputs)))
    if not rows:
        return None
    return make_table(
        "fp64",
        "Worst error against fp64, in units of eager's own error",
        ("id", "arm", *inputs),
        rows,
        2,
        "below 1 is closer to fp64 than eager; ~ outside the tolerance, where eager itself strays, and within the "
        "allowed factor of eager's error; ! fails",
    )


def price_table(data: PageData) -> PageTable:
    """Return tokens a second and the price of 1e9 tokens, of eager and every candidate."""
    rows = []
    for shape in data.shapes:
        for name in (EAGER, *data.candidates):
            arm = shape.arms.get(name)
            if arm is None or not arm.tokens_per_s:
                continue
            rows.append(
                (
                    PageCell(shape.id),
                    PageCell(shape.label),
                    PageCell(name),
                    PageCell(number(arm.tokens_per_s), arm.tokens_per_s),
                    PageCell(number(arm.price), arm.price, arm.tokens_per_s),
                )
            )
    names = ("id", "shape", "arm", "tokens/s", "$ per 1e9 tokens")
    columns = tuple(Column(text, index > 2, index > 2) for index, text in enumerate(names))
    note = "valid tokens only, the geometric mean over processes: the price of an hour over the tokens of an hour"
    return PageTable("price", "Price of 1e9 tokens", columns, tuple(rows), note)


def environment_tables(data: PageData) -> list[PageTable]:
    """Return the machine and its software, the run's settings, and the limits the predictions were made with."""
    meta, facts = data.run.meta, data.summary.environment
    machine = [(name, size(value) if name.endswith("_bytes") else str(value)) for name, value in facts.items()]
    machine += [("rooflane of the run", meta.rooflane_version), ("device asked for", meta.device)]
    settings = [(name, str(value)) for name, value in meta.settings.items() if value is not None]
    limits = [
        (name, f"{figure['value']:.5g} {figure['unit']}", figure["mark"], figure["source"])
        for name, figure in meta.profile.items()
        if isinstance(figure, dict) and "value" in figure
    ]
    title = f"Device profile {meta.profile['name']}: {meta.profile['title']}"
    return [
        make_table("environment", "Environment", ("fact", "value"), machine, 2),
        make_table("settings", "Settings", ("setting", "value"), settings, 2),
        make_table("profile", title, ("limit", "value", "mark", "source"), limits, 4),
    ]


def confusion_table(data: PageData) -> PageTable:
    """Return predicted regimes against measured ones, the shapes' ids in the cells."""
    used = [name for name in REGIMES if any(name in (s.regime, s.measured_regime) for s in data.shapes)]
    predicted = used + (["infeasible"] if any(shape.regime == "infeasible" for shape in data.shapes) else [])
    columns = used + ([UNMEASURED] if any(shape.measured_regime is None for shape in data.shapes) else [])
    rows = []
    for said in predicted:
        cells = []
        for was in columns:
            ids = [s.id for s in data.shapes if s.regime == said and (s.measured_regime or UNMEASURED) == was]
            mark = "" if was == UNMEASURED else " ✓" if said == was else " ✗"
            cells.append(f"{len(ids)}{mark}: {', '.join(ids)}" if ids else NONE)
        rows.append((said, *cells))
    hits = sum(shape.measured_regime == shape.regime for shape in data.shapes)
    known = sum(shape.measured_regime is not None for shape in data.shapes)
    note = (
        f"{hits} of {known} regimes as predicted"
        if known
        else "no regime was measured: this device has no clock of its own"
    )
    heads = ("predicted", *(name if name == UNMEASURED else f"measured {name}" for name in columns))
    return make_table("confusion", "Regimes: predicted against measured", heads, rows, len(heads), note)


def _ratio(check: Truth | None) -> str:
    """Return an error in units of eager's own, marked where it is outside the gate or fails."""
    if check is None:
        return NONE
    return number(check.ratio) + ("!" if not check.passed else "" if check.within_gate else "~")
