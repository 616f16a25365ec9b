"""The device of a campaign: held by one campaign at a time, and read before each block. Loads no torch."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rooflane.dispatch.device import STATE_VARIABLE, state_dir
from rooflane.dispatch.state_files import holders, open_regular, take_lock
from rooflane.eval.exit_codes import EvaluationError


def device_key(device: str) -> str:
    """Return what a device is locked by: the GPU's UUID, which no CUDA_VISIBLE_DEVICES renames, or `cpu`."""
    if device == "cpu":
        return device
    from rooflane.eval.record.environment import gpu_uuid

    return gpu_uuid() or device


@contextmanager
def campaign_lock(device_key: str, run: str) -> Iterator[Path]:
    """Hold a device for one campaign; yields the lock's file.

    `device_key` is the GPU's UUID, or `cpu`; `run` is named to whoever comes second. Raises `EvaluationError` at once
    when another campaign holds the device. The kernel drops the lock with its holder, so a killed campaign leaves
    nothing to clean up.
    """
    path = lock_path(device_key)
    file = _open(path)
    with file:
        if not take_lock(file.fileno()):
            raise EvaluationError(_busy(device_key, file, path))
        _write(file, json.dumps({"pid": os.getpid(), "run": run}))
        try:
            yield path
        finally:
            _write(file, "")


def lock_path(device_key: str) -> Path:
    """Return the lock file of a device: in the temporary folder, which all users of a machine share."""
    folder = state_dir() if os.environ.get(STATE_VARIABLE) else Path(tempfile.gettempdir())
    return folder / f"rooflane-{re.sub(r'[^A-Za-z0-9.-]+', '_', device_key)}.lock"


def _open(path: Path) -> IO[str]:
    """Open a lock file, made so that any user of the machine can take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Without O_CREAT first: a system may refuse to "create" another user's file in a shared folder.
            return os.fdopen(open_regular(path, os.O_RDWR), "r+", encoding="utf-8")
        except FileNotFoundError:
            number = open_regular(path, os.O_RDWR | os.O_CREAT)
            file = os.fdopen(number, "r+", encoding="utf-8")
            if os.fstat(number).st_uid == os.getuid():
                os.fchmod(number, 0o666)
            return file
    except OSError as error:
        raise EvaluationError(
            f"{path}: the lock that keeps two campaigns off one device cannot be opened ({error}); give "
            f"{STATE_VARIABLE} a folder that may be written"
        ) from None


def _busy(device_key: str, file: IO[str], path: Path) -> str:
    """Return the paragraph for who comes second."""
    try:
        holder = json.loads(file.read())
        who = f"process {holder['pid']} with run {holder['run']}"
    except (ValueError, KeyError, TypeError, OSError):
        # No campaign wrote its name: a process that one of its candidates left behind, say.
        who = " and ".join(holders(path)) or "another process"
    return (
        f"{device_key} is taken by {who} ({path}): two campaigns on one device would measure each other; wait for it "
        "to end, or stop it"
    )


def _write(file: IO[str], text: str) -> None:
    """Replace a lock file's text."""
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


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
