"""A seccomp filter that keeps a process from the network and from other processes; written by hand, no library.

A filter is a small program that the kernel runs at each system call. It sees the call's number and the values of its
arguments, not what pointers point to. So it cannot tell one file from another: that is Landlock's part
(`rooflane.eval.sandbox.landlock`). A refused call returns EPERM; the process goes on. The filter holds for every
process that the worker starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

PR_GET_SECCOMP = 21
SECCOMP_SET_MODE_FILTER = 1
TSYNC = 1  # every thread of the process, not the calling one alone
# Without it kernels before 5.16 switch off speculative loads in a filtered process, which slows the candidate alone.
SPEC_ALLOW = 4

# Classic BPF: load a word of the call's description, compare, return.
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
# Offsets in the call's description; an argument is 8 bytes, its low half first on both machines.
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16
# The other numbering of the same x86-64 processor; every call by it is refused.
X32_BIT = 0x40000000

PRIO_USER = 2
# Signal 0 asks only whether a process is there; the others end it.
ENDING = (0, signal.SIGINT, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)

# Numbers of the system calls on x86-64 and on 64-bit Arm. These are refused whatever their arguments.
NEVER = {
    # Other processes' memory, descriptors and steps.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Ways round this filter or round Landlock.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    # The machine as others see it: file systems, namespaces, clocks, counters, keys, the kernel.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
}
# These are refused by their arguments.
BY_ARGUMENT = {
    "ioprio_set": (251, 30),
    "kill": (62, 129),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "socket": (41, 198),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}
NUMBERS = NEVER | BY_ARGUMENT
SECCOMP = (317, 277)
# Each machine's name for the kernel, and its column above.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Set something of the process that an argument names: which argument it is.
OF_A_PROCESS = {
    "sched_setscheduler": 0,
    "sched_setparam": 0,
    "sched_setattr": 0,
    "prlimit64": 0,
    "migrate_pages": 0,
    "move_pages": 0,
    "ioprio_set": 1,
    "setpriority": 1,
}
# An OpenMP library that pins its threads names each by its id, which no filter can tell from another process's.
PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Rule:
    """Allow a call where one of these arguments has one of these values, and `never` does not hold; else refuse it."""

    allowed: tuple[tuple[int, tuple[int, ...]], ...]
    never: tuple[int, int] | None = None


def is_there() -> bool:
    """Return whether the kernel has seccomp and the calls of this processor have numbers here."""
    known = platform.machine() in MACHINES and struct.calcsize("P") == 8
    return known and ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def pinning_is_free(environment: Mapping[str, str]) -> bool:
    """Return whether `sched_setaffinity` is left alone, because a library pins threads by their ids."""
    return any(environment.get(name) for name in PINNING_VARIABLES)


def make_rules(pid: int, *, signals: bool, pinning: bool) -> dict[str, Rule]:
    """Return the rule of each refused call, for a worker with this process id.

    `signals` restricts what the worker may send to other processes to the signals that end one. A filter cannot tell
    the worker's children from strangers, and compilers and pools end their children. A process that was ended is
    reported; one that is stopped for a moment would only seem slow. Landlock tells them apart where it can.
    `pinning` restricts the cores of other threads and processes.
    """
    own = (0, pid)
    rules = {name: Rule(()) for name in NEVER}
    rules |= {name: Rule(((argument, own),)) for name, argument in OF_A_PROCESS.items()}
    rules["setpriority"] = Rule(((1, own),), never=(0, PRIO_USER))
    rules["socket"] = Rule(((0, (socket.AF_UNIX,)),))
    if pinning:
        rules["sched_setaffinity"] = Rule(((0, own),))
    if signals:
        # Which argument holds the signal, and which the process.
        group = -pid & 0xFFFFFFFF
        rules["kill"] = Rule(((1, ENDING), (0, (*own, group))))
        rules["tgkill"] = rules["rt_tgsigqueueinfo"] = Rule(((2, ENDING), (0, own)))
        rules["rt_sigqueueinfo"] = Rule(((1, ENDING), (0, own)))
        rules["tkill"] = rules["pidfd_send_signal"] = Rule(((1, ENDING),))
    return rules


def assemble(rules: Mapping[str, Rule], machine: str) -> bytes:
    """Return the filter's program for a machine of `MACHINES`, 8 bytes an instruction."""
    identity, column = MACHINES[machine]
    program = [_word(MACHINE), (EQUAL, 1, 0, identity), (RETURN, 0, 0, REFUSE), _word(NUMBER)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, REFUSE)]
    for name, rule in rules.items():
        body = _body(rule)
        program += [(EQUAL, 0, len(body), NUMBERS[name][column]), *body]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _word(offset: int) -> tuple[int, int, int, int]:
    return (LOAD, 0, 0, offset)


def _body(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return the instructions that decide on a call; each path ends in a return."""
    body: list[tuple[int, int, int, int]] = []
    if rule.never:
        argument, value = rule.never
        body += [_word(ARGUMENTS + 8 * argument), (EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE)]
    for argument, values in rule.allowed:
        body.append(_word(ARGUMENTS + 8 * argument))
        for value in values:
            body += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*body, (RETURN, 0, 0, REFUSE)]


def install(program: bytes) -> None:
    """Put a filter on every thread of this process, for good; raises `OSError` where the kernel refuses."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    filter_program = Program(len(program) // 8, program)
    number = SECCOMP[MACHINES[platform.machine()][1]]
    # An older kernel may not know a flag. A worker has one thread here, so it can do without each of them.
    for flags in (TSYNC | SPEC_ALLOW, TSYNC, 0):
        if not libc.syscall(number, SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(filter_program)):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            break
    raise OSError(code, f"seccomp: {os.strerror(code)}")
