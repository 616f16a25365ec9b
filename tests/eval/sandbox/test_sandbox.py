"""The sandbox: what it refuses and lets be on this kernel, what its filter decides on any, and who is confined."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rooflane.dispatch.device import profiles_dir
from rooflane.eval import cli
from rooflane.eval.campaign import confinement
from rooflane.eval.campaign.confinement import Sandboxes, scratch_folder, seed_caches
from rooflane.eval.sandbox import check as sandbox_check
from rooflane.eval.sandbox import confine as sandbox
from rooflane.eval.sandbox import landlock, seccomp
from rooflane.eval.sandbox.check import FORBIDDEN, NEEDED, Trial, summarise
from rooflane.eval.sandbox.confine import Means, explain, find_means

OWN, OTHER = 4242, 77
MEANS = find_means()
MACHINES = list(seccomp.MACHINES)
# What is left to each system alone, by the action's first words.
FILES = ("write", "make a file", "truncate", "remove", "link", "read a hidden")


def trials_with(means: Means) -> dict[str, Trial]:
    """Make the trials with these means in a new interpreter: they fork."""
    code = (
        "import json, sys; from dataclasses import asdict\n"
        "from rooflane.eval.sandbox.check import make_trials\n"
        "from rooflane.eval.sandbox.confine import Means\n"
        f"print(json.dumps([asdict(trial) for trial in make_trials({means!r})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {trial["action"]: Trial(**trial) for trial in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def trials():
    if not (MEANS.landlock >= landlock.SCOPE_VERSION and MEANS.seccomp):
        pytest.skip(f"this system has {MEANS.describe()}")
    return trials_with(MEANS)


@pytest.mark.parametrize("action", FORBIDDEN)
def test_a_forbidden_action_is_refused(trials, action):
    """The last three do nothing of use without the sandbox either: the kernel complains of empty arguments then."""
    trial = trials[action]
    code = "EACCES" if action.startswith(FILES) or action == "open another's memory" else "EPERM"
    if action == "link a file from outside":
        code = "EXDEV" if trial.inside == "EXDEV" else "EACCES"
    assert (trial.wanted, trial.inside, trial.holds) == ("refused", code, True)


@pytest.mark.parametrize("action", NEEDED)
def test_what_an_honest_program_needs_works(trials, action):
    assert (trials[action].wanted, trials[action].without, trials[action].inside) == ("works", "works", "works")


def test_forbidden_actions_work_without_the_sandbox(trials):
    """So that the refusals are the sandbox's: files, a socket and signals are any program's to use."""
    open_ways = {action for action in FORBIDDEN if trials[action].without == "works"}
    own_means = {"open a socket (IPv4)", "stop another process", "end another process", "set another's priority"}
    assert open_ways >= own_means | {action for action in FORBIDDEN if action.startswith(FILES)}


@pytest.mark.skipif(not MEANS.seccomp, reason="no seccomp here")
def test_seccomp_alone_keeps_network_and_neighbours_but_no_files():
    means = Means(0, True)
    found = trials_with(means)
    for action in ("open a socket (IPv4)", "open a socket (IPv6)", "trace another process", "read another's memory"):
        assert found[action].inside == "EPERM"
    for action in ("stop another process", "set another's priority", "set another's limits"):
        assert found[action].inside == "EPERM"
    assert all(found[action].holds for action in NEEDED), "a pool's processes can be ended, a thread started"
    for action in ("write a file outside", "read a hidden file", "end another process"):
        assert found[action].inside == "works" and not found[action].holds
    line = summarise(means, list(found.values()))
    assert line.startswith("on in part: seccomp; it does not keep a candidate from these: write a file outside, ")


@pytest.mark.skipif(MEANS.landlock < 3, reason="no such version of Landlock here")
@pytest.mark.parametrize("version", [2, 3])
def test_an_older_landlock_refuses_what_it_knows(version):
    found = trials_with(Means(version, MEANS.seccomp))
    for action in ("write a file outside", "make a file outside", "remove a file outside", "read a hidden file"):
        assert found[action].inside == "EACCES"
    assert found["truncate a file outside"].holds == (version >= 3)
    assert all(found[action].holds for action in NEEDED)


def decide(machine: str, rules: dict, name: str | int, *arguments: int, identity: int | None = None) -> bool:
    """Return whether the filter allows a call, as the kernel would decide: it reads the program's words in turn."""
    program = seccomp.assemble(rules, machine)
    known, column = seccomp.MACHINES[machine]
    number = name if isinstance(name, int) else seccomp.NUMBERS[name][column]
    wide = [value & (1 << 64) - 1 for value in (*arguments, *[0] * 6)][:6]
    call = struct.pack("<IIQ6Q", number, known if identity is None else identity, 0, *wide)
    at = loaded = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == seccomp.RETURN:
            assert value in (seccomp.ALLOW, seccomp.REFUSE)
            return value == seccomp.ALLOW
        if code == seccomp.LOAD:
            loaded = struct.unpack_from("<I", call, value)[0]
        else:
            at += if_true if (loaded == value if code == seccomp.EQUAL else loaded >= value) else if_false


