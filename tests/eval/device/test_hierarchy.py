"""The probes of the hierarchy: their walks, their arithmetic and their code without a GPU; possible figures on one."""

from __future__ import annotations

import json
import math
import re
import subprocess

import numpy as np
import pytest
import torch

from rooflane.dispatch import Profile, load_profile
from rooflane.dispatch.profile import Figure
from rooflane.eval.cli import main
from rooflane.eval.commands import device as command
from rooflane.eval.device import hierarchy, probe
from rooflane.eval.device.hierarchy import (
    Reading,
    code_faults,
    examine_runs,
    in_time,
    lay_out,
    measure_hierarchy,
    reckon,
    successors,
    take_reading,
    timing_cost,
    two_modes,
)
from rooflane.families.ladder.hierarchy.probes import CLOCK, GIB, L1, LINE, POLYNOMIAL, PROBES, SCATTER, SMALL, Order
from rooflane.families.ladder.hierarchy.probes import wgmma_rate as predicted_rate
from rooflane.families.resources.machine_code import find_disassembler
from rooflane.families.resources.resource_gate import nvrtc_version
from rooflane.families.runtime.cuda_kernel import compile_cubin
from rooflane.families.runtime.host import missing_compiler

BY_NAME = {probe.name: probe for probe in PROBES}
# What no chip of compute capability 9.0 exceeds: 32 banks of 4 bytes, 128 multiply-adds, 4,096 FLOPs of float16.
PEAKS = {"B/clk/SM": 128, "op/clk/SM": 128, "FLOP/clk/SM": 4096}


def value(name: str, cycles: float = 1.0, nanoseconds: float = 1.0, blocks: int = 132) -> float:
    return reckon(BY_NAME[name], Reading(cycles, nanoseconds, blocks))


def test_every_figure_has_a_name_of_its_own_and_comes_from_a_run_or_the_profile():
    assert len(BY_NAME) == len(PROBES)
    for one in PROBES:
        assert one.predicted > 0 and one.reason
        assert (one.run is None) == bool(one.profile)
        assert not one.profile or hasattr(load_profile("h200"), one.profile)
        assert one.predicted <= PEAKS.get(one.unit, math.inf)
        if one.run:
            head = one.run.source().partition(f'#line 1 "{one.run.file}"\n')[2]
            assert head.startswith("// ") and f"{one.run.kernel}(" in head
            assert not one.mode or one.run.samples


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_walk_visits_every_place_before_it_returns(count: int, shuffled: bool):
    follows, at, seen = successors(count, shuffled), 0, set()
    while at not in seen:
        seen.add(at)
        at = int(follows[at])
    assert at == 0 and len(seen) == count
    if count == 1000:
        assert ((follows - torch.arange(count)) == 1).float().mean() > 0.99 or shuffled
        assert shuffled == bool(((follows - torch.arange(count)).abs() > 1).float().mean() > 0.9)


def test_a_place_in_memory_holds_the_address_of_the_next():
    words = lay_out(Order(64 * LINE, 2 * LINE, shuffled=True))
    start, at, seen = words.data_ptr(), words.data_ptr(), set()
    for _ in range(32):
        assert (at - start) % (2 * LINE) == 0
        seen.add(at)
        at = int(words[(at - start) // 8])
    assert at == start and len(seen) == 32 and int((words != 0).sum()) == 32


def test_a_walk_is_long_enough_to_be_timed_and_no_line_of_memory_is_met_twice():
    for one in PROBES:
        if one.run and isinstance(one.run.data, Order):
            order, places = one.run.data, one.run.data.size // one.run.data.stride
            warm, samples = one.run.arguments
            assert samples == one.run.samples and one.run.repeats >= 512
            if order.size < GIB:
                assert warm == places  # all of it is in the cache
            else:
                assert warm == 0 and one.run.repeats <= places


def test_scattered_bursts_are_each_read_once():
    for bits in (8, 17):
        places = np.arange(1 << bits, dtype=np.uint64) * SCATTER & ((1 << bits) - 1)
        assert len(np.unique(places)) == 1 << bits and (np.diff(places.astype(int)) != 1).mean() > 0.9


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("L1 read", (9, 3, 3, 1)),
        ("L2 read, 16 MiB", (17, 3, 3, 1)),
        ("L2 read, 16 MiB, 32-byte bursts scattered", (19, 1, 1, SCATTER)),
        ("memory read, 32 bytes of each line", (23, 1, 3, 1)),
    ],
)
def test_a_stream_stays_in_what_it_reads(name: str, sizes: tuple[int, ...]):
    """Sizes are powers of two: bursts, chunks of 16 bytes in a burst and from one to the next, the multiplier."""
    run = BY_NAME[name].run
    bursts, burst, stride, _ = run.arguments
    assert run.arguments == sizes
    assert 16 << bursts << burst == run.work and 16 << bursts << stride == run.data_bytes / (1 if run.whole else 144)
    # The kernel counts chunks by 32 bits.
    assert run.repeats << bursts << burst < 1 << 31


