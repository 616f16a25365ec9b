"""The resource gate: its arithmetic by hand, its record against a real compilation, and that it can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from rooflane.families.resident.hopper.plan import WarpgroupPlan, rowblock_plan, warpgroup_plan
from rooflane.families.resources import resource_gate
from rooflane.families.resources.kernel_resources import (
    ARCHITECTURES,
    Resources,
    _blocks,
    code_key,
    measure_hopper,
    nvrtc_version,
)
from rooflane.families.resources.resource_gate import compare, load_record, measure_all_hopper, room_of, write_record
from rooflane.families.resources.shipped import hopper_case, hopper_cases, resident_case, shipped_cases
from rooflane.families.runtime import cuda_kernel
from rooflane.shapes import Shape, load_shapes

HOPPER = next(architecture for architecture in ARCHITECTURES if architecture.number == 90)
BASE = Resources(registers=128, spill_bytes=0, shared_bytes=32768, blocks_per_sm=4)
# Eight warps hold this kernel's tiles without a spill; four have half the registers between them.
SPILLING = (128, 4, 128, 128, 128, True)
CHANGED = f"""
import dataclasses, json
from rooflane.families.resources.kernel_resources import ARCHITECTURES, compiler_version, measure
from rooflane.families.resources.resource_gate import compare, load_record
from rooflane.families.resources.shipped import resident_case

case = resident_case(*{SPILLING})
hopper = next(architecture for architecture in ARCHITECTURES if architecture.number == 90)
found = measure(dataclasses.replace(case, num_warps=4), hopper)
print(json.dumps(compare(load_record(compiler_version()), {{f"{{case.name}} | sm_90": found}})))
"""
SAMPLE = """
import dataclasses, json
from rooflane.families.resources.kernel_resources import ARCHITECTURES, compiler_version, measure
from rooflane.families.resources.resource_gate import load_record, room_of
from rooflane.families.resources.shipped import resident_case

record, found, recorded = load_record(compiler_version()), {}, {}
for architecture in ARCHITECTURES:
    case = resident_case(128, 4, 128, 16, 500, False, room_of(architecture))
    name = f"{case.name} | sm_{architecture.number}"
    found[name], recorded[name] = dataclasses.asdict(measure(case, architecture)), record[name]
print(json.dumps([found, recorded]))
"""
DIGESTS = f"""
import dataclasses, json
from rooflane.families.resources.kernel_resources import ARCHITECTURES, code_key, compiler_version
from rooflane.families.resources.resource_gate import load_record
from rooflane.families.resources.shipped import resident_case

case = resident_case(*{SPILLING})
ampere, _, hopper, _ = ARCHITECTURES
change = dataclasses.replace
constants = case.constants | {{"STAGES": case.constants["STAGES"] + 1}}
found = {{
    "recorded": load_record(compiler_version())[f"{{case.name}} | sm_90"]["code"],
    "same": code_key(case, hopper),
    "warps": code_key(change(case, num_warps=4), hopper),
    "stages": code_key(change(case, num_stages=case.num_stages + 1), hopper),
    "constant": code_key(change(case, constants=constants), hopper),
    "architecture": code_key(case, ampere),
}}
print(json.dumps(found))
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
    assert _blocks(registers, shared, warps, HOPPER) == blocks


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


def launched(case):
    return case.function.__name__, str(case.constants), case.num_warps, case.num_stages


def test_every_published_shape_launches_a_recorded_kernel(root):
    shipped = {launched(case) for case in shipped_cases()}
    for shape in load_shapes(root / "shapes" / "published.csv"):
        if shape.d_model <= 128 and shape.seq_len <= 128:
            sizes = (shape.d_model, shape.num_heads, shape.ffn_dim, shape.seq_len, shape.batch_size)
            assert launched(resident_case(*sizes, shape.causal)) in shipped, shape.id


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: f"sm_{architecture.number}")
def test_names_are_unique(architecture):
    names = [case.name for case in shipped_cases(room_of(architecture))]
    assert len(names) == len(set(names))


