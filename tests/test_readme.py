"""Every command of the README and of docs/ runs once, in one copy of the tree as a clone would be.

Nothing is left out of a command but time. In the copy `shapes/published.csv` holds two small shapes under published
ids. `rooflane eval` gets one or two processes, one control, a short budget and (but for one command) a shipped profile.
Placeholders get values. `make` sets up an environment of its own, so it runs as `make -n`; `pip` runs as a dry run.
A code block that begins with a comment naming a file is written to that file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rooflane.eval.exit_codes import ExitCode

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# The README first: what its commands write, those of the other pages read.
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAMS = ("rooflane", "python", "make", "pip", "pytest")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FILE_COMMENT = re.compile(r"# ([\w./-]+\.(?:py|toml|csv))\n")
RECORD = "briefs/records/h200-published"
SHAPES = """\
id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal
1,2,8,16,2,16,1,true
2,1,12,16,4,16,2,true
"""
# The organiser's script is not ours to ship: the stand-in runs in its place.
STANDIN = ROOT / "tests" / "standin" / "benchmark.py"
ORGANISER = "torch_transformer_benchmark.py"
SMALL_RUN = ["--control", "identity", "--budget", "0.05", "--processes"]
SMALL_MODEL = shlex.split("--batch-size 2 --seq-len 8 --d-model 16 --heads 2 --ffn-dim 16 --layers 1")
SHORT_BENCHMARK = shlex.split("--warmup 1 --repeats 2 --accuracy-trials 1")
# A finding of something missing is a result of doctor's, not a fault.
ALLOWED = {"doctor": (0, 1)}
EACH_COMMAND = """
import sys
from rooflane.eval import cli
for known in (*cli.app.registered_commands, *cli.app.registered_groups):
    try:
        cli.main([known.name, *sys.argv[1:]])
    except SystemExit as end:
        assert not end.code, known.name
"""
# What the example of optimize() must have done, beside running.
EXAMPLE_HOLDS = """
assert y.shape == x.shape
assert "shape 64x128 (64x128x128 h4 f128 l4 causal)" in fast.route.explain()
"""


@dataclass(frozen=True)
class Step:
    """One thing a page shows: a command to run, or a code block to write or run."""

    kind: str
    text: str


def steps(text: str) -> list[Step]:
    """Return the code blocks and commands of a text, in the order they stand in it."""
    found: list[Step] = []
    place = 0
    for fence in FENCE.finditer(text):
        found += commands(INLINE.findall(text[place : fence.start()]))
        language, body = fence.groups()
        if language == "python":
            found.append(Step(language, body))
        elif language in ("", "console", "sh", "bash"):
            found += commands(line.split(" # ")[0].removeprefix("$ ").strip() for line in body.splitlines())
        place = fence.end()
    return found + commands(INLINE.findall(text[place:]))


def commands(lines) -> list[Step]:
    return [Step("command", line) for line in lines if line.split(" ")[0] in PROGRAMS and " " in line]


def sections(text: str) -> dict[str, str]:
    """Return a page's text by the heading it stands under."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return the files of a clone, with small shapes in place of the published ones."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in tracked.stdout.split("\0") if name] if tracked.returncode == 0 else []
    if not names:
        pytest.skip("the tree is no git clone, so the files that belong to it are unknown")
    place = tmp_path_factory.mktemp("readme") / "clone"
    for name in names:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    for path in ("shapes/published.csv", "published.csv"):
        (place / path).write_text(SHAPES)
    shutil.copy(STANDIN, place / ORGANISER)
    return place


def expand(command: str, clone: Path) -> list[str]:
    """Return what is run for a command: itself, with less to do and with values for its placeholders."""
    words = shlex.split(command)
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if words[0] == "pip":
        return [sys.executable, "-m", "pip", *words[1:], "--dry-run", "--no-deps", "--no-build-isolation", "--quiet"]
    if words[0] == "python":
        return [sys.executable, *words[1:], *(SMALL_MODEL + SHORT_BENCHMARK if ORGANISER in words else [])]
    # What continues a run, or judges families, gets the latest run here; what only reads one, the record of 14 shapes.
    runs = sorted((clone / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    run = str(runs[-1].parent) if runs and {"--resume", "regret"} & set(words) else RECORD
    words = [re.sub(r"^RUN\b", run, word) for word in words]
    words = [word.replace("::A", "::dispatched").replace("::B", "::sdpa") for word in words]
    if words[1] == "COMMAND":
        return [sys.executable, "-c", EACH_COMMAND, *words[2:]]
    if words[1] == "eval" and len(words) > 2 and "--resume" not in words:
        # `rules regret` judges several families over processes: it takes at least two.
        words += [*SMALL_RUN, "2" if words.count("--candidate") > 2 else "1"]
        if "--quick" not in words:
            words += ["--profile", "cpu"]  # only the quick run measures this host first, which takes 8 seconds
    if words[1] == "ladder" and len(words) > 2:
        words += ["--rung", {"gemm": "naive", "reduce": "sum atomics"}[words[2]]]  # every rung is compiled by its tests
    if words[1] == "submit" and len(words) > 2:
        words += ["--organiser-args", shlex.join(SHORT_BENCHMARK)]
    return words


def run(words: list[str], clone: Path) -> subprocess.CompletedProcess[str]:
    """Run one command in the clone, this environment's programs first."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "ROOFLANE_RULES")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{environment.get('PATH', '')}", "OMP_NUM_THREADS": "1"}
    environment |= {"ROOFLANE_STATE_DIR": str(clone / "state"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=600)


def test_every_command_runs_once(clone: Path):
    shown = dict.fromkeys(step for page in PAGES for step in steps(page.read_text()))
    assert len(shown) > 40
    # A bare name in a sentence (`rooflane plan`) is served by the command with its arguments, where a page has that.
    texts = [step.text for step in shown]
    failed = []
    for step in shown:
        named = FILE_COMMENT.match(step.text)
        if named and step.kind == "python":
            (clone / named[1]).write_text(step.text)
            continue
        if step.kind == "python":
            words = [sys.executable, "-c", step.text + (EXAMPLE_HOLDS if "optimize(" in step.text else "")]
        elif any(other.startswith(step.text + " ") for other in texts):
            continue
        else:
            words = expand(step.text, clone)
        done = run(words, clone)
        if done.returncode == ExitCode.USAGE and all(word.replace("-", "").isalpha() for word in words):
            done = run([*words, "--help"], clone)  # a name in a sentence, of a command that needs arguments
        if done.returncode not in ALLOWED.get(words[1], (0,)):
            failed.append(f"{shlex.join(words)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    assert not failed, "\n\n".join(failed)


def test_make_eval_is_the_command_of_the_evaluate_section(clone: Path):
    done = run(["make", "-n", "eval"], clone)
    assert done.returncode == 0, done.stderr
    command = "rooflane eval shapes/published.csv --quick"
    assert command in done.stdout
    assert Step("command", command) in steps(sections((ROOT / "README.md").read_text())["Evaluate"])


def test_each_recipe_has_a_section_with_something_to_copy():
    found = sections((ROOT / "README.md").read_text())
    for title in ("Evaluate", "Submit", "Add a rule", "Bring a kernel", "Serve a model", "Read the report"):
        assert FENCE.search(found[title]), title
