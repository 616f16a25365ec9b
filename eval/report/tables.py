"""The report's tables as plain text cells: the terminal, Markdown and README views all print these."""

from __future__ import annotations

from rooflane.dispatch.units import counted, size
from rooflane.eval.report.detail_tables import (
    accuracy_table,
    clock_table,
    cost_table,
    finding_table,
    prediction_table,
    profile_table,
    rows_of_problems,
    state_table,
    verdict_table,
)
from rooflane.eval.report.table import NONE, Table, grouped, interval, number, percent, price, time_columns, times
from rooflane.eval.stats.figures import NULL, Cell, Headline, ShapeRow, Summary
from rooflane.eval.stats.rounds import POWER_LIMIT, SLOW_CLOCK
from rooflane.eval.stats.verdict import Verdict

CONTROL_TITLES = {NULL: "null", "compiled": "compiled", "compiled_reduce_overhead": "compiled RO", "sdpa": "SDPA"}
GATE_MARK = "!"
LASTING_MARK = "*"
LASTING_SAID = {
    POWER_LIMIT: "at the board's power limit",
    SLOW_CLOCK: "at a clock under 75% of the campaign's median",
}
# Verdicts that say why by themselves.
PROVEN = (Verdict.FASTER, Verdict.SLOWER, Verdict.EQUIVALENT)
# Above this share of a call the tick of the clock matters. The 32 ns of an H200 are 0.1% of 32 us, so an event pair
# encloses one call, as the organiser's does. A window of several calls would enclose their fingerprints too.
COARSE_TICK = 0.01


def headline_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return for each candidate its line, and all that the line rests on."""
    return [(headline_line(headline), "; ".join(headline_details(headline))) for headline in summary.headlines]


def all_tables(summary: Summary) -> list[Table]:
    """Return the report's tables that have rows, in order."""
    tables = []
    for candidate in summary.meta.candidates:
        makers = (speed_table, verdict_table, clock_table, state_table, accuracy_table, cost_table)
        tables += [make(summary, candidate) for make in makers]
    tables += [ranking_table(summary), oversize_table(summary), prediction_table(summary), profile_table(summary)]
    tables += [finding_table(summary), not_run_table(summary), failure_table(summary)]
    return [table for table in tables if table.rows]


def main_tables(summary: Summary) -> list[Table]:
    """Return what a run ends with: each candidate's times and speedups, and the ranking of several candidates."""
    tables = [speed_table(summary, candidate) for candidate in summary.meta.candidates]
    return [table for table in (*tables, ranking_table(summary)) if table.rows]


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
                *_times(row, cell),
                interval(cell.speedup)
                + (GATE_MARK if cell.status == "incorrect" else "")
                + (LASTING_MARK if summary.contamination.conditions(row.shape.id) else ""),
                *(_control(row.cells[name]) for name in controls),
            )
        )
    return Table(
        title=f"{candidate}: event time in ms, speedup over eager",
        columns=("id", "shape", "regime", "family", "eager", "candidate", "speedup [95%]")
        + tuple(CONTROL_TITLES[name] for name in controls),
        rows=tuple(rows),
        left=4,
        note="regime: predicted (~ borderline), then measured where it differs; "
        + ("(measured): from a run of eager before the campaign, not predicted; " if rows_of_problems(summary) else "")
        + f"the null is eager timed against itself; {GATE_MARK} fails the gate"
        + "".join(f"; {line}" for line in _lasting(summary)),
        optional=("shape", "family", "compiled RO", "compiled", "regime", "SDPA", "null"),
    )


def ranking_table(summary: Summary) -> Table:
    """Return the candidates from the fastest on, those that do not differ on one rank."""
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
        columns=("rank", "candidate", "no different from", "time over the first's [95%]"),
        rows=tuple(rows),
        left=3,
        note="=: shares the rank, because its paired interval with the first contains 1; without a rank: the reason",
    )


