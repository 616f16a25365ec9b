"""Check the machine and the installation: what is present, what is missing, how to get it. Works without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rooflane.eval.sandbox.check import check_in_new_process
from rooflane.eval.stats.host_pace import SLOW, core_paces, slow_cores
from rooflane.families.runtime.host import find_ninja, host_compiler, missing_compiler, python_header

PACKAGES = ("shapes", "baseline", "families", "dispatch", "eval")
# What the records were made with (constraints-gpu.txt) or what the CPU set pins; another version runs, unrecorded.
RECORDED_TORCH = ("2.11.0", "2.13.0")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `status` is ok, note (works, with a limit) or missing."""

    topic: str
    status: str
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return every finding, in the order a newcomer would need them."""
    return [_python(), *_cores(), *_versions(), *_devices(), *_compilers(), _sandbox(), *_origins()]


def _python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Finding("python", "ok", text)


def _cores() -> list[Finding]:
    """Report how fast a fixed loop runs on each core this process may use; nothing where it cannot choose one."""
    paces = core_paces()
    if not paces:
        return []
    slow, quickest = slow_cores(paces), min(paces.values()) / 1e3
    if not slow:
        return [Finding("cores", "ok", f"{len(paces)}, a fixed loop takes {quickest:.0f} us on each within a third")]
    text = f"on {len(slow)} of {len(paces)} cores a fixed loop takes over {SLOW:g} times its {quickest:.0f} us"
    remedy = "other work may share those cores: launch-bound times depend on where a process runs; stop it"
    return [Finding("cores", "note", text, remedy)]


def _installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None; imports nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _present(
    topic: str, found: str | None, remedy: str, lacking: str = "not installed", status: str = "missing"
) -> Finding:
    return Finding(topic, "ok", found) if found else Finding(topic, status, lacking, remedy)


def _versions() -> list[Finding]:
    """Report the libraries by their metadata, so that a broken one cannot stop the report."""
    findings = []
    torch = _installed("torch")
    if torch is None or importlib.util.find_spec("torch") is None:
        remedy = "pip install 'torch>=2.11'; classify, route and rules work without it"
        findings.append(Finding("torch", "missing", "not importable", remedy))
    elif torch.split("+")[0] not in RECORDED_TORCH:
        remedy = f"fine to use; install {' or '.join(RECORDED_TORCH)} to compare with the committed records"
        findings.append(Finding("torch", "note", f"{torch}; no record was made with this version", remedy))
    else:
        findings.append(Finding("torch", "ok", torch))
    remedy = "pip install 'triton>=3.6' (Linux); without it the GPU families and the compiled control do not build"
    libraries = ("numpy", "scipy", "pandas", "pydantic", "matplotlib")
    return [
        *findings,
        _present("triton", _installed("triton"), remedy),
        *(_present(name, _installed(name), f"pip install {name}") for name in libraries),
    ]


def _devices() -> list[Finding]:
    """Report driver, GPUs and clocks through NVML, and whether torch sees the same GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return [Finding("gpu", "note", "NVML bindings are missing", "pip install nvidia-ml-py"), *_torch_cuda(0)]
    except pynvml.NVMLError as error:
        remedy = "none needed to run on the CPU; on a GPU machine install the NVIDIA driver"
        return [Finding("gpu", "note", f"no NVIDIA driver responds ({error})", remedy), *_torch_cuda(0)]
    try:
        findings = [Finding("driver", "ok", str(pynvml.nvmlSystemGetDriverVersion()))]
        count = pynvml.nvmlDeviceGetCount()
        findings += [_gpu(pynvml, index) for index in range(count)]
        return findings + _torch_cuda(count)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml, index: int) -> Finding:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def memory() -> str:
        figures = nvml.nvmlDeviceGetMemoryInfo(handle)
        return f"{figures.free / 2**30:.0f} of {figures.total / 2**30:.0f} GiB free"

    def clocks() -> str:
        now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        return f"SM clock {now} of {nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)} MHz"

    def throttle() -> str:
        return f"throttle reasons {nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle):#x}"

    parts = [str(nvml.nvmlDeviceGetName(handle))]
    for read in (memory, clocks, throttle):
        # A virtual or partitioned GPU refuses single queries; the rest of the line still helps.
        with contextlib.suppress(nvml.NVMLError):
            parts.append(read())
    others = 0
    with contextlib.suppress(nvml.NVMLError):
        others = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    topic = f"gpu {index}"
    if others:
        remedy = "stop them before timing: they share the GPU"
        return Finding(topic, "note", f"{', '.join(parts)}, {others} compute process(es) running", remedy)
    return Finding(topic, "ok", ", ".join(parts))


