"""Every command in the README is run, section by section, each section in a copy of the tree as a clone would be.

Nothing is taken from a command but time: `shapes/published.csv` holds two small shapes under the published ids in the
copy, `rooflane eval` gets one or two processes, one control, a short budget and but for one command a profile that is
there, and placeholders get values.
`make` commands, which set up an environment of their own, are run as `make -n`, and what they would run is run too;
`pip install` is run as a dry run. Code blocks that begin with a comment naming a file are written to that file.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rooflane.eval import cli
from rooflane.eval.exit_codes import ExitCode

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PROGRAMS = ("rooflane", "python", "pytest", "make", "pip")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"#{1,2} (.+)")
FILE_COMMENT = re.compile(r"# ([\w./-]+\.(?:py|toml|csv))\n")
RECORD = "briefs/records/h200-published"
SHAPES = """\
id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal
1,2,8,16,2,16,1,true
2,1,12,16,4,16,2,true
"""
# The organiser's script is not ours to ship: where the tests hold a stand-in for it, that is what runs.
STANDIN = ROOT / "tests" / "standin"
ORGANISER = "torch_transformer_benchmark.py"
SMALL_RUN = ["--control", "identity", "--budget", "0.05", "--processes"]
SMALL_MODEL = shlex.split("--batch-size 2 --seq-len 8 --d-model 16 --heads 2 --ffn-dim 16 --layers 1")
SHORT_BENCHMARK = shlex.split("--warmup 1 --repeats 2 --accuracy-trials 1")
# A finding of something missing is an answer of doctor's, not a fault.
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


@dataclass(frozen=True)
class Step:
    """One thing a section shows: a command to run, or a code block to write or run."""

    kind: str
    text: str


def steps(section: str) -> list[Step]:
    """Return a section's code blocks and commands, those of a block before those inside the text around it."""
    found = [Step(language, body) for language, body in FENCE.findall(section) if language in ("python", "toml")]
    shells = [body for language, body in FENCE.findall(section) if language in ("", "console", "sh", "bash")]
    lines = [line.split(" # ")[0].removeprefix("$ ").strip() for body in shells for line in body.splitlines()]
    lines += INLINE.findall(FENCE.sub("", section))
    commands = [line for line in lines if line.split(" ")[0] in PROGRAMS and " " in line]
    return found + [Step("command", command) for command in dict.fromkeys(commands)]


def sections() -> dict[str, str]:
    """Return the README's text by heading; what stands before the first one under the title."""
    found: dict[str, str] = {}
    title, fenced = "", False
    for line in (ROOT / "README.md").read_text().splitlines(keepends=True):
        fenced ^= line.startswith("```")
        heading = HEADING.match(line)
        if heading and not fenced:  # a comment in a block begins like a heading
            title = heading[1]
        found[title] = found.get(title, "") + line
    return {title: text for title, text in found.items() if steps(text)}


SECTIONS = sections()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return the files of a clone, with small shapes in place of the published ones."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split("\0") if tracked.returncode == 0 else []
    if not any(names):
        pytest.skip("the tree is no git clone, so which files belong to it cannot be told")
    place = tmp_path_factory.mktemp("readme") / "clone"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    for path in ("shapes/published.csv", "published.csv"):
        (place / path).write_text(SHAPES)
    if STANDIN.is_dir():
        shutil.copy(next(STANDIN.glob("*benchmark*.py"), next(STANDIN.glob("*.py"))), place / ORGANISER)
    return place


def expand(command: str, clone: Path) -> list[list[str]]:
    """Return what is run for a command: itself, with less to do and with values for its placeholders."""
    runs = sorted((clone / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    own = str(runs[-1].parent) if runs else RECORD
    words = shlex.split(command)
    if words[0] == "make":
        return [["make", "-n", *words[1:]]]
    if words[0] == "pip":
        return [[sys.executable, "-m", "pip", *words[1:], "--dry-run", "--no-deps", "--no-build-isolation", "--quiet"]]
    if words[0] == "pytest":
        return [[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:]]]
    if words[0] == "python":
        tail = SMALL_MODEL + SHORT_BENCHMARK if ORGANISER in words else []
        return [[sys.executable, *words[1:], *tail]]
    # What goes on with a run, or judges families, gets the section's own; what reads one, the record of 14 shapes.
    run = own if {"--resume", "regret"} & set(words) else RECORD
    words = [re.sub(r"^RUN\b", run, word) for word in words]
    words = [word.replace("::A", "::dispatched").replace("::B", "::sdpa") for word in words]
    if words[1] == "COMMAND":
        return [[sys.executable, "-c", EACH_COMMAND, *words[2:]]]
    if words[1] == "eval" and "--resume" not in words:
        if not any(word.endswith(".csv") for word in words):
            words.append("published.csv")  # shown for its option
        # What several families are compared by is judged over processes: `rules regret` takes no fewer than two.
        words += [*SMALL_RUN, "2" if words.count("--candidate") > 2 else "1"]
        if "--quick" not in words:
            words += ["--profile", "cpu"]  # the quick run alone measures this host first, which takes it 8 seconds
    if words[1] == "submit":
        words += ["--organiser-args", shlex.join(SHORT_BENCHMARK)]
    return [words]


def run(words: list[str], clone: Path) -> subprocess.CompletedProcess[str]:
    """Run one command in the clone, this environment's programs first."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "ROOFLANE_RULES")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{environment.get('PATH', '')}", "OMP_NUM_THREADS": "1"}
    environment |= {"ROOFLANE_STATE_DIR": str(clone / "state"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_command_of_a_section_runs(title: str, tree: Path, tmp_path: Path):
    clone = shutil.copytree(tree, tmp_path / "clone")
    for step in steps(SECTIONS[title]):
        named = FILE_COMMENT.match(step.text)
        if named and step.kind != "command":
            (clone / named[1]).write_text(step.text)
            continue
        if step.kind == "toml":
            continue  # a fragment of a file; what reads it has tests of its own
        lines = [[sys.executable, "-c", step.text]] if step.kind == "python" else expand(step.text, clone)
        for words in lines:
            done = run(words, clone)
            if done.returncode == ExitCode.USAGE and all(word.replace("-", "").isalpha() for word in words):
                done = run([*words, "--help"], clone)  # a name in a sentence, of a command that needs arguments
            allowed = ALLOWED.get(words[1], (0,))
            assert done.returncode in allowed, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_make_eval_is_the_command_of_the_evaluate_section(tree: Path):
    done = run(["make", "-n", "eval"], tree)
    assert done.returncode == 0, done.stderr
    command = "rooflane eval shapes/published.csv --quick"
    assert command in done.stdout
    assert Step("command", command) in steps(SECTIONS["Evaluate"])


def offers(command: str, option: str) -> bool:
    """Return whether the command line has a command with that parameter."""
    found = next((known for known in cli.app.registered_commands if known.name == command), None)
    return found is not None and option in inspect.signature(found.callback).parameters


# The five-minute jobs, and whether the command line offers what the section is about.
JOBS = {
    "Evaluate": offers("eval", "file"),
    "Submit": offers("submit", "organiser"),
    "Add a rule": True,
    "Bring a kernel": offers("eval", "candidate"),
    "Gate in pytest": True,
    "Use as a module": True,
    "Read the report": offers("report", "html"),
}


@pytest.mark.parametrize("title", [title for title, offered in JOBS.items() if offered])
def test_each_five_minute_job_has_a_section_with_something_to_run(title: str):
    assert title in SECTIONS
    assert FENCE.search(SECTIONS[title]), "a block to copy, not only words"
