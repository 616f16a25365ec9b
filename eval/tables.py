"""The report's tables as plain text cells: the terminal, Markdown and README views all print these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rooflane.eval.stats import Interval
from rooflane.eval.summary import LAUNCH_SHARE, NULL, REFERENCE, Cell, Headline, ShapeRow, Spread, Summary

NONE = "-"
CONTROL_TITLES = {NULL: "null", "compiled": "compiled", "compiled_reduce_overhead": "compiled RO", "sdpa": "SDPA"}
GATE_MARK = "!"


@dataclass(frozen=True)
class Table:
    """A titled table of text; `left` counts the leading columns that are words, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int
    note: str = ""


def headline_lines(summary: Summary) -> list[str]:
    """Return one line per candidate: its geometric mean with interval and verdict, or why there is none."""
    return [_headline_line(headline) for headline in summary.headlines]


def all_tables(summary: Summary) -> list[Table]:
    """Return the report's tables that have rows, in order."""
    tables = []
    for candidate in summary.meta.candidates:
        tables += [speed_table(summary, candidate), clock_table(summary, candidate)]
    tables += [ranking_table(summary), oversize_table(summary), prediction_table(summary), finding_table(summary)]
    tables += [not_run_table(summary), failure_table(summary)]
    return [table for table in tables if table.rows]


def speed_table(summary: Summary, candidate: str) -> Table:
    """Return eager, the candidate and every control side by side; speedups are over eager, paired by process."""
    controls = [name for name in CONTROL_TITLES if name in summary.meta.controls]
    rows = []
    for row in summary.rows:
        if row.eager.event_ms is None:
            continue
        cell = row.cells[candidate]
        rows.append(
            (
                row.shape.id,
                row.shape.label(),
                _regimes(row),
                cell.family or NONE,
                number(row.eager.event_ms.median),
                number(cell.event_ms.median) if cell.event_ms else cell.status,
                interval(cell.speedup) + (GATE_MARK if cell.status == "incorrect" else ""),
                *(_control(row.cells[name]) for name in controls),
            )
        )
    return Table(
        title=f"{candidate}: event time in ms, speedup over eager",
        columns=("id", "shape", "regime", "family", "eager", "candidate", "speedup [95%]")
        + tuple(CONTROL_TITLES[name] for name in controls),
        rows=tuple(rows),
        left=4,
        note="regime: predicted (~ borderline), then measured where it differs; the null is eager timed against "
        f"itself; {GATE_MARK} fails the gate",
    )


