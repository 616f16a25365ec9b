"""The command line: results without torch, JSON beside every table, one paragraph for every error."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rooflane.dispatch import keep_profile, load_profile, load_rules
from rooflane.eval import cli
from rooflane.eval.campaign import planning
from rooflane.eval.commands import output
from rooflane.eval.commands.output import Group
from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.record.settings import Settings
from rooflane.eval.submit import runs as submit_runs

HEADER = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal"
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from rooflane.eval.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"scipy", "matplotlib", "pandas", "triton"} & sys.modules.keys()
    assert not heavy, heavy
"""


def test_classify_answers_in_under_a_second_with_torch_not_importable(root: Path):
    command = [sys.executable, "-c", WITHOUT_TORCH, "classify", root / "shapes" / "published.csv"]
    command += ["--profile", "rtx5090"]
    seconds = 0.0
    for _ in range(3):  # processor time, three tries at most: a busy machine is no fault of the command's
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if seconds < 1.0:
            break
    assert seconds < 1.0


def test_published_shapes_have_their_known_regimes_on_an_rtx5090(rooflane):
    status, out, _ = rooflane("classify", "published.csv", "--profile", "rtx5090", "--json")
    assert status == 0
    found = {item["shape"]["id"]: item for item in json.loads(out)["shapes"]}
    assert {key: found[key]["regime"] for key in ("1", "2", "3", "4", "7", "9", "10", "12")} == dict.fromkeys(
        ("1", "2", "3", "4", "7", "9", "10", "12"), "launch"
    )
    assert found["6"]["regime"] == found["13"]["regime"] == "bandwidth" and found["14"]["regime"] == "infeasible"
    # On the edge: the published break-even costs lie inside the range of host costs that were seen.
    assert all(found[key]["regime"] == "launch" or found[key]["borderline"] for key in ("5", "11"))
    assert found["8"]["regime"] == "compute" or found["8"]["borderline"]


def test_saved_prediction_is_the_printed_one_and_carries_its_figures(rooflane, tmp_path: Path):
    path = tmp_path / "prediction.json"
    status, out, _ = rooflane("classify", "published.csv", "--profile", "h200", "--save", path, "--json")
    assert status == 0 and json.loads(path.read_text()) == json.loads(out)
    assert json.loads(out)["profile"]["eager_dispatch"]["mark"] == "measured"


