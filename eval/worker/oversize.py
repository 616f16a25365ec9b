"""Shapes whose eager forward does not fit: the candidate against the chunked reference, element by element.

A batch element is one sequence; elements are independent, so the reference runs on one at a time and the time of the
whole batch is the sum. Each element is drawn from a seed of its own: the judge holds one, never the whole input.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rooflane.baseline import BaselineTransformer, chunked_reference, config_of, generate_random_case, torch_dtype
from rooflane.eval.check.cases import OutputFacts
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.outputs import SharedBytes, describe_output, output_fault
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.eval.worker import protocol
from rooflane.eval.worker.clock import Clock
from rooflane.eval.worker.subject import Subject, WrongKind
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

# Scratch of the chunked reference: fewer and larger blocks up to here, and what it can always have.
SCRATCH_BYTES = (128 << 20, 8 << 30)
# Values of one element's width alive beside the scratch: keys, values, two hidden states, temporaries.
ELEMENT_COPIES = 8


class BigCall:
    """The candidate's side: one input that fits, one output, handed over element by element."""

    def __init__(self, subject: Subject, clock: Clock) -> None:
        self.subject = subject
        self.clock = clock
        self._out: Tensor | None = None

    def handlers(self) -> protocol.Handlers:
        """Return what this answers, by request."""
        return {
            protocol.CallWhole: self.call_whole,
            protocol.ShipPart: self.ship_part,
            protocol.TimeWhole: self.time_whole,
        }

    def call_whole(self, request: protocol.CallWhole) -> protocol.WholeCalled:
        """Call an arm on the whole shape; return its seconds, its peak memory and the valid tokens."""
        shape, device = self.subject.shape, self.subject.device
        self._out = None
        x, mask = draw_whole(shape, device, request.seed, request.padding)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = perf_counter_ns()
        with torch.inference_mode():
            out = self.subject.arms[request.arm].forward(x, mask)
        self.clock.synchronize()
        seconds = (perf_counter_ns() - before) / 1e9
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        if fault := output_fault(out, x, mask):
            raise WrongKind(fault)
        self._out = out
        return protocol.WholeCalled(seconds, peak, int(mask.sum()))

    def ship_part(self, request: protocol.ShipPart) -> OutputFacts:
        """Write the first rows of one element of the output for the judge."""
        part = self._out[request.element : request.element + 1, : request.rows]
        self.subject.buffer.write(part)
        return describe_output(part)

    def time_whole(self, request: protocol.TimeWhole) -> protocol.WholeTimed:
        """Time one call on new contents; its output is held for the judge."""
        self._out = None
        case = draw_whole(self.subject.shape, self.subject.device, request.seed, request.padding)
        self.clock.synchronize()

        def keep(number: int, out: Tensor) -> None:
            self._out = out

        with torch.inference_mode():
            event_ns, host_ns = self.clock.window(self.subject.arms[request.arm].forward, [case], keep)()
        if fault := output_fault(self._out, *case):
            raise WrongKind(fault)
        return protocol.WholeTimed(event_ns, host_ns, int(case[1].sum()))


class BigJudge:
    """The judge's side: the chunked reference of one element at a time."""

    def __init__(
        self,
        model: BaselineTransformer,
        shape: Shape,
        device: torch.device,
        clock: Clock,
        buffers: Sequence[SharedBytes],
    ) -> None:
        self.model = model
        self.shape = shape
        self.device = device
        self.clock = clock
        self.buffers = buffers

    def compare_element(self, request: protocol.CompareElement) -> protocol.ElementCompared:
        """Gate the first rows of an element of an output; return the reference's nanoseconds too.

        Of a causal stack these rows depend on no later one; of another, `rows` must be the whole sequence.
        """
        rows, output = request.rows, request.output
        shape = (1, rows, self.shape.d_model)
        if output.shape != shape or output.dtype != self.shape.dtype:
            fault = f"the output's element is of shape {output.shape}, {output.dtype}"
            return protocol.ElementCompared(None, 0, fault)
        out = self.buffers[request.buffer].read(shape, torch_dtype(self.shape.dtype), self.device)
        mask = draw_mask(self.shape, self.device, request.seed, request.padding)[[request.element]]
        x = draw_element(self.shape, self.device, request.seed, request.element)[None]
        x = x.masked_fill_(~mask[:, :, None], 0)
        scratch = self._scratch_bytes(x)
        self.clock.synchronize()
        before = perf_counter_ns()
        with torch.inference_mode():
            ref = chunked_reference(self.model, x[:, :rows], mask[:, :rows], budget_bytes=scratch)
        self.clock.synchronize()
        elapsed = perf_counter_ns() - before
        return protocol.ElementCompared(check_gate(out, ref), elapsed)

    def _scratch_bytes(self, x: Tensor) -> int:
        """Return the scratch the chunked reference may use beside what is allocated now."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
        else:
            free = available_memory_bytes()
        element = ELEMENT_COPIES * x.numel() * x.element_size()
        least, most = SCRATCH_BYTES
        return max(least, min(most, (free - element) // 2))


def cap_memory(device: torch.device, cap_bytes: int | None) -> None:
    """Let this process allocate no more than `cap_bytes` of the GPU, on a CPU that much more; None lifts the cap."""
    if device.type != "cuda":
        _cap_addresses(cap_bytes)
        return
    # Cached blocks count against the cap although nothing uses them.
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total) if cap_bytes else 1.0)


def _cap_addresses(more: int | None) -> None:
    """Let an allocation that needs over `more` further bytes fail, where the system would else end some process."""
    try:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = hard if more is None else held + more
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    except (ImportError, OSError, ValueError):  # not Linux, or a stricter limit stands
        return


def draw_whole(shape: Shape, device: torch.device, seed: int, padding: float) -> tuple[Tensor, Tensor]:
    """Draw the one input that fits; the usual generator would hold two or three of them for a moment."""
    mask = draw_mask(shape, device, seed, padding)
    dtype = torch_dtype(shape.dtype)
    x = torch.empty(shape.batch_size, shape.seq_len, shape.d_model, device=device, dtype=dtype)
    for element in range(shape.batch_size):
        x[element].normal_(generator=torch.Generator(device=device).manual_seed(seed + element))
    return x.masked_fill_(~mask[:, :, None], 0), mask


def draw_element(shape: Shape, device: torch.device, seed: int, element: int) -> Tensor:
    """Draw one element `[S, D]` of that input, padding not yet zeroed."""
    x = torch.empty(shape.seq_len, shape.d_model, device=device, dtype=torch_dtype(shape.dtype))
    return x.normal_(generator=torch.Generator(device=device).manual_seed(seed + element))


def draw_mask(shape: Shape, device: torch.device, seed: int, padding: float) -> Tensor:
    """Draw the mask `[B, S]` of that input."""
    narrow = replace(config_of(shape), d_model=1)
    return generate_random_case(narrow, device, torch_dtype(shape.dtype), seed, padding)[1]
