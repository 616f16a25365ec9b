"""The kernel resource gate: what every shipped kernel costs a multiprocessor, against a checked-in record. No GPU.

It catches the regression that passes every correctness test: a few registers more, one block less an SM.

python -m rooflane.families.resources.resource_gate            compile, compare, fail on a lost block or a new spill
python -m rooflane.families.resources.resource_gate --changed  the same, but compile only what changed since the record
python -m rooflane.families.resources.resource_gate --record   write the record for these compiler versions

Triton's kernels are compiled for every architecture the record knows, the CUDA C++ ones for theirs where NVRTC is
installed. A compiler of one version makes the same code of the same source: `--changed` takes the record's word for a
kernel whose digest of source, constants and options stands beside its figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rooflane.families.ladder import gemm, reduce
from rooflane.families.registry import load_families
from rooflane.families.resources.kernel_case import PROGRAM_BYTES, Architecture, CudaCase, KernelCase, TritonCase
from rooflane.families.runtime.host import missing_compiler

RECORD = Path(__file__).parent / "resources.json"
# The figures of every kernel, by name and architecture, as they stand in the record.
Recorded = Mapping[str, Mapping[str, int | str]]
REGISTERS = 65536  # a multiprocessor's, on every architecture here
WARP_REGISTER_UNIT = 256  # registers are handed out to warps in units of this


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, spilled bytes a thread, shared bytes a block, blocks an SM.

    `code` is the digest of all that decides the kernel's machine code under one compiler version.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    code: str = ""


def triton_version() -> str:
    """Return the key of the Triton compiler: its version, whose package carries its own ptxas."""
    import triton

    return f"triton {triton.__version__}"


def nvrtc_version() -> str | None:
    """Return the key of the CUDA C++ compiler, None where it or its bindings are not installed."""
    try:
        version = package_version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return None
    return None if missing_compiler() else f"nvrtc {version}"


def code_key(case: KernelCase) -> str:
    """Return the digest of a kernel's source, constants and options."""
    number = case.architecture.number
    if isinstance(case, TritonCase):
        text = f"{number} {case.num_warps} {case.num_stages} {_source(case).hash()}"
    else:
        from rooflane.families.runtime.cuda_kernel import OPTIONS

        text = f"{number} {OPTIONS} {case.shared_bytes} {case.threads} {case.source}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(case: TritonCase) -> Any:
    from triton.compiler import ASTSource

    function = case.load()
    names = function.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in case.types.items() if kind[0] == "*"}
    return ASTSource(function, signature, constants, aligned)


def measure(case: KernelCase) -> Resources:
    """Compile a kernel ahead of time and return what it takes.

    Raises `RuntimeError` when the assembler does not report registers, which would otherwise pass for none.
    """
    registers, spills, shared = _measure_triton(case) if isinstance(case, TritonCase) else _measure_cuda(case)
    return Resources(
        registers, spills, shared, _blocks(registers, shared, case.warps, case.architecture), code_key(case)
    )


