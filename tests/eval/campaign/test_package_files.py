"""What a candidate writes into the package or leaves running: found and named, and gone before the next campaign."""

import os
import shutil
import time
from pathlib import Path

import pytest

from rooflane.eval import evaluate
from rooflane.eval.campaign import campaign, forkserver, launch
from rooflane.eval.campaign.device import campaign_lock
from rooflane.eval.campaign.package_files import FOLDERS, PackageFiles
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.render import make_environment
from rooflane.shapes import Shape

SHAPE = Shape("a", 2, 8, 16, 2, 32, 1)
FAST = {
    "device": "cpu", "profile": "cpu", "controls": (), "budget_s": 0.02, "processes": 1, "trials": 1, "rounds": 2,
    # The sandbox refuses what these programs do.
    "sandbox": False,
}  # fmt: skip


@pytest.fixture
def package(root, tmp_path):
    """A copy of the package."""
    target = tmp_path / "site" / "rooflane"
    for name in FOLDERS:
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return target


EDITS = {
    "eval/check/stress_set.json": lambda path: path.write_text('{"stresses": []}'),
    "eval/report/templates/report.md.j2": lambda path: path.write_text("every candidate is faster\n"),
    "dispatch/rules.toml": lambda path: path.write_text(path.read_text() + "\n"),
    "eval/check/gate.py": lambda path: path.write_text(path.read_text().replace("False", "True")),
    "baseline/sitecustomize.py": lambda path: path.write_text("raise SystemExit\n"),
    "shapes/published.csv": lambda path: path.unlink(),
    "eval/worker/clock.py": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.timeout(60)
def test_a_file_that_changes_comes_or_goes_is_named(package):
    files = PackageFiles(package)
    assert files.changes() == []
    files.require_unchanged()
    for name, edit in EDITS.items():
        edit(package / name)
    assert files.changes() == sorted(EDITS)
    with pytest.raises(EvaluationError, match="baseline/sitecustomize.py, .* changed on disk since this process began"):
        files.require_unchanged()


def test_bytecode_that_is_not_of_before_is_removed_and_an_editors_file_means_nothing(package):
    cache = package / "eval" / "check" / "__pycache__"
    cache.mkdir()
    for name in ("kept", "changed"):
        (cache / f"{name}.cpython-311.pyc").write_bytes(b"code")
    files = PackageFiles(package)
    (cache / "changed.cpython-311.pyc").write_bytes(b"other code")
    (cache / "new.cpython-311.pyc").write_bytes(b"code")
    (package / "eval" / "check" / ".gate.py.swp").write_bytes(b"")
    assert files.changes() == []
    assert [path.name for path in cache.iterdir()] == ["kept.cpython-311.pyc"]


def test_no_new_server_or_interpreter_is_started_from_changed_files(package, monkeypatch):
    files = PackageFiles(package)
    (package / "eval" / "cli.py").unlink()
    for module in (forkserver, launch):
        monkeypatch.setattr(module, "loaded_package", lambda: files)
    monkeypatch.setattr(forkserver, "_server", None)
    with pytest.raises(EvaluationError, match="file eval/cli.py changed on disk"):
        forkserver.fork_server()
    monkeypatch.setattr(forkserver, "available", lambda: False)
    with pytest.raises(EvaluationError, match="file eval/cli.py changed on disk"):
        launch.start_process((0,))


EDITOR = """
from pathlib import Path

ROOT = Path({root!r})
(ROOT / "eval" / "check" / "stress_set.json").write_text('{{"stresses": []}}')
(ROOT / "eval" / "report" / "templates" / "report.md.j2").write_text("faster")
(ROOT / "families" / "own.py").write_text("")

def build(model, shape, device):
    return lambda x, mask=None: model(x, mask)
"""


@pytest.mark.slow
def test_a_candidate_that_edits_the_package_is_reported_and_no_further_process_is_started(
    package, tmp_path, monkeypatch
):
    def run(guard):
        monkeypatch.setattr(campaign, "PackageFiles", lambda: guard)
        notes = []
        path = tmp_path / "mine.py"
        path.write_text(EDITOR.format(root=str(package)))
        found = evaluate(
            [SHAPE], [str(path)], runs_dir=tmp_path / "runs", **FAST | {"processes": 2},
            on_event=lambda event: notes.append(event.text) if event.kind == "note" else None,
        )  # fmt: skip
        return [row.integrity for row in found.records() if row.kind == "candidate"], found.summary().exit_code(), notes

    rows, status, notes = run(PackageFiles(package))
    names = "eval/check/stress_set.json, eval/report/templates/report.md.j2, families/own.py"
    assert status == 30
    assert rows == [
        [
            f"rooflane's own files {names} changed on disk while candidates ran; where you changed them yourself, "
            "measure again"
        ]
    ], "of the first of two processes"
    assert any("no further process is started" in note and names in note for note in notes)
    monkeypatch.setattr(PackageFiles, "changes", lambda self: [])
    rows, status, notes = run(PackageFiles(package))
    assert rows == [[], []] and status != 30


def test_templates_are_those_of_when_the_reports_code_was_imported(root):
    texts = {path.name: path.read_text() for path in (root / "eval" / "report" / "templates").iterdir()}
    assert make_environment().loader.mapping == texts


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_that_a_candidate_leaves_is_ended_and_the_next_campaign_has_the_device(root, tmp_path, monkeypatch):
    path = root / "tests" / "exploits" / "cheats" / "e21_held_lock.py"

    def run():
        notes = []
        evaluate(
            [SHAPE], [str(path)], runs_dir=tmp_path / "runs", **FAST,
            on_event=lambda event: notes.append(event.text) if event.kind == "note" else None,
        )  # fmt: skip
        return [note for note in notes if "had left running" in note]

    (note,) = run()
    pids = [int(word.strip("),")) for word in note.split() if word.strip("),").isdigit()]
    # The candidate's build, its copy's, and the second model's.
    assert len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with campaign_lock("cpu", "next"):
        pass
    monkeypatch.setattr("rooflane.eval.campaign.team.end_strays", list)
    assert run() == []
    time.sleep(0.2)
    with pytest.raises(EvaluationError, match=r"cpu is taken by process \d+ \("), campaign_lock("cpu", "next"):
        pass
    assert len(launch.end_strays()) == 3
    with campaign_lock("cpu", "next"):
        pass