def rules(signals: bool = True, pinning: bool = True) -> dict[str, seccomp.Rule]:
    return seccomp.make_rules(OWN, signals=signals, pinning=pinning)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", seccomp.NEVER)
def test_these_calls_are_refused_whatever_their_arguments(machine, name):
    assert not decide(machine, rules(), name) and not decide(machine, rules(), name, OWN, OWN, OWN)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_numbering_are_refused(machine):
    """A 32-bit call has other numbers, and so has the x32 numbering of x86-64."""
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert decide(machine, rules(), read)
    assert not decide(machine, rules(), read, identity=0x40000003)
    assert decide(machine, rules(), read | seccomp.X32_BIT) == (machine == "aarch64")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("family", "allowed"),
    [(socket.AF_UNIX, True), (socket.AF_INET, False), (socket.AF_INET6, False), (16, False), (17, False), (40, False)],
)
def test_only_local_sockets_are_opened(machine, family, allowed):
    assert decide(machine, rules(), "socket", family, 1) is allowed


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["sched_setaffinity", *seccomp.OF_A_PROCESS])
def test_a_process_is_set_by_itself_alone(machine, name):
    place = seccomp.OF_A_PROCESS.get(name, 0)
    for who, allowed in ((0, True), (OWN, True), (OTHER, False), (1, False), (-1, False)):
        arguments = [0] * place + [who]
        assert decide(machine, rules(), name, *arguments) is allowed, who
    if name == "setpriority":
        assert not decide(machine, rules(), name, seccomp.PRIO_USER, 0), "every process of the user"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("who", "number", "allowed"),
    [
        (OWN, signal.SIGUSR1, True),
        (0, signal.SIGUSR1, True),
        (-OWN, signal.SIGSTOP, True),
        (OTHER, 0, True),
        (OTHER, signal.SIGTERM, True),
        (OTHER, signal.SIGKILL, True),
        (OTHER, signal.SIGSTOP, False),
        (OTHER, signal.SIGCONT, False),
        (-OTHER, signal.SIGSTOP, False),
        (-1, signal.SIGSTOP, False),
    ],
)
def test_without_landlock_other_processes_can_be_ended_but_not_slowed(machine, who, number, allowed):
    assert decide(machine, rules(), "kill", who, number) is allowed
    assert decide(machine, rules(signals=False), "kill", who, number), "Landlock's part"


def test_a_library_that_pins_its_threads_may_do_so():
    assert not seccomp.pinning_is_free({"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": ""})
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        assert seccomp.pinning_is_free({name: "true"})
    assert decide("x86_64", rules(pinning=False), "sched_setaffinity", OTHER)


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_the_numbers_are_those_of_the_systems_headers(header, column):
    if not Path(header).exists():
        pytest.skip(f"{header} is not here")
    text = Path(header).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", text)}
    wrong = {
        name: numbers
        for name, numbers in seccomp.NUMBERS.items()
        if known.get(name, numbers[column]) != numbers[column]
    }
    assert not wrong and len(known.keys() & seccomp.NUMBERS.keys()) > 40


