"""Questions about numbers already measured: how many processes to plan, what tokens cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflane.eval.commands.output import AsJson, console, print_json
from rooflane.eval.exit_codes import EvaluationError

if TYPE_CHECKING:
    from rooflane.eval.record.nulls import NullResult

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
NullsPath = Annotated[
    Path | None,
    typer.Option("--nulls", metavar="PATH", help="Null results: a file, a run, or a folder of runs.  [your own store]"),
]


def plan_command(
    see: Annotated[str, typer.Option(help="The smallest gain to be seen, with 80% power: 1% or 0.01.")] = "1%",
    sd: Annotated[
        str | None, typer.Option(help="Between-process standard deviation of the geometric mean.  [from the nulls]")
    ] = None,
    nulls: NullsPath = None,
    floor: Annotated[str | None, typer.Option(help="A known noise floor, in place of a provisional one.")] = None,
    max_processes: Annotated[int, typer.Option(help="The most processes to plan.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Say how many processes, and minutes, a wanted resolution takes, from the noise of null results."""
    from rooflane.eval.record.nulls import store_path
    from rooflane.eval.report.table import Table, print_table, print_text
    from rooflane.eval.stats.power import noise_of, parse_share, plan
    from rooflane.eval.stats.run import find_nulls

    known, wanted = None if floor is None else parse_share(floor), parse_share(see)
    if sd is not None:
        noises = [("given", parse_share(sd), None)]
    else:
        path = nulls or store_path()
        if nulls and not path.exists():
            raise EvaluationError(f"{path}: no such file; --nulls takes a file of null results, such as {store_path()}")
        if not path.exists():
            raise EvaluationError(
                f"{path}: no null results are stored yet; run `rooflane eval`, name some with --nulls, or give --sd"
            )
        noises = [(place, *noise_of(found)) for place, found in _by_machine(find_nulls(path)).items()]
    plans = [
        (place, plan(wanted, noise, floor=known, most=max_processes, process_s=seconds))
        for place, noise, seconds in noises
    ]
    if as_json:
        print_json([{"noise": place} | found.as_dict() for place, found in plans])
        return
    rows = [
        (
            place.split(" (")[0],
            f"{found.sd:.2%}",
            str(found.processes),
            f"{found.power:.0%}",
            f"{found.smallest:.2%}",
            "-" if found.minutes is None else f"{found.minutes:.1f}",
        )
        for place, found in plans
    ]
    columns = ("noise from", "sd", "processes", "power", "80% sees", "minutes")
    screen = console()
    print_table(Table(f"to see {wanted:.2%}", columns, tuple(rows), 1), screen)
    for place, found in plans:
        if not found.enough:
            text = f"{place}: {max_processes} processes do not see {found.see:.2%}; they see {found.smallest:.2%}."
            print_text(text, screen)
    clear = f"{known:.2%}" if known else "this run's own null half-width, until 19 nulls are stored"
    print_text(
        f"The interval must clear the noise floor: {clear}. Fix the number of processes before the run. "
        "Do not add more after seeing the result.",
        screen,
    )


def _by_machine(nulls: list[NullResult]) -> dict[str, list[NullResult]]:
    found: dict[str, list[NullResult]] = {}
    for null in nulls:
        if null.sd is not None:
            found.setdefault(f"{null.machine} ({null.software})", []).append(null)
    if not found:
        raise EvaluationError("none of these null results has a spread: their runs had one process; give --sd")
    return found


def price_command(
    run: RunFolder,
    candidate: Annotated[str | None, typer.Option(help="Which arm.  [the run's first candidate]")] = None,
    mix: Annotated[
        list[str] | None, typer.Option(metavar="ID=CALLS", help="Calls of a shape in the mix; repeatable.  [one each]")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="Share of the paid time that serves tokens, over 0 to 1.")] = 1.0,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of the device.  [the run's profile]")] = None,
    as_json: AsJson = False,
) -> None:
    """Price a mix of shapes: all its valid tokens over all its time, in $ per 1e9 tokens, with interval."""
    from rooflane.eval.report.table import Table, interval, number, price, print_table, print_text
    from rooflane.eval.stats.price import price_mix
    from rooflane.eval.stats.run import open_run

    found = price_mix(open_run(run), candidate, _calls(mix or []), utilisation, price_per_hour)
    if as_json:
        print_json(asdict(found))
        return
    rows = [
        (arm, number(rate.centre), price(dollars))
        for arm, rate, dollars in ((found.arm, found.tokens_per_s, found.price), ("eager", *found.eager))
        if rate
    ]
    mix = ", ".join(f"{calls:g} x shape {name}" for name, calls in found.calls.items())
    title = f"{mix}, at {utilisation:.0%} utilisation and {found.price_per_hour:g} $/h"
    screen = console()
    print_table(Table(title, ("arm", "tokens/s", "$/1e9 tok [95%]"), tuple(rows), 1), screen)
    if found.ratio:
        ratio = interval(found.ratio)
        print_text(
            f"{found.arm} serves the mix {ratio} as fast as eager. This is the ratio of the total times.", screen
        )


def _calls(mix: list[str]) -> dict[str, float]:
    calls = {}
    for text in mix:
        name, separator, count = text.partition("=")
        if name in calls:
            raise EvaluationError(f"--mix names shape {name!r} twice; write each once, with the sum of its calls")
        try:
            calls[name] = float(count)
        except ValueError:
            calls[name] = -1.0
        if not separator or not 0 <= calls[name] < float("inf"):
            raise EvaluationError(f"{text!r} is no part of a mix; write ID=CALLS, such as --mix 1=3 --mix 6=1")
    return calls
