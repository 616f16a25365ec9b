"""The rungs without a GPU: what they state, what they refuse, and what the compiler makes of them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch

from rooflane.eval.device.ladder import LADDERS, examine, sizes_for
from rooflane.families.ladder import gemm, launch, reduce
from rooflane.families.ladder.launch import RungError, bind, normwise_error, refuse_tensors
from rooflane.families.resources.machine_code import find_disassembler, instructions
from rooflane.families.resources.resource_gate import compare, load_record, measure, nvrtc_version

RUNGS = [*gemm.RUNGS, *reduce.RUNGS]
CPU = torch.device("cpu")
needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="needs NVRTC: pip install 'rooflane[hopper]'")


def named(name: str):
    return next(rung for rung in RUNGS if rung.name == name)


def test_names_are_unique_and_every_idea_stands_at_the_head_of_its_file():
    for rungs in LADDERS.values():
        assert len({rung.name for rung in rungs}) == len(rungs)
    for rung in RUNGS:
        head = rung.source().partition(f'#line 1 "{rung.file}"\n')[2]
        assert head.startswith("// "), rung.file
        assert rung.kernel in head and rung.predicted > 0 and rung.reason


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_rung_states_sizes_that_agree_with_each_other(rung):
    assert rung.threads % 32 == 0 and rung.threads <= 1024
    # The register file holds the blocks that the rung promises.
    assert rung.registers * rung.threads * rung.blocks <= 65536


def test_the_ring_of_the_top_rung_fills_its_shared_memory():
    top = named("async copies")
    (rows, _, depth), constants = top.tile, top.constants
    assert top.shared_bytes == constants["STAGES"] * 2 * depth * (rows + constants["PAD"]) * 4


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("naive", (0, 1, 1), "at least 1"),
        ("warp tiles", (1, 1, 1 << 23), "K must be at most"),
        ("coalesced", (1 << 20, 1 << 20, 1), "more than 2147483647 blocks"),
        ("sum atomics", (2, 8), "sums one row"),
        ("softmax held", (1, 4097), "at most 4096 columns"),
        ("argmax held", (0, 5), "at least 1"),
    ],
)
def test_sizes_that_a_rung_cannot_compute_are_refused(name, sizes, reason):
    assert reason in named(name).refuse(*sizes)


def test_a_rung_may_ask_for_multiples():
    rung = dataclasses.replace(named("naive"), multiples=(1, 8, 16))
    assert rung.refuse(3, 8, 16) is None
    assert rung.refuse(3, 9, 16) == "N must be a multiple of 8, not 9"


@pytest.mark.parametrize(("columns", "blocks"), [(1, 3), (1024, 3), (1025, 5), (2048, 5), (2049, 9), (4096, 9)])
def test_a_row_in_registers_takes_as_few_warps_as_hold_it(columns, blocks):
    """Of nine rows a block of four warps takes four of one warp each, two of two warps, or one."""
    assert named("softmax held").grid(132, 9, columns) == blocks


def test_a_sum_starts_a_block_for_its_elements_or_as_many_as_fit():
    assert named("sum vector loads").grid(132, 1, 4097) == 2
    assert named("sum grid stride").grid(132, 1, 4097) == 132 * 8
    assert named("sum grid stride").scratch_words(132, 1, 4097) == 132 * 8 + 2
    assert named("sum atomics").scratch_words(132, 1, 4097) == 2 and named("softmax held").scratch_words(132, 9, 8) == 0


@pytest.mark.parametrize("rung", gemm.RUNGS, ids=lambda rung: rung.name)
def test_the_grid_covers_a_ragged_output_once(rung):
    rows, columns, _ = rung.tile
    assert rung.tiles(rows, columns) == 1
    assert rung.tiles(rows + 1, 2 * columns + 1) == 6


def test_tensors_that_a_rung_does_not_take_are_refused_by_name():
    rung = named("naive")
    a, b, c = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, 5)
    assert refuse_tensors(rung, [a, b], c) == "its tensors must be on a CUDA device"
    assert refuse_tensors(rung, [a, b, b], c) == "it takes 2 inputs, not 3"
    assert refuse_tensors(rung, [a, b.half()], c) == "it needs float32 [5, 4], not float16 [5, 4]"
    assert refuse_tensors(rung, [a, torch.zeros(5, 3)], c) == "it needs float32 [5, 4], not float32 [5, 3]"
    assert refuse_tensors(rung, [a, b], torch.zeros(5, 3).T) == (
        "its tensors must be contiguous, aligned to 16 bytes and on one device"
    )
    for inputs in ([], [a], [torch.zeros(4), b]):
        assert refuse_tensors(rung, inputs, c) == "its inputs must be matrices, and all of them"
    with pytest.raises(RungError, match="rung naive of the gemm ladder: .* CUDA device"):
        bind(rung, [a, b], c)


def test_a_launch_hands_the_driver_addresses_sizes_and_scratch(monkeypatch):
    """A stand-in for the driver's function reads the parameters as the device would."""
    seen = []

    def driver(function, *sizes):
        *sizes, stream, pointers, _ = sizes
        places = (ctypes.c_void_p * 5).from_address(pointers)
        addresses = [ctypes.c_uint64.from_address(place).value for place in places[:3]]
        numbers = [ctypes.c_int32.from_address(place).value for place in places[3:]]
        seen.append((function, sizes, stream, addresses, numbers))
        return len(seen) - 1

    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **more: made.append(zeros(*size, **more)) or made[-1])
    monkeypatch.setattr(launch, "refuse_tensors", lambda *given: None)
    monkeypatch.setattr(launch, "_load", lambda *given: 77)
    pointer = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer)
    monkeypatch.setattr(launch, "_entry", lambda: kind(driver))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    rung = named("sum grid stride")
    x, out = torch.ones(1, 100), torch.empty(1)
    call = bind(rung, [x], out)
    call()
    (scratch,) = made
    assert scratch.numel() == 3 * rung.blocks + 2
    assert seen == [
        (77, [3 * rung.blocks, 1, 1, rung.threads, 1, 1, 0], 5, [x.data_ptr(), out.data_ptr(), scratch.data_ptr()],
         [1, 100])
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="refused to launch sum_grid_stride with status 1"):
        call()


