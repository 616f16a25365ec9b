"""`rooflane models`: what is taken, as text and JSON."""

from __future__ import annotations

import json

import pytest

from rooflane.dispatch.adapters.known import KNOWN, REFUSED
from rooflane.eval import cli


@pytest.fixture
def rooflane(capsys, tmp_path, monkeypatch):
    """Return a function that runs one command in an empty folder: (status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_the_list_names_every_known_block(rooflane):
    status, out, _ = rooflane("models")
    assert status == 0
    for known in KNOWN:
        assert known.label in out and known.name.rpartition(".")[2] in out and known.form in out
    assert all(reason in out for reason in REFUSED.values())
    status, out, _ = rooflane("models", "--json")
    listed = json.loads(out)
    assert [row["class"] for row in listed["taken"]][1:] == [known.name for known in KNOWN]
    assert {row["class"]: row["reason"] for row in listed["refused"]} == REFUSED
