"""The held stream: an attempt counts when the read was queued in time, and every attempt draws another input."""

import pytest
import torch

from rooflane.eval.check import held_stream
from rooflane.eval.check.held_stream import ATTEMPTS, HOLD_NS, LONGER, TICKS_PER_NS, call_held


class FakeStream:
    """Stands for the device: the hold ends by itself after `early` attempts that were too short."""

    def __init__(self, monkeypatch, early):
        self.early, self.slept = early, []
        monkeypatch.setattr(held_stream, "_Event", object)
        monkeypatch.setattr(held_stream, "_record", lambda event: None)
        monkeypatch.setattr(held_stream, "_sleep", self.slept.append)
        monkeypatch.setattr(held_stream, "_synchronize", lambda: None)
        monkeypatch.setattr(held_stream, "_query", lambda event: len(self.slept) <= self.early)


@pytest.mark.parametrize(("early", "number"), [(0, 0), (2, 2), (99, ATTEMPTS - 1)])
def test_it_holds_longer_until_the_host_is_in_time(monkeypatch, early, number):
    device, read = FakeStream(monkeypatch, early), []
    found, out = call_held(lambda x, mask: x + 1, lambda at: (torch.full((2,), float(at)), None), read.append)
    assert found == number
    # The input has its contents back when the forward runs, and each attempt its own input.
    assert [tensor.tolist() for tensor in read] == [[at + 1.0] * 2 for at in range(number + 1)]
    assert out is read[-1]
    assert device.slept == [HOLD_NS * LONGER**at * TICKS_PER_NS for at in range(number + 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
def test_unjoined_work_is_read_too_early(joined):
    side, weight = torch.cuda.Stream(), torch.eye(512, device="cuda")

    def forward(x, mask):
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            out = x
            for _ in range(20):
                out = out @ weight
        if joined:
            here.wait_stream(side)
        return out

    wrong = 0
    for seed in range(10):
        read = []
        draw = lambda number, seed=seed: (torch.randn(512, 512, device="cuda") + seed + number, None)  # noqa: E731
        _, out = call_held(forward, draw, lambda out, read=read: read.append(out.clone()))
        wrong += not torch.equal(read[-1], out)
    assert wrong == (0 if joined else 10)


@pytest.mark.gpu
def test_work_that_does_not_wait_for_its_input_reads_zeros():
    side = torch.cuda.Stream()

    def forward(x, mask):
        with torch.cuda.stream(side):
            out = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return out

    _, out = call_held(forward, lambda number: (torch.full((4,), 7.0, device="cuda"), None), lambda out: None)
    assert out.tolist() == [1.0] * 4
