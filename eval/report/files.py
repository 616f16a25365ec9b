"""Write the files that a user names: whole or not at all, and never through a link."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from rooflane.eval.exit_codes import EvaluationError

# The one name that stands for the standard output: `report RUN --csv /dev/stdout | head`.
STDOUT = Path("/dev/stdout")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there, with the mode of the file it replaces; text becomes UTF-8.

    `/dev/stdout` is the standard output. Any other link, and whatever is no regular file, is refused: a link could
    lead to a file that the user did not name. Raises `EvaluationError` for these, and where the file cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    mode = _mode_of(path)
    fresh = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    try:
        # Made anew or not at all: a link that waits under this name is not followed.
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
        if mode is not None:
            fresh.chmod(mode)
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise EvaluationError(f"{path}: cannot be written ({error.strerror}); check that the path exists") from None


def _mode_of(path: Path) -> int | None:
    """Return the mode of the file to be replaced, None where there is none; raises for what must not be replaced."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error.strerror}); name another place") from None
    if stat.S_ISLNK(found):
        raise EvaluationError(
            f"{path}: is a link to {os.readlink(path)}, and rooflane writes through no link; name that file itself, or "
            "remove the link"
        )
    if not stat.S_ISREG(found):
        raise EvaluationError(f"{path}: cannot be written (it is no regular file); name another place")
    return stat.S_IMODE(found)
