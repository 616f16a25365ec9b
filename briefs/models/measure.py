"""Measure optimize() on whole models beside eager, half-precision eager and the compiled half-precision model.

Each fresh process builds every arm of a model, checks it against float64, and times the arms interleaved in mirrored
order on inputs that no arm has met. One JSON line a model and process is kept; a line that is there is not made again.
The first process compiles what is in no cache, so its set-up times are those of a cold start.

`python briefs/models/measure.py --out FILE` measures, `--table FILE` prints the table, and `--table FILE --page PAGE`
writes it between the markers of a page.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import reference_numerics
from rooflane.dispatch import optimize, parse_rules, served
from rooflane.eval.campaign.blocks import Round, choose_counts, time_blocks
from rooflane.eval.check.gate import check_gate
from rooflane.eval.record.environment import describe_environment, resolve_device
from rooflane.eval.report.report import markdown_table as markdown
from rooflane.eval.report.report import update_between_markers
from rooflane.eval.report.tables import NONE, Table, interval, number
from rooflane.eval.stats.estimator import paired_log_ratio, t_interval
from rooflane.eval.stats.rounds import median_ns
from rooflane.eval.worker.arms import free_memory
from rooflane.eval.worker.clock import estimate_ns, make_clock

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "problems").glob("*.py"))
SEED = 20261201
ROUNDS, WARMUPS, REPEATS = 4, 10, 50
Line = dict[str, Any]
Forward = Callable[..., Tensor]
OURS, OURS_HALF = "rooflane", "rooflane fp16"
EAGER, HALF, GRAPHS = "eager", "eager fp16", "fp16 compiled RO"
ARMS = (EAGER, HALF, GRAPHS, OURS, OURS_HALF)


def load_problem(name: str) -> dict[str, Any]:
    """Return the names that a problem file defines."""
    path = HERE / "problems" / f"{name}.py"
    space: dict[str, Any] = {"__name__": f"problem_{name}"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    return space


def build_model(problem: dict[str, Any]) -> nn.Module:
    """Return the model on the CPU, in evaluation mode, with weights drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return problem["Model"](*problem["get_init_inputs"]()).eval()


def draw(problem: dict[str, Any], seed: int, device: torch.device) -> Tensor:
    """Return the input of a seed on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return problem["get_inputs"]()[0].to(device)


def build_arm(name: str, model: nn.Module, device: torch.device, family: str | None) -> tuple[nn.Module, Forward]:
    """Return an arm's module on the device and its forward, which takes an input in float32 or of integers."""
    half = name in (HALF, GRAPHS, OURS_HALF)
    module = copy.deepcopy(model).to(device, torch.float16 if half else torch.float32)
    if name in (OURS, OURS_HALF):
        rules = None if family is None else parse_rules(RULE.format(family=family), "measure")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a decoder that is not called may be refused
            module = optimize(module, rules=rules, on_unseen="build")
    call: Forward = torch.compile(module, mode="reduce-overhead", dynamic=False) if name == GRAPHS else module
    if not half:
        return module, call
    return module, lambda x: call(x.half() if x.is_floating_point() else x)


RULE = '[[rule]]\nname = "one"\nwhen = {{}}\nfamily = "{family}"\nbecause = "measured by itself"\n'


