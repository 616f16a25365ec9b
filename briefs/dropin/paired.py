"""Compare two trees of rooflane on one device: event and host time of a dispatched call, in alternating processes.

`python briefs/dropin/paired.py --old DIR --out FILE` times the published shapes with DIR, another checkout, and with
this one. It starts one process of each by turns. It prints new over old, and how many microseconds more a call takes
the host, each with its interval over the pairs. A checkout is made by `git archive COMMIT | tar -x -C DIR`.

Host time is the wall time of a call in a block that starts on an idle device. It is the host's own where a block's
launches fit into the device's queue: on the launch-bound shapes. The host cost of the common call is measured by
`--ids 1,2 --host-calls 20000 --pairs 6`.
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
# Calls: behind a fresh build, in an event window, and in a block of host time.
WARMUPS, EVENTS, BLOCK = 50, 100, 100


def measure(tree: Path, shapes: Path, ids: list[str], host_calls: int) -> dict[str, dict[str, float]]:
    """Return the median event time and the host time of a call in microseconds, for each shape.

    Raises `RuntimeError` where the package is not the tree's.
    """
    import torch

    from rooflane import dispatch
    from rooflane.baseline import build_baseline, config_of, generate_random_case, reference_numerics
    from rooflane.eval.worker.clock import make_clock
    from rooflane.shapes import load_shapes

    if (loaded := Path(dispatch.__file__).resolve().parents[1]) != tree.resolve():
        raise RuntimeError(f"this process imports rooflane from {loaded}, expected {tree.resolve()}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference_numerics(device)
    clock = make_clock(device)
    found = {}
    for shape in load_shapes(shapes):
        if shape.id not in ids:
            continue
        model = dispatch.optimize(build_baseline(shape, device, SEED), shape, on_unseen="error")
        cases = [(generate_random_case(config_of(shape), device, torch.float32, SEED + i)[0], None) for i in range(20)]
        with torch.inference_mode():
            for number in range(WARMUPS):
                model(*cases[number % 20])
            events = clock.window(model, [cases[number % 20] for number in range(EVENTS)])()[0]
            clock.synchronize()
            hosts = []
            for _ in range(max(1, host_calls // BLOCK)):
                start = perf_counter()
                for number in range(BLOCK):
                    model(*cases[number % 20])
                hosts.append((perf_counter() - start) / BLOCK)
                clock.synchronize()
        found[shape.id] = {"event_us": median(events) / 1e3, "host_us": median(hosts) * 1e6}
    return found


def run(tree: Path, options: list[str]) -> dict[str, dict[str, float]]:
    """Measure with a tree in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "rooflane"
        package.mkdir()
        for part in PARTS:
            (package / part).symlink_to(tree.resolve() / part)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, "--measure", str(tree), *options]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def report(pairs: list[tuple[dict, dict]]) -> str:
    """Return new over old and the host's difference by shape, and the geometric mean, with 95 % intervals."""
    from rooflane.eval.report.tables import interval
    from rooflane.eval.stats.estimator import t_interval
    from rooflane.eval.stats.mean import mean_of

    lines = []
    means: list[list[float]] = [[] for _ in pairs]
    for shape in pairs[0][0]:
        logs = [math.log(new[shape]["event_us"] / old[shape]["event_us"]) for old, new in pairs]
        for mean, log in zip(means, logs, strict=True):
            mean.append(log)
        more = mean_of([new[shape]["host_us"] - old[shape]["host_us"] for old, new in pairs])
        half = more.half_width()
        span = "" if half is None else f" [{more.log - half:+.2f}, {more.log + half:+.2f}]"
        old_us, new_us = (median(side[shape]["event_us"] for side in sides) for sides in zip(*pairs, strict=True))
        host = median(new[shape]["host_us"] for _, new in pairs)
        lines.append(
            f"shape {shape}: event {old_us:.2f} -> {new_us:.2f} us, new over old {interval(t_interval(logs))}; "
            f"host {host:.2f} us, {more.log:+.2f}{span} us a call"
        )
    whole = [sum(mean) / len(mean) for mean in means]
    return "\n".join([*lines, f"geometric mean, new over old: {interval(t_interval(whole))} over {len(pairs)} pairs"])


def main() -> int:
    """Run the pairs, or measure in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="the other checkout")
    parser.add_argument("--ids", default=IDS, help="shapes of the file, by id")
    parser.add_argument("--shapes", type=Path, default=ROOT / "shapes" / "published.csv", help="shape file")
    parser.add_argument("--host-calls", type=int, default=1000, help="calls of a process whose host time is taken")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("paired.jsonl"), help="file each pair is appended to")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure, asked.shapes, asked.ids.split(","), asked.host_calls)))
        return 0
    if asked.old is None:
        parser.error("name the other checkout with --old DIR")
    options = ["--shapes", str(asked.shapes), "--ids", asked.ids, "--host-calls", str(asked.host_calls)]
    pairs = []
    for number in range(asked.pairs):
        trees = (asked.old, ROOT) if number % 2 == 0 else (ROOT, asked.old)
        found = {tree: run(tree, options) for tree in trees}
        pairs.append((found[asked.old], found[ROOT]))
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"old": found[asked.old], "new": found[ROOT]}) + "\n")
    print(report(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