def _torch_cuda(driver_gpus: int) -> list[Finding]:
    """Report the CUDA that torch was built for and whether it reaches the GPUs the driver lists."""
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        import torch
    except Exception as error:  # a half-installed torch raises anything from ImportError to OSError
        return [Finding("cuda", "missing", f"torch does not import: {error}", "reinstall torch")]
    if torch.version.cuda is None:
        remedy = "install a CUDA build of torch to use the GPU" if driver_gpus else "none needed to run on the CPU"
        return [Finding("cuda", "missing" if driver_gpus else "note", "this torch is a CPU build", remedy)]
    if not torch.cuda.is_available():
        remedy = "check the driver's version against that CUDA" if driver_gpus else "none needed to run on the CPU"
        status = "missing" if driver_gpus else "note"
        return [Finding("cuda", status, f"torch is built for CUDA {torch.version.cuda} but reaches no GPU", remedy)]
    return [Finding("cuda", "ok", f"{torch.version.cuda}, {torch.cuda.device_count()} GPU(s) reached by torch")]


def _compilers() -> list[Finding]:
    header = python_header()
    remedy = "install them (Debian: apt-get install python3-dev); Triton and the C++ call path need them"
    found = str(header) if header.exists() else None
    compiler, headers = _cpp_compiler(), _present("python headers", found, remedy, f"{header} is not there")
    # pip installs ninja beside this Python, which may not be on the path.
    ninja = _first_line(path, "--version") if (path := find_ninja()) else None
    remedy = "pip install ninja; until then the C++ compiler is called directly"
    findings = [compiler, headers, _present("ninja", ninja, remedy, "none on the path", "note")]
    lacking = [finding.topic for finding in (compiler, headers) if finding.status != "ok"]
    if lacking:
        remedy = f"get the {' and the '.join(lacking)} as shown above; until then calls go through Python"
        findings.append(Finding("c++ host path", "note", f"cannot be built without the {', '.join(lacking)}", remedy))
    else:
        findings.append(Finding("c++ host path", "ok", "can be built: a compiler and Python's headers are here"))
    missing = missing_compiler()
    usable = None if missing else f"usable, cuda-bindings {_installed('cuda-bindings')}"
    remedy = "on an H100 or H200: pip install 'rooflane[hopper]'; without it the slower Triton kernels run there"
    return [*findings, _present("nvrtc", usable, remedy, f"cannot be used ({missing})", "note")]


def _cpp_compiler() -> Finding:
    topic = "c++ compiler"
    try:
        command = host_compiler()
    except RuntimeError as error:
        return Finding(topic, "missing", str(error), "fix CXX or unset it")
    if not command:
        remedy = "install g++ (Debian: apt-get install g++); torch.compile and Triton need it"
        return Finding(topic, "missing", "none on the path", remedy)
    check = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            check, input="int main() {}\n", capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if not done.returncode:
            return Finding(topic, "ok", _first_line(*command, "--version"))
        reason = " ".join(done.stderr.split())[:200] or f"it ends with status {done.returncode}"
    remedy = "install g++ 10 or newer (Debian: apt-get install g++); if CXX is set, fix or unset it"
    return Finding(topic, "missing", f"{' '.join(command)} does not compile C++20: {reason}", remedy)


def _first_line(command: str, *arguments: str) -> str:
    """Return the first line a tool prints, or the reason it printed none."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command} does not respond ({error})"
    lines = done.stdout.strip().splitlines() or ["prints no version"]
    return f"{lines[0]} at {command}"


def _sandbox() -> Finding:
    """Report what the sandbox of candidates' files keeps them from, by trying it."""
    line, trials = check_in_new_process()
    if line.startswith("on:"):
        return Finding("sandbox", "ok", line.removeprefix("on: "))
    remedy = "Linux 6.12 or newer with Landlock switched on refuses all of it; until then run only files that you trust"
    if trials:
        remedy += "; python -m rooflane.eval.sandbox.check prints each trial"
    return Finding("sandbox", "note", line, remedy)


def _origins() -> list[Finding]:
    origins: dict[str, Path | None] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(f"rooflane.{package}")
        origins[package] = Path(spec.origin).resolve().parent if spec and spec.origin else None
    home = Path(__file__).resolve().parents[2]
    findings = []
    for package, origin in origins.items():
        topic = f"rooflane.{package}"
        if origin is None:
            remedy = "reinstall rooflane: pip install -e . in a clone, or the wheel"
            findings.append(Finding(topic, "missing", "not importable as a package", remedy))
        elif origin.parent != home:
            remedy = (
                f"the other packages come from {home}: leave the folder that holds a clone named rooflane, "
                "or uninstall one of the two"
            )
            findings.append(Finding(topic, "note", f"{origin}: another copy than this command's own", remedy))
        else:
            findings.append(Finding(topic, "ok", str(origin)))
    return findings
