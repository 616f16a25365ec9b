"""The kernel resource gate: what every shipped kernel costs a multiprocessor, against a checked-in record. No GPU.

It catches the regression that passes every correctness test: a few registers more, one block less an SM.

python -m rooflane.families.resource_gate            compile, compare, fail on a lost block or a new spill
python -m rooflane.families.resource_gate --record   write the record for these compiler versions

Triton's kernels are compiled for every architecture below, the CUDA C++ ones for theirs where NVRTC is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rooflane.families.resident.config import HOPPER, Room
from rooflane.families.runtime_compiler import missing_compiler
from rooflane.families.shipped import HopperCase, KernelCase, hopper_cases, shipped_cases

RECORD = Path(__file__).parent / "resources.json"
REGISTERS = 65536  # a multiprocessor's, on every architecture below
WARP_REGISTER_UNIT = 256  # registers are handed out to warps in units of this
BLOCK_SHARED_BYTES = 1024  # shared memory the system takes of each block


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor (CUDA programming guide, compute capabilities)."""

    number: int
    shared_bytes: int
    threads: int
    blocks: int


ARCHITECTURES = [
    Architecture(80, 164 * 1024, 2048, 32),
    Architecture(89, 100 * 1024, 1536, 24),
    Architecture(90, 228 * 1024, 2048, 32),
    Architecture(120, 100 * 1024, 1536, 32),
]


HOPPER_ARCHITECTURE = next(architecture for architecture in ARCHITECTURES if architecture.number == 90)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, spilled bytes a thread, shared bytes a block, blocks an SM."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int


def compiler_version() -> str:
    """Return the key of the compiler: Triton's version, whose package carries its own ptxas."""
    import triton

    return f"triton {triton.__version__}"


def nvrtc_version() -> str | None:
    """Return the key of the compiler of CUDA C++, None where it or its bindings are not installed."""
    try:
        version = package_version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return None
    return None if missing_compiler() else f"nvrtc {version}"


def measure(case: KernelCase, architecture: Architecture) -> Resources:
    """Compile a kernel ahead of time and return what it takes.

    Raises `RuntimeError` when the assembler does not report registers, which would otherwise pass for none.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.function.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in case.types.items() if kind[0] == "*"}
    # Kernels without their last stage are kept from the cache that launches read.
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.runtime.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.runtime.add_stages_inspection_hook = _leave_out_assembler
        compiled = triton.compile(
            ASTSource(case.function, signature, constants, aligned),
            target=GPUTarget("cuda", architecture.number, 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    registers, spills = _assemble(compiled.asm["ptx"], architecture.number)
    shared = compiled.metadata.shared
    return Resources(registers, spills, shared, _blocks(registers, shared, case.num_warps, architecture))


def _leave_out_assembler(*arguments: Any) -> tuple[str, str] | None:
    """Stop Triton short of ptxas, which `_assemble` runs for its report: a quarter of the work is saved.

    Triton gives (backend, stages, ...); from 3.7 on it also asks, with nothing, for the change's key and hash.
    """
    if not arguments:
        return "no assembler", "no assembler"
    arguments[1]["cubin"] = lambda source, metadata: b""
    return None


def _assemble(ptx: str, number: int) -> tuple[int, int]:
    """Return registers and spilled bytes a thread, as ptxas reports them."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    blackwell = tools / "ptxas-blackwell"
    tool = blackwell if number >= 100 and blackwell.exists() else tools / "ptxas"
    suffix = "a" if number >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name=sm_{number}{suffix}", str(source), "-o", str(source) + ".cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    return _reported(report, number)


def _reported(report: str, number: int) -> tuple[int, int]:
    """Return registers and spilled bytes a thread from an assembler's report."""
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    if not (registers and spills):
        raise RuntimeError(f"ptxas reported no registers for sm_{number}: {report.strip()[:300]}")
    return int(registers[1]), int(spills[1])


