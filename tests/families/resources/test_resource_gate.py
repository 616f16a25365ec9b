"""The resource gate: its arithmetic by hand, its record against a real compilation, and that it can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from rooflane.families import load_families
from rooflane.families.resident.config import H200
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.families.resident.spec import choose
from rooflane.families.resources import resource_gate
from rooflane.families.resources.kernel_case import ARCHITECTURES, SM90, CudaCase, TritonCase
from rooflane.families.resources.resource_gate import (
    Resources,
    _blocks,
    code_key,
    compare,
    load_record,
    measure,
    measure_all,
    nvrtc_version,
    shipped_cases,
    write_record,
)
from rooflane.families.runtime import cuda_kernel
from rooflane.shapes import Shape, load_shapes

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

BASE = Resources(registers=128, spill_bytes=0, shared_bytes=32768, blocks_per_sm=4)
# Eight warps hold this kernel's tiles without a spill; four have half the registers between them.
SPILLING = "resident whole d128 h4 f128 s128 b128 | sm_90"
# Compiles in a process of its own, where kernels are not interpreted; prints everything the slow tests compare.
COMPILED = f"""
import dataclasses, json
from rooflane.families.resources.kernel_case import ARCHITECTURES, TritonCase
from rooflane.families.resources.resource_gate import code_key, measure, triton_version
from rooflane.families.resources.resource_gate import compare, load_record, shipped_cases