def measure_model(name: str, device: torch.device, arms: Sequence[str], family: str | None, budget_s: float) -> Line:
    """Build, check and time the arms of one model; return what a JSON line holds."""
    problem = load_problem(name)
    model = build_model(problem)
    x = draw(problem, SEED, device)
    with torch.inference_mode():
        exact = copy.deepcopy(model).to(device, torch.float64)
        expected = exact(x.double() if x.is_floating_point() else x)
        del exact
    forwards: dict[str, Forward] = {}
    found: dict[str, Line] = {}
    for arm in arms:
        free_memory(device)
        before, start = _allocated(device), perf_counter()
        try:
            module, forward = build_arm(arm, model, device, family)
            with torch.inference_mode(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(3):  # graphs are captured at the second call
                    out = forward(x).clone()
                _synchronize(device)
        except Exception as error:  # an arm that cannot be built is a row, not our failure
            found[arm] = {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
            continue
        setup_s = perf_counter() - start
        _reset_peak(device)
        with torch.inference_mode():
            forward(x)
        gate = check_gate(out.double(), expected)
        found[arm] = {
            "setup_s": setup_s,
            "peak_bytes": _peak(device) - before,
            "use": gate.use,
            "failed": gate.failed,
            "total": gate.total,
            "error": float((out.double() - expected).norm() / expected.norm()),
        }
        if arm in (OURS, OURS_HALF):
            found[arm]["stacks"] = [one.explain() for one in served(module) if one.stack is not None]
            found[arm]["said"] = sorted({str(one.message)[:200] for one in said if "own forward" in str(one.message)})
        forwards[arm] = forward
    del expected
    for arm, sample in _time(problem, forwards, device, budget_s).items():
        found[arm]["event_ns"] = [part.event_ns for part in sample.rounds]
    return {"model": name, "arms": found}


def _time(
    problem: dict[str, Any], forwards: dict[str, Forward], device: torch.device, budget_s: float
) -> dict[str, Any]:
    clock = make_clock(device)
    # Calls take x and a mask; these models take x alone.
    calls = {arm: (lambda x, _=None, forward=forward: forward(x)) for arm, forward in forwards.items()}
    x = draw(problem, SEED + 1, device)
    with torch.inference_mode():
        counts = {
            arm: choose_counts(
                estimate_ns(call, (x, None), clock), warmups=WARMUPS, repeats=REPEATS, rounds=ROUNDS, budget_s=budget_s
            )
            for arm, call in calls.items()
        }
        timed = {arm: TimedArm(call, partial(draw, problem, device=device), clock) for arm, call in calls.items()}
        samples, failures = time_blocks(timed, counts, rounds=ROUNDS, order_seed=SEED)
    for arm, error in failures.items():
        raise RuntimeError(f"{arm} failed while it was timed: {error}")
    return samples


class TimedArm:
    """Times one arm in this process, every call on an input it has not met."""

    def __init__(self, forward: Forward, draw: Callable[[int], Tensor], clock: Any) -> None:
        self._forward, self._draw, self._clock, self._drawn = forward, draw, clock, 100

    def measure(self, round_index: int, calls: int) -> Round:
        """Return one round's event nanoseconds; the first round is preceded by warm-up calls."""
        if round_index == 0:
            for case in self._cases(WARMUPS):
                self._forward(*case)
        return Round(self._clock.window(self._forward, self._cases(calls))()[0])

    def _cases(self, count: int) -> list[tuple[Tensor, None]]:
        with torch.inference_mode(False), torch.no_grad():
            cases = [(self._draw(SEED + self._drawn + index), None) for index in range(count)]
        self._drawn += count
        self._clock.synchronize()
        return cases


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a record, none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def render_table(path: Path) -> str:
    """Return the table in Markdown and the conditions under it."""
    lines = read_lines(path)
    rows = []
    for name in dict.fromkeys(line["model"] for line in lines):
        rows += _rows(name, [line for line in lines if line["model"] == name])
    columns = (
        "model", "arm", "event ms", "over eager", "over fp16 compiled RO", "use", "error", "set-up s", "again s", "MB"
    )  # fmt: skip
    note = (
        "event ms: median over processes; ratios: time of that arm over this one's; use: largest share of the "
        "tolerance against float64, above 1 fails; error: norm of the difference over the norm; set-up: first process, "
        "nothing compiled; again: a later process; MB: weights, copies and scratch of one call"
    )
    facts = lines[0]["environment"]
    versions = [f"{name} {facts[name]}" for name in ("torch", "triton", "python") if facts.get(name)]
    conditions = [facts.get("gpu") or facts["cpu"], *versions]
    processes = len({line["process"] for line in lines})
    table = Table("", columns, tuple(rows), 2, note)
    served = dict.fromkeys(stack for line in lines for stack in line["arms"].get(OURS, {}).get("stacks", []))
    stacks = "\n".join(f"- {' '.join(stack.split())}" for stack in served)
    count = "1 process" if processes == 1 else f"{processes} processes"
    return "\n\n".join([markdown(table), stacks, f"{'; '.join(conditions)}; {count}."])


def _rows(name: str, lines: list[Line]) -> list[tuple[str, ...]]:
    rows = []
    for arm in ARMS:
        found = [line["arms"][arm] for line in lines if line["arms"].get(arm, {}).get("event_ns")]
        if not found:
            continue
        times = [median_ns([sample for part in one["event_ns"] for sample in part]) / 1e6 for one in found]
        rows.append(
            (
                name if arm == EAGER else "",
                arm,
                number(median(times)),
                _over(lines, EAGER, arm),
                _over(lines, GRAPHS, arm),
                f"{number(max(one['use'] for one in found))}{' !' if max(one['use'] for one in found) > 1 else ''}",
                f"{max(one['error'] for one in found):.1e}",
                number(found[0]["setup_s"]),
                number(median(one["setup_s"] for one in found[1:])) if len(found) > 1 else NONE,
                number(max(one["peak_bytes"] for one in found) / 1e6),
            )
        )
    return rows


def _over(lines: list[Line], base: str, arm: str) -> str:
    both = [line["arms"] for line in lines if all(line["arms"].get(one, {}).get("event_ns") for one in (base, arm))]
    if base == arm or not both:
        return NONE
    return interval(t_interval([paired_log_ratio(one[base]["event_ns"], one[arm]["event_ns"]) for one in both]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in fresh processes, or print or place the table of a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=NAMES, help="this model alone; repeatable")
    parser.add_argument("--arm", action="append", choices=ARMS, help="this arm alone; repeatable")
    parser.add_argument("--family", help="serve by this family in place of the routed one")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of timed calls for each arm and process")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("models.jsonl"), help="file the JSON lines are appended to")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="print the table of this record")
    parser.add_argument("--page", type=Path, help="with --table: write it between the markers of this page")
    asked = parser.parse_args(arguments)
    if asked.table:
        text = render_table(asked.table)
        update_between_markers(asked.page, "models", text) if asked.page else print(text)
        return 0
    if asked.process is None:
        own = sys.argv[1:] if arguments is None else list(arguments)
        for process in range(asked.processes):
            subprocess.run([sys.executable, __file__, *own, "--process", str(process)], check=True)
        return 0
    device = torch.device(resolve_device(asked.device))
    reference_numerics(device)
    there = {(line["model"], line["process"], line["family"]) for line in read_lines(asked.out)}
    for name in asked.only or NAMES:
        if (name, asked.process, asked.family) in there:
            continue
        line = measure_model(name, device, asked.arm or ARMS, asked.family, asked.budget)
        head = {"process": asked.process, "family": asked.family, "environment": describe_environment(device.type)}
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(head | line) + "\n")
        print(f"{name}, process {asked.process}: {', '.join(_news(line))}", flush=True)
    return 0


def _news(line: Line) -> list[str]:
    news = []
    for arm, found in line["arms"].items():
        if "event_ns" in found:
            ms = median_ns([sample for part in found["event_ns"] for sample in part]) / 1e6
            news.append(f"{arm} {ms:.3g} ms, use {found['use']:.2f}, set-up {found['setup_s']:.1f} s")
        else:
            news.append(f"{arm}: {found['skipped']}")
    return news


if __name__ == "__main__":
    sys.exit(main())