def test_every_shipped_shape_launches_a_recorded_hopper_kernel():
    """Read from the file alone, so that a new configuration is asked for where no compiler is."""
    record = json.loads(resource_gate.RECORD.read_text())
    names = {f"{case.name} | sm_90" for case in hopper_cases()}
    assert len(names) == len(list(hopper_cases())) > 10, "names are unique"
    versions = [version for version in record if version.startswith("nvrtc")]
    assert versions
    for version in versions:
        assert set(record[version]) == names, version


needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="needs NVRTC: pip install 'rooflane[hopper]'")
SMALL_BATCH = rowblock_plan(Shape("small", 1, 128, 128, 4, 128, 4, True), 132)
LARGE_BATCH = warpgroup_plan(Shape("large", 64, 128, 128, 4, 128, 4, True), 132)


def compared(case, name):
    return compare(load_record(nvrtc_version()), {f"{name} | sm_90": measure_hopper(case)})


@needs_nvrtc
def test_a_hopper_kernel_is_as_recorded():
    case = hopper_case(SMALL_BATCH)
    assert compared(case, case.name) == []


@needs_nvrtc
def test_a_ring_that_does_not_fit_fails(monkeypatch):
    name = hopper_case(LARGE_BATCH).name
    monkeypatch.setattr(WarpgroupPlan, "stages", LARGE_BATCH.stages + 1)
    (line,) = compared(hopper_case(LARGE_BATCH), name)
    assert "blocks an SM 1 -> 0" in line


@needs_nvrtc
def test_registers_for_two_programs_spill_and_fail():
    case = hopper_case(SMALL_BATCH)
    bounds = "__launch_bounds__(THREADS, 1)"
    assert bounds in case.source
    changed = dataclasses.replace(case, source=case.source.replace(bounds, "__launch_bounds__(THREADS, 2)"))
    (line,) = compared(changed, case.name)
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
def test_the_record_holds_what_the_compiler_makes():
    """One kernel an architecture, compiled whatever its digest says."""
    done = compiled_for_real("-c", SAMPLE)
    assert done.returncode == 0, done.stderr
    found, recorded = json.loads(done.stdout)
    assert len(found) == len(ARCHITECTURES) and found == recorded


@pytest.mark.slow
@pytest.mark.parametrize("change", ["warps", "stages", "constant", "architecture"])
def test_a_changed_kernel_is_compiled_again(change):
    done = compiled_for_real("-c", DIGESTS)
    assert done.returncode == 0, done.stderr
    digests = json.loads(done.stdout)
    assert digests["same"] == digests["recorded"] != digests[change]


@needs_nvrtc
def test_a_kernel_whose_digest_stands_in_the_record_is_not_compiled(monkeypatch):
    recorded = load_record(nvrtc_version())
    name = f"{hopper_case(SMALL_BATCH).name} | sm_90"
    asked = {}

    def compile_none(measure_one, jobs):
        asked.update(jobs)
        return dict.fromkeys(jobs, BASE)

    monkeypatch.setattr(resource_gate, "_in_parallel", compile_none)
    assert measure_all_hopper(recorded) == {key: Resources(**values) for key, values in recorded.items()}
    assert not asked
    for stale in ({"code": "another"}, {"code": ""}):
        found = measure_all_hopper(recorded | {name: recorded[name] | stale})
        assert list(asked) == [name] and found[name] == BASE
    assert set(measure_all_hopper()) == set(asked) == set(recorded), "with no record everything is compiled"


def test_the_digest_of_a_hopper_kernel_is_of_its_text_its_launch_and_the_compilers_options(monkeypatch):
    case = hopper_case(LARGE_BATCH)
    digest = code_key(case, HOPPER)
    assert digest == code_key(hopper_case(LARGE_BATCH), HOPPER)
    assert digest != code_key(dataclasses.replace(case, source=case.source + " "), HOPPER)
    assert digest != code_key(dataclasses.replace(case, plan=SMALL_BATCH), HOPPER)
    monkeypatch.setattr(cuda_kernel, "OPTIONS", (*cuda_kernel.OPTIONS, "--use_fast_math"))
    assert digest != code_key(case, HOPPER)


@pytest.mark.slow
def test_a_configuration_that_spills_fails():
    done = compiled_for_real("-c", CHANGED)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)
    assert f"{resident_case(*SPILLING).name} | sm_90" in line and "spilled bytes" in line
