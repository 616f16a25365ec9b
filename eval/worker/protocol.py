"""What parent and worker say to each other: one frozen dataclass a request and an answer, as JSON lines.

A request names its answer: `Build` is answered by `Built`, and any request may be answered by `Failed` or `Wrong`. The
parent validates each answer before it uses it: a field that is missing, unknown or of another type makes the whole
answer invalid. Nothing is unpickled, and no torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar, dataclass_transform, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rooflane.eval.check.cases import Called, Case, OutputFacts
from rooflane.eval.record.records import ArmId, GateResult, Status, TruthCheck
from rooflane.eval.worker.candidates import Plan
from rooflane.eval.worker.outside import Standing
from rooflane.shapes import Problem, Shape

A = TypeVar("A")
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Nanoseconds of the clocks beside the windows. A window's own times may be of any sign: the parent reports those.
Ns = Annotated[int, Field(gt=0)]


class InvalidMessage(ValueError):
    """A line that is no message, or none of those that may stand there."""


@dataclass_transform(frozen_default=True)
class Message:
    """A message: each subclass is a frozen dataclass. Numbers are not taken for texts, nor texts for numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)


class Request(Message, Generic[A]):
    """A request whose answer is an `A`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        REQUESTS[cls.__name__] = cls
        ANSWERS[cls] = get_args(cls.__orig_bases__[0])[0]


Handler = Callable[[Any], Message | Called | OutputFacts]
Handlers = dict[type[Request], Handler]
REQUESTS: dict[str, type[Request]] = {}
ANSWERS: dict[type[Request], type] = {}


# Answers.
class Failed(Message):
    """Something raised: the status a row gets, and one line on what."""

    status: Literal["error", "oom"]
    reason: str


class Wrong(Message):
    """An output that is no plain tensor of the right shape, or a call that changed what it was given."""

    reason: str


class Done(Message):
    """Nothing to report."""


class Greeting(Message):
    """The process as it was set up."""

    environment: dict[str, Any]
    uuid: str | None


class Described(Message):
    """A problem with what is known after it ran, and the nanoseconds of a call by two clocks.

    `device_ns` is None where the device has no clock of its own. `peak_bytes` is the most memory of one call.
    """

    problem: Problem
    call_ns: Ns
    device_ns: Ns | None
    peak_bytes: int


class Begun(Message):
    """How many inputs of the shape may be alive at once."""

    capacity: int


class Held(Message):
    """The reference is held; its first call's seconds where it was called."""

    setup_s: Finite | None


class DeviceState(Message):
    """Whether the GPU's context still works."""

    ok: bool


class Built(Message):
    """An arm as it was built, ready where its status is "ok"."""

    plan: Plan
    status: Status
    reason: str
    setup_s: Finite | None
    note: str = ""


class Compared(Message):
    """Whether two things were the same."""

    same: bool


class Digests(Message):
    """A digest of each of an arm's weights, by name."""

    digests: tuple[tuple[str, int], ...]


class Inspected(Message):
    """What was tampered with, what else changed in the process, and the most memory allocated.

    `notes` are no evidence by themselves.
    """

    findings: list[str]
    notes: list[str]
    peak_bytes: int | None


class Estimated(Message):
    """A call's nanoseconds, and the warm-up calls made."""

    call_ns: Ns
    warmups: int


class Window(Message):
    """A window's times, its fingerprints (`marks`, base64) and what the kept outputs show.

    `kept` numbers the outputs that still hold their call's result; `deferred` those whose bytes changed after their
    fingerprint was taken although no other call was given the same memory.
    """

    event_ns: list[int]
    host_ns: list[int]
    loop_ns: int
    marks: str
    kept: list[int]
    overwritten: bool
    tokens: Finite
    deferred: list[int]
    fault: str
    changed: str
    # What other processes did to this one meanwhile; only the reference's worker looks.
    outside: list[str]