def oversize_table(summary: Summary) -> Table:
    """Return the shapes eager cannot run, measured against the chunked reference, outside the geometric mean."""
    rows = []
    for row in summary.rows:
        if row.eager.event_ms is not None or row.eager.status not in ("infeasible", "oom"):
            continue
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
                    *reversed(time_columns(cell)),
                    interval(cell.speedup),
                    number(cell.use),
                    _bytes(cell.predicted_peak_bytes),
                    _bytes(cell.measured_peak_bytes),
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


def not_run_table(summary: Summary) -> Table:
    """Return the rows that were left out, those of one reason together."""
    rows = [
        (row.shape.id, cell.arm, cell.status, cell.reason)
        for row in summary.rows
        for cell in row.cells.values()
        if cell.status in ("skipped", "infeasible", "unsupported") and not (cell.kind == "candidate" and cell.event_ms)
    ]
    return Table("Not run", ("shape", "arm", "status", "reason"), grouped(grouped(rows, 1)), 4, prose=True)


def not_run_lines(summary: Summary) -> list[str]:
    """Return the shapes that were not run, in any process or in some, those of one reason on one line."""
    rows = [(name, summary.row(name).eager.reason or "not reached") for name in summary.not_run]
    lines = [f"not run: {counted_shapes(names)}: {reason}" for names, reason in grouped(rows)]
    # On a busy machine a process may leave out a shape that another one timed.
    some = [(row.shape.id, row.eager.reason) for row in summary.rows if row.eager.event_ms and row.eager.reason]
    some = [(name, reason) for name, reason in some if summary.row(name).eager.status == "skipped"]
    return lines + [f"not run in every process: {counted_shapes(names)}: {reason}" for names, reason in grouped(some)]


def counted_shapes(names: str) -> str:
    """Return ids joined by commas with their noun."""
    return f"{'shapes' if ',' in names else 'shape'} {names}"


def oversize_lines(summary: Summary) -> list[str]:
    """Return one line for each candidate on each shape that is too large for eager."""
    table = oversize_table(summary)
    return [
        f"too large for eager: shape {row[0]}, {row[2]}: {row[4]} ms, {row[6]} over the chunked reference"
        for row in table.rows
    ]


def failure_table(summary: Summary) -> Table:
    """Return what failed."""
    rows = [(row.shape.id, cell.arm, cell.status, cell.reason) for row, cell in summary.failures()]
    return Table("Failures", ("shape", "arm", "status", "reason"), tuple(rows), 4, prose=True)


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
    """Return what a reader must know about the whole campaign: lost blocks, slow host, clock, overhead, sandbox."""
    lines = []
    if text := summary.contamination.describe():
        lines.append(text)
    if summary.meta.left_out:
        lines.append(summary.meta.left_out)
    if summary.host and (text := summary.host.describe()):
        lines.append(text)
    if text := _window(summary):
        lines.append(text)
    if summary.meta.overhead_share is not None:
        share = percent(summary.meta.overhead_share)
        lines.append(f"{share} of the run's time was neither warm-up, measurement nor verification{_spent(summary)}")
    if summary.meta.sandbox:
        lines.append(f"sandbox {summary.meta.sandbox}")
    return lines


def _lasting(summary: Summary) -> list[str]:
    """Return which shapes were timed throughout under one condition of the machine, which is no disturbance."""
    rows: list[tuple[str, str]] = []
    for row in summary.rows:
        for what, count in summary.contamination.conditions(row.shape.id).items():
            processes = f"{count} of {counted(summary.meta.settings['processes'], 'process')}"
            rows.append((row.shape.id, f"{LASTING_SAID[what]} throughout, in {processes}"))
    return [f"{LASTING_MARK} {counted_shapes(names)}: {text}" for names, text in grouped(rows)]


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
    text = (
        f"one call between two events (k = 1), whose clock ticks every {summary.tick_ns / 1e3:g} us: "
        f"{share:.2%} of the shortest call (shape {shape})"
    )
    return text if share <= COARSE_TICK else f"{text}, too coarse for a ratio nearer than that"