def _measure_triton(case: TritonCase) -> tuple[int, int, int]:
    import triton
    from triton.backends.compiler import GPUTarget

    number = case.architecture.number
    # Kernels without their last stage are kept from the cache that launches read.
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.runtime.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.runtime.add_stages_inspection_hook = _leave_out_assembler
        compiled = triton.compile(
            _source(case),
            target=GPUTarget("cuda", number, 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    return *_assemble(compiled.asm["ptx"], number), compiled.metadata.shared


def _measure_cuda(case: CudaCase) -> tuple[int, int, int]:
    from rooflane.families.runtime.cuda_kernel import compiler_report

    report = compiler_report(case.source, f"sm_{case.architecture.number}a")
    own = re.search(r"(\d+) bytes smem", report)
    return *_reported(report, case.architecture.number), case.shared_bytes + (int(own[1]) if own else 0)


def _leave_out_assembler(*arguments: Any) -> tuple[str, str] | None:
    """Stop Triton short of ptxas, which `_assemble` runs for its report: a quarter of the work is saved.

    Triton gives (backend, stages, ...); from 3.7 on it also asks, with nothing, for the change's key and hash.
    """
    if not arguments:
        return "no assembler", "no assembler"
    arguments[1]["cubin"] = lambda source, metadata: b""
    return None


def _assemble(ptx: str, number: int) -> tuple[int, int]:
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
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    if not (registers and spills):
        raise RuntimeError(f"ptxas reported no registers for sm_{number}: {report.strip()[:300]}")
    return int(registers[1]), int(spills[1])


def _blocks(registers: int, shared: int, warps: int, architecture: Architecture) -> int:
    """Return the blocks one multiprocessor holds, 0 when not even one fits."""
    warp_registers = -(-registers * 32 // WARP_REGISTER_UNIT) * WARP_REGISTER_UNIT
    by_registers = REGISTERS // (warp_registers * warps)
    by_shared = architecture.shared_bytes // (shared + PROGRAM_BYTES)
    return min(by_registers, by_shared, architecture.threads // (32 * warps), architecture.blocks)


def compare(recorded: Recorded, measured: dict[str, Resources]) -> list[str]:
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


def shipped_cases(kind: type[KernelCase] = KernelCase) -> dict[str, KernelCase]:
    """Return what every family and the ladders ship of a kind, by name; families may name the same cases."""
    cases = [case for family in load_families().values() for case in family.kernel_cases()]
    cases += [rung.case() for rung in (*gemm.RUNGS, *reduce.RUNGS)]
    return {case.key: case for case in cases if isinstance(case, kind)}


def measure_all(cases: Mapping[str, KernelCase], vouched: Recorded | None = None) -> dict[str, Resources]:
    """Compile the cases, a core each, but for those whose digest stands in the record with their figures."""
    kept = {
        name: Resources(**vouched[name])
        for name, case in cases.items()
        if vouched and name in vouched and vouched[name].get("code") == code_key(case)
    }
    found = kept | _in_parallel({name: case for name, case in cases.items() if name not in kept})
    return {name: found[name] for name in cases}


def _in_parallel(cases: Mapping[str, KernelCase]) -> dict[str, Resources]:
    # Spawned: the compiler keeps state that does not survive a fork.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(measure, cases.values()), strict=True))


def load_record(version: str) -> Recorded:
    """Return the record of a compiler version.

    Raises `LookupError` when that version was never recorded.
    """
    record = _read()
    if version not in record:
        raise LookupError(
            f"{RECORD.name} holds no record of {version} (it has {', '.join(record) or 'none'}); look at what it makes "
            "of the kernels and record it with python -m rooflane.families.resources.resource_gate --record"
        )
    return record[version]


def _read() -> dict[str, Recorded]:
    """Return the whole record; raises `LookupError` when it is torn."""
    try:
        return json.loads(RECORD.read_text()) if RECORD.exists() else {}
    except ValueError as error:
        raise LookupError(f"{RECORD} is no JSON ({error}); put it back with git checkout") from None


def write_record(version: str, measured: dict[str, Resources]) -> None:
    """Write a compiler version's figures into the record, the other versions kept."""
    record = _read()
    record[version] = {key: asdict(value) for key, value in measured.items()}
    RECORD.write_text(_text(record))


def _text(record: Mapping[str, Recorded]) -> str:
    """Return the record as JSON with one kernel a line, so that a diff reads as a table."""
    blocks = []
    for version, kernels in record.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(values)}" for key, values in kernels.items())
        blocks.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rooflane.families.resources.resource_gate", description=__doc__.splitlines()[0]
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--changed", action="store_true", help="compile only what has changed since it was recorded")
    mode.add_argument("--record", action="store_true", help="write the record for these compiler versions")
    options = parser.parse_args(arguments)
    if options.record and not os.access(RECORD if RECORD.exists() else RECORD.parent, os.W_OK):
        parser.error(f"{RECORD} cannot be written, so nothing is compiled; record in a checkout of your own")
    compilers: dict[str, type[KernelCase]] = {triton_version(): TritonCase}
    nvrtc = nvrtc_version()
    if nvrtc is None:
        print("the CUDA C++ kernels are left out: nvidia-cuda-nvrtc or cuda-bindings is not installed", file=sys.stderr)
    else:
        compilers[nvrtc] = CudaCase
    failed = 0
    for version, kind in compilers.items():
        cases = shipped_cases(kind)
        if options.record:
            write_record(version, measure_all(cases))
            print(f"{RECORD.name}: recorded {version}")
            continue
        try:
            recorded = load_record(version)
        except LookupError as error:
            print(error, file=sys.stderr)
            failed = 1
            continue
        differences = compare(recorded, measure_all(cases, recorded if options.changed else None))
        print("\n".join(differences) or f"every shipped kernel is as recorded under {version}")
        failed |= bool(differences)
    return failed


if __name__ == "__main__":
    sys.exit(main())
