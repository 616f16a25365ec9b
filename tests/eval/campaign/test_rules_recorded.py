"""A run keeps the rule table it was predicted with, whatever becomes of the file."""

from __future__ import annotations

import pytest

from rooflane.dispatch import load_profile, load_rules, route
from rooflane.eval import evaluate, open_run, render_markdown
from rooflane.eval.campaign import campaign
from rooflane.eval.campaign.campaign import Campaign
from rooflane.eval.worker import worker

MINE = '[[rule]]\nname = "mine"\nwhen = { d_model = 16 }\nfamily = "chunked"\nbecause = "a test"\n'


@pytest.fixture
def started(tmp_path, tiny_shape, monkeypatch):
    """Return a function that starts a run by a table and measures nothing of it."""
    monkeypatch.setattr(Campaign, "run_all", lambda self: self.run)
    monkeypatch.setattr(worker, "reference_numerics", lambda device: None)
    (tmp_path / "mine.toml").write_text(MINE)

    def start(**settings):
        run = evaluate([tiny_shape], runs_dir=tmp_path / "runs", device="cpu", profile="cpu", **settings)
        return open_run(run.folder)

    return start


def test_the_record_names_table_digest_and_every_row(started, tiny_shape):
    run = started(rules="shipped")
    assert run.meta.rules.source == "the shipped rules"
    assert run.meta.rules.digest == load_rules("shipped").digest()
    chosen = route(tiny_shape, load_profile("cpu"), load_rules("shipped")).rule.name
    assert run.meta.prediction(tiny_shape.id).candidates["dispatched"]["rule"] == chosen


class Heard(Exception):
    """Raised where workers would be started, with their first request."""

    def __init__(self, candidates, hello, *rest):
        super().__init__()
        self.hello = hello


def test_a_worker_routes_by_the_recorded_rows(started, tiny_shape, tmp_path, monkeypatch):
    def no_team(*given):
        raise Heard(*given)

    monkeypatch.setattr(campaign, "Team", no_team)
    path = tmp_path / "mine.toml"
    run = started(rules=str(path), controls=())
    assert run.meta.rules.source == "mine.toml over the shipped rules"
    assert run.meta.rules.digest in render_markdown(run.summary())
    path.write_text(MINE.replace('"chunked"', '"sdpa_flash"'))
    with pytest.raises(Heard) as heard:
        Campaign(run, None)._run_team(0, ())
    mine = worker.Worker([])
    mine.handle(heard.value.hello)
    found = route(tiny_shape, load_profile("cpu"), mine.rules)
    assert (found.rule.name, found.family) == ("mine", "chunked")
    assert str(tmp_path) not in run.meta.rules.source + run.meta.rules.text


@pytest.mark.parametrize(
    ("device", "candidate", "pending", "noted"),
    [
        ("cuda", "chunked", True, True),
        ("cuda", "chunked", False, False),
        ("cuda", "graph_compile", True, False),  # calls torch's own code
        ("cpu", "chunked", True, False),  # the C++ call path launches CUDA kernels
    ],
)
def test_a_build_of_the_call_path_is_announced(started, monkeypatch, device, candidate, pending, noted):
    def no_team(*given):
        raise Heard(*given)

    monkeypatch.setattr(campaign, "Team", no_team)
    monkeypatch.setattr(campaign, "host_build_pending", lambda: pending)
    run = started(candidates=candidate, controls=())
    run.meta = run.meta.model_copy(update={"device": device})
    notes = []
    with pytest.raises(Heard):
        Campaign(run, lambda event: notes.append((event.kind, event.text)))._run_team(0, ())
    assert notes == [("note", "compiling the C++ call path once, about half a minute")] * noted
