"""Commands that need the profile alone, no GPU and no torch: classify, route, families."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rooflane.dispatch import Profile, Route, RouteError, classify, load_rules, refusal, route
from rooflane.dispatch.units import counted, duration, size
from rooflane.eval.commands.output import (
    AsJson,
    ProfileName,
    RulesFile,
    ShapeFile,
    console,
    find_profile,
    find_shapes,
    print_json,
    say,
)
from rooflane.eval.report.files import write_file
from rooflane.eval.report.table import Table, print_table
from rooflane.families import load_families
from rooflane.shapes import load_problems
from rooflane.shapes.problem import SHIPPED, SHIPPED_NAME, candidate_of, summary_of


def classify_command(
    file: ShapeFile,
    profile: ProfileName = "auto",
    as_json: AsJson = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the prediction as JSON.")] = None,
) -> None:
    """Predict what limits each shape's eager forward: launch, bandwidth or compute, with the evidence."""
    shapes = find_shapes(file)
    device = find_profile(profile)
    found = [classify(shape, device) for shape in shapes]
    document = {"profile": device.model_dump(mode="json"), "shapes": [item.as_dict() for item in found]}
    if save:
        write_file(save, json.dumps(document, indent=2) + "\n")
        console(stderr=True).print(f"prediction for {len(found)} shapes on {device.name} written to {save}")
    if as_json:
        print_json(document)
        return
    rows = [
        (
            item.shape.id,
            item.shape.label(),
            item.regime + (" (borderline)" if item.borderline else ""),
            f"{item.margin:.2f}",
            str(item.device_ops),
            duration(item.launch_s),
            duration(item.compute_s),
            duration(item.bandwidth_s),
            duration(item.breakeven_dispatch_s),
            size(item.peak_bytes),
            duration(item.predicted_s),
        )
        for item in found
    ]
    title = (
        f"{device.title}: {device.eager_dispatch.value:g} us an eager operation ({device.eager_dispatch.mark}), "
        f"{device.memory.value:g} GB"
    )
    names = ("id", "shape", "regime", "margin", "ops", "launch", "compute", "bandwidth", "break-even", "peak", "eager")
    optional = ("shape", "break-even", "ops", "peak")
    print_table(Table(title, names, rows, 3, optional=optional), console())


def route_command(
    file: ShapeFile,
    shape: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this shape; repeatable.")] = None,
    profile: ProfileName = "auto",
    rules: RulesFile = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also show the evidence, and every rejected rule and family.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which rule and family serve each shape. Exit 2 when a shape has none.

    With --details, show why every other rule and family does not serve it.
    """
    shapes = find_shapes(file, shape or ())
    device, table = find_profile(profile), load_rules(rules)
    routes, unserved = [], []
    for item in shapes:
        try:
            routes.append(route(item, device, table))
        except RouteError as error:
            unserved.append(str(error))
    if as_json:
        print_json([item.as_dict() for item in routes])
    elif details and routes:
        say(*"\n\n".join(_details(item, device) for item in routes).split("\n"))
    elif routes:
        _print_routes(routes, device.title)
    if unserved:
        raise RouteError("; ".join(unserved))


def _details(found: Route, device: Profile) -> str:
    lines = load_families()[found.family].explain(found.shape, device)
    return "\n".join([found.explain(), *(f"  kernel    {line}" for line in lines)])


def _print_routes(routes: list[Route], device: str) -> None:
    rows = [
        (
            item.shape.id,
            item.shape.label(),
            item.classification.regime,
            item.rule.name,
            item.family + "".join(f" {name}={value}" for name, value in item.options.items()),
            duration(item.predicted_s),
        )
        for item in routes
    ]
    columns = ("id", "shape", "regime", "rule", "family", "predicted")
    print_table(Table(device, columns, rows, 5, optional=("shape", "regime")), console())
    served = Counter(item.family for item in routes).most_common()
    families = ", ".join(f"{count} by {family}" for family, count in served)
    say(f"{counted(len(routes), 'shape')}: {families}; --details shows what was rejected and why")


def problems_command(as_json: AsJson = False) -> None:
    """List the shipped problems: `rooflane eval --problem NAME` takes each, `--problem shipped` all of them."""
    problems = load_problems(SHIPPED_NAME)
    rows = [
        {"problem": one.id, "what it is": summary_of(one), "file": one.file, "candidate": str(candidate_of(one))}
        for one in problems
    ]
    if as_json:
        print_json(rows)
        return
    cells = [tuple(row.values())[:2] for row in rows]
    print_table(Table("Shipped problems, each with a right candidate", tuple(rows[0])[:2], cells, 2), console())
    print(f"they lie in {SHIPPED}; as a --candidate, `{SHIPPED_NAME}` means the candidates beside them")


def families_command(profile: ProfileName = "auto", as_json: AsJson = False, file: ShapeFile = "published.csv") -> None:
    """List the families: which shapes of FILE each can build on the device, and why not the rest."""
    shapes = find_shapes(file)
    device = find_profile(profile)
    rows = []
    for name, spec in load_families().items():
        refused: dict[str, list[str]] = {}
        for shape in shapes:
            reason = refusal(spec, shape, device, {})
            if reason:
                refused.setdefault(reason, []).append(shape.id)
        served = len(shapes) - sum(map(len, refused.values()))
        rows.append(
            {
                "family": name,
                "summary": spec.summary,
                "contract": spec.contract,
                "options": dict(spec.options),
                "serves": served,
                "of": len(shapes),
                "refused": [{"reason": reason, "shapes": ids} for reason, ids in refused.items()],
            }
        )
    if as_json:
        print_json(rows)
        return
    columns = ("family", "serves", "what it does", "options", "why not the rest")
    cells = [
        (
            row["family"],
            f"{row['serves']} of {row['of']}",
            row["summary"] + (f" (does not keep: {row['contract']})" if row["contract"] else ""),
            "; ".join(f"{option}: {meaning}" for option, meaning in row["options"].items()) or "-",
            "; ".join(f"{', '.join(item['shapes'])}: {item['reason']}" for item in row["refused"]) or "-",
        )
        for row in rows
    ]
    print_table(Table(f"{device.title}, shapes of {file}", columns, cells, len(columns)), console())