def test_values_are_reckoned_from_cycles_nanoseconds_and_work():
    # 128 dependent steps 64 times in 32,768 cycles.
    assert value("multiply-add latency", 32768) == 4.0
    # 1,024 threads, four chains, 64 steps, 128 times: 2^25 operations, 128 a cycle.
    assert value("multiply-add rate", 1 << 18) == 128.0
    # 64 KiB 256 times in 2^17 cycles.
    assert value("L1 read", 1 << 17) == 128.0
    # 32 warps, eight loads, 4 bytes a lane, 512 times.
    assert value("shared read", 1 << 17) == 128.0
    # 1 GiB in 250 us, however many blocks share it; of the lines' 32 bytes a quarter counts.
    assert value("memory read, in order", 1, 250e3) == pytest.approx(GIB / 250e-6 / 1e12)
    assert value("memory read, 32 bytes of each line", 1, 250e3, 7) == pytest.approx(GIB / 4 / 250e-6 / 1e12)
    # A signal goes to and fro 4,096 times.
    assert value("signal to a block of the cluster", 2 * 4096 * 500) == 500.0
    assert value("grid barrier", 1, 512 * 1500) == 1.5
    assert value(CLOCK, 1.98e6, 1e6) == 1.98
    # Four warpgroups of 16 products 64 times, each product of N = 128 takes 64 cycles; two warpgroups of N = 256.
    assert value("wgmma fp16, N = 128", 4 * 16 * 64 * 64) == 4096.0
    assert value("wgmma fp16, N = 256", 2 * 16 * 64 * 128) == 4096.0
    # 16 warps of 16 products of 4,096 FLOPs, 256 times, at half of the peak.
    assert value("mma.sync fp16", 2 * 16 * 16 * 256) == 2048.0


def test_modes_are_the_medians_of_the_two_parts_less_the_cost_of_timing():
    samples = (210, 215, 220, 222, 230, 430, 440, 900)
    assert two_modes(samples[:7]) == (220.0, 430.0)
    # A single slow step of a thousand does not move the upper mode.
    assert two_modes([200] * 600 + [260] * 400) == (200.0, 260.0)
    assert two_modes([7, 7]) == (7.0, 7.0)
    near, far = BY_NAME["L2 latency, 40 MiB, near"], BY_NAME["L2 latency, 40 MiB, far"]
    reading = Reading(1, 1, 1, samples[:7])
    assert (reckon(near, reading, 20.0), reckon(far, reading, 20.0)) == (200.0, 410.0)
    assert timing_cost(Reading(L1.repeats * 40, 1, 1, (58, 60, 90))) == 20.0


def test_a_reading_spans_the_blocks_that_ran():
    # Cycles and nanoseconds before, then behind; the second block did not run, the third has another counter.
    times = [100, 5000, 1100, 5600, 0, 0, 0, 0, 9_000, 4900, 11_000, 5500, 31, 32]
    assert take_reading(times, 3, "chase") == Reading(1500, 700, 2, (31, 32))
    with pytest.raises(RuntimeError, match="no block of the kernel chase timed itself"):
        take_reading([0] * 8, 2, "chase")


