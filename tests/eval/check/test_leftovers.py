"""What is left switched on in the interpreter: found, taken away, and told from what was there before."""

import gc
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rooflane.eval.check.leftovers import Leftovers, Settings
from rooflane.eval.check.outputs import output_fault


def hook(*given):
    return None


def push_function_mode():
    TorchFunctionMode().__enter__()


def push_dispatch_mode():
    TorchDispatchMode().__enter__()


def start_timer():
    signal.signal(signal.SIGVTALRM, hook)
    signal.setitimer(signal.ITIMER_VIRTUAL, 100)


LEFT = {
    "function modes": push_function_mode,
    "dispatch modes": push_dispatch_mode,
    "sys.setprofile": lambda: sys.setprofile(hook),
    "sys.settrace": lambda: sys.settrace(hook),
    "threading.setprofile": lambda: threading.setprofile(hook),
    "threading.settrace": lambda: threading.settrace(hook),
    "gc.callbacks": lambda: gc.callbacks.append(hook),
    "SIGUSR1": lambda: signal.signal(signal.SIGUSR1, hook),
    "ITIMER_VIRTUAL": start_timer,
}


@pytest.fixture
def own_signals():
    kept = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGVTALRM, signal.SIGTERM)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


@pytest.mark.parametrize("name", LEFT)
def test_what_was_left_is_named_and_taken_away(own_signals, name):
    left = Leftovers()
    LEFT[name]()
    left.look()
    assert any(name in line for line in left.findings), left.findings
    found = list(left.findings)
    after = Leftovers()
    after.look()
    left.look()
    assert after.findings == [] and left.findings == found, "it is gone, and not found twice"
    assert (sys.getprofile(), sys.gettrace(), threading.getprofile()) == (left.profile, left.trace, None)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


@pytest.mark.parametrize("name", ["sys.setprofile", "threading.settrace", "gc.callbacks", "SIGUSR1", "function modes"])
def test_what_was_there_before_is_nobodys_finding_and_stays(own_signals, name):
    LEFT[name]()
    try:
        left = Leftovers()
        assert left.inspect() == []
        depth = torch._C._len_torch_function_stack()
        assert (name == "function modes") == (depth == 1)
        assert (name == "sys.setprofile") == (sys.getprofile() is hook)
    finally:
        sys.setprofile(None)
        threading.settrace(None)
        gc.callbacks[:] = [one for one in gc.callbacks if one is not hook]
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()


def test_handlers_that_end_a_program_or_follow_children_are_ordinary(own_signals):
    left = Leftovers()
    kept = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGTERM, hook)
    signal.signal(signal.SIGCHLD, hook)
    assert left.inspect() == []
    signal.signal(signal.SIGCHLD, kept)


SETTINGS = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "the default dtype is torch.float64"),
    "device": (lambda: torch.set_default_device("meta"), "the default device is meta"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu is on, torch.bfloat16"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_build_are_kept_for_its_calls_alone(name):
    change, said = SETTINGS[name]
    left, plain = Leftovers(), Settings.now()
    with left.building():
        change()
        own = Settings.now()
    assert Settings.now() == plain != own
    forward = left.wrap(lambda x, mask=None: Settings.now())
    assert forward(None) == own and Settings.now() == plain
    left.look()
    assert left.findings == [] and len(left.notes) == 1 and said in left.notes[0]
    with left.building():
        assert Settings.now() == own, "what one build sets holds for the copy's build too"


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_a_call_leaves_are_put_back_and_noted(name):
    change, said = SETTINGS[name]
    left, plain = Leftovers(), Settings.now()
    change()
    assert left.take_away() == [] and Settings.now() == plain
    assert said in left.notes[0]


def test_a_forward_is_not_wrapped_where_nothing_was_set():
    left = Leftovers()
    with left.building():
        torch.set_grad_enabled(False)
    assert left.wrap(hook) is hook and torch.is_grad_enabled() and left.notes == []


@pytest.mark.parametrize("name", ["data_ptr", "clone", "stride"])
def test_an_attribute_that_hides_a_method_is_refused_and_another_is_not(name):
    x, out = torch.zeros(2, 3), torch.zeros(2, 3)
    out.made_by = "me"
    assert output_fault(out, x) is None
    setattr(out, name, lambda *given: 0)
    assert output_fault(out, x) == f"the output carries attributes that hide methods of torch.Tensor: {name}"


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 brings sys.monitoring")
def test_a_tool_left_in_use_is_named():
    left = Leftovers()
    sys.monitoring.use_tool_id(4, "mine")
    try:
        left.look()
    finally:
        sys.monitoring.free_tool_id(4)
    assert "tool 4 of sys.monitoring" in left.findings[0]


HOOKS = """
import sys
from rooflane.eval.check.leftovers import Leftovers

sys.addaudithook(lambda event, arguments: None)
left = Leftovers()
import filelock
print(left.inspect())
sys.addaudithook(lambda event, arguments: None)
print(left.inspect())
"""


def test_an_audit_hook_is_found_beside_one_that_was_there_before():
    # In a process of its own: nothing takes an audit hook away again.
    done = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, timeout=120)
    before, after = done.stdout.splitlines()
    assert before == "[]" and "an audit hook was added" in after, done.stderr