PLANNING = [
    ["classify", "published.csv", "--profile", "h200"],
    ["route", "published.csv", "--profile", "h200"],
    ["families", "--profile", "h200"],
    ["rules", "list"],
    ["rules", "check"],
    ["rules", "explain", "published.csv", "--profile", "h200", "--shape", "8"],
]
ALL_PLANNING = """
import json, sys
sys.modules["torch"] = None
from rooflane.eval.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, arguments
    print("\\0")
heavy = {"scipy", "matplotlib", "pandas", "triton"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_every_planning_command_prints_text_and_json_without_torch(tmp_path: Path):
    asked = [[*arguments, *extra] for arguments in PLANNING for extra in ((), ("--json",))]
    command = [sys.executable, "-c", ALL_PLANNING, json.dumps(asked)]
    # Somewhere else than the repository: a shipped shape file is found by its bare name.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("\0")[:-1]
    assert len(printed) == len(asked)
    for arguments, text in zip(asked, printed, strict=True):
        assert text.strip(), arguments
        if arguments[-1] == "--json":
            json.loads(text)


def test_a_file_at_hand_wins_over_the_shipped_one(rooflane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "published.csv").write_text(f"{HEADER}\nmine,1,8,16,1,16,1,true\n")
    monkeypatch.chdir(tmp_path)
    _, out, _ = rooflane("classify", "published.csv", "--profile", "h200", "--json")
    assert [item["shape"]["id"] for item in json.loads(out)["shapes"]] == ["mine"]


def test_explain_names_the_chosen_rule_and_why_not_the_others(rooflane):
    _, out, _ = rooflane("rules", "explain", "published.csv", "--shape", "14", "--profile", "h200", "--json")
    (found,) = json.loads(out)
    assert found["chosen"] == "does-not-fit"
    assert found["rules"]["does-not-fit"].startswith("chosen, sends it to chunked: ")
    assert "regime" in found["rules"]["launch-bound"] or "launch_ratio" in found["rules"]["launch-bound"]


def test_explain_tells_a_rule_that_comes_later_from_one_whose_family_cannot_serve(rooflane):
    _, out, _ = rooflane("rules", "explain", "published.csv", "--shape", "2", "--profile", "h200", "--json")
    assert json.loads(out)[0]["rules"]["anything-else"] == "matches, but comes after the chosen rule"
    _, out, _ = rooflane("rules", "explain", "published.csv", "--shape", "2", "--profile", "cpu", "--json")
    verdict = json.loads(out)[0]["rules"]["fits-one-sm"]
    assert verdict.startswith("matches, but its family resident cannot serve: needs an NVIDIA GPU")


def test_a_shape_without_a_family_hides_no_other(rooflane):
    status, out, err = rooflane("route", "published.csv", "--profile", "cpu")
    assert status == ExitCode.USAGE
    assert out.count("sdpa_flash") == 14 and "13 shapes: 13 by sdpa_flash" in out
    assert err.startswith("rooflane: shape 14 ") and len(err.strip().splitlines()) == 1


def test_families_count_what_the_router_would_take(rooflane):
    _, out, _ = rooflane("families", "--profile", "cpu", "--json")
    (chunked,) = [row for row in json.loads(out) if row["family"] == "chunked"]
    assert chunked["serves"] == 13 and chunked["refused"][0]["reason"].startswith("needs ")


RULE = 'replace = true\n[[rule]]\nname = "all"\nwhen = {when}\nfamily = "{family}"\nbecause = "x"\n'
BAD_REQUESTS = {
    "missing file": (None, ("classify", "nowhere.csv"), "nowhere.csv"),
    "wrong header": ("id,batch\n", ("classify", "FILE"), "FILE:1"),
    "negative size": (f"{HEADER}\na,-1,8,16,1,16,1,true\n", ("classify", "FILE"), "FILE:2: column batch_size: '-1'"),
    "fractional size": (f"{HEADER}\na,1,8.5,16,1,16,1,true\n", ("classify", "FILE"), "FILE:2: column seq_len: '8.5'"),
    "indivisible heads": (f"{HEADER}\na,1,8,16,3,16,1,true\n", ("classify", "FILE"), "not divisible by num_heads 3"),
    "unknown profile": (None, ("classify", "published.csv", "--profile", "h999"), "'h999'"),
    "malformed profile": ("name = [\n", ("classify", "published.csv", "--profile", "FILE"), "FILE:"),
    "malformed rules": ("[[rule]\n", ("rules", "check", "FILE"), "FILE:1"),
    "unknown family routed": (
        RULE.format(when="{}", family="warp"), ("route", "published.csv", "--rules", "FILE"), "'warp'",
    ),
    "unknown field": (
        RULE.format(when="{ colour = 1 }", family="chunked"), ("route", "published.csv", "--rules", "FILE"), "'colour'",
    ),
    "no catch-all": (
        RULE.format(when='{ regime = "launch" }', family="chunked"),
        ("route", "published.csv", "--rules", "FILE"), "without a catch-all",
    ),
    "unknown shape": (None, ("eval", "published.csv", "--shape", "99"), "'99'"),
    "unknown device": (None, ("probe", "--device", "tpu"), "'tpu'"),
    "unknown plot format": (None, ("profile", "published.csv", "--plot", "a.gif"), ".svg or .png"),
    "unknown arm": (None, ("profile", "published.csv", "--shape", "2", "--arm", "warp"), "rooflane: candidate 'warp'"),
    "no such run": (None, ("report", "nowhere"), "nowhere"),
    "no such runs": (None, ("compare", "nowhere", "neither"), "nowhere"),
    "no such candidate": (None, ("eval", "published.csv", "--candidate", "gone.py", "--device", "cpu"), "gone.py"),
    "no file": (None, ("eval",), "FILE"),
    "resume with settings": (None, ("eval", "--resume", "nowhere", "--quick"), "quick"),
    "resume of no run": (None, ("eval", "--resume", "nowhere"), "nowhere"),
    "unwritable": (None, ("classify", "published.csv", "--save", "no/such/folder.json"), "no/such/folder.json"),
    "unknown option": (None, ("classify", "published.csv", "--nothing"), "--nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_one_paragraph_and_exit_2(case: str, rooflane, tmp_path: Path, monkeypatch):
    content, arguments, expected = BAD_REQUESTS[case]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "given.toml"
    if content is not None:
        file.write_text(content)
    arguments = [str(file) if argument == "FILE" else argument for argument in arguments]
    status, _, err = rooflane(*arguments)
    assert status == ExitCode.USAGE
    assert "Traceback" not in err
    assert expected.replace("FILE:", f"{file}:") in " ".join(err.split())


def test_cuda_without_a_gpu_says_what_to_do(rooflane, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = rooflane("eval", "published.csv", "--device", "cuda")
    assert status == ExitCode.USAGE
    assert "rooflane doctor" in err and len(err.strip().splitlines()) == 1


def test_rules_check_tells_each_fault_once(rooflane, tmp_path: Path):
    path = tmp_path / "rules.toml"
    second = RULE.format(when="{}", family="chunked").removeprefix("replace = true\n")
    path.write_text(RULE.format(when="{}", family="warp") + second)
    status, out, err = rooflane("rules", "check", path)
    assert (status, err) == (ExitCode.USAGE, "")
    # The second row has the first one's name: that it also stands behind it is no fault of its own.
    first, repeated = out.splitlines()
    assert first.startswith(f"error: {path}:2: ") and repeated.startswith(f"error: {path}:7: ")


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path):
    from rooflane.shapes import ShapeError

    for arguments in (["--debug", "classify", "gone.csv"], ["classify", "gone.csv", "--debug"]):
        with pytest.raises(ShapeError):
            cli.main(arguments)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), ExitCode.USAGE, "pip install torch"),
        (PermissionError(13, "Permission denied", "/x"), ExitCode.USAGE, "may be written"),
        (KeyError("lost"), ExitCode.ERROR, "unexpected KeyError"),
        # A missing module of rooflane is a broken installation, not a missing library.
        (ModuleNotFoundError("No module named 'rooflane.x'", name="rooflane.x"), ExitCode.ERROR, "unexpected"),
    ],
)
def test_errors_of_others_are_explained_too(error: Exception, status: ExitCode, words: str):
    paragraph, code = cli.explain_error(error)
    assert code == status and words in paragraph and "\n" not in paragraph


def test_version_is_the_installed_one(rooflane):
    from importlib.metadata import version

    assert rooflane("--version")[:2] == (0, f"rooflane {version('rooflane')}\n")


def test_module_starts_the_same_command_line():
    done = subprocess.run([sys.executable, "-m", "rooflane.eval", "--version"], capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"rooflane ")


def test_a_docstrings_line_breaks_are_not_the_helps():
    """An 80-column docstring shown at another width would break in the midst of sentences."""
    group = Group()

    @group.command("say")
    def say() -> None:
        """Say
        something.

        In a second
        paragraph.
        """

    (command,) = group.registered_commands
    assert command.help == "Say something.\n\nIn a second paragraph."


def each_command(command, words=()):
    """Return every command of the program with the words that call it."""
    for name, known in getattr(command, "commands", {}).items():
        yield from each_command(known, (*words, name))
    if not hasattr(command, "commands"):
        yield words, command


def test_help_shows_every_word_of_every_options_text(rooflane, monkeypatch):
    """rich's own markup would take a default in brackets, such as [dispatched], for a style."""
    monkeypatch.setenv("COLUMNS", "500")
    shown, defaults = 0, set()
    for words, command in each_command(typer.main.get_command(cli.app)):
        status, out, _ = rooflane(*words, "--help")
        assert status == 0
        page = " ".join(out.split())
        for parameter in command.params:
            text = " ".join((parameter.help or "").replace("`", "").split())
            assert text in page, (words, parameter.name)
            shown += bool(text)
            defaults |= set(re.findall(r"\[[^\]]+\]", text))
    assert shown > 60
    assert {
        "[dispatched]",
        "[every control]",
        "[one each]",
        "[from the nulls]",
        "[your own store]",
    } <= defaults