class StreamHeld(Message):
    """A call on a held stream: the number of its input, its fingerprint (base64), and what its output shows.

    `deferred` says that the output changed after its stream had passed it.
    """

    number: int
    marks: str
    deferred: bool
    fault: str


class States(Message):
    """Nanoseconds of each call by the other clocks and in the other cache states."""

    harness_ns: list[Ns]
    device_ns: list[Ns]
    idle_ns: list[Ns]
    cold_ns: list[Ns]
    rotating_ns: list[Ns]


class Gated(Message):
    """An output compared with the reference's; `same` tells whether its bytes have the fingerprint taken before."""

    gate: GateResult
    same: bool = True


class Names(Message):
    """Names of stress inputs."""

    names: list[str]


class Stressed(Message):
    """An output on a stress input compared with float64, or why it could not be."""

    check: TruthCheck | None
    fault: str = ""


class MarksCompared(Message):
    """The row of a fingerprint that differs most, in units of the limit."""

    row: int
    ratio: float


class WholeCalled(Message):
    """One call on a whole shape."""

    seconds: Finite
    peak_bytes: int | None
    valid_tokens: int


class WholeTimed(Message):
    """One timed call on a whole shape."""

    event_ns: list[int]
    host_ns: list[int]
    valid_tokens: int


class ElementCompared(Message):
    """One element compared with the chunked reference, or why it could not be."""

    gate: GateResult | None
    reference_ns: int
    fault: str = ""


# Requests to any worker.
class Hello(Request[Greeting]):
    """Set the process up for a device; `rules` is the run's own table as TOML."""

    device: str
    profile: dict[str, Any]
    rules: str
    describe: bool
    # How the parent was scheduled before any candidate ran; None where the system does not say.
    standing: Standing | None = None


class BeginShape(Request[Begun]):
    """Draw a shape's weights; no arm is built on them yet."""

    shape: Shape | Problem
    seed: int
    memory_cap_bytes: int | None


class EndShape(Request[Done]):
    """Release everything that belongs to a shape."""


class CheckDevice(Request[DeviceState]):
    """Return whether the GPU's context still works."""


class BusyWait(Request[Done]):
    """Wait for requests without sleeping, on the fastest of some cores, or no longer."""

    on: bool
    cores: list[int]


class DescribeProblem(Request[Described]):
    """Run a problem file once, to learn what its module takes, returns and costs."""

    problem: Problem


# Requests about one worker's arms.
class Build(Request[Built]):
    """Build an arm, and make its first call."""

    arm: ArmId
    call: bool = True


class Call(Request[Called]):
    """Call an arm on a case, or as a promise allows, and write the output where the judge reads it."""

    arm: ArmId
    case: Case
    promise: str = ""


class Repeat(Request[Compared]):
    """Call an arm several times on one input and compare the outputs' bytes."""

    arm: ArmId
    case: Case


class CompareOperations(Request[Compared]):
    """Compare the operations an arm runs with the baseline's."""

    arm: ArmId
    case: Case


class DigestWeights(Request[Digests]):
    """Return a digest of each of an arm's weights."""

    arm: ArmId


class LoadWeights(Request[Done]):
    """Load the shape's weights into an arm."""

    arm: ArmId


class Settle(Request[Done]):
    """Note threads, processes and weights before anything is timed."""


class Inspect(Request[Inspected]):
    """Report what was tampered with since the shape began."""


class Estimate(Request[Estimated]):
    """Warm an arm up within a budget and estimate its call."""

    arm: ArmId
    seed: int
    warmups: int
    budget_s: float


class Prepare(Request[Done]):
    """Draw the inputs of a window; `watch` has `Finish` check whether the calls changed them."""

    arm: ArmId
    seed: int
    calls: int
    lead: int
    mark_seed: int
    fixed: bool = False
    watch: bool = True


class Go(Request[Done]):
    """Run the window's calls."""


