"""The report's tables as plain text cells: the terminal, Markdown and README views all print these."""

from __future__ import annotations

from rooflane.eval.report.detail_tables import (
    accuracy_table,
    clock_table,
    cost_table,
    failure_table,
    finding_table,
    not_run_table,
    prediction_table,
    state_table,
    verdict_table,
)
from rooflane.eval.report.table import NONE, Table, counted, interval, number, percent, price, ratio, size, spread
from rooflane.eval.stats.figures import NULL, REFERENCE, Cell, Headline, ShapeRow, Summary

__all__ = [
    "Table", "all_tables", "environment_line", "headline_lines", "interval", "number", "oversize_table", "ratio",
    "size", "speed_table", "spread",
]  # fmt: skip

CONTROL_TITLES = {NULL: "null", "compiled": "compiled", "compiled_reduce_overhead": "compiled RO", "sdpa": "SDPA"}
GATE_MARK = "!"
# Above this share of a call the clock's tick is felt. An H200's 32 ns are 0.1% of 32 us, so an
# event pair holds one call, as the organiser's does; a window of several would hold their fingerprints too.
COARSE_TICK = 0.01


def headline_lines(summary: Summary) -> list[str]:
    """Return one line per candidate: its geometric mean with interval and verdict, or why there is none."""
    return [_headline_line(headline) for headline in summary.headlines]


def all_tables(summary: Summary) -> list[Table]:
    """Return the report's tables that have rows, in order."""
    tables = []
    for candidate in summary.meta.candidates:
        makers = (speed_table, verdict_table, clock_table, state_table, accuracy_table, cost_table)
        tables += [make(summary, candidate) for make in makers]
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
                number(row.eager.event_ms.centre),
                number(cell.event_ms.centre) if cell.event_ms else cell.status,
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


def environment_line(summary: Summary) -> str:
    """Return where and with what the run was made, on one line."""
    facts, meta = summary.environment, summary.meta
    place = facts.get("gpu") or facts.get("cpu") or meta.device
    known = [f"{name} {facts[name]}" for name in ("driver", "torch", "triton", "python") if facts.get(name)]
    commit = f"commit {facts['commit'][:12]}" if facts.get("commit") else "no commit"
    if (facts.get("commit") or "").endswith("-dirty"):
        commit += " with changes"
    settings = meta.settings
    processes = counted(settings["processes"], "process")
    measured = f"{processes}, {settings['rounds']} mirrored rounds, {settings['inputs']} inputs"
    price = f"{meta.price_per_hour:g} $/h" if meta.price_per_hour else "no price in the profile"
    return "; ".join(
        [place, *known, f"rooflane {meta.rooflane_version}", commit, measured, f"profile {meta.profile['name']}", price]
    )


def conditions(summary: Summary) -> list[str]:
    """Return what a reader must know about the campaign as a whole: dropped blocks, slow host, clock tick, overhead."""
    lines = []
    if said := summary.contamination.describe():
        lines.append(said)
    if summary.host and (said := summary.host.describe()):
        lines.append(said)
    if said := _window(summary):
        lines.append(said)
    if summary.meta.overhead_share is not None:
        share = percent(summary.meta.overhead_share)
        lines.append(f"{share} of the run's time was neither warm-up, measurement nor verification{_spent(summary)}")
    return lines


def _spent(summary: Summary) -> str:
    """Return where a run's time went, in seconds; empty for a run of before that was recorded."""
    seconds = summary.meta.spent_s
    parts = ", ".join(f"{what} {seconds[what]:.0f} s" for what in sorted(seconds, key=seconds.get, reverse=True))
    return f" (of {sum(seconds.values()):.0f} s: {parts})" if parts else ""


def _window(summary: Summary) -> str:
    """Return how many calls an event pair encloses, and how coarse its clock is beside the shortest of them."""
    calls = [
        (cell.event_ms.centre, row.shape.id)
        for row in summary.rows
        for cell in row.cells.values()
        if cell.kind in ("baseline", "candidate") and cell.event_ms
    ]
    if summary.tick_ns is None or not calls:
        return ""
    shortest, shape = min(calls)
    share = summary.tick_ns / (shortest * 1e6)
    said = (
        f"one call between two events (k = 1), whose clock ticks every {summary.tick_ns / 1e3:g} us: "
        f"{share:.2%} of the shortest call (shape {shape})"
    )
    return said if share <= COARSE_TICK else f"{said}, too coarse for a ratio nearer than that"


def _headline_line(headline: Headline) -> str:
    """Return one candidate's line."""
    of = f"{headline.passed} of {counted(headline.shapes, 'shape')}"
    verdict = headline.verdict.upper() if headline.verdict != "none" else "no verdict"
    if headline.geomean is None:
        second = ""
        if headline.penalised:
            second = f"; with 1x where it failed (or its own ratio, if lower) {interval(headline.penalised)}"
        said = "" if headline.verdict == "none" else f"{verdict}, "
        return f"{headline.candidate}: {said}{of} passed, no geometric mean: {headline.why}{second}"
    each = ", ".join(f"{value:.3g}x" for value in headline.per_process)
    for process, shapes in headline.excused.items():
        each += f" (process {process} left out, with no clean block of shape {' and '.join(shapes)})"
    floor = f", floor {headline.floor.describe()}" if headline.floor else ""
    nulls = [("null", headline.null), ("its own null", headline.copy_null)]
    said = "".join(f"; {name} {interval(null)}" for name, null in nulls if null)
    if headline.sign_flip_p is not None:
        said += f"; sign-flip p {headline.sign_flip_p:.2g}"
    if headline.dividend:
        said += f"; harness dividend {headline.dividend:.3f}x"
    if headline.mix_price:
        said += f"; one call of each: {price(headline.mix_price)} $/1e9 tokens"
    return (
        f"{headline.candidate}: geometric mean {interval(headline.geomean)} over {of}{floor}, "
        f"by process {each}{said}; {verdict}: {headline.why}"
    )


def _regimes(row: ShapeRow) -> str:
    """Return the predicted regime, and the measured one where it differs."""
    text = row.regime + ("~" if row.borderline else "")
    return text if row.measured_regime in (None, row.regime) else f"{text}, {row.measured_regime}"


def _control(cell: Cell) -> str:
    """Return a control's speedup, or why it has none: a status, or too few processes with clean blocks of both."""
    if cell.speedup is None:
        return "few clean" if cell.status == "ok" else cell.status
    return f"{cell.speedup.centre:.3g}x" + (GATE_MARK if cell.status == "incorrect" else "")
