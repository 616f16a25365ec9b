"""The organiser's own protocol in a candidate's process: eager and the candidate in turn, no look at any output.

What stands between these calls is what stands between the script's, so its figures have something to be held against:
one fixed input, both models in one process, no pause between the rounds (`rooflane submit --beside`). The evaluator's
own figures come from its windows, where every output leaves a fingerprint.
"""

from __future__ import annotations

from typing import Any

import torch

from rooflane.eval.worker.subject import failure
from rooflane.eval.worker.windows import Windows


class ScriptRounds:
    """Runs the script's rounds over one subject's arms."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def script_rounds(self, arm: str, seed: int, warmups: int, repeats: int, rounds: int) -> dict[str, Any]:
        """Return the event nanoseconds `[round][call]` of an arm and of eager, which may not fit the memory beside it.

        Even rounds run eager first, odd ones the arm.
        """
        windows, clock = self._windows, self._windows.clock
        subject = windows.subject
        sides = {"bare_eager_ns": subject.template, "bare_ns": subject.arms[arm].forward}
        times: dict[str, list[list[int]]] = {name: [] for name in sides}
        try:
            case = windows.draw(seed)
            windows.pace_ns()
            with torch.inference_mode():
                for forward in sides.values():
                    for _ in range(warmups):
                        forward(*case)
                    clock.synchronize()
                for number in range(rounds):
                    for name in sides if number % 2 == 0 else reversed(sides):
                        times[name].append(clock.window(sides[name], [case] * repeats)()[0])
            return times
        except Exception as error:
            return failure(error)
        finally:
            # The judge's process has no use of what this one keeps for itself, and may need the room.
            if subject.device.type == "cuda":
                torch.cuda.empty_cache()
