"""Measure the device at hand and state its limits as a profile."""

from __future__ import annotations

import re
from datetime import date

import torch

from rooflane.dispatch import Profile, ProfileError, keep_profile, kept_path, load_profile, match_profile
from rooflane.dispatch.device import AUTO, CPU, host_memory_bytes
from rooflane.dispatch.profile import SI, Figure
from rooflane.eval.device import probe_readings as read

# Sizes and counts are exact; rounding a memory up would promise bytes that are not there.
EXACT = 12


def measure_profile(device: torch.device | str = "cpu", name: str | None = None) -> Profile:
    """Return the measured profile of a device; about three seconds on a CPU, ten on a GPU.

    Every figure that can be read here is marked measured, with the date and the device as its source. The price,
    what the device does not report, and an eager dispatch cost measured on a busy host are marked assumed.
    """
    device = torch.device(device)
    title = read.device_name(device)
    source = f"rooflane probe, {date.today().isoformat()}, {title}, torch {torch.__version__}"
    known = _known_profile(device, title)

    def measured(value: float, unit: str, digits: int = 3) -> Figure:
        value = read.rounded(value / SI[unit], digits)
        return Figure(value=value, unit=unit, mark="measured", source=source)

    def assumed(value: float, unit: str, why: str) -> Figure:
        return Figure(value=value, unit=unit, mark="assumed", source=why)

    cache = read.cache_bytes(device)
    dispatch_s, doubt = read.eager_dispatch_s(device)
    dispatch = measured(dispatch_s, "us")
    if doubt:
        source = f"{dispatch.source}, on a busy host: {doubt}; probe again when it is idle"
        dispatch = assumed(dispatch.value, "us", source)
    figures = {
        "eager_dispatch": dispatch,
        "copy_rate": measured(read.copy_bytes_per_s(device, cache or 0), "TB/s"),
        "special": measured(read.special_per_s(device), "Gop/s"),
        "cache": measured(cache, "MiB", EXACT) if cache else assumed(1, "MiB", "the system names no cache size"),
    }
    rates = {dtype: read.matmul_flops(device, dtype) for dtype in read.DTYPES}
    for dtype, rate in rates.items():
        if rate:
            figures[f"matmul_{dtype}"] = measured(rate, "TFLOP/s")
        else:
            why = f"no {dtype} matmul runs here; the float32 rate stands in for it"
            figures[f"matmul_{dtype}"] = assumed(figures["matmul_float32"].value, "TFLOP/s", why)
    figures |= _cuda_figures(device, measured) if device.type == "cuda" else _cpu_figures(measured, assumed)
    price = known.price if known else assumed(0, "USD/h", "no price is known for this device; edit this figure")
    return Profile(
        name=name or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        title=title,
        kind=device.type,
        match=(title,) if device.type == "cuda" else (),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        price=price,
        **figures,
    )


def measure_once(profile: str, kind: str) -> None:
    """Measure this host and keep its profile where `profile` is `auto`, the device a CPU, and none is kept yet."""
    if profile.lower() == AUTO and kind == CPU and not kept_path().is_file():
        keep_profile(measure_profile(CPU))


def _known_profile(device: torch.device, title: str) -> Profile | None:
    """Return the shipped profile of this device, for what cannot be measured: its price."""
    try:
        return match_profile(title) if device.type == "cuda" else load_profile("cpu")
    except ProfileError:
        return None


def _cuda_figures(device: torch.device, measured) -> dict[str, Figure]:
    """Return the figures only a GPU has."""
    limits = torch.cuda.get_device_properties(device)
    replay, node = read.graph_times(device)
    return {
        "kernel_launch": measured(read.kernel_launch_s(device), "us"),
        "graph_replay": measured(replay, "us"),
        "graph_node": measured(node, "us"),
        "memory": measured(limits.total_memory, "GB", EXACT),
        "shared_memory": measured(limits.shared_memory_per_block_optin, "KiB", EXACT),
        "sm_count": measured(limits.multi_processor_count, "count", EXACT),
    }


def _cpu_figures(measured, assumed) -> dict[str, Figure]:
    """Return the figures that differ between a CPU and a GPU; what a CPU lacks is 0."""
    absent = {"kernel_launch": "us", "graph_replay": "us", "shared_memory": "KiB"}
    figures = {name: assumed(0, unit, "a CPU has none") for name, unit in absent.items()}
    # A CPU has no graph; the least any operation costs is given where a GPU states the cost of a node.
    figures["graph_node"] = measured(read.smallest_op_s(torch.device("cpu")), "us")
    memory = host_memory_bytes()
    if memory is None:
        raise ProfileError("this system does not report its memory; write the profile by hand from devices/cpu.toml")
    return figures | {"memory": measured(memory, "GB", EXACT), "sm_count": measured(torch.get_num_threads(), "count")}
