"""Files of the state folder and of a run: what is no regular file is refused in one paragraph, and never waited for."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from rooflane.dispatch import ProfileError, keep_profile, kept_path, load_profile, state_files
from rooflane.dispatch.state_files import NotRegular, holders, open_regular, read_regular, replace_file, take_lock

pytestmark = pytest.mark.timeout(20)


def make(kind, path):
    """Put something that is no regular file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's whole path may have a hundred bytes
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "a link":
        (path.parent / "elsewhere").write_text("kept\n")
        path.symlink_to("elsewhere")
    else:
        path.symlink_to(path.name)


KINDS = ("a FIFO", "a folder", "a socket", "a link", "a loop")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_APPEND])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path, kind, flags):
    make(kind, tmp_path / "file")
    with pytest.raises(NotRegular, match="a link" if kind == "a loop" else kind):
        open_regular(tmp_path / "file", flags)


def test_reading_follows_a_link_to_a_file_and_refuses_one_to_a_device(tmp_path):
    make("a link", tmp_path / "file")
    assert read_regular(tmp_path / "file") == b"kept\n"
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(NotRegular, match="a device"):
        read_regular(tmp_path / "null")
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a link", "a loop"])
def test_a_file_that_is_replaced_takes_the_place_of_anything_and_leaves_a_links_target_alone(tmp_path, kind):
    make(kind, tmp_path / "file")
    replace_file(tmp_path / "file", "new\n")
    assert not (tmp_path / "file").is_symlink() and (tmp_path / "file").read_text() == "new\n"
    if kind == "a link":
        assert (tmp_path / "elsewhere").read_text() == "kept\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "elsewhere"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_profile_that_is_no_regular_file_is_one_paragraph(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path))
    make(kind, kept_path())
    with pytest.raises(ProfileError, match="cannot be read .it is .* must be a regular file; remove it"):
        load_profile("auto", "cpu")
    if kind != "a folder":
        keep_profile(load_profile("cpu"))
        assert load_profile("auto", "cpu").name == "cpu"


def test_the_descriptor_is_closed_when_a_program_is_started(tmp_path):
    (tmp_path / "file").write_text("")
    number = open_regular(tmp_path / "file", os.O_RDWR)
    assert not os.get_inheritable(number)
    os.close(number)


def test_a_lock_is_waited_for_so_long_and_its_holder_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        number = open_regular(path, os.O_RDWR)
        before = time.monotonic()
        assert not take_lock(number, 0.2)
        assert 0.2 <= time.monotonic() - before < 5
        (who,) = holders(path)
        assert who.startswith(f"process {other.pid} (py")
        other.kill()
        other.wait()
        assert take_lock(number, 5) and holders(path) == []
        os.close(number)


def test_without_the_look_at_its_kind_a_fifo_is_waited_for(tmp_path, monkeypatch):
    make("a FIFO", tmp_path / "nulls.jsonl")
    monkeypatch.setattr(state_files, "_require_regular", lambda found: None)
    monkeypatch.setattr(state_files, "NONBLOCK", 0)
    reader = threading.Thread(target=read_regular, args=[tmp_path / "nulls.jsonl"])
    reader.start()
    reader.join(0.3)
    assert reader.is_alive()
    os.close(os.open(tmp_path / "nulls.jsonl", os.O_WRONLY))
    reader.join()
