"""Where this machine's own knowledge lies between runs: the stored null results and the locks."""

from __future__ import annotations

import os
from pathlib import Path

STATE_VARIABLE = "ROOFLANE_STATE_DIR"


def state_dir() -> Path:
    """Return the folder of what is kept between runs: `ROOFLANE_STATE_DIR`, or the user's own state folder."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "rooflane"