def test_a_figure_of_the_clock_is_told_in_time():
    assert in_time(40, "cycles", 132, 2.0) == "20.0 ns"
    assert in_time(100, "B/clk/SM", 100, 2.0) == "20.0 TB/s"
    assert in_time(16, "op/clk/SM", 132, 1.98) == "4,182 Gop/s"
    assert in_time(4096, "FLOP/clk/SM", 132, 1.98) == "1,071 TFLOP/s"
    assert in_time(4.3, "TB/s", 132, 1.98) == "-"


def test_narrow_products_are_bound_by_the_reads_of_their_operands():
    """Of N = 8: 16,384 FLOPs, 4 cycles of the cores; 72 rows of 32 bytes, 18 cycles of shared memory."""
    assert predicted_rate(8) == pytest.approx(16384 / 18)
    assert predicted_rate(64) == predicted_rate(256) == 4096


def test_the_polynomial_is_two_to_the_power_as_the_kernel_evaluates_it():
    """In float32 as in issue.cu, but for the rounding of fused multiply-adds."""
    c0, c1, c2, c3 = (np.float32(POLYNOMIAL[name].rstrip("f")) for name in ("C0", "C1", "C2", "C3"))
    x, magic = np.linspace(0, 1, 10_001, dtype=np.float32), np.float32(12582912)
    shifted = magic - x
    left = magic - shifted - x
    assert np.abs(left).max() <= 0.5
    part = ((c3 * left + c2) * left + c1) * left + c0
    found = (part.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(np.float32)
    assert np.abs(found / np.exp2(-x.astype(np.float64)) - 1).max() < 7.6e-5


def test_what_the_code_lacks_is_told():
    assert code_faults(L1, ["LDG.E.64", "BRA"]) == []
    assert code_faults(SMALL, ["LDG.E.64", "STL.64"]) == ["no LDG.E.64.STRONG.GPU", "STL in the code"]


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_version() is None or find_disassembler() is None, reason="needs NVRTC and nvdisasm")
def test_every_kernel_compiles_to_the_instructions_that_it_measures():
    assert examine_runs() == ([], "")


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_version() is None or find_disassembler() is None, reason="needs NVRTC and nvdisasm")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("multiply-add rate", 256), ("exp2 rate", 256), ("shared read", 8), ("shared read, 16 bytes a lane", 8),
        ("other block's shared read", 8), ("other block's shared write", 8), ("L1 read", 8), ("L2 read, 16 MiB", 8),
        ("L1 latency", 16), ("wgmma fp16, N = 8", 16), ("mma.sync fp16", 16),
    ],
)  # fmt: skip
def test_what_is_timed_stays_in_its_loop(name: str, count: int, tmp_path):
    """The compiler takes a read of one address out of a loop: the rate would then be that of an empty loop."""
    run = BY_NAME[name].run
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compile_cubin(run.source(), "sm_90a"))
    listing = subprocess.run([find_disassembler(), "-c", path], capture_output=True, text=True, check=True).stdout
    lines = listing.partition(f"\n.text.{run.kernel}:")[2].partition("\n.text.")[0].splitlines()
    labels = {line.rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L_")}
    loops = [
        lines[labels[target[1]] : number]
        for number, line in enumerate(lines)
        if (target := re.search(r"BRA `\((\.L_\w+)\)", line)) and labels.get(target[1], number) < number
    ]
    assert count in [sum(f" {run.expected[0]}" in line for line in loop) for loop in loops]


def test_without_nvrtc_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(hierarchy, "nvrtc_version", lambda: None)
    faults, note = examine_runs()
    assert faults == [] and "pip install 'rooflane[hopper]'" in note


def measured(profile: Profile) -> Profile:
    figures = {one.name: Figure(value=one.predicted, unit=one.unit, mark="measured", source="q") for one in PROBES}
    return profile.model_copy(update={"hierarchy": figures})


def test_figures_are_kept_with_the_profile(tmp_path):
    profile = measured(load_profile("h200"))
    profile.save(tmp_path / "mine.toml")
    again = load_profile(tmp_path / "mine.toml")
    assert again == profile and again.hierarchy["L1 latency"].value == 40
    assert load_profile("rtx5090").hierarchy == {} and "hierarchy" not in again.figures()
    # The shipped profile has every figure, as it was measured.
    assert load_profile("h200").hierarchy.keys() == {one.name for one in PROBES}


def probe_hierarchy(capsys, *more: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["probe", "--hierarchy", *more])
    out, err = capsys.readouterr()
    return end.value.code, out, " ".join(err.split())


def test_without_a_gpu_the_kernels_are_examined_and_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(probe, "measure_profile", lambda kind, name: load_profile("cpu"))
    monkeypatch.setattr(hierarchy, "examine_runs", lambda: ([], ""))
    status, out, err = probe_hierarchy(capsys, "--device", "cpu")
    assert status == 0 and "not measured: the device is a CPU; their machine code has the expected" in err
    assert "as predicted for an H200" in out and "4.00 cycles" in out and "on the device" not in out
    monkeypatch.setattr(hierarchy, "examine_runs", lambda: (["L1 read: no LDG"], ""))
    status, out, err = probe_hierarchy(capsys, "--device", "cpu", "--json")
    assert status == 20 and "L1 read: no LDG" in err and json.loads(out)["hierarchy"] == {}


def test_measured_figures_are_printed_and_in_the_json(capsys, monkeypatch):
    from rooflane.eval.record import environment

    monkeypatch.setattr(environment, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "")
    monkeypatch.setattr(probe, "measure_profile", lambda kind, name: load_profile("h200"))
    monkeypatch.setattr(hierarchy, "measure_hierarchy", measured)
    status, out, _ = probe_hierarchy(capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("L1 latency"))
    assert status == 0 and line.split()[-6:] == ["40.0", "cycles", "40.0", "cycles", "20.2", "ns"]
    status, out, _ = probe_hierarchy(capsys, "--json")
    assert json.loads(out)["hierarchy"]["grid barrier"]["unit"] == "us"


@pytest.mark.gpu
@pytest.mark.slow
def test_every_figure_is_possible():
    """Bounds are of the hardware, or a factor of four round what was predicted: a slip of a unit or a count is more."""
    if torch.cuda.get_device_capability() != (9, 0) or missing_compiler():
        pytest.skip("the kernels are for compute capability 9.0 and need NVRTC")
    found = {name: figure.value for name, figure in measure_hierarchy(load_profile("h200")).hierarchy.items()}
    for one in PROBES:
        assert one.predicted / 4 <= found[one.name] <= one.predicted * 4, one.name
        # A counter's reading and the loop's first and last loads are good to a percent.
        assert found[one.name] <= 1.01 * PEAKS.get(one.unit, math.inf), one.name
    assert found[CLOCK] <= 2.0  # the highest clock of an H100 or H200 is 1.98 GHz
    assert found["exp2 rate"] <= 16.2  # four units of four lanes an SM
    assert found["memory read, in order"] <= 4.9  # the datasheet's rate is 4.8 TB/s
    assert found["shared latency"] < found["shared latency, 2-way conflict"] + 1
    # 31 more passes of the banks take a cycle each at least.
    assert found["shared latency, 32-way conflict"] >= found["shared latency"] + 30
    assert found["shared read, 2-way conflict"] <= 64.6 and found["shared read, 32-way conflict"] <= 4.1
    # Each level is further away than the one before it.
    levels = ["shared latency", "L1 latency", "other block's shared latency", "memory latency, every line in turn"]
    assert [found[name] for name in levels] == sorted(found[name] for name in levels)
    assert found["L1 latency"] < found["L2 latency, 4 MiB, near"] <= found["L2 latency, 4 MiB, far"]
    assert found["L2 latency, 4 MiB"] < found["memory latency, every line in turn"]
    assert found["L2 read, 16 MiB"] > found["memory read, in order"]
    # A relaxed barrier does less; a larger block or cluster waits for more.
    assert found["cluster barrier, 2 blocks, relaxed"] < found["cluster barrier, 2 blocks"]
    assert found["block barrier, 128 threads"] < found["block barrier, 1,024 threads"]
    assert found["wgmma fp16, N = 8"] < found["wgmma fp16, N = 256"] > found["mma.sync fp16"]
