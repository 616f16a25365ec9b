"""What a candidate leaves switched on in its worker's interpreter, where the harness's own operations would meet it.

Three kinds are told apart. Settings (default dtype, default device, autocast, grad mode) are the candidate's own: its
calls get them, the harness's operations do not. Modes on torch's stacks and hooks of the interpreter run code of the
candidate's inside the harness: they are taken away and reported. A hook that was there before the first candidate,
such as a debugger's or a coverage tool's, is not the candidate's.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Bound here, before any candidate is imported.
function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
get_profile = sys.getprofile
get_trace = sys.gettrace
_pop_function_mode = torch._C._pop_torch_function_stack
_pop_dispatch_mode = torch._C._pop_torch_dispatch_stack
_set_default_dtype = torch.set_default_dtype
_set_default_device = torch.set_default_device
_set_autocast_enabled = torch.set_autocast_enabled
_set_autocast_dtype = torch.set_autocast_dtype
_set_grad_enabled = torch._C._set_grad_enabled
_add_audit_hook = sys.addaudithook
_get_signal = signal.getsignal
_get_timer = signal.getitimer
_set_timer = signal.setitimer

# An entry for each audit hook that this process was given after the harness's own.
_audit_hooks: list[str] = []

AUTOCAST_TYPES = ("cpu", "cuda")
TIMERS = {"ITIMER_REAL": signal.ITIMER_REAL, "ITIMER_VIRTUAL": signal.ITIMER_VIRTUAL, "ITIMER_PROF": signal.ITIMER_PROF}
# Programs handle these to end cleanly, to follow their children or a terminal.
ORDINARY_SIGNALS = {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGPIPE", "SIGWINCH", "SIGCONT", "SIGTSTP"}
# Tools 6 and 7 of `sys.monitoring` stand for `setprofile` and `settrace`.
MONITORING_TOOLS = range(6)


@dataclass(frozen=True)
class Settings:
    """The process-wide settings of torch that decide what a plain operation makes; `device` None is no default."""

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    grad: bool

    @classmethod
    def now(cls) -> Settings:
        """Return the settings in force."""
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_TYPES]
        return cls(
            torch.get_default_dtype(),
            None if context is None else context.device,
            tuple(casts),
            torch.is_grad_enabled(),
        )

    def enter(self) -> None:
        """Put these settings in force."""
        now = Settings.now()
        if now.device != self.device:
            _set_default_device(self.device)
        if now.dtype != self.dtype:
            _set_default_dtype(self.dtype)
        for (kind, enabled, dtype), current in zip(self.autocast, now.autocast, strict=True):
            if (kind, enabled, dtype) != current:
                _set_autocast_enabled(kind, enabled)
                _set_autocast_dtype(kind, dtype)
        if now.grad != self.grad:
            _set_grad_enabled(self.grad)

    def beside(self, other: Settings) -> list[str]:
        """Return a line for each setting that `other` has in another way; grad mode decides nothing here."""
        lines = []
        if self.dtype != other.dtype:
            lines.append(f"the default dtype is {other.dtype}")
        if self.device != other.device:
            lines.append(f"the default device is {other.device}")
        for mine, (kind, enabled, dtype) in zip(self.autocast, other.autocast, strict=True):
            if mine[1:] != (enabled, dtype):
                lines.append(f"autocast on {kind} is {f'on, {dtype}' if enabled else 'off'}")
        return lines


class Leftovers:
    """The modes, hooks and settings of this process before any candidate; `take_away` finds what has come since."""

    def __init__(self) -> None:
        self._settings = Settings.now()
        self._own = self._settings
        self._depth = function_modes(), dispatch_modes()
        self.profile, self.trace = get_profile(), get_trace()
        self._thread_hooks = _thread_hooks()
        self._callbacks = list(gc.callbacks)
        self._handlers = _handlers()
        self._tools = _tools()
        _hear_of_audit_hooks()
        self._audit_hooks = len(_audit_hooks)
        self._found: list[str] = []
        self.findings: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let a candidate be built in its own settings; those it leaves are kept for its calls."""
        self._own.enter()
        try:
            yield
        finally:
            self._pop_modes()
            self._own = Settings.now()
            self._settings.enter()
            for line in self._settings.beside(self._own):
                self._note(f"in the candidate's process {line}: its calls run so, the harness's operations do not")

    def wrap(self, forward: Callable) -> Callable:
        """Return a forward that runs in the candidate's settings; itself where these are the harness's."""
        if not self._settings.beside(self._own):
            return forward
        own, settings = self._own, self._settings

        def call(x: Any, mask: Any = None) -> Any:
            own.enter()
            try:
                return forward(x, mask)
            finally:
                settings.enter()

        return call

    def take_away(self) -> list[str]:
        """Put modes, settings and the two hooks of this thread back as they were; return a line for each finding."""
        self._found = []
        self._pop_modes()
        left = Settings.now()
        if left != self._settings:
            for line in self._settings.beside(left):
                self._note(f"a call left another setting in its process: {line}; it was put back")
            self._settings.enter()
        for name, found, kept, put in (
            ("sys.setprofile", get_profile(), self.profile, sys.setprofile),
            ("sys.settrace", get_trace(), self.trace, sys.settrace),
        ):
            if found is not kept:
                put(kept)
                self._find(f"a function was left in {name}")
        return self._found

    def look(self) -> None:
        """Take away what `take_away` does, and the other hooks through which code runs between two operations."""
        self.take_away()
        for name, hook in _thread_hooks().items():
            if hook is not self._thread_hooks[name]:
                getattr(threading, name)(self._thread_hooks[name])
                self._find(f"a function was left in threading.{name}")
        if any(one not in self._callbacks for one in gc.callbacks):
            gc.callbacks[:] = self._callbacks
            self._find("a function was left in gc.callbacks")
        for name, handler in _handlers().items():
            if handler != self._handlers.get(name):
                self._handlers[name] = handler
                self._find(f"a handler of {name} was left")
        for name, which in TIMERS.items():
            if _get_timer(which)[0] and any(self._handlers):
                _set_timer(which, 0)
                self._find(f"the timer {name} was left running")
        for tool, callback in _tools().items():
            if callback != self._tools.get(tool):
                self._tools[tool] = callback
                self._find(f"tool {tool} of sys.monitoring was left in use")

    def inspect(self) -> list[str]:
        """Return every finding; an audit hook, which no one can list or remove, is heard of when it is added."""
        self.look()
        if len(_audit_hooks) > self._audit_hooks:
            self._audit_hooks = len(_audit_hooks)
            self._find("an audit hook was added")
        return self.findings

    def _pop_modes(self) -> None:
        """Empty torch's two stacks down to where they stood; a default device is a setting, and stays."""
        functions, dispatches = self._depth
        device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        kept = []
        while function_modes() > functions:
            mode = _pop_function_mode()
            if mode is device:
                kept.append(mode)
            else:
                self._find(f"{type(mode).__name__} was left on the stack of torch's function modes")
        for mode in kept:
            torch._C._push_on_torch_function_stack(mode)
        while dispatch_modes() > dispatches:
            mode = _pop_dispatch_mode(None)
            self._find(f"{type(mode).__name__} was left on the stack of torch's dispatch modes")

    def _find(self, line: str) -> None:
        line = f"{line}: it runs code inside the harness's own operations"
        self._found.append(line)
        if line not in self.findings:
            self.findings.append(line)

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


def _thread_hooks() -> dict[str, Any]:
    """Return what `threading` installs in each new thread."""
    return {"setprofile": threading.getprofile(), "settrace": threading.gettrace()}


def _handlers() -> dict[str, Any]:
    """Return the Python handlers of signals that end no program and tell of no child."""
    found = {one.name: _get_signal(one) for one in signal.valid_signals() if isinstance(one, signal.Signals)}
    return {name: handler for name, handler in found.items() if callable(handler) and name not in ORDINARY_SIGNALS}


def _tools() -> dict[int, str]:
    """Return the tools of `sys.monitoring` in use, by number."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    if monitoring is None:
        return {}
    return {tool: name for tool in MONITORING_TOOLS if (name := monitoring.get_tool(tool)) is not None}


@cache
def _hear_of_audit_hooks() -> None:
    """Add an audit hook that hears of every later one, once for this process."""
    # torch.compile and transformers import filelock; from Python 3.12 on it adds an audit hook of its own.
    with suppress(ImportError):
        import filelock  # noqa: F401
    _add_audit_hook(_note_audit_hook)


def _note_audit_hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "sys.addaudithook":
        _audit_hooks.append(event)
