"""Shapes whose eager forward does not fit: the candidate against the chunked reference, element by element.

A batch element is one sequence; elements are independent, so the reference runs on one at a time and the time of the
whole batch is the sum. Each element is drawn from a seed of its own: the judge holds one, never the whole input.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rooflane.baseline import BaselineTransformer, chunked_reference, config_of, generate_random_case, torch_dtype
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.outputs import SharedBytes, describe_output, output_fault
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.eval.worker.clock import Clock
from rooflane.eval.worker.subject import Subject, WrongKind, failure
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

    def big_call(self, arm: str, seed: int, padding: float) -> dict[str, Any]:
        """Call an arm on the whole shape; return its seconds, its peak memory and the valid tokens."""
        shape, device = self.subject.shape, self.subject.device
        self._out = None
        try:
            x, mask = draw_whole(shape, device, seed, padding)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = perf_counter_ns()
            with torch.inference_mode():
                out = self.subject.arms[arm].forward(x, mask)
            self.clock.synchronize()
            seconds = (perf_counter_ns() - before) / 1e9
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            if fault := output_fault(out, x, mask):
                raise WrongKind(fault)
            self._out = out
            return {"seconds": seconds, "peak_bytes": peak, "valid_tokens": int(mask.sum())}
        except Exception as error:
            return failure(error)

    def big_ship(self, element: int, rows: int) -> dict[str, Any]:
        """Write the first rows of one element of the output for the judge."""
        try:
            part = self._out[element : element + 1, :rows]
            self.subject.buffer.write(part)
            return {"output": describe_output(part)}
        except Exception as error:
            return failure(error)

    def big_time(self, arm: str, seed: int, padding: float) -> dict[str, Any]:
        """Time one call on new contents; its output is held for the judge."""
        self._out = None
        try:
            case = draw_whole(self.subject.shape, self.subject.device, seed, padding)
            self.clock.synchronize()

            def keep(number: int, out: Tensor) -> None:
                self._out = out

            with torch.inference_mode():
                event_ns, host_ns = self.clock.window(self.subject.arms[arm].forward, [case], keep)()
            if fault := output_fault(self._out, *case):
                raise WrongKind(fault)
            return {"event_ns": event_ns, "host_ns": host_ns, "valid_tokens": int(case[1].sum())}
        except Exception as error:
            return failure(error)


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

    def big_compare(
        self, seed: int, padding: float, element: int, rows: int, output: dict[str, Any], buffer: int
    ) -> dict[str, Any]:
        """Gate the first rows of an element of an output; return the reference's nanoseconds too.

        Of a causal stack these rows depend on no later one; of another, `rows` must be the whole sequence.
        """
        shape = (1, rows, self.shape.d_model)
        if tuple(output["shape"]) != shape or output["dtype"] != self.shape.dtype:
            return {"fault": f"the output's element is of shape {tuple(output['shape'])}, {output['dtype']}"}
        out = self.buffers[buffer].read(shape, torch_dtype(self.shape.dtype), self.device)
        mask = draw_mask(self.shape, self.device, seed, padding)[element : element + 1]
        x = draw_element(self.shape, self.device, seed, element)[None].masked_fill_(~mask[:, :, None], 0)
        scratch = self._scratch_bytes(x)
        self.clock.synchronize()
        before = perf_counter_ns()
        with torch.inference_mode():
            ref = chunked_reference(self.model, x[:, :rows], mask[:, :rows], budget_bytes=scratch)
        self.clock.synchronize()
        elapsed = perf_counter_ns() - before
        return {"gate": check_gate(out, ref).model_dump(mode="json"), "reference_ns": elapsed}

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