def verdict_word(verdict: str) -> str:
    """Return a verdict as reports print it: FASTER, SLOWER, EQUIVALENT, INCONCLUSIVE and so on, or no verdict."""
    return "no verdict" if verdict == Verdict.NONE else verdict.upper()


def headline_line(headline: Headline) -> str:
    """Return a candidate's result as one line to repeat: how many times faster, the verdict, the shapes, the null."""
    total = headline.shapes + headline.partial + headline.oversize + headline.not_run
    where = f"{headline.shapes} of {counted(total, 'shape')}"
    if headline.geomean is None:
        passed = f"no geometric mean, {headline.passed} of {counted(headline.shapes, 'shape')} passed"
        return f"{headline.candidate}: {passed}, {verdict_word(headline.verdict)}: {headline.why}"
    centre, *ends = interval(headline.geomean).split(" ", 1)
    than = "faster than eager" if (headline.geomean.low or 0) > 1 else "the speed of eager"
    null = f" (null {times(headline.null.centre)}x)" if headline.null else ""
    said = " ".join([f"{headline.candidate}: {centre} {than}", *ends])
    line = f"{said}, {verdict_word(headline.verdict)}, on {where}{null}"
    return line if headline.verdict in PROVEN else f"{line}: {headline.why}"


def headline_details(headline: Headline) -> list[str]:
    """Return what stands behind a candidate's line: why, what it leaves out, floor, nulls, processes and price."""
    parts = [headline.why] if headline.verdict in PROVEN else []
    parts += [f"{headline.partial} timed in some processes only"] if headline.partial else []
    parts += [f"{headline.oversize} too large for eager"] if headline.oversize else []
    parts += [f"{headline.not_run} not run"] if headline.not_run else []
    if headline.floor and not (parts and headline.floor.describe() in headline.why):
        parts.append(f"floor {headline.floor.describe()}")
    nulls = [("null", headline.null), ("its own null", headline.copy_null)]
    parts += [f"{name} {interval(null)}" for name, null in nulls if null]
    if headline.geomean is None:
        if headline.penalised:
            parts.append(f"with 1x where it failed (or its own ratio, if lower) {interval(headline.penalised)}")
        return parts
    if headline.per_process:
        whole = " with every shape" if headline.lost else ""
        parts.append(f"by process{whole} {', '.join(f'{times(value)}x' for value in headline.per_process)}")
    parts += [
        f"process {process} has no clean block of shape {' and '.join(shapes)}"
        for process, shapes in headline.lost.items()
    ]
    if headline.sign_flip_p is not None:
        parts.append(f"sign-flip p {headline.sign_flip_p:.2g}")
    if headline.dividend:
        parts.append(f"harness dividend {times(headline.dividend)}x")
    if headline.mix_price:
        parts.append(f"one call of each: {price(headline.mix_price)} $/1e9 tokens")
    return parts


def _times(row: ShapeRow, cell: Cell) -> tuple[str, str]:
    eager, candidate = time_columns(cell)
    return number(row.eager.event_ms.centre, 4) if eager == NONE else eager, candidate


def _regimes(row: ShapeRow) -> str:
    text = row.regime + ("~" if row.borderline else "") + (" (measured)" if row.profiled else "")
    return text if row.measured_regime in (None, row.regime) else f"{text}, {row.measured_regime}"


def _control(cell: Cell) -> str:
    """Return a control's speedup, or why it has none: a status, or too few processes with clean blocks of both."""
    if cell.speedup is None:
        return "few clean" if cell.status == "ok" else cell.status
    return f"{times(cell.speedup.centre)}x" + (GATE_MARK if cell.status == "incorrect" else "")


def _bytes(count: int | None) -> str:
    return NONE if count is None else size(count)
