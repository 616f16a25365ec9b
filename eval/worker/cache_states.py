"""The other clocks and the other cache states of one subject's arms, taken beside its timed windows."""

from __future__ import annotations

from typing import Any

import torch

from rooflane.eval.worker import protocol
from rooflane.eval.worker.clock import cache_bytes
from rooflane.eval.worker.windows import Windows

# Inputs that are used in turn must overflow the cache this many times before none is found in it.
ROTATION = 5
ROTATION_CASES_MAX = 256


class CacheStates:
    """Times an arm by every clock once: what they say against each other is for the report."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def states(self, request: protocol.TimeStates) -> protocol.States:
        """Return an arm's nanoseconds by the other clocks and in the other cache states, as many calls as fit."""
        windows, clock, seed = self._windows, self._windows.clock, request.seed
        forward = windows.subject.arms[request.arm].forward
        fit = int(request.budget_s * 1e9 / 5 / max(1, request.call_ns))
        calls = max(1, min(request.calls, fit, windows.capacity()))
        fresh = [windows.draw(seed + number) for number in range(calls)]
        same = [windows.draw(seed + calls)] * calls
        with torch.inference_mode():
            forward(*same[0])
            return protocol.States(
                harness_ns=clock.window(forward, same)()[0],
                device_ns=clock.spans(forward, fresh, request.host_ns),
                idle_ns=clock.idle(forward, fresh),
                cold_ns=clock.cold(forward, fresh),
                rotating_ns=self._rotate(forward, fresh, calls),
            )

    def _rotate(self, forward: Any, cases: list, calls: int) -> list[int]:
        """Time calls over inputs that overflow the L2 five times between two uses; nothing where that is too many."""
        device = self._windows.subject.device
        if device.type != "cuda":
            return []
        size = cases[0][0].numel() * cases[0][0].element_size()
        wanted = -(-ROTATION * cache_bytes(device) // size)
        if wanted > min(ROTATION_CASES_MAX, self._windows.capacity()):
            return []
        x, mask = cases[0]
        ring = [(x.clone(), mask) for _ in range(max(2, wanted))]
        self._windows.clock.window(forward, ring)
        return self._windows.clock.window(forward, (ring * (-(-calls // len(ring))))[:calls])()[0]