NAMES = ["prefill[long]", "[bold]fat[/bold]", "x[/red]", ":smile:"]


@pytest.fixture
def narrow(monkeypatch):
    """Give every table a terminal of 80 columns."""
    monkeypatch.setattr(output, "PIPE_WIDTH", 80)


def test_brackets_and_colons_of_a_users_names_are_no_markup(rooflane, tmp_path, monkeypatch):
    path, rules = tmp_path / "shapes.csv", tmp_path / "mine.toml"
    path.write_text(f"{HEADER}\n" + "".join(f"{name},2,16,32,2,32,1,true\n" for name in NAMES))
    rows = "".join(
        f'[[rule]]\nname = "{name}"\nwhen = {{ id = "{name}" }}\nfamily = "chunked"\nbecause = "{name}"\n'
        for name in NAMES
    )
    rules.write_text(rows)
    profile = load_profile("h200").model_copy(update={"title": NAMES[1]})
    profile.save(tmp_path / "named.toml")
    options = ("--profile", tmp_path / "named.toml", "--rules", rules)
    commands = [
        ("classify", path, *options[:2]),
        ("route", path, *options),
        ("route", path, *options, "--details"),
        ("rules", "list", *options[2:]),
        ("rules", "explain", path, *options),
    ]
    for width in (80, 160):
        monkeypatch.setattr(output, "PIPE_WIDTH", width)
        for command in commands:
            status, out, _ = rooflane(*command)
            assert status == 0
            # The device's title holds markup too; only the shapes' names are in every table.
            assert all(name in out for name in NAMES), command
    # A finding prints its status as a word, with no markup.
    status, out, _ = rooflane("doctor")
    assert "[/" not in out and "yellow" not in out and "note" in out