@pytest.mark.parametrize(
    ("value", "kept"), [(-2, b"\xfe\xff\xff\xff"), (1.0, b"\x00\x00\x80\x3f"), (b"\x01" * 128, b"\x01" * 128)]
)
def test_other_parameters_are_packed_as_the_kernel_reads_them(value, kept):
    assert launch._parameter(value).raw == kept


def test_the_error_is_normwise_and_a_missing_number_does_not_pass():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert normwise_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert normwise_error(torch.tensor([3.0, math.nan]), truth) == math.inf
    assert normwise_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert normwise_error(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_the_truth_of_a_rung_is_what_torch_computes_of_its_inputs(rung):
    sizes = (5, 7, 3) if rung.LADDER == "gemm" else sizes_for(rung, (3, 50))
    drawn = rung.draw(CPU, *sizes)
    truth = rung.truth(drawn)
    assert truth.shape == rung.value(torch.zeros(rung.output_shape(*sizes))).shape
    assert [tuple(one.shape) for one in rung.prepare(drawn)] == rung.input_shapes(*sizes)
    again = rung.draw(CPU, *sizes)
    assert all(torch.equal(one, other) for one, other in zip(drawn, again, strict=True))


def test_the_truths_of_the_reductions_by_their_definitions():
    x = torch.randn(4, 33, dtype=torch.float64)
    assert torch.allclose(named("softmax held").truth([x]), x.exp() / x.exp().sum(1, keepdim=True))
    centred = x - x.mean(1, keepdim=True)
    assert torch.allclose(
        named("layernorm held").truth([x]), centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    )
    assert torch.allclose(named("rmsnorm held").truth([x]), x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt())
    assert named("argmax held").truth([x]).tolist() == [max(range(33), key=row.__getitem__) for row in x.tolist()]
    assert named("sum grid stride").truth([x[:1]]).item() == pytest.approx(math.fsum(x[0].tolist()))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_rung_keeps_its_registers_and_has_the_instructions_that_it_names(rung):
    found = examine(rung)
    assert found.faults == ()
    assert found.note == "" or find_disassembler() is None


@pytest.mark.slow
@needs_nvrtc
def test_a_register_cap_that_costs_occupancy_fails():
    """A third block an SM leaves the register tiles 80 registers a thread: they spill, and the gate says so."""
    rung = named("register tiles")
    capped = dataclasses.replace(rung, blocks=3)
    (line,) = compare(load_record(nvrtc_version()), {rung.case().key: measure(capped.case())})
    assert re.search(r"spilled bytes 0 -> \d+", line)
    assert any("spilled" in fault for fault in examine(capped).faults)


@pytest.mark.slow
@needs_nvrtc
def test_a_lifted_register_cap_loses_a_block_and_fails():
    """The other side of the cliff: of 1,024 threads with more than 32 registers each an SM holds one block, not two."""
    case = named("shared tiles").case()
    bounds = "__launch_bounds__(THREADS, BLOCKS)"
    assert bounds in case.source
    lifted = dataclasses.replace(case, source=case.source.replace(bounds, "__launch_bounds__(THREADS, 1)"))
    (line,) = compare(load_record(nvrtc_version()), {case.key: measure(lifted)})
    assert "blocks an SM 2 -> 1" in line


@pytest.mark.slow
@needs_nvrtc
def test_an_instruction_that_is_not_there_is_a_fault():
    rung = dataclasses.replace(named("naive"), expected=("FFMA", "HGMMA"), registers=8, blocks=32)
    faults = examine(rung).faults
    assert "no HGMMA" in faults or find_disassembler() is None
    assert any(fault.endswith("more than 8") for fault in faults)


def test_code_that_is_none_is_told():
    with pytest.raises(LookupError, match="does not read the code|no nvdisasm"):
        instructions(b"no code")
