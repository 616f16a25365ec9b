"""Clocks, power and throttling of the GPU round each block, read by the parent from the driver. Loads no torch."""

from __future__ import annotations

from typing import Any

# Reasons that name no throttling: nothing to do, or clocks held where the user asked.
ORDINARY = ("None", "GpuIdle", "ApplicationsClocksSetting", "All")
PREFIX = "nvmlClocksThrottleReason"


class Telemetry:
    """One GPU's readings; without a driver or its Python bindings every reading is None."""

    def __init__(self, uuid: str | None) -> None:
        self._nvml = self._handle = None
        if uuid is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            self._nvml = pynvml
        except Exception:  # no bindings, no driver, or no permission: telemetry is optional everywhere
            self._nvml = None

    def read(self, own_processes: int) -> dict[str, Any] | None:
        """Return SM clock (MHz), power (W), temperature (C), throttle reasons and the compute processes not ours."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            names = [name for name in dir(nvml) if name.startswith(PREFIX) and isinstance(getattr(nvml, name), int)]
            seen = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            return {
                "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "temp_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "throttle": [
                    name.removeprefix(PREFIX)
                    for name in names
                    if name.removeprefix(PREFIX) not in ORDINARY and reasons & getattr(nvml, name)
                ],
                "other_processes": max(0, seen - own_processes),
            }
        except nvml.NVMLError:
            return None
