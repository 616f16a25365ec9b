"""What one compiled kernel costs a multiprocessor: registers, spills, shared memory, blocks. Needs no GPU."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import singledispatch
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from rooflane.families.resources.kernel_case import PROGRAM_BYTES, Architecture, CudaCase, KernelCase, TritonCase
from rooflane.families.runtime.runtime_compiler import missing_compiler

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


@singledispatch
def code_key(case: KernelCase) -> str:
    """Return the digest of a kernel's source, constants and options."""
    raise TypeError(f"no compiler takes a {type(case).__name__}")


@code_key.register
def _(case: TritonCase) -> str:
    return _digest(f"{case.architecture.number} {case.num_warps} {case.num_stages} {_source(case).hash()}")


@code_key.register
def _(case: CudaCase) -> str:
    from rooflane.families.runtime.cuda_kernel import OPTIONS

    return _digest(f"{case.architecture.number} {OPTIONS} {case.shared_bytes} {case.threads} {case.source}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(case: TritonCase) -> Any:
    """Return a Triton kernel with its types and constants."""
    from triton.compiler import ASTSource

    function = case.load()
    names = function.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in case.types.items() if kind[0] == "*"}
    return ASTSource(function, signature, constants, aligned)


@singledispatch
def measure(case: KernelCase) -> Resources:
    """Compile a kernel ahead of time and return what it takes.

    Raises `RuntimeError` when the assembler does not report registers, which would otherwise pass for none.
    """
    raise TypeError(f"no compiler takes a {type(case).__name__}")


@measure.register
def _(case: TritonCase) -> Resources:
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
    registers, spills = _assemble(compiled.asm["ptx"], number)
    return _resources(case, registers, spills, compiled.metadata.shared)


@measure.register
def _(case: CudaCase) -> Resources:
    from rooflane.families.runtime.cuda_kernel import compiler_report

    report = compiler_report(case.source, f"sm_{case.architecture.number}a")
    registers, spills = _reported(report, case.architecture.number)
    own = re.search(r"(\d+) bytes smem", report)
    return _resources(case, registers, spills, case.shared_bytes + (int(own[1]) if own else 0))


def _resources(case: KernelCase, registers: int, spills: int, shared: int) -> Resources:
    blocks = _blocks(registers, shared, case.warps, case.architecture)
    return Resources(registers, spills, shared, blocks, code_key(case))


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


def _blocks(registers: int, shared: int, warps: int, architecture: Architecture) -> int:
    """Return the blocks one multiprocessor holds, 0 when not even one fits."""
    warp_registers = -(-registers * 32 // WARP_REGISTER_UNIT) * WARP_REGISTER_UNIT
    by_registers = REGISTERS // (warp_registers * warps)
    by_shared = architecture.shared_bytes // (shared + PROGRAM_BYTES)
    return min(by_registers, by_shared, architecture.threads // (32 * warps), architecture.blocks)