class Finish(Request[Window]):
    """Read the window's clocks and check what was kept."""


class Hold(Request[StreamHeld]):
    """Call the window's arm once more, with the stream held until the call and its fingerprint are queued."""

    seed: int


class Ship(Request[OutputFacts]):
    """Write a kept output's bytes for the judge."""

    number: int


class Release(Request[Done]):
    """Release the window."""


class TimeStates(Request[States]):
    """Time an arm by the other clocks and in the other cache states."""

    arm: ArmId
    seed: int
    calls: int
    budget_s: float
    host_ns: int
    call_ns: int


class CallWhole(Request[WholeCalled]):
    """Call an arm on a shape that eager cannot run."""

    arm: ArmId
    seed: int
    padding: float


class ShipPart(Request[OutputFacts]):
    """Write the first rows of one element of that output for the judge."""

    element: int
    rows: int


class TimeWhole(Request[WholeTimed]):
    """Time one such call on new contents."""

    arm: ArmId
    seed: int
    padding: float


# Requests to the judge.
class HoldReference(Request[Held]):
    """Make the shape's model the reference: the eager arm, and the judge over it."""

    call: bool


class Compare(Request[Gated]):
    """Gate an output on a case; `flipped` says that the rows of every weight were reversed for it."""

    case: Case
    output: OutputFacts
    buffer: int
    flipped: bool = False


class ListStresses(Request[Names]):
    """Return the names of the stress inputs."""


class CompareStressed(Request[Stressed]):
    """Compare an output on a stress input, and eager's, with float64."""

    case: Case
    output: OutputFacts
    buffer: int


class CompareMarks(Request[MarksCompared]):
    """Compare a timed call's fingerprint with that of the reference's output."""

    case: Case
    marks: str
    mark_seed: int


class CompareKept(Request[Gated]):
    """Gate a kept output of a timed call, and check its bytes against the fingerprint taken behind the call."""

    case: Case
    output: OutputFacts
    buffer: int
    marks: str
    mark_seed: int


class CompareElement(Request[ElementCompared]):
    """Gate the first rows of one element against the chunked reference."""

    seed: int
    padding: float
    element: int
    rows: int
    output: OutputFacts
    buffer: int


def is_failure(answer: Message | Called) -> bool:
    """Return whether an answer says that something raised, in a call or in the build of an arm."""
    return isinstance(answer, Failed) or (isinstance(answer, Built) and answer.status in ("error", "oom"))


def encode_request(request: Request, number: int) -> bytes:
    """Return a request as one line."""
    return _line({"number": number, "request": type(request).__name__, "body": _body(request)})


def decode_request(line: bytes) -> tuple[int, Request]:
    """Return a request and its number."""
    message = json.loads(line)
    return message["number"], _parse(REQUESTS[message["request"]], message["body"])


def encode_answer(answer: Message, number: int) -> bytes:
    """Return the answer to the request of a number as one line."""
    return _line({"answers": number, "answer": type(answer).__name__, "body": _body(answer)})


def decode_answer(message: dict[str, Any], request: type[Request]) -> Message:
    """Return the answer that a parsed line holds; raises `InvalidMessage` where the request has no such answer."""
    allowed = {kind.__name__: kind for kind in (ANSWERS[request], Failed, Wrong)}
    kind = allowed.get(message.get("answer")) if isinstance(message.get("answer"), str) else None
    if kind is None or set(message) != {"answer", "body"}:
        raise InvalidMessage(f"no answer to {request.__name__}")
    try:
        return _parse(kind, message["body"])
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidMessage(f"{kind.__name__}, field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def _body(message: Message) -> dict[str, Any]:
    return _adapter(type(message)).dump_python(message, mode="json")


def _parse(kind: type, body: Any) -> Any:
    # As JSON text: of Python values strictness would refuse lists for tuples and mappings for dataclasses.
    return _adapter(kind).validate_json(json.dumps(body))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
