"""The operations of a forward as torch's profiler sees them: whether a candidate is the baseline under another name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.profiler import profile

Forward = Callable[[Tensor, Tensor | None], Tensor]


def operation_signature(forward: Forward, x: Tensor, mask: Tensor | None) -> tuple[tuple[str, str], ...]:
    """Return the name and input shapes of every torch operation of one call, in order.

    A kernel launched without torch's dispatcher leaves nothing here, so a signature tells what a forward does only
    where it equals another's.
    """
    # Without kineto, whose start takes seconds; the names of host operations need none of it.
    with torch.inference_mode(), profile(use_kineto=False, record_shapes=True) as profiled:
        forward(x, mask)
    events = sorted(profiled.function_events, key=lambda event: event.time_range.start)
    return tuple((event.name, str(event.input_shapes)) for event in events if event.name.startswith("aten::"))


def is_baseline(forward: Forward, baseline: Forward, x: Tensor, mask: Tensor | None) -> bool:
    """Tell whether a forward runs the baseline's operations and no others, in the baseline's order.

    Such a candidate cannot be faster than what it is compared with; the report names it as what it is.
    """
    return operation_signature(forward, x, mask) == operation_signature(baseline, x, mask)
