"""Read the instructions of compiled CUDA code with a disassembler: Triton's package carries one, as does CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

# A line of the listing: the address, perhaps a predicate, the instruction's name.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def find_disassembler() -> str | None:
    """Return the path of nvdisasm: that on the path, else that of Triton's package; None where neither is there."""
    found = shutil.which("nvdisasm")
    spec = find_spec("triton")
    if found or spec is None or not spec.origin:
        return found
    shipped = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(shipped) if shipped.exists() else None


def instructions(cubin: bytes) -> list[str]:
    """Return the name of each instruction in the order of the code, its modifiers behind points.

    Raises `LookupError` where no disassembler is installed, or where it does not read the code.
    """
    tool = find_disassembler()
    if tool is None:
        raise LookupError("no nvdisasm is installed; it comes with Triton on Linux and with the CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    found = INSTRUCTION.findall(done.stdout)
    if done.returncode or not found:
        raise LookupError(f"{tool} does not read the code: {done.stderr.strip()[:200] or 'it lists no instruction'}")
    return found
