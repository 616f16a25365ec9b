"""The report page: one HTML file that opens offline, from a run's records alone."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from rooflane.dispatch.units import size
from rooflane.eval.record.records import RECORDS_FILE, RUN_FILE, TruthCheck
from rooflane.eval.report.escape import plain
from rooflane.eval.report.files import write_file
from rooflane.eval.report.page.charts import NARROW, PLOT_KINDS, WIDE, draw
from rooflane.eval.report.page.drawing import scheme_css, svg_text
from rooflane.eval.report.page.source import PageData
from rooflane.eval.report.render import TEMPLATES, make_environment
from rooflane.eval.report.table import NONE, Table, number, times
from rooflane.eval.report.tables import all_tables, conditions, environment_line, headline_lines, verdict_word
from rooflane.eval.stats.figures import Headline

VERDICT_SIGNS = {"faster": "▲", "slower": "▼", "none": "○", "equivalent": "=", "inconclusive": "?"}
REGIMES = ("launch", "bandwidth", "compute")
UNMEASURED = "not measured"
FILES = {
    RECORDS_FILE: "the records, one JSON line each",
    RUN_FILE: "settings, shapes, predictions",
    "digest.json": "the digest of the finished run",
}
# Which section shows a table of the report, by how its title begins; a table that no line names goes with the clocks.
PLACES = {
    **dict.fromkeys(("event time", "verdict", "Ranking", "Too large"), "results"),
    **dict.fromkeys(("Prediction", "Regimes"), "predictions"),
    "set-up and price": "price",
    **dict.fromkeys(("Failures", "Findings", "Not run"), "outcomes"),
}
CLOCKS = "clocks"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?")
BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def render_page(data: PageData, folder: Path) -> str:
    """Return the page of a run, to be written into `folder`; the same records give the same bytes.

    Texts of the records are escaped, and the page's own policy forbids it to fetch anything.
    """
    from markupsafe import Markup

    environment = make_environment(
        autoescape=True, finalize=lambda value: plain(value) if type(value) is str else value
    )
    environment.globals |= {"sort_key": sort_key, "numeric_columns": numeric_columns}
    style = scheme_css(":root") + TEMPLATES["page.css"]
    script = TEMPLATES["page.js"]
    summary, paths = data.summary, [(data.run.folder / name, text) for name, text in FILES.items()]
    prices, tokens = price_table(data)
    return environment.get_template("page.html.j2").render(
        meta=data.meta,
        device=data.device,
        state=summary.state,
        cards=[_card(*pair) for pair in zip(summary.headlines, headline_lines(summary), strict=True)],
        problems=summary.problems(),
        tables=report_sections(data),
        integrity=integrity_table(data),
        confusion=confusion_table(data),
        truth=truth_table(data),
        price=prices,
        tokens=tokens,
        price_per_hour=data.meta.price_per_hour,
        conditions=[environment_line(summary), *conditions(summary)],
        environment_tables=environment_tables(data),
        files=[
            {
                "text": text,
                "name": path.name,
                "link": _link(path, folder),
                "digest": sha256(path.read_bytes()).hexdigest(),
            }
            for path, text in paths
            if path.is_file()
        ],
        charts={kind: _chart(data, kind) for kind in PLOT_KINDS},
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_allowed(style)}; script-src {_allowed(script)}; "
        "base-uri 'none'; form-action 'none'",
    )


def write_page(data: PageData, path: Path) -> None:
    """Write a run's page; its links to the records are relative to its own place."""
    write_file(path, render_page(data, path.parent))


def sort_key(text: str) -> float | None:
    """Return the number a cell begins with, bytes in units of one; None where there is none."""
    match = NUMBER.match(text)
    if not match:
        return None
    rest = text[match.end() :].split()
    return float(match.group().replace(",", "")) * BYTES.get(rest[0] if rest else "", 1.0)


def numeric_columns(table: Table) -> list[bool]:
    """Return which columns sort as numbers: the figures, and words that are all numbers, as shape ids often are."""
    return [
        index >= table.left or all(NUMBER.fullmatch(row[index]) for row in table.rows)
        for index in range(len(table.columns))
    ]


def report_sections(data: PageData) -> dict[str, list[Table]]:
    """Return every table of the report by section, in the report's order."""
    found: dict[str, list[Table]] = {name: [] for name in (*PLACES.values(), CLOCKS)}
    for table in all_tables(data.summary):
        owner = next((f"{name}: " for name in data.meta.candidates if table.title.startswith(f"{name}: ")), "")
        title = table.title.removeprefix(owner)
        found[next((place for start, place in PLACES.items() if title.startswith(start)), CLOCKS)].append(table)
    return found


def integrity_table(data: PageData) -> Table:
    """Return the evidence of manipulation that records carry."""
    cells = [(row.shape.id, cell) for row in data.summary.rows for cell in row.cells.values()]
    rows = [(name, cell.arm, text) for name, cell in cells for text in cell.integrity]
    return Table("Integrity", ("id", "arm", "evidence"), tuple(rows), 3)


