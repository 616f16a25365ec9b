"""What a run is going to do, decided before anything runs: profile, predictions, and what is left out and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rooflane.dispatch import Profile, ProfileError, classify, load_profile
from rooflane.dispatch.units import size
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import ANCHOR, COMPILED_PREFIX, INFEASIBLE, NOOP, Prediction, RunMeta
from rooflane.eval.record.settings import Settings
from rooflane.eval.worker.candidates import Candidate, plan_candidate
from rooflane.families import get_family
from rooflane.shapes import Shape

# Of a limited run, the share calls may take beside imports and compilation, and the calls an arm makes at the least:
# the first one, one accuracy trial (two), two estimates, one warm-up, four rounds, two checks of what was timed.
CALL_SHARE = 0.6
LEAST_CALLS = 12
# What a call may take over its prediction: a roofline knows no caches, and CPU calls took 1.3 to 3.7 times theirs.
CALL_SLACK = 2
PROBES = (NOOP, ANCHOR)
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def profile_for(settings: Settings, device: str) -> Profile:
    """Return the profile a run predicts with, its memory lowered to a cap."""
    try:
        profile = load_profile(settings.profile, device)
    except ProfileError as error:
        raise EvaluationError(str(error)) from None
    if profile.kind != device:
        raise EvaluationError(
            f"profile {profile.name} describes a {profile.kind} device, the run is on {device}; pass a matching "
            "--profile, or leave it to auto"
        )
    cap = settings.memory_cap_bytes
    if cap and cap < profile.memory_bytes:
        profile = profile.with_figure("memory", cap / 1e9, "assumed", "the run's memory cap")
    return profile


def predict(shape: Shape, profile: Profile, candidates: Sequence[Candidate], rules: object) -> Prediction:
    """Return what is expected of a shape, written down before any of it runs."""
    plans = {}
    for candidate in candidates:
        plan = plan_candidate(candidate, shape, profile, rules)
        plans[candidate.text] = {
            "family": plan.family,
            "rule": plan.rule,
            "options": plan.options,
            "contract": plan.contract,
            "predicted_s": plan.predicted_s,
            "peak_bytes": plan.peak_bytes,
            "unsupported": plan.unsupported,
        }
    return Prediction(shape=shape.id, classification=classify(shape, profile).as_dict(), candidates=plans)


def infeasible(meta: RunMeta, shape: Shape) -> bool:
    """Tell whether a shape's eager forward was predicted not to fit."""
    return meta.prediction(shape.id).classification["regime"] == INFEASIBLE


def compiles(meta: RunMeta, process: int) -> bool:
    """Tell whether a process is sure to need torch's compiler: for a control, or for the family of a candidate."""
    controls = process < meta.settings["compile_processes"] and any(
        name.startswith(COMPILED_PREFIX) for name in meta.controls
    )
    plans = [plan for prediction in meta.predictions for plan in prediction.candidates.values()]
    return controls or any(plan["family"] and get_family(plan["family"]).compiles for plan in plans)


def skip_reasons(meta: RunMeta, settings: Settings) -> dict[str, str]:
    """Return the shapes that are not run although eager fits, each with the reason.

    The prediction, the settings and the size of the machine's memory decide, before anything runs: the set does not
    depend on what else the machine does. Under a time budget the quickest shapes are taken first, until their least
    calls would fill the share of it that calls may take.
    """
    shapes = {shape.id: shape for shape in meta.shape_list()}
    found = {shape.id: _skip_reason(meta, settings, shape) for shape in shapes.values()}
    reasons = {name: reason for name, reason in found.items() if reason}
    if settings.time_budget_s is None:
        return reasons
    seconds = {name: meta.prediction(name).classification["predicted_s"] for name in shapes}
    room = settings.time_budget_s * CALL_SHARE
    for name in sorted(seconds, key=seconds.get):
        if name in reasons or infeasible(meta, shapes[name]):
            continue
        # The no-op and the anchor take no call of the shape.
        arms = sum(len(set(meta.planned(process, name)) - set(PROBES)) for process in range(settings.processes))
        room -= arms * LEAST_CALLS * CALL_SLACK * seconds[name]
        if room < 0:
            reasons[name] = (
                f"eager is predicted to take {seconds[name]:.2g} s a call, and the run's time budget of "
                f"{settings.time_budget_s:g} s is filled by quicker shapes"
            )
    return reasons


def _skip_reason(meta: RunMeta, settings: Settings, shape: Shape) -> str | None:
    """Return why a shape that fits is not run on this device, None when it is."""
    classification = meta.prediction(shape.id).classification
    predicted, limit = classification["predicted_s"], settings.max_call_s
    if predicted > limit:
        return f"eager is predicted to take {predicted:.1f} s a call, over the limit of {limit:g} s"
    if meta.device == "cpu" and (have := machine_memory_bytes()) < classification["peak_bytes"]:
        return f"eager needs {size(classification['peak_bytes'])} at its peak, the machine has {size(have)}"
    return None


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or its container's limit: what is free changes from minute to minute."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or no limit in it
        return min(total, int(MEMORY_LIMIT.read_text()))
    return total


def skipped_candidates(meta: RunMeta, settings: Settings, shape: Shape) -> dict[str, tuple[str, str]]:
    """Return the candidates of an infeasible shape that do not fit either or take too long: status and reason."""
    limit = settings.max_call_s
    skipped = {}
    for name, plan in meta.prediction(shape.id).candidates.items():
        if plan["unsupported"]:
            skipped[name] = ("infeasible", plan["unsupported"])
        elif (plan["predicted_s"] or 0) > limit:
            reason = f"predicted to take {plan['predicted_s']:,.0f} s a call, over the limit of {limit:g} s"
            skipped[name] = ("skipped", reason)
    return skipped