@pytest.mark.parametrize(
    ("hidden", "left"),
    [
        (["a"], ["b", "c/d", "c/e", "f"]),
        (["c/d", "f"], ["a", "b", "c/e"]),
        (["c/new"], ["a", "b", "c/d", "c/e", "f"]),
        (["c/d/x", "a"], ["b", "c/d/y", "c/e", "f"]),
    ],
)
def test_what_is_hidden_is_covered_by_no_allowed_path(tmp_path, hidden, left):
    """A link to a folder above what is hidden would open it, so links are never followed."""
    for name in ("a", "b", "c/d", "c/e"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("f", "c/d/x", "c/d/y"):
        (tmp_path / name).write_text("something")
    (tmp_path / "link").symlink_to(tmp_path)
    found = {
        os.path.relpath(path, tmp_path)
        for path in landlock.visible(str(tmp_path), {str(tmp_path / name) for name in hidden})
    }
    assert not any(path == name or name.startswith(f"{path}/") for path in found for name in hidden)
    covered = {
        name
        for name in ("a", "b", "c/d", "c/d/y", "c/e", "f")
        if any(name == path or name.startswith(f"{path}/") for path in found)
    }
    assert covered >= set(left)


def test_nothing_hidden_leaves_the_folder_whole(tmp_path):
    assert list(landlock.visible(str(tmp_path), {"/elsewhere"})) == [str(tmp_path)]


@pytest.mark.parametrize(
    ("outcomes", "line"),
    [
        ({}, "on: Landlock version 7 and seccomp refused each of 20 forbidden actions in a trial"),
        (
            {"read a hidden file": "works"},
            "on in part: Landlock version 7 and seccomp; it does not keep a candidate from these: read a hidden file",
        ),
        (
            {"make an io_uring": "EFAULT"},
            "on in part: Landlock version 7 and seccomp; it does not keep a candidate from these: make an io_uring",
        ),
        ({"start a thread": "EPERM"}, "off: in it a candidate could not start a thread"),
    ],
)
def test_the_line_says_what_the_trials_found(outcomes, line):
    found = [Trial(name, "refused", "works", outcomes.get(name, "EACCES")) for name in FORBIDDEN]
    found += [Trial(name, "works", "works", outcomes.get(name, "works")) for name in NEEDED]
    assert summarise(Means(7, True), found) == line


def test_a_sandbox_that_cannot_be_put_on_is_off_for_a_reason(monkeypatch):
    """A filter that the kernel refuses must not look like a sandbox that refuses everything."""
    monkeypatch.setattr(sandbox_check, "find_means", lambda: Means(0, True))
    monkeypatch.setattr(sandbox_check, "confine", lambda wanted, means: seccomp.install(b""))
    assert sandbox_check.check_sandbox() == ("off: its trial failed ([Errno 22] seccomp: Invalid argument)", [])


def test_a_system_without_the_means_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sandbox_check, "find_means", lambda: Means(0, False))
    assert sandbox_check.main([]) == 1
    assert capsys.readouterr().out.endswith("sandbox off: this system has neither Landlock nor seccomp\n")


@pytest.mark.parametrize(("version", "used"), [(0, 0), (1, 0), (2, 2), (7, 7)])
def test_the_first_version_of_landlock_is_not_used(monkeypatch, version, used):
    """It refuses each move between folders, which compilers make."""
    monkeypatch.setattr(sandbox.landlock, "version", lambda: version)
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    assert find_means().landlock == used


@pytest.mark.parametrize("reason", ["PermissionError: [Errno 13] denied", "OSError: [Errno 1] Operation not permitted"])
def test_a_refusal_names_the_way_out_in_the_sandbox_alone(reason):
    assert explain(reason, confined=True).endswith("--no-sandbox runs it without)")
    assert explain(reason, confined=False) == reason
    assert explain("ValueError: no", confined=True) == "ValueError: no"


class Server:
    """A fork server whose trial says what the test wants."""

    def __init__(self, line: str) -> None:
        self.check_sandbox = lambda: line


@pytest.fixture
def make_sandboxes(monkeypatch, tmp_path):
    """Return a function that makes the sandboxes of two files and two families."""
    monkeypatch.setattr(confinement, "seed_caches", lambda caches: (caches / "seeded").touch())

    def make(line="on: all", wanted=True, names=("a.py", "b.py:make", "dispatched", "gemm_fp16")):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.py").write_text("def build(model, shape, device): ...")
        (tmp_path / "b.py").write_text("def make(model, shape, device): ...")
        monkeypatch.setattr(confinement, "fork_server", lambda: Server(line) if line else None)
        files = {name: tmp_path / name.split(":")[0] for name in names if ".py" in name}
        return Sandboxes(files, tmp_path / "scratch", (tmp_path / "runs",), wanted=wanted)

    return make


def test_files_are_confined_and_families_are_not(make_sandboxes, tmp_path):
    sandboxes = make_sandboxes()
    assert sandboxes.confine("dispatched") is sandboxes.confine("gemm_fp16") is None
    first, second = sandboxes.confine("a.py"), sandboxes.confine("b.py:make")
    assert {first.temporary, first.caches}.isdisjoint({second.temporary, second.caches})
    assert first.readable == (str(tmp_path / "a.py"), os.path.realpath(profiles_dir()))
    assert {
        str(tmp_path / "runs"),
        str(tmp_path / "scratch"),
        os.path.realpath(os.environ["ROOFLANE_STATE_DIR"]),
    } <= set(first.hidden)


