"""Facts about the place a run is made in."""

import subprocess

from rooflane.eval.record.environment import available_memory_bytes, describe_environment, git_commit, resolve_device


def test_auto_is_a_device_that_works():
    import torch

    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_commit_is_only_that_of_the_root_itself(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert git_commit(inner) is None
    (tmp_path / "new").write_text("x")
    git_commit.cache_clear()
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_a_cpu_has_no_driver_and_memory_is_known():
    assert "driver" not in describe_environment("cpu")
    assert available_memory_bytes() > 1 << 28
