"""Which device is at hand, asked of NVIDIA's management library, so that torch need not be loaded."""

from __future__ import annotations

import os


def device_name() -> str | None:
    """Return the driver's name of the GPU that CUDA would call device 0, or None where no GPU can be used.

    `CUDA_VISIBLE_DEVICES` is honoured: an empty value or -1 hides every GPU, otherwise its first entry (an index or
    a UUID) counts. NVML numbers by PCI bus while CUDA may number by speed; set `CUDA_DEVICE_ORDER=PCI_BUS_ID` on a
    host with GPUs of several kinds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        if first is None or first.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first or 0))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(first)
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return name.decode() if isinstance(name, bytes) else name


def host_memory_bytes() -> int | None:
    """Return this machine's physical memory, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