def test_temporary_files_go_with_their_worker_and_caches_with_the_run(make_sandboxes):
    sandboxes = make_sandboxes()
    first = sandboxes.confine("a.py")
    assert Path(first.caches, "seeded").exists()
    for folder in (first.temporary, first.caches):
        Path(folder, "made").touch()
    second = sandboxes.confine("a.py")
    assert second == first and Path(first.temporary).is_dir()
    assert not Path(first.temporary, "made").exists() and Path(first.caches, "made").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"wanted": False}, "off: --no-sandbox was given"),
        ({"line": ""}, "off: only Linux has the means for it"),
        ({"line": "off: this system has neither"}, "off: this system has neither"),
    ],
)
def test_without_a_sandbox_nobody_is_confined_and_the_run_says_why(make_sandboxes, options, line):
    sandboxes = make_sandboxes(**options)
    assert sandboxes.line == line and sandboxes.confine("a.py") is None


def test_a_run_of_families_alone_says_nothing(make_sandboxes):
    assert make_sandboxes(names=("dispatched", "gemm_fp16")).line == ""


def test_part_of_a_sandbox_is_used(make_sandboxes):
    assert make_sandboxes(line="on in part: seccomp").confine("a.py") is not None


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """The user's Triton cache with three kernels, a lock and a link; and the folder to copy to."""
    own, copy = tmp_path / "own", tmp_path / "copy"
    for number, name in enumerate(("old", "new", "newest")):
        path = own / name / "kernel.cubin"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes([number]) * 100)
        os.utime(path, (1000 + number, 1000 + number))
    (own / "old" / "kernel.lock").touch()
    (own / "link").symlink_to("/etc/hostname")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(own))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    copy.mkdir()
    return own, copy


def test_a_cache_starts_as_a_copy_that_shares_nothing_with_the_users_own(caches):
    own, copy = caches
    seed_caches(copy)
    copied = {str(path.relative_to(copy / "triton")) for path in copy.rglob("*") if path.is_file()}
    assert copied == {"old/kernel.cubin", "new/kernel.cubin", "newest/kernel.cubin"}
    mine = copy / "triton" / "new" / "kernel.cubin"
    assert mine.stat().st_nlink == 1
    mine.write_bytes(b"poison")
    assert (own / "new" / "kernel.cubin").read_bytes() == b"\1" * 100


@pytest.mark.parametrize(("limit", "copied"), [(50, set()), (150, {"newest"}), (250, {"newest", "new"})])
def test_of_a_large_cache_the_newest_files_are_copied(caches, monkeypatch, limit, copied):
    monkeypatch.setattr(confinement, "SEED_BYTES", limit)
    seed_caches(caches[1])
    assert {path.parent.name for path in caches[1].rglob("*.cubin")} == copied


def test_scratch_folders_go_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(confinement.tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0
        (folder / "left").mkdir(mode=0o500)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(platform.system() != "Linux", reason="variables of Linux")
def test_compilers_are_sent_to_the_workers_own_folders(tmp_path):
    wanted = sandbox.Confinement(str(tmp_path / "temporary"), str(tmp_path / "caches"), (), ())
    code = (
        "import json, os, tempfile; from rooflane.eval.sandbox.confine import Confinement, use_private_folders\n"
        f"before = tempfile.gettempdir(); use_private_folders({wanted!r})\n"
        "os.makedirs(os.environ['TMPDIR'])\n"
        "print(json.dumps({**os.environ, 'now': tempfile.gettempdir()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    said = json.loads(done.stdout)
    assert said["now"] == said["TMPDIR"] == wanted.temporary
    for name in (
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "CUDA_CACHE_PATH",
        "XDG_CACHE_HOME",
    ):
        assert said[name].startswith(wanted.caches) and Path(said[name]).is_dir()
    assert len({said[name] for name in sandbox.CACHE_VARIABLES}) == len(sandbox.CACHE_VARIABLES)


@pytest.mark.parametrize(
    ("options", "wanted"), [([], True), (["--no-sandbox"], False), (["--no-sandbox", "--quick"], False)]
)
def test_the_option_of_the_command_reaches_the_run(monkeypatch, options, wanted):
    seen = {}

    def stop(shapes, candidates, **settings):
        seen.update(settings)
        raise SystemExit(5)

    monkeypatch.setattr("rooflane.eval.evaluate", stop, raising=False)
    with pytest.raises(SystemExit):
        cli.main(["eval", "published.csv", "--shape", "1", "--profile", "cpu", "--device", "cpu", *options])
    assert seen["sandbox"] is wanted