def clock_table(summary: Summary, candidate: str) -> Table:
    """Return the candidate's clocks, its use of tolerance, counts, set-up and price."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        if row.eager.event_ms is None or cell.event_ms is None:
            continue
        rows.append(
            (
                row.shape.id,
                cell.rule or NONE,
                spread(cell.event_ms),
                number(cell.device_ms and cell.device_ms.median),
                number(cell.host_ms and cell.host_ms.median),
                spread(row.eager.event_ms),
                number(cell.use),
                number(cell.setup_s),
                cell.counts + ("*" if cell.shrunk else ""),
                row.eager.counts + ("*" if row.eager.shrunk else ""),
                str(cell.processes),
                number(cell.tokens_per_s),
                number(cell.price_per_1e9_tokens),
            )
        )
    return Table(
        title=f"{candidate}: clocks in ms, median (range over processes)",
        columns=(
            "id", "rule", "event", "device", "host", "eager event", "use", "set-up s", "calls", "eager calls",
            "processes", "tokens/s", "$/1e9 tok",
        ),
        rows=tuple(rows),
        left=2,
        note="use: worst error in units of the tolerance, above 1 fails; calls: rounds x repeats, * shrunk to the time "
        "budget; tokens: valid ones only",
    )  # fmt: skip


def ranking_table(summary: Summary) -> Table:
    """Return the candidates from the fastest on, those that cannot be told apart on one rank."""
    rows = [
        (
            NONE if place.rank is None else f"{place.rank}{'=' if place.shared else ''}",
            place.candidate,
            place.why or ", ".join(place.like) or NONE,
            interval(place.behind) if place.behind else NONE,
        )
        for place in summary.ranking
    ]
    return Table(
        title="Ranking of the candidates by event time",
        columns=("rank", "candidate", "not told apart from", "time over the first's [95%]"),
        rows=tuple(rows),
        left=3,
        note="=: shares the rank, the paired interval with the first of it holds 1; without a rank: why",
    )


def oversize_table(summary: Summary) -> Table:
    """Return the shapes eager cannot run, measured against the chunked reference, outside the geometric mean."""
    rows = []
    for row in summary.rows:
        if row.eager.event_ms is not None or row.eager.status not in ("infeasible", "oom"):
            continue
        reference = row.cells.get(REFERENCE)
        for name in summary.meta.candidates:
            cell = row.cells[name]
            if cell.event_ms is None:
                continue  # listed with its reason among what was not run, or failed
            rows.append(
                (
                    row.shape.id,
                    row.shape.label(),
                    cell.family or name,
                    size(row.predicted_peak_bytes),
                    spread(cell.event_ms),
                    spread(reference.event_ms) if reference else NONE,
                    interval(cell.speedup),
                    number(cell.use),
                    size(cell.predicted_peak_bytes),
                    size(cell.measured_peak_bytes),
                    number(cell.tokens_per_s),
                    number(cell.price_per_1e9_tokens),
                )
            )
    return Table(
        title="Too large for eager: against the chunked reference, outside the geometric mean",
        columns=(
            "id", "shape", "family", "eager needs", "candidate ms", "reference ms", "ratio [95%]", "use",
            "peak predicted", "measured", "tokens/s", "$/1e9 tok",
        ),
        rows=tuple(rows),
        left=3,
        note="reference: the sum over batch elements in the first process, one element times the batch in the others",
    )  # fmt: skip


def prediction_table(summary: Summary) -> Table:
    """Return what was predicted beside what was measured, and where the prediction was wrong."""
    rows = []
    hits: Counter[tuple[str, str]] = Counter()
    for row in summary.rows:
        if row.eager.event_ms is None:
            continue
        measured = row.measured_regime
        if measured:
            hits[row.regime, measured] += 1
        cell = row.cells[summary.meta.candidates[0]]
        rows.append(
            (
                row.shape.id,
                row.regime + ("~" if row.borderline else ""),
                measured or NONE,
                NONE if measured is None else "" if measured == row.regime else "wrong",
                number(row.predicted_ms),
                number(row.eager.event_ms.median),
                ratio(row.eager.event_ms.median, row.predicted_ms),
                number(cell.predicted_ms),
                number(cell.event_ms.median if cell.event_ms else None),
                ratio(cell.event_ms.median if cell.event_ms else None, cell.predicted_ms),
            )
        )
    counts = ", ".join(f"{count} {said} measured as {was}" for (said, was), count in sorted(hits.items()))
    return Table(
        title="Prediction against measurement (ms)",
        columns=(
            "id", "predicted", "measured", "", "eager predicted", "eager measured", "ratio",
            "candidate predicted", "candidate measured", "ratio",
        ),
        rows=tuple(rows),
        left=4,
        note=(
            f"regimes: {counts}; launch is measured when a call lasts over {LAUNCH_SHARE:g} times its device time, "
            "the split of the rest is the ledger's"
            if counts
            else "regimes are not measured: this device has no clock of its own"
        ),
    )  # fmt: skip


def finding_table(summary: Summary) -> Table:
    """Return what a reader must know about arms that did run: broken promises, notes, controls that fail."""
    rows = []
    for row in summary.rows:
        for cell in row.cells.values():
            said = list(cell.findings)
            if cell.contract and cell.event_ms:
                said.append(f"declared: {cell.contract}")
            said += cell.notes
            if cell.kind == "control" and cell.status not in ("ok", "skipped", "unsupported"):
                said.append(f"{cell.status}: {cell.reason}")
            rows += [(row.shape.id, cell.arm, text) for text in said]
    return Table("Findings", ("id", "arm", "finding"), _grouped(rows), 3)


def not_run_table(summary: Summary) -> Table:
    """Return the rows that were left out, with the time or bytes that ruled them out."""
    rows = [
        (row.shape.id, cell.arm, cell.status, cell.reason)
        for row in summary.rows
        for cell in row.cells.values()
        if cell.status in ("skipped", "infeasible", "unsupported") and not (cell.kind == "candidate" and cell.event_ms)
    ]
    return Table("Not run", ("id", "arm", "status", "reason"), _grouped(rows, 1), 4)


def failure_table(summary: Summary) -> Table:
    """Return what failed."""
    rows = [(row.shape.id, cell.arm, cell.status, cell.reason) for row, cell in summary.failures()]
    return Table("Failures", ("id", "arm", "status", "reason"), tuple(rows), 4)


def environment_line(summary: Summary) -> str:
    """Return where and with what the run was made, on one line."""
    facts, meta = summary.environment, summary.meta
    place = facts.get("gpu") or facts.get("cpu") or meta.device
    known = [f"{name} {facts[name]}" for name in ("driver", "torch", "triton", "python") if facts.get(name)]
    commit = f"commit {facts['commit'][:12]}" if facts.get("commit") else "no commit"
    if (facts.get("commit") or "").endswith("-dirty"):
        commit += " with changes"
    settings = meta.settings
    measured = f"{settings['processes']} processes, {settings['rounds']} mirrored rounds, {settings['inputs']} inputs"
    price = f"{meta.price_per_hour:g} $/h" if meta.price_per_hour else "no price in the profile"
    return "; ".join(
        [place, *known, f"rooflane {meta.rooflane_version}", commit, measured, f"profile {meta.profile['name']}", price]
    )


def number(value: float | None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:#.3g}".rstrip(".")


def spread(value: Spread | None) -> str:
    """Return a median with its range over processes."""
    return f"{number(value.median)} ({number(value.low)}-{number(value.high)})" if value else NONE


def interval(value: Interval | None) -> str:
    """Return a ratio with its interval."""
    if value is None:
        return NONE
    if value.low is None:
        return f"{value.centre:.3g}x"
    return f"{value.centre:.3g}x [{value.low:.3g}, {value.high:.3g}]"


def ratio(measured: float | None, predicted: float | None) -> str:
    """Return measured over predicted."""
    return number(measured / predicted) if measured and predicted else NONE


def size(count: int | None) -> str:
    """Return bytes in the unit that reads best."""
    if count is None:
        return NONE
    unit, scale = next((pair for pair in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if count >= pair[1]), ("kB", 1e3))
    return f"{count / scale:.3g} {unit}"


def _headline_line(headline: Headline) -> str:
    """Return one candidate's line."""
    if headline.geomean is None:
        return f"{headline.candidate}: incomplete, no geometric mean: {headline.why}"
    each = ", ".join(f"{value:.3g}x" for value in headline.per_process)
    null = f"; null {interval(headline.null)}" if headline.null else ""
    verdict = headline.verdict.upper() if headline.verdict != "none" else "no verdict"
    return (
        f"{headline.candidate}: geometric mean {interval(headline.geomean)} over {headline.shapes} shapes, "
        f"by process {each}{null}; {verdict}: {headline.why}"
    )


def _regimes(row: ShapeRow) -> str:
    """Return the predicted regime, and the measured one where it differs."""
    text = row.regime + ("~" if row.borderline else "")
    return text if row.measured_regime in (None, row.regime) else f"{text}, {row.measured_regime}"


def _control(cell: Cell) -> str:
    """Return a control's speedup, or why it has none."""
    if cell.speedup is None:
        return cell.status
    return f"{cell.speedup.centre:.3g}x" + (GATE_MARK if cell.status == "incorrect" else "")


def _grouped(rows: Sequence[tuple[str, ...]], column: int = 0) -> tuple[tuple[str, ...], ...]:
    """Return rows that agree in all but one column as one row, that column's texts joined."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(row[:column] + row[column + 1 :], []).append(row[column])
    return tuple((*key[:column], ", ".join(texts), *key[column:]) for key, texts in groups.items())
