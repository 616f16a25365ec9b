"""Run the organiser's script once a shape and process, each in a fresh process; every run becomes a row."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rooflane.dispatch import Profile, ProfileError, RuleError, classify, load_profile
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import available_memory_bytes, git_commit, resolve_device
from rooflane.eval.record.records import INFEASIBLE
from rooflane.eval.submit.launch import End, SubmitJob, run_once
from rooflane.eval.submit.organiser import (
    OrganiserFile,
    check_device,
    parse_organiser_args,
    read_organiser,
    shape_arguments,
)
from rooflane.eval.submit.parse import CANDIDATE_SIDE, Figures, UnreadableError, explain_end, parse_output
from rooflane.eval.submit.submission import Submission, SubmitMeta, SubmitRow, create_submission, open_submission
from rooflane.eval.worker import candidates
from rooflane.eval.worker.candidates import Candidate, load_rule_table, parse_candidate, plan_candidate
from rooflane.shapes import Shape

TIME_LIMIT_S = 600.0
# A traceback that passes through one of these files is the candidate's, not the script's.
CANDIDATE_FILES = (str(Path(__file__).with_name("placed.py")), str(candidates.__file__))


@dataclass(frozen=True)
class SubmitEvent:
    """Something a progress display may show: a run that begins (`row` None) or ended."""

    process: int
    processes: int
    shape: str
    done: int
    total: int
    row: SubmitRow | None


def submit(
    organiser: str | Path,
    shapes: Sequence[Shape],
    candidate: str = "dispatched",
    *,
    device: str = "auto",
    profile: str = "auto",
    rules: str | None = None,
    processes: int = 1,
    organiser_args: str = "",
    time_limit_s: float = TIME_LIMIT_S,
    runs_dir: str | Path = "runs",
    command: str = "",
    on_event: Callable[[SubmitEvent], None] | None = None,
) -> Submission:
    """Run the organiser's script on every shape with the candidate in its place; return what was recorded.

    Each shape runs in a fresh process of at most `time_limit_s` seconds, `processes` times over. A run that fails
    loses only its own row. Raises `EvaluationError` when the request cannot be run, or the script changes on the way;
    Ctrl-C returns the submission with `interrupted` set.
    """
    check_device(device)
    if processes < 1 or not time_limit_s > 0:
        raise EvaluationError("processes must be 1 or more, and the time limit above 0 seconds")
    if not shapes:
        raise EvaluationError("no shape was given; name a shape file with at least one line")
    script = read_organiser(organiser)
    extra = parse_organiser_args(organiser_args, bool(script.known))
    parsed = parse_candidate(candidate)
    kind = resolve_device(device.removesuffix(":0"))
    limits = _profile(profile, kind)
    try:
        table = load_rule_table(rules)
    except RuleError as error:
        raise EvaluationError(str(error)) from None
    now = datetime.datetime.now(datetime.UTC)
    meta = SubmitMeta(
        id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}-submit",
        started_at=now.isoformat(timespec="seconds"),
        command=command,
        rooflane_version=version("rooflane"),
        commit=git_commit(),
        organiser=str(script.path),
        sha256=script.sha256,
        known=script.known,
        candidate=candidate,
        candidate_sha256=_sha256(parsed),
        device=kind,
        profile=limits.name,
        arguments=extra,
        processes=processes,
        time_limit_s=time_limit_s,
        shapes=[shape.as_dict() for shape in shapes],
        plans={shape.id: asdict(plan_candidate(parsed, shape, limits, table)) for shape in shapes},
        infeasible=_infeasible(shapes, limits),
    )
    return _run_all(create_submission(Path(runs_dir), meta), script, on_event)


def resume_submission(folder: str | Path, *, on_event: Callable[[SubmitEvent], None] | None = None) -> Submission:
    """Continue a submission: keep its rows and make the missing runs, with the same script and candidate.

    A complete submission is returned as it is, even without its script. Raises `EvaluationError` when the
    script or the candidate's file is not what the submission began with.
    """
    submission = open_submission(folder)
    meta = submission.meta
    if not submission.missing():
        return submission
    script = read_organiser(meta.organiser)
    if script.sha256 != meta.sha256:
        raise EvaluationError(
            f"{meta.organiser}: sha256 is {script.sha256[:12]}, the submission began with {meta.sha256[:12]}; put that "
            "file back, or start a new submission"
        )
    if _sha256(parse_candidate(meta.candidate)) != meta.candidate_sha256:
        raise EvaluationError(
            f"candidate {meta.candidate}: the file changed since the submission began; start a new submission"
        )
    return _run_all(submission, script, on_event)


def _run_all(
    submission: Submission, script: OrganiserFile, on_event: Callable[[SubmitEvent], None] | None
) -> Submission:
    """Make every missing run; on Ctrl-C keep what was measured."""
    meta = submission.meta
    shapes = {shape.id: shape for shape in meta.shape_list()}
    report = on_event or (lambda event: None)
    total = meta.processes * len(shapes)
    missing = submission.missing()
    done = total - len(missing)
    try:
        for process, shape_id in missing:
            report(SubmitEvent(process, meta.processes, shape_id, done, total, None))
            row = _run_shape(meta, process, shapes[shape_id])
            script.check_unchanged()
            submission.append(row)
            done += 1
            report(SubmitEvent(process, meta.processes, shape_id, done, total, row))
    except KeyboardInterrupt:
        submission.interrupted = True
    return submission


def _run_shape(meta: SubmitMeta, process: int, shape: Shape) -> SubmitRow:
    plan = meta.plans[shape.id]
    arguments = shape_arguments(shape, meta.device, meta.arguments)
    if plan["unsupported"]:
        end = End(None, "", "", 0.0, False, {})
        outcome, reason, figures = "unsupported", plan["unsupported"], None
    else:
        job = SubmitJob(
            organiser=meta.organiser,
            sha256=meta.sha256,
            arguments=arguments,
            candidate=meta.candidate,
            plan=plan,
            shape=shape.as_dict(),
            memory_bytes=available_memory_bytes() if meta.device == "cpu" else None,
        )
        end = run_once(job, meta.time_limit_s)
        outcome, reason, figures = judge(end, shape, meta.candidate, meta.time_limit_s)
    # The baseline's end was predicted; a candidate's own is its failure.
    expected = outcome == "oom" and shape.id in meta.infeasible and not reason.startswith(CANDIDATE_SIDE)
    if expected:
        reason += f"; as predicted: {meta.infeasible[shape.id]}, and the script has no run without its baseline"
    return SubmitRow(
        submission=meta.id,
        process=process,
        shape=shape.id,
        outcome=outcome,
        reason=reason,
        exit_status=end.status,
        arguments=arguments,
        figures=figures,
        expected=expected,
        stdout=end.stdout,
        stderr=end.stderr,
        wall_s=end.wall_s,
        environment=end.environment,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def judge(end: End, shape: Shape, candidate: str, time_limit_s: float) -> tuple[str, str, Figures | None]:
    """Return the outcome of a run that ended, one line on it, and its figures where they can be read."""
    if end.status is None:
        return "timeout", f"not finished within the time limit of {time_limit_s:g} s", None
    files = (*CANDIDATE_FILES, candidate.partition(":")[0]) if ".py" in candidate else CANDIDATE_FILES
    outcome, reason = explain_end(end.status, end.stdout, end.stderr, files)
    if outcome not in ("passed", "failed"):
        return outcome, reason, None
    sizes = (shape.batch_size, shape.seq_len, shape.d_model, shape.num_heads, shape.ffn_dim, shape.num_layers)
    try:
        if end.cut:
            raise UnreadableError("far more was printed than the script prints")
        figures = parse_output(end.stdout, shape.tokens, (*sizes, shape.causal))
        if figures.accuracy.passed != (outcome == "passed"):
            raise UnreadableError(f"exit status {end.status}, and the summary contradicts it")
    except UnreadableError as error:
        return "unreadable", str(error), None
    if outcome == "failed":
        accuracy = figures.accuracy
        reason = (
            f"{accuracy.failed:,} of {accuracy.total:,} elements outside the tolerance, the largest error "
            f"{accuracy.max_abs:g}"
        )
    return outcome, reason, figures


def _profile(name: str, kind: str) -> Profile:
    try:
        profile = load_profile(name, kind)
    except ProfileError as error:
        raise EvaluationError(str(error)) from None
    if profile.kind != kind:
        raise EvaluationError(
            f"profile {profile.name} describes a {profile.kind} device, the script runs on {kind}; pass a matching "
            "--profile, or leave it to auto"
        )
    return profile


def _infeasible(shapes: Sequence[Shape], profile: Profile) -> dict[str, str]:
    found = {}
    for shape in shapes:
        classification = classify(shape, profile)
        if classification.regime == INFEASIBLE:
            need, have = classification.peak_bytes / 1e9, classification.memory_bytes / 1e9
            found[shape.id] = f"the baseline needs {need:,.0f} GB, {profile.name} has {have:,.0f} GB"
    return found


def _sha256(candidate: Candidate) -> str:
    """Return the hash of a candidate's file, "" for a family."""
    return hashlib.sha256(candidate.path.read_bytes()).hexdigest() if candidate.path else ""
