"""Where a run happens: device, driver, versions, commit, clocks. No host name, no user, no path."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rooflane.eval.exit_codes import EvaluationError

ROOT = Path(__file__).resolve().parents[2]
COMMIT_VARIABLE = "ROOFLANE_COMMIT"


def resolve_device(name: str) -> str:
    """Return "cpu" or "cuda" for a device request.

    Raises `EvaluationError` for CUDA without a usable GPU, for `cuda:N` (events would sit on device 0), and for
    anything else.
    """
    if name == "cpu":
        return name
    if name not in ("auto", "cuda"):
        raise EvaluationError(
            f"device {name!r} is not one of auto, cpu, cuda; to use another GPU than the first, set "
            "CUDA_VISIBLE_DEVICES and ask for cuda"
        )
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "auto":
        return "cpu"
    built = "was built without CUDA" if torch.version.cuda is None else "finds no usable GPU or driver"
    raise EvaluationError(
        f"device cuda was asked for, but torch {torch.__version__} {built}; run `rooflane doctor` to see what is "
        "missing, or use --device cpu"
    )


def package_version(name: str) -> str | None:
    """Return a distribution's version, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def git_commit(root: Path = ROOT) -> str | None:
    """Return the checkout's commit, with "-dirty" when files differ from it; None outside a checkout.

    `ROOFLANE_COMMIT` goes first, for a copy without its history, as in a container.
    """
    if stated := os.environ.get(COMMIT_VARIABLE):
        return stated

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed copy may lie inside some other repository's folder; only our own root counts.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe_environment(device: str) -> dict[str, Any]:
    """Return the device, driver and versions a record carries; imports torch."""
    import torch

    facts: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "rooflane": package_version("rooflane"),
        "commit": git_commit(),
        "threads": torch.get_num_threads(),
        "cpu": _cpu_model(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
        }
    return facts


def gpu_uuid() -> str | None:
    """Return the name NVML knows torch's first GPU by; it ignores CUDA_VISIBLE_DEVICES, so an index may be another."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else None


def available_memory_bytes() -> int:
    """Return the system memory that can still be allocated without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where the driver refuses or is absent."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no NVIDIA driver, or no permission
        return None
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
        # Old bindings return bytes.
        return found.decode() if isinstance(found, bytes) else found
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _cpu_model() -> str:
    """Return the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
