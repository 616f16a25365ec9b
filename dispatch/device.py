"""The device at hand and its profile, found without torch.

`auto` means one profile in every command: the one measured on this device and kept, else the shipped one. Kept
profiles are in the state folder, one file per device.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from rooflane.dispatch.profile import SI, Profile, ProfileError, read_profile
from rooflane.dispatch.state_files import open_regular, replace_file

DEVICES = Path(__file__).parent / "devices"
CPU = "cpu"
AUTO = "auto"
STATE_VARIABLE = "ROOFLANE_STATE_DIR"


def state_dir() -> Path:
    """Return the folder of what is kept between runs: `ROOFLANE_STATE_DIR`, or the user's own state folder."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "rooflane"


def profiles_dir() -> Path:
    """Return the folder of the profiles that are kept."""
    return state_dir() / "profiles"


def load_profile(name_or_path: str | Path = AUTO, kind: str | None = None) -> Profile:
    """Return a shipped profile by name in any case, a profile file by path, or for "auto" that of the device at hand.

    `kind` ("cpu" or "cuda") picks the device that "auto" means; by default a usable GPU, else the CPU. Raises
    `ProfileError` for an unknown name, a malformed file, or a GPU that no profile describes.
    """
    text = str(name_or_path)
    if text.lower() == AUTO:
        return device_profile(device_at_hand(kind))
    if text.lower() in profile_names():
        return read_profile(DEVICES / f"{text.lower()}.toml")
    if text.endswith(".toml") or Path(text).is_file():
        return read_profile(Path(text))
    names = ", ".join(profile_names())
    raise ProfileError(f"no profile is called {text!r}; there are: {AUTO}, {names}, or the path of a TOML file")


def profile_names() -> list[str]:
    """Return the names of the profiles that ship, sorted."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def device_at_hand(kind: str | None = None) -> str | None:
    """Return the driver's name of the GPU at hand, or None for the CPU.

    `kind` "cpu" asks for the CPU. Raises `ProfileError` when `kind` is "cuda" and no GPU can be used.
    """
    found = None if kind == CPU else device_name()
    if kind == "cuda" and found is None:
        raise ProfileError("no usable GPU was found, so `auto` has no CUDA profile; name one, such as h200")
    return found


def device_profile(gpu: str | None) -> Profile:
    """Return the profile of a GPU by the driver's name, or of the CPU for None: the kept one, else the shipped one."""
    if path := find_kept(gpu):
        return read_profile(path)
    return host_profile() if gpu is None else match_profile(gpu)


def match_profile(device: str) -> Profile:
    """Return the shipped profile of the GPU that the driver calls `device`; raises `ProfileError` when none fits."""
    wanted = _bare(device)
    for name in profile_names():
        profile = read_profile(DEVICES / f"{name}.toml")
        if wanted in map(_bare, profile.match):
            return profile
    raise ProfileError(
        f"no profile describes the device at hand, {device!r}; measure it with `rooflane probe --keep`, or name a "
        f"profile (there are: {', '.join(profile_names())})"
    )


def host_profile() -> Profile:
    """Return the shipped cpu profile with this machine's own memory."""
    profile = read_profile(DEVICES / f"{CPU}.toml")
    memory = host_memory_bytes()
    if memory is None:
        return profile
    return profile.with_figure("memory", memory / SI["GB"], "measured", "physical memory of this machine")


def kept_path(gpu: str | None = None) -> Path:
    """Return where a device's measured profile is kept: one file a GPU model, or a CPU model and number of cores."""
    name = host_name() if gpu is None else _bare(gpu)
    return profiles_dir() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.toml"


def find_kept(gpu: str | None = None) -> Path | None:
    """Return the file of a device's kept profile, None where there is none.

    Raises `ProfileError` when something else than a regular file lies in its place.
    """
    path = kept_path(gpu)
    if not os.path.lexists(path):
        return None
    try:
        os.close(open_regular(path, os.O_RDONLY))
    except OSError as error:
        raise ProfileError(f"{path}: the profile kept of this device cannot be read ({error})") from None
    return path


def keep_profile(profile: Profile, gpu: str | None = None) -> Path:
    """Keep a measured profile as the meaning of `auto` on its device; return the file."""
    path = kept_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two runs may measure at once: each file appears whole.
    replace_file(path, profile.to_toml())
    return path


def kept_note(kind: str | None = None) -> str | None:
    """Return one line that names the kept profile and its age if `auto` means one, else None."""
    path = find_kept(device_at_hand(kind))
    if path is None:
        return None
    hours = (time.time() - path.stat().st_mtime) / 3600
    age = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours" if hours >= 2 else "less than 2 hours"
    busy = "" if read_profile(path).eager_dispatch.mark == "measured" else ", while other work ran"
    return f"profile: measured on this device {age} ago{busy} ({path}); `rooflane probe --keep` measures it again"


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


def processor_name() -> str:
    """Return the name of this host's processor, or "CPU" where the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def host_name() -> str:
    """Return this host's processor and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor_name()}, {cores} cores"


def host_memory_bytes() -> int | None:
    """Return this machine's physical memory, or None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _bare(device: str) -> str:
    """Return the device's name in lower case without the vendor's prefixes, which vary with the driver."""
    return re.sub(r"^(nvidia )?(tesla )?", "", device.lower()).strip()