def test_no_table_breaks_a_cell_at_80_columns(rooflane, narrow):
    _, out, _ = rooflane("classify", "published.csv", "--profile", "h200")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    # Columns are left out; each shape stays on one line, its figures whole.
    assert "break-even" not in lines[1] and sum(line.startswith("8 ") for line in lines) == 1
    assert "not shown at this width: shape, break-even, ops, peak" in lines
    (eighth,) = [line for line in lines if line.startswith("8 ")]
    assert "bandwidth (borderline)" in eighth and "2.42 ms" in eighth
    # Sentences do not fit beside each other: a row is stacked, its sentences wrapped between words.
    _, out, _ = rooflane("rules", "list", "--rules", "shipped")
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for rule in load_rules("shipped").rules:
        assert rule.name in out and rule.because in words


def test_route_is_one_line_a_shape_a_summary_and_details_on_request(rooflane, narrow):
    _, out, _ = rooflane("route", "published.csv", "--profile", "h200")
    lines = [line.rstrip() for line in out.splitlines() if line.strip()]
    assert len(lines) == 14 + 5, "a title, a header, a rule under it, a line a shape, what is not shown, the summary"
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1].startswith("14 shapes: 11 by resident, 2 by fused, 1 by chunked; --details")
    _, out, _ = rooflane("route", "published.csv", "--profile", "H200", "--shape", "14")
    assert "1 shape: 1 by chunked" in out and "rejected  " not in out
    _, out, _ = rooflane("route", "published.csv", "--profile", "h200", "--shape", "14", "--details")
    assert out.startswith("shape 14 ") and "rejected  rule fits-one-sm: " in out and "41.1 TB at the peak" in out
    assert "kernel    " not in out, "chunked has one way to run a shape"
    _, out, _ = rooflane("route", "published.csv", "--profile", "h200", "--shape", "7", "--details")
    # Shape 7 has heads of 8 columns, which the ladder's first kernel does not take.
    kernels = [line for line in out.splitlines() if line.startswith("  kernel    ")]
    assert kernels == [
        "  kernel    rowblocks: takes heads of 16, 32, 64 columns, not 8",
        "  kernel    rowwarps: takes the shape",
    ]
    status, _, err = rooflane("route", "published.csv", "--profile", "h200", "--shape", "99")
    assert status == ExitCode.USAGE and "holds no shape '99'" in err