cases, record, change = shipped_cases(TritonCase), load_record(triton_version()), dataclasses.replace
sample = [f"resident whole d128 h4 f128 s16 b500 | sm_{{architecture.number}}" for architecture in ARCHITECTURES]
case = cases[{SPILLING!r}]
constants = case.constants | {{"STAGES": case.constants["STAGES"] + 1}}
print(json.dumps({{
    "measured": [dataclasses.asdict(measure(cases[name])) for name in sample],
    "sample": [record[name] for name in sample],
    "spilled": compare(record, {{case.key: measure(change(case, num_warps=4))}}),
    "recorded": record[case.key]["code"],
    "same": code_key(case),
    "others": [
        code_key(change(case, num_warps=4)),
        code_key(change(case, num_stages=case.num_stages + 1)),
        code_key(change(case, constants=constants)),
        code_key(change(case, architecture=ARCHITECTURES[0])),
    ],
}}))
"""


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [
        (255, 0, 8, 1),  # 255 registers round up to 8192 a warp: eight warps take all 65536
        (128, 0, 8, 2),
        (32, 0, 4, 16),  # 2048 threads hold sixteen blocks of four warps
        (32, 100 * 1024, 4, 2),  # 228 KiB hold two blocks of 101 KiB
        (32, 228 * 1024, 4, 0),  # a block's own KiB no longer fits
        (16, 0, 1, 32),  # the limit on blocks
    ],
)
def test_blocks_an_sm_by_hand(registers, shared, warps, blocks):
    assert _blocks(registers, shared, warps, SM90) == blocks


def test_only_a_lost_block_or_a_new_spill_is_reported():
    recorded = {"k": vars(BASE)}
    assert compare(recorded, {"k": Resources(120, 0, 16384, 5)}) == []
    assert compare(recorded, {"k": Resources(130, 0, 32768, 4)}) == [], "registers alone cost nothing"
    (lost,) = compare(recorded, {"k": Resources(136, 0, 32768, 3)})
    assert "blocks an SM 4 -> 3" in lost and "registers 128 -> 136" in lost
    (spilled,) = compare(recorded, {"k": Resources(128, 8, 32768, 4)})
    assert "spilled bytes 0 -> 8" in spilled
    assert compare(recorded, {"other": BASE}) == ["other: not in the record"]


def test_records_of_other_compilers_are_kept_and_a_new_one_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(resource_gate, "RECORD", tmp_path / "resources.json")
    with pytest.raises(LookupError, match="--record"):
        load_record("triton 1")
    write_record("triton 1", {"k": BASE})
    write_record("triton 2", {"k": Resources(1, 2, 3, 4), "l": BASE})
    assert load_record("triton 1") == {"k": vars(BASE)}
    assert load_record("triton 2")["k"]["spill_bytes"] == 2
    with pytest.raises(LookupError, match="triton 1, triton 2"):
        load_record("triton 3")
    assert set(json.loads((tmp_path / "resources.json").read_text())) == {"triton 1", "triton 2"}


def test_a_torn_record_an_unknown_flag_and_a_record_out_of_reach_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resource_gate, "RECORD", tmp_path / "resources.json")
    (tmp_path / "resources.json").write_text('{"triton 1": {')
    with pytest.raises(LookupError, match="no JSON .* git checkout"):
        load_record("triton 1")
    for arguments, said in ((["--chnaged"], "unrecognized"), (["--changed", "--record"], "not allowed with")):
        with pytest.raises(SystemExit) as end:
            resource_gate.main(arguments)
        assert end.value.code == 2 and said in capsys.readouterr().err
    monkeypatch.setattr(resource_gate.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit) as end:
        resource_gate.main(["--record"])
    assert end.value.code == 2 and "cannot be written, so nothing is compiled" in capsys.readouterr().err


def test_every_published_shape_launches_a_recorded_kernel(root):
    room = dataclasses.replace(H200, sm90=False)
    shipped = shipped_cases(TritonCase).values()
    launched = [(case.load, case.constants, case.num_warps, case.num_stages) for case in shipped]
    for shape in load_shapes(root / "shapes" / "published.csv"):
        if shape.d_model <= 128 and shape.seq_len <= 128:
            case = choose(shape, room).config.case(SM90)
            assert (case.load, case.constants, case.num_warps, case.num_stages) in launched, shape.id


def test_the_record_holds_every_shipped_kernel_and_no_other():
    """Read from the file alone, so that a new configuration is asked for where no compiler is."""
    record = json.loads(resource_gate.RECORD.read_text())
    triton, cuda = set(shipped_cases(TritonCase)), set(shipped_cases(CudaCase))
    assert len(triton) == 29 * len(ARCHITECTURES) and len(cuda) > 10
    assert {version.split()[0] for version in record} == {"triton", "nvrtc"}
    for version, kernels in record.items():
        assert set(kernels) == (triton if version.startswith("triton") else cuda), version


def test_a_family_names_no_two_kernels_alike():
    for family in load_families().values():
        keys = [case.key for case in family.kernel_cases()]
        assert len(keys) == len(set(keys)), family.name


needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="needs NVRTC: pip install 'rooflane[hopper]'")
SMALL_BATCH = RowBlocks.try_plan(Shape("small", 1, 128, 128, 4, 128, 4, True), H200)
LARGE_BATCH = Warpgroups.try_plan(Shape("large", 64, 128, 128, 4, 128, 4, True), H200)


def compared(case, key):
    return compare(load_record(nvrtc_version()), {key: measure(case)})


@needs_nvrtc
def test_a_cuda_kernel_is_as_recorded():
    case = SMALL_BATCH.case(SM90)
    assert compared(case, case.key) == []


@needs_nvrtc
def test_a_ring_that_does_not_fit_fails(monkeypatch):
    key = LARGE_BATCH.case(SM90).key
    monkeypatch.setattr(Warpgroups, "stages", LARGE_BATCH.stages + 1)
    (line,) = compared(LARGE_BATCH.case(SM90), key)
    assert "blocks an SM 1 -> 0" in line


@needs_nvrtc
def test_registers_for_two_programs_spill_and_fail():
    case = SMALL_BATCH.case(SM90)
    bounds = "__launch_bounds__(THREADS, 1)"
    assert bounds in case.source
    changed = dataclasses.replace(case, source=case.source.replace(bounds, "__launch_bounds__(THREADS, 2)"))
    (line,) = compared(changed, case.key)
    assert "spilled bytes" in line


def compiled_for_real(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with kernels compiled: here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_shipped_kernels_are_as_recorded():
    done = compiled_for_real("-m", "rooflane.families.resources.resource_gate", "--changed")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_record_is_what_the_compiler_makes_and_a_changed_kernel_is_compiled_again():
    """One kernel an architecture is compiled whatever its digest says; one with half its warps spills."""
    done = compiled_for_real("-c", COMPILED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured"] == found["sample"] and len(found["sample"]) == len(ARCHITECTURES)
    assert found["same"] == found["recorded"]
    # Warps, stages, a constant, the architecture: each is part of the digest.
    assert len({found["same"], *found["others"]}) == 5
    (line,) = found["spilled"]
    assert SPILLING in line and "spilled bytes" in line


@needs_nvrtc
def test_a_kernel_whose_digest_stands_in_the_record_is_not_compiled(monkeypatch):
    recorded = load_record(nvrtc_version())
    cases, name = shipped_cases(CudaCase), SMALL_BATCH.case(SM90).key
    asked = {}

    def compile_none(cases):
        asked.update(cases)
        return dict.fromkeys(cases, BASE)

    monkeypatch.setattr(resource_gate, "_in_parallel", compile_none)
    assert measure_all(cases, recorded) == {key: Resources(**values) for key, values in recorded.items()}
    assert not asked
    for stale in ({"code": "another"}, {"code": ""}):
        asked.clear()
        found = measure_all(cases, recorded | {name: recorded[name] | stale})
        assert list(asked) == [name] and found[name] == BASE
    assert set(measure_all(cases)) == set(asked) == set(recorded), "with no record everything is compiled"


def test_the_digest_of_a_cuda_kernel_is_of_its_text_its_launch_and_the_compilers_options(monkeypatch):
    case = LARGE_BATCH.case(SM90)
    digest = code_key(case)
    assert digest == code_key(LARGE_BATCH.case(SM90))
    for change in ({"source": case.source + " "}, {"threads": 256}, {"shared_bytes": case.shared_bytes + 16}):
        assert digest != code_key(dataclasses.replace(case, **change))
    monkeypatch.setattr(cuda_kernel, "OPTIONS", (*cuda_kernel.OPTIONS, "--use_fast_math"))
    assert digest != code_key(case)
