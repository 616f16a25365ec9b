"""Compare two trees of rooflane on one device: event and host time of a dispatched call, in alternating processes.

`python briefs/dropin/paired.py --old DIR --out FILE` times the published shapes with DIR, another checkout, and with
this one. It starts one process of each by turns, and prints new over old with its interval over the pairs. Host time is
the wall time of a call while the device keeps up, or is behind; only launch-bound shapes show the host.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).parents[2]
PARTS = ("shapes", "baseline", "families", "dispatch", "eval")
IDS = "1,2,5,7,8,12,13"
SEED = 20261201
# Calls: behind a fresh build, in an event window, and in a host window.
WARMUPS, EVENTS, HOST = 50, 100, 1000


def measure(ids: list[str]) -> dict[str, dict[str, float]]:
    """Return the median event time and the host time of a call in microseconds, for each shape."""
    import torch

    from rooflane.baseline import build_baseline, config_of, generate_random_case, reference_numerics
    from rooflane.dispatch import optimize
    from rooflane.eval.worker.clock import make_clock
    from rooflane.shapes import load_shapes

    device = torch.device("cuda")
    reference_numerics(device)
    clock = make_clock(device)
    found = {}
    for shape in load_shapes(ROOT / "shapes" / "published.csv"):
        if shape.id not in ids:
            continue
        model = optimize(build_baseline(shape, device, SEED), shape, on_unseen="error")
        cases = [(generate_random_case(config_of(shape), device, torch.float32, SEED + i)[0], None) for i in range(20)]
        with torch.inference_mode():
            for number in range(WARMUPS):
                model(*cases[number % 20])
            events = clock.window(model, [cases[number % 20] for number in range(EVENTS)])()[0]
            torch.cuda.synchronize()
            hosts = []
            for _ in range(10):
                start = perf_counter()
                for number in range(HOST // 10):
                    model(*cases[number % 20])
                hosts.append((perf_counter() - start) / (HOST // 10))
                torch.cuda.synchronize()
        found[shape.id] = {"event_us": median(events) / 1e3, "host_us": min(hosts) * 1e6}
    return found


def run(tree: Path, ids: str) -> dict[str, dict[str, float]]:
    """Measure with a tree in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "rooflane"
        package.mkdir()
        for part in PARTS:
            (package / part).symlink_to(tree.resolve() / part)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, "--measure", "--ids", ids]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def report(pairs: list[tuple[dict, dict]]) -> str:
    """Return new over old by shape, and the geometric mean, with 95 % intervals over the pairs."""
    from rooflane.eval.report.tables import interval
    from rooflane.eval.stats.estimator import t_interval

    lines = []
    means: list[list[float]] = [[] for _ in pairs]
    for shape in pairs[0][0]:
        logs = [math.log(new[shape]["event_us"] / old[shape]["event_us"]) for old, new in pairs]
        for mean, log in zip(means, logs, strict=True):
            mean.append(log)
        more = [new[shape]["host_us"] - old[shape]["host_us"] for old, new in pairs]
        old_us, new_us = (median(side[shape]["event_us"] for side in sides) for sides in zip(*pairs, strict=True))
        host = median(new[shape]["host_us"] for _, new in pairs)
        lines.append(
            f"shape {shape}: event {old_us:.2f} -> {new_us:.2f} us, new over old {interval(t_interval(logs))}; "
            f"host {host:.2f} us, {median(more):+.2f} us"
        )
    whole = [sum(mean) / len(mean) for mean in means]
    return "\n".join([*lines, f"geometric mean, new over old: {interval(t_interval(whole))} over {len(pairs)} pairs"])


def main() -> int:
    """Run the pairs, or measure in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="the other checkout")
    parser.add_argument("--ids", default=IDS, help="published shapes, by id")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("paired.jsonl"), help="file each pair is appended to")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.ids.split(","))))
        return 0
    if asked.old is None:
        parser.error("name the other checkout with --old DIR")
    pairs = []
    for number in range(asked.pairs):
        trees = (asked.old, ROOT) if number % 2 == 0 else (ROOT, asked.old)
        found = {tree: run(tree, asked.ids) for tree in trees}
        pairs.append((found[asked.old], found[ROOT]))
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"old": found[asked.old], "new": found[ROOT]}) + "\n")
    print(report(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
