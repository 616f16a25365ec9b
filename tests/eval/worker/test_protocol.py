"""The wire between parent and worker: what is sent arrives as it was, and what no harness writes is refused."""

import json
from dataclasses import is_dataclass

import pytest

from rooflane.eval.check.cases import Called, Case
from rooflane.eval.record.records import ArmId, parse_arm
from rooflane.eval.worker import protocol
from rooflane.eval.worker.protocol import InvalidMessage, decode_answer, decode_request, encode_answer, encode_request
from rooflane.shapes import Shape

MINE = ArmId("a file of mine.py", "copy", "a file of mine.py")
WINDOW = {
    "event_ns": [1, 2], "host_ns": [], "loop_ns": 3, "marks": "", "kept": [0], "overwritten": False, "tokens": 4.5,
    "deferred": [], "fault": "", "changed": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [
        protocol.Hello("cpu", {"name": "cpu"}, "[[rule]]", describe=True),
        protocol.BeginShape(Shape("a", 2, 8, 16, 2, 16, 1), 2**47, None),
        protocol.Build(MINE, call=False),
        protocol.Call(MINE, Case(3, 0.25, "mask", "holes"), "kept output"),
        protocol.BusyWait(True, [1, 2]),
        protocol.Go(),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_):
    assert decode_request(encode_request(request_, 7)) == (7, request_)


def test_every_request_is_a_dataclass_with_an_answer_of_its_own():
    assert len(protocol.REQUESTS) > 20
    for name, request in protocol.REQUESTS.items():
        assert is_dataclass(request) and request.__name__ == name
        assert is_dataclass(protocol.ANSWERS[request])


def decoded(kind, body, request=protocol.Finish, **more):
    return decode_answer({"answer": kind, "body": body} | more, request)


def test_an_answer_arrives_as_it_was_sent():
    assert decoded("Window", WINDOW) == protocol.Window(**WINDOW)
    sent = encode_answer(protocol.MarksCompared(3, float("inf")), 7)
    message = json.loads(sent)
    assert message.pop("answers") == 7
    assert decode_answer(message, protocol.CompareMarks).ratio == float("inf")
    assert decoded("Failed", {"status": "oom", "reason": "no memory"}).status == "oom"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"event_ns": [1, 2.5]}, "event_ns.1"),
        ({"event_ns": [1, float("nan")]}, "event_ns.1"),
        ({"event_ns": ["1"]}, "event_ns.0"),
        ({"event_ns": [True]}, "event_ns.0"),
        ({"event_ns": None}, "event_ns"),
        ({"tokens": float("nan")}, "tokens"),
        ({"overwritten": 0}, "overwritten"),
        ({"fault": 3}, "fault"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_field_of_another_type_or_name_makes_the_answer_invalid(change, said):
    with pytest.raises(InvalidMessage, match=f"field {said}"):
        decoded("Window", WINDOW | change)


def test_a_missing_field_and_another_requests_answer_are_invalid():
    for name in WINDOW:
        with pytest.raises(InvalidMessage, match=f"field {name}"):
            decoded("Window", {key: value for key, value in WINDOW.items() if key != name})
    for kind in ("Estimated", "nothing", None, ["Window"]):
        with pytest.raises(InvalidMessage, match="no answer to Finish"):
            decoded(kind, {"call_ns": 1, "warmups": 1})
    with pytest.raises(InvalidMessage, match="no answer to Finish"):
        decoded("Window", WINDOW, extra=1)


def test_what_is_nested_is_as_strict():
    facts = {"shape": [2, 8], "dtype": "float32", "device": "cpu", "strides": "contiguous", "bytes": 64}
    assert decoded("Called", {"output": facts, "not_loaded": ""}, protocol.Call) == Called(
        output=protocol.OutputFacts((2, 8), "float32", "cpu", "contiguous", 64)
    )
    for change in ({"bytes": "64"}, {"shape": [2.5]}, {"more": 1}):
        with pytest.raises(InvalidMessage):
            decoded("Called", {"output": facts | change, "not_loaded": ""}, protocol.Call)
    states = dict.fromkeys(("harness_ns", "device_ns", "idle_ns", "cold_ns", "rotating_ns"), [5])
    assert decoded("States", states, protocol.TimeStates).idle_ns == [5]
    with pytest.raises(InvalidMessage, match="cold_ns"):
        decoded("States", states | {"cold_ns": [0]}, protocol.TimeStates)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("eager", ArmId("eager", "baseline")),
        ("noop", ArmId("noop", "noop")),
        ("anchor", ArmId("anchor", "anchor")),
        ("sdpa", ArmId("sdpa", "control")),
        ("one of two.py", ArmId("one of two.py", "candidate", "one of two.py")),
        ("copy of one of two.py", ArmId("one of two.py", "copy", "one of two.py")),
        ("copy of x.py", ArmId("copy of x.py", "candidate", "copy of x.py")),
        ("copy of copy of x.py", ArmId("copy of x.py", "copy", "copy of x.py")),
    ],
)
def test_a_records_text_names_one_arm_and_no_other(text, arm):
    found = parse_arm(text, ["one of two.py", "copy of x.py"])
    assert found == arm and str(found) == text
