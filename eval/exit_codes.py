"""What the command line's exit status means; 2 is reserved for usage and never means anything else."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """One code per outcome, so that CI can tell a wrong output from a slow one and from a typing error."""

    COMPLETE = 0  # every planned row is there and every output correct (or the required verdict holds)
    ERROR = 1  # an unexpected exception
    USAGE = 2  # a request that cannot be run
    SLOWER = 10  # --require: the whole interval lies below the noise floor
    EQUIVALENT = 11  # --require faster: the whole interval lies within the declared margin of 1
    INCONCLUSIVE = 12  # --require: the interval does not clear the floor, or no verdict is claimed
    INCORRECT = 20  # a candidate's output failed a check
    CONTRACT = 21  # correct, but a built forward breaks a promise it owes its caller
    INCOMPLETE = 22  # a row is missing, a check was not run, or an arm raised, ran out of memory or lost its worker
    INTEGRITY = 30  # evidence that outputs, clocks or state were manipulated
    CONTAMINATED = 40  # the machine was disturbed too much, or a copy of an arm differs from the arm
    INTERRUPTED = 130  # Ctrl-C; what was measured is kept


class EvaluationError(ValueError):
    """A request that cannot be evaluated; the text is one paragraph: what, where and how to fix it."""
