"""One run of the organiser's script in this process, our model in the contract's place."""

from __future__ import annotations

import inspect
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooflane.eval.record.environment import describe_environment
from rooflane.eval.submit.launch import SubmitJob
from rooflane.eval.submit.organiser import run_with_class
from rooflane.eval.worker.candidates import load_attribute, parse_candidate
from rooflane.eval.worker.process import add_working_folder, end_with_parent
from rooflane.families import get_family
from rooflane.shapes import Shape


def main(facts: int) -> None:
    """Read the job from standard input and run it; the script's exit ends this process."""
    os.set_inheritable(facts, False)
    add_working_folder()
    job = SubmitJob.model_validate_json(sys.stdin.buffer.raw.readline())
    end_with_parent(sys.stdin.fileno())
    if job.memory_bytes is not None:
        limit_memory(job.memory_bytes)
    try:
        run_with_class(Path(job.organiser), job.arguments, lambda module: class_to_place(job), job.sha256)
    finally:
        # Behind the run, so that nothing of it is disturbed.
        sys.stdout.flush()
        if torch := sys.modules.get("torch"):
            # A device that no longer responds must not hide the exception that broke it.
            with suppress(Exception):
                device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
                os.write(facts, json.dumps(describe_environment(device)).encode())


def class_to_place(job: SubmitJob) -> Any:
    """Return the class that takes the place: the candidate's own, or one that builds it at the first call."""
    candidate = parse_candidate(job.candidate)
    if candidate.path:
        target = load_attribute(candidate)
        if inspect.isclass(target):
            return target
        options: dict[str, Any] = {}
    else:
        target = get_family(job.plan["family"]).build
        options = job.plan["options"]
    from rooflane.eval.submit.placed import PlacedTransformer

    wanted = Shape(**job.shape)

    class UserOptimizedTransformer(PlacedTransformer):
        """The candidate under the contract's name."""

        def choose(self, plain: Any, shape: Shape, device: Any) -> Any:
            if (shape.batch_size, shape.seq_len) != (wanted.batch_size, wanted.seq_len):
                return None
            forward = target(plain, replace(wanted, dtype=shape.dtype), device, **options)
            if not callable(forward):
                raise TypeError(f"{job.candidate}: build() returned {type(forward).__name__}, not a forward")
            return forward

    return UserOptimizedTransformer


def limit_memory(limit: int) -> None:
    """Let an allocation past `limit` bytes fail in this process, where the system would else end another one."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, ValueError, OSError):  # not a POSIX system, or a stricter limit stands
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
