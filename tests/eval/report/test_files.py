"""Files that a user names: written whole, with their mode kept, and never through a link."""

import os
import socket
import stat

import pytest

from rooflane.eval import EvaluationError, cli, update_between_markers
from rooflane.eval.commands.evaluate import REPORT_FILE
from rooflane.eval.export.write import MARK, write_export
from rooflane.eval.report.files import write_file

BLOCK = "<!-- table:begin -->\nold\n<!-- table:end -->\n"


def link(path, target):
    """Make a link to a file that must stay as it is."""
    target.write_text(BLOCK + MARK)
    path.symlink_to(target)


def pipe(path, target):
    os.mkfifo(path)


def folder(path, target):
    path.mkdir()


def device(path, target):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def dangling(path, target):
    path.symlink_to(target)


@pytest.mark.parametrize("make", [link, dangling, pipe, folder, device])
def test_a_link_or_what_is_no_regular_file_is_refused_in_one_paragraph(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    path, target = tmp_path / "out.md", tmp_path / "target"
    make(path, target)
    before = target.read_text() if target.exists() else None
    with pytest.raises(EvaluationError, match="is a link to|is no regular file") as found:
        write_file(path, "new")
    assert str(path) in str(found.value) and "\n" not in str(found.value)
    assert (target.read_text() if target.exists() else None) == before
    assert stat.S_IFMT(path.lstat().st_mode) != stat.S_IFREG
    assert {item.name for item in tmp_path.iterdir()} <= {"out.md", "target"}


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "out.md"
    write_file(path, "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    with path.open() as reader:
        write_file(path, "second")
        assert reader.read() == "first", "who reads the old file keeps it"
    assert path.read_text() == "second" and stat.S_IMODE(path.stat().st_mode) == 0o640
    write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing" / "out.md", tmp_path / "file" / "out.md", tmp_path / ("x" * 300)):
        with pytest.raises(EvaluationError, match="cannot be written"):
            write_file(path, "x")


@pytest.mark.parametrize("option", ["--markdown", "--csv", "--readme", "--html", "--plot"])
def test_no_option_of_report_writes_through_a_link(tmp_path, stored_run, capsys, option):
    path, target = tmp_path / "out-latency.svg", tmp_path / "target"
    link(path, target)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(stored_run.folder), option, str(path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"{path}: is a link to {target}" in said
    assert target.read_text() == BLOCK + MARK and path.is_symlink()


def test_a_report_in_the_run_folder_an_export_and_a_readme_are_not_written_through_links(tmp_path, stored_run):
    for name, write in (
        (REPORT_FILE, lambda path: write_file(path, "report")),
        ("submission.py", lambda path: write_export(f'"""{MARK} x"""', path)),
        ("README.md", lambda path: update_between_markers(path, "table", "new")),
    ):
        path, target = stored_run.folder / name, tmp_path / f"target of {name}"
        link(path, target)
        with pytest.raises(EvaluationError, match="is a link to"):
            write(path)
        assert target.read_text() == BLOCK + MARK


def test_the_standard_output_is_allowed_by_its_name_and_remarks_then_go_beside_it(stored_run, capfdbinary):
    with pytest.raises(SystemExit):
        cli.main(["report", str(stored_run.folder), "--csv", "/dev/stdout"])
    found = capfdbinary.readouterr()
    assert found.out.startswith(b"shape,arm,") and b"calls written" not in found.out and b"calls written" in found.err


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