def test_every_command_routes_by_the_kept_profile_and_says_so(rooflane, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keep_profile(load_profile("cpu").model_copy(update={"name": "measured-here"}))
    for command in (("classify", "published.csv"), ("route", "published.csv", "--shape", "2"), ("families",)):
        _, _, err = rooflane(*command)
        assert err.startswith("profile: measured on this device less than 2 hours ago (") and err.count("\n") == 1
        _, _, err = rooflane(*command, "--profile", "cpu")
        assert err == "" or "shape 14" in err
    _, out, _ = rooflane("route", "published.csv", "--shape", "2", "--json")
    assert json.loads(out)[0]["profile"] == "measured-here"
    # What eval, submit and export plan with.
    assert planning.profile_for(Settings(), "cpu").name == submit_runs._profile("auto", "cpu").name
    assert planning.profile_for(Settings(), "cpu").name == "measured-here"


def test_probe_saves_over_no_file_and_says_a_source_once(rooflane, tmp_path, monkeypatch):
    from rooflane.eval.device import probe

    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(probe, "measure_profile", lambda kind, name: load_profile("cpu"))
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    status, _, err = rooflane("probe", "--device", "cpu", "--save", path)
    assert status == ExitCode.USAGE and "--force" in err and path.read_text() == "mine"
    status, out, err = rooflane("probe", "--device", "cpu", "--save", path, "--force", "--keep")
    assert status == 0 and load_profile(path) == load_profile("auto", "cpu") == load_profile("cpu")
    assert f"profile written to {path}" in " ".join(err.split()) and "profile kept in" in err
    assert out.count("GEMM of 1024 cubed\n") == 1, "the source is not repeated on each row"


def test_an_option_of_the_wrong_kind_is_refused_where_it_is_written(rooflane, tmp_path):
    path = tmp_path / "mine.toml"
    new = ("rules", "new", "--into", path, "--name", "q", "--when", "seq_len>=5", "--family", "chunked")
    status, _, err = rooflane(*new, "--option", "budget_gib=abc", "--because", "q")
    assert status == ExitCode.USAGE and "sets budget_gib to 'abc'; it must be a number above 0" in err
    assert not path.exists()
    path.write_text(
        '[[rule]]\nname = "q"\nwhen = {}\nfamily = "chunked"\noptions = { budget_gib = true }\nbecause = "q"\n'
    )
    status, out, _ = rooflane("rules", "check", path)
    assert status != 0 and "sets budget_gib to True; it must be a number above 0" in out


def test_a_file_in_a_runs_place_is_no_run(rooflane, tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text(HEADER)
    status, _, err = rooflane("report", path)
    assert status == ExitCode.USAGE and "not a run" in err


def test_a_second_shape_to_profile_is_refused_not_forgotten(rooflane):
    status, _, err = rooflane("profile", "published.csv", "--shape", "2", "--shape", "3", "--device", "cpu")
    assert status == ExitCode.USAGE and "--shape 2 --shape 3: one forward at a time" in err