def truth_table(data: PageData) -> Table:
    """Return each candidate's error against fp64 in units of eager's own, a column for each stress input."""
    places = [(row.shape.id, cell.arm) for row in data.summary.rows for cell in data.candidates(row)]
    inputs = tuple(dict.fromkeys(name for checks in data.truth.values() for name in checks))
    rows = [(*key, *(_ratio(data.truth[key].get(name)) for name in inputs)) for key in places if key in data.truth]
    note = (
        "below 1 is closer to fp64 than eager; ~ outside the tolerance, where eager itself strays, and within the "
        "allowed factor of eager's error; ! fails"
    )
    title = "Worst error against fp64, in units of eager's own error"
    return Table(title, ("id", "arm", *inputs), tuple(rows), 2, note)


def price_table(data: PageData) -> tuple[Table, list[float]]:
    """Return the price of 1e9 tokens for eager and every candidate, and the tokens a second of each row."""
    cells = [(row, cell) for row in data.summary.rows for cell in (row.eager, *data.candidates(row))]
    priced = [(row.shape, cell) for row, cell in cells if cell.tokens_per_s]
    rows = [
        (shape.id, shape.label(), cell.arm, number(cell.tokens_per_s), number(cell.price_per_1e9_tokens))
        for shape, cell in priced
    ]
    columns = ("id", "shape", "arm", "tokens/s", "$ per 1e9 tokens")
    note = "valid tokens only, the geometric mean over processes: the price of an hour over the tokens of an hour"
    return Table("Price of 1e9 tokens", columns, tuple(rows), 3, note), [cell.tokens_per_s for _, cell in priced]


def environment_tables(data: PageData) -> dict[str, Table]:
    """Return the machine and its software, the run's settings, and the limits the predictions were made with."""
    meta, facts = data.meta, data.summary.environment
    machine = [(name, size(value) if name.endswith("_bytes") else str(value)) for name, value in facts.items()]
    machine += [("rooflane of the run", meta.rooflane_version), ("device asked for", meta.device)]
    settings = [(name, str(value)) for name, value in meta.settings.items() if value is not None]
    limits = [
        (name, f"{figure['value']:.5g} {figure['unit']}", figure["mark"], figure["source"])
        for name, figure in meta.profile.items()
        if isinstance(figure, dict) and "value" in figure
    ]
    title = f"Device profile {meta.profile['name']}: {meta.profile['title']}"
    return {
        "environment": Table("Environment", ("fact", "value"), tuple(machine), 2),
        "settings": Table("Settings", ("setting", "value"), tuple(settings), 2),
        "profile": Table(title, ("limit", "value", "mark", "source"), tuple(limits), 4),
    }


def confusion_table(data: PageData) -> Table:
    """Return predicted regimes against measured ones, the shapes' ids in the cells."""
    pairs = [
        (row.regime, row.measured_regime or UNMEASURED, row.shape.id) for row in data.summary.rows if not row.profiled
    ]
    used = [name for name in REGIMES if any(name in pair[:2] for pair in pairs)]
    predicted = used + ["infeasible"] * any(regime == "infeasible" for regime, _, _ in pairs)
    columns = used + [UNMEASURED] * any(was == UNMEASURED for _, was, _ in pairs)
    rows = []
    for regime in predicted:
        cells = []
        for column in columns:
            ids = [name for *pair, name in pairs if pair == [regime, column]]
            mark = "" if column == UNMEASURED else " ✓" if regime == column else " ✗"
            cells.append(f"{len(ids)}{mark}: {', '.join(ids)}" if ids else NONE)
        rows.append((regime, *cells))
    known = [regime == was for regime, was, _ in pairs if was != UNMEASURED]
    note = f"{sum(known)} of {len(known)} regimes as predicted"
    heads = ("predicted", *(name if name == UNMEASURED else f"measured {name}" for name in columns))
    note = note if known else "no regime was measured: this device has no clock of its own"
    return Table("Regimes: predicted against measured", heads, tuple(rows), len(heads), note)


def _ratio(check: TruthCheck | None) -> str:
    """Return an error in units of eager's own, marked where it is outside the gate or fails."""
    if check is None:
        return NONE
    return number(check.max_ratio) + ("!" if not check.passed else "" if check.gate.passed else "~")


def _chart(data: PageData, kind: str):
    """Return a chart drawn twice, for wide and for narrow places; None when there is nothing to draw."""
    from markupsafe import Markup

    charts = {name: draw(kind, data, width) for name, width in (("wide", WIDE), ("narrow", NARROW))}
    if charts["wide"] is None:
        return None
    return Markup("\n".join(svg_text(chart, f"{kind}-{name}", name) for name, chart in charts.items()))


def _card(headline: Headline, lines: tuple[str, str]) -> dict[str, str]:
    """Return what the top of the page says of one candidate; `lines` are the report's own: result and details."""
    mean, verdict = headline.geomean, headline.verdict
    return {
        "candidate": headline.candidate,
        "figure": f"{times(mean.centre)}x" if mean else "no mean",
        "interval": f"[{times(mean.low)}, {times(mean.high)}], 95 %" if mean and mean.low is not None else "",
        "sign": VERDICT_SIGNS.get(verdict, "!"),
        "verdict": verdict_word(verdict),
        "kind": verdict,
        "why": headline.why,
        "line": "; ".join(filter(None, lines)).removeprefix(f"{headline.candidate}: "),
    }


def _link(path: Path, folder: Path) -> str:
    relative = Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    return quote(relative if relative.startswith(".") else f"./{relative}")


def _allowed(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