def measure_hopper(case: HopperCase) -> Resources:
    """Compile a CUDA C++ kernel and return what it takes; shared memory is the plan's and the kernel's own arrays."""
    from rooflane.families.cuda_kernel import compiler_report

    report = compiler_report(case.source, f"sm_{HOPPER_ARCHITECTURE.number}a")
    registers, spills = _reported(report, HOPPER_ARCHITECTURE.number)
    own = re.search(r"(\d+) bytes smem", report)
    shared = case.plan.shared_bytes + (int(own[1]) if own else 0)
    return Resources(
        registers, spills, shared, _blocks(registers, shared, case.plan.threads // 32, HOPPER_ARCHITECTURE)
    )


def _blocks(registers: int, shared: int, warps: int, architecture: Architecture) -> int:
    """Return the blocks one multiprocessor holds, 0 when not even one fits."""
    warp_registers = -(-registers * 32 // WARP_REGISTER_UNIT) * WARP_REGISTER_UNIT
    by_registers = REGISTERS // (warp_registers * warps)
    by_shared = architecture.shared_bytes // (shared + BLOCK_SHARED_BYTES)
    return min(by_registers, by_shared, architecture.threads // (32 * warps), architecture.blocks)


def compare(recorded: dict[str, dict[str, int]], measured: dict[str, Resources]) -> list[str]:
    """Return one line for each kernel that lost a block an SM, spills more, or is not in the record."""
    lines = []
    for key, found in measured.items():
        if key not in recorded:
            lines.append(f"{key}: not in the record")
            continue
        before = Resources(**recorded[key])
        worse = []
        if found.blocks_per_sm < before.blocks_per_sm:
            worse.append(f"blocks an SM {before.blocks_per_sm} -> {found.blocks_per_sm}")
        if found.spill_bytes > before.spill_bytes:
            worse.append(f"spilled bytes {before.spill_bytes} -> {found.spill_bytes}")
        if worse:
            worse.append(f"registers {before.registers} -> {found.registers}")
            worse.append(f"shared bytes {before.shared_bytes} -> {found.shared_bytes}")
            lines.append(f"{key}: {', '.join(worse)}")
    return lines


def measure_all(cases: Iterable[str] | None = None) -> dict[str, Resources]:
    """Compile what ships of Triton for every architecture, a core each; `cases` picks kernels by name."""
    jobs = [
        (case.name, index)
        for index, architecture in enumerate(ARCHITECTURES)
        for case in shipped_cases(room_of(architecture))
        if cases is None or case.name in set(cases)
    ]
    # Spawned: the compiler keeps state that does not survive a fork.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return dict(zip(map(_key, jobs), pool.map(_measure_job, jobs), strict=True))


def measure_all_hopper() -> dict[str, Resources]:
    """Compile what ships of CUDA C++, a core each."""
    cases = list(hopper_cases())
    names = [f"{case.name} | sm_{HOPPER_ARCHITECTURE.number}" for case in cases]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return dict(zip(names, pool.map(measure_hopper, cases), strict=True))


def _key(job: tuple[str, int]) -> str:
    return f"{job[0]} | sm_{ARCHITECTURES[job[1]].number}"


def _measure_job(job: tuple[str, int]) -> Resources:
    name, index = job
    (case,) = [case for case in shipped_cases(room_of(ARCHITECTURES[index])) if case.name == name]
    return measure(case, ARCHITECTURES[index])


def room_of(architecture: Architecture) -> Room:
    """Return what a large device of an architecture offers the kernels."""
    hopper = architecture is HOPPER_ARCHITECTURE
    return Room(HOPPER.units, architecture.shared_bytes - BLOCK_SHARED_BYTES, hopper)


def load_record(version: str) -> dict[str, dict[str, int]]:
    """Return the record of a compiler version.

    Raises `LookupError` when that version was never recorded.
    """
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if version not in record:
        raise LookupError(
            f"{RECORD.name} holds no record of {version} (it has {', '.join(record) or 'none'}); look at what it makes "
            "of the kernels and record it with python -m rooflane.families.resource_gate --record"
        )
    return record[version]


def write_record(version: str, measured: dict[str, Resources]) -> None:
    """Write a compiler version's figures into the record, the other versions kept."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[version] = {key: asdict(value) for key, value in measured.items()}
    RECORD.write_text("\n".join(_lines(record)) + "\n")


def _lines(record: dict[str, dict[str, dict[str, int]]]) -> Iterator[str]:
    """Yield the record as JSON with one kernel a line, so that a diff reads as a table."""
    yield "{"
    for version_index, (version, kernels) in enumerate(record.items()):
        yield f" {json.dumps(version)}: {{"
        for index, (key, values) in enumerate(kernels.items()):
            yield f"  {json.dumps(key)}: {json.dumps(values)}{',' if index + 1 < len(kernels) else ''}"
        yield f" }}{',' if version_index + 1 < len(record) else ''}"
    yield "}"


def main() -> int:
    """Record or compare; return the exit status."""
    compilers = {compiler_version(): measure_all}
    nvrtc = nvrtc_version()
    if nvrtc is None:
        print("the CUDA C++ kernels are left out: nvidia-cuda-nvrtc or cuda-bindings is not installed", file=sys.stderr)
    else:
        compilers[nvrtc] = measure_all_hopper
    failed = 0
    for version, measure_them in compilers.items():
        if "--record" in sys.argv[1:]:
            write_record(version, measure_them())
            print(f"{RECORD.name}: recorded {version}")
            continue
        try:
            recorded = load_record(version)
        except LookupError as error:
            print(error, file=sys.stderr)
            failed = 1
            continue
        differences = compare(recorded, measure_them())
        print("\n".join(differences) or f"every shipped kernel is as recorded under {version}")
        failed |= bool(differences)
    return failed


if __name__ == "__main__":
    sys.exit(main())
