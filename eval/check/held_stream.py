"""A call on a held stream: the device starts on it only when the host has queued the call and the read of its output.

Timed calls of a launch-bound forward end on the device before the next launch, so work on a stream that the caller's
stream does not wait for is complete by the time its output is read. Held back, that work and the read start together,
and the read comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The first hold, and the factor and number of longer ones while the host is slower than the hold: 4 ms to 1 s.
HOLD_NS = 4_000_000
LONGER = 4
ATTEMPTS = 5
# clock64 ticks at most 2 per ns on the GPUs we know.
TICKS_PER_NS = 2

# Bound here, before any candidate is imported.
_Event = torch.cuda.Event
_record = torch.cuda.Event.record
_query = torch.cuda.Event.query
_sleep = torch.cuda._sleep
_synchronize = torch.cuda.synchronize
_copy = torch.Tensor.copy_
_clone = torch.Tensor.clone
_zero = torch.Tensor.zero_


def call_held(
    forward: Callable[..., Any], draw: Callable[[int], tuple[Any, ...]], read: Callable[[Any], object]
) -> tuple[int, Any]:
    """Call a forward on the held current stream; return the number of the input it held for, and the output.

    `draw(number)` returns the inputs of an attempt. `read(out)` queues the read of the output on the current stream.
    The first tensor among the inputs gets its contents on the stream, behind the hold. Work that does not wait for
    the stream reads zeros. An attempt whose hold ends before the read is queued shows nothing. The next one holds
    longer and draws another input, because memory may still contain the answer for this one. A forward that waits for
    the device ends every hold early: then the last attempt counts.
    """
    for attempt in range(ATTEMPTS):
        inputs = draw(attempt)
        x = next((given for given in inputs if isinstance(given, Tensor)), torch.empty(0))
        contents, released = _clone(x), _Event()
        _zero(x)
        _sleep(HOLD_NS * LONGER**attempt * TICKS_PER_NS)
        _record(released)
        _copy(x, contents)
        out = forward(*inputs)
        read(out)
        held = not _query(released)
        _synchronize()
        if held:
            break
    return attempt, out
