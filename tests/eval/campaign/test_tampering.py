"""Whole runs of tiny dishonest candidates, one for each guard of the core, and of honest ones that look like them."""

import pytest

from rooflane.eval import EvaluationError, evaluate, open_run
from rooflane.shapes import Shape

SHAPE = Shape("a", 2, 8, 16, 2, 32, 1)
FAST = {"device": "cpu", "profile": "cpu", "controls": (), "budget_s": 0.03, "processes": 1}
HEAD = "import os, sys, time, threading, torch\n"
PLAIN = "def build(model, shape, device):\n    return lambda x, mask=None: model(x, mask)\n"
# Hides more of each call than a busy host takes from one of the null's.
SLOW = PLAIN.replace("model(x, mask)", "(time.sleep(0.02), model(x, mask))[1]")
# Calls before the timed ones: verification and warm-up need fewer than this many, all calls together more.
SETTLED = 55

DISHONEST = {
    "clock": (
        "import rooflane.eval.worker.clock as harness\n"
        "real = time.perf_counter_ns\nharness._now = lambda: real() // 10\n"
        + SLOW,
        "the parent's wall clock",
    ),
    "stale answers once verified": (
        "def build(model, shape, device):\n"
        "    seen, calls = [], []\n"
        "    def forward(x, mask=None):\n"
        "        calls.append(1)\n"
        f"        if len(calls) > {SETTLED} and seen:\n"
        "            return seen[0].clone()\n"
        "        seen[:] = [model(x, mask)]\n"
        "        return seen[0].clone()\n"
        "    return forward\n",
        "although the verified",
    ),
    "work left to a thread": (
        "def build(model, shape, device):\n"
        "    calls = []\n"
        "    def forward(x, mask=None):\n"
        "        calls.append(1)\n"
        f"        if len(calls) < {SETTLED}:\n"
        "            return model(x, mask)\n"
        "        out = torch.empty_like(x)\n"
        "        def later():\n"
        "            time.sleep(0.001)\n"
        "            with torch.inference_mode():\n"
        "                out.copy_(model(x, mask))\n"
        "        threading.Thread(target=later).start()\n"
        "        return out\n"
        "    return forward\n",
        "timed call",
    ),
    "a lazy output once verified": (
        "class Lazy(torch.Tensor):\n    pass\n"
        "def build(model, shape, device):\n"
        "    calls = []\n"
        "    def forward(x, mask=None):\n"
        "        calls.append(1)\n"
        "        out = model(x, mask)\n"
        f"        return out if len(calls) < {SETTLED} else out.as_subclass(Lazy)\n"
        "    return forward\n",
        "not a torch.Tensor",
    ),
    "a forged answer": (
        "for descriptor in range(3, 64):\n"
        "    try:\n"
        "        os.write(descriptor, b'{\"answers\": 1, \"event_ns\": [1]}\\n')\n"
        "    except OSError:\n"
        "        pass\n" + PLAIN,
        "nothing that was asked",
    ),
    "an end before its process is checked": (
        "from rooflane.eval.worker.subject import Subject\n"
        "Subject.inspect = lambda *asked: os._exit(0)\n" + PLAIN,
        "Subject.inspect was replaced",
    ),
    "a patched comparison": (
        "torch.equal = lambda *tensors: True\n"
        "def build(model, shape, device):\n    return lambda x, mask=None: model(x, mask)\n",
        "torch.equal was replaced",
    ),
    "a changed flag beside a patched comparison": (
        "torch.isfinite = lambda tensor: tensor == tensor\ntorch.use_deterministic_algorithms(True)\n" + PLAIN,
        "deterministic algorithms went from False to True",
    ),
}  # fmt: skip

HONEST = {
    "changed flags": (
        "torch.use_deterministic_algorithms(True)\ntorch.set_float32_matmul_precision('highest')\n"
        "torch.set_default_dtype(torch.float64)\ntorch.set_num_threads(2)\n" + PLAIN
    ),
    "a thread and a process that stay": (
        "import subprocess\n"
        "def build(model, shape, device):\n"
        "    calls, helpers = [], []\n"
        "    def forward(x, mask=None):\n"
        "        calls.append(1)\n"
        f"        if len(calls) == {SETTLED + 60}:\n"
        "            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "            helpers.append(subprocess.Popen(['sleep', '60']))\n"
        "        return model(x, mask)\n"
        "    return forward\n"
    ),
    "packed weights, repacked when they change": (
        "def build(model, shape, device):\n"
        "    kept = {}\n"
        "    def forward(x, mask=None):\n"
        "        version = tuple((p.data_ptr(), p._version) for p in model.parameters())\n"
        "        if kept.get('version') != version:\n"
        "            kept.update(version=version, packed=[p.detach().clone() for p in model.parameters()])\n"
        "        return model(x, mask)\n"
        "    return forward\n"
    ),
    "built at the first call": (
        "def build(model, shape, device):\n"
        "    made = []\n"
        "    def forward(x, mask=None):\n"
        "        if not made:\n"
        "            time.sleep(0.05)\n"
        "            made.append(model)\n"
        "        return made[0](x, mask)\n"
        "    return forward\n"
    ),
    "a thread that is waited for": (
        "def build(model, shape, device):\n"
        "    def forward(x, mask=None):\n"
        "        out = []\n"
        "        def work():\n"
        "            with torch.inference_mode():\n"
        "                out.append(model(x, mask))\n"
        "        thread = threading.Thread(target=work)\n"
        "        thread.start()\n"
        "        thread.join()\n"
        "        return out[0]\n"
        "    return forward\n"
    ),
}


DISHONEST_BODIES = {name: body for name, (body, _) in DISHONEST.items()}
ONE_BUFFER = (
    "def build(model, shape, device):\n"
    "    held = {}\n"
    "    def forward(x, mask=None):\n"
    "        out = model(x, mask)\n"
    "        return held.setdefault('out', torch.empty_like(out)).copy_(out)\n"
    "    return forward\n"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep tiny operations on one thread: handing them to a second costs more than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The rows of each program by kind, all from one campaign: every candidate has a worker of its own."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {**DISHONEST_BODIES, **HONEST, "one buffer": ONE_BUFFER}
    paths = {name: folder / f"program{number}.py" for number, name in enumerate(programs)}
    for name, path in paths.items():
        path.write_text(HEAD + programs[name])
    run = evaluate([SHAPE], [str(path) for path in paths.values()], runs_dir=folder / "runs", **FAST)
    rows = {record.arm: record for record in run.records()}
    assert rows["eager"].status == "ok", "a dishonest candidate costs nobody else a row"
    return {name: (rows[str(path)], rows[f"copy of {path}"]) for name, path in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISHONEST)
def test_a_dishonest_candidate_leaves_evidence(found, name):
    row, _ = found[name]
    assert row.integrity, row.status
    assert DISHONEST[name][1] in " ".join([*row.integrity, row.reason])


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_one_that_looks_like_it_leaves_none(found, name):
    row, copy = found[name]
    assert (row.status, row.reason) == ("ok", "")
    assert row.integrity == copy.integrity == []
    assert row.verification.contract_class == "pure"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("changed flags", "deterministic algorithms went from False to True"),
        ("changed flags", "the float32 matmul precision went from high to highest"),
        ("changed flags", "the default dtype is torch.float64"),
        ("changed flags", "the number of threads went from 1 to 2"),
        ("a thread and a process that stay", "2 threads of the candidate's came while it was timed"),
        ("a thread and a process that stay", "2 processes of the candidate's came while it was timed"),
    ],
)
def test_what_changed_in_the_process_is_a_note(found, name, said):
    # The candidate and its copy have one process.
    row, _ = found[name]
    assert any(said in line for line in row.verification.notes), row.verification.notes


@pytest.mark.slow
def test_one_buffer_for_every_output_is_a_contract_and_no_crime(found):
    row, _ = found["one buffer"]
    assert (row.status, row.integrity) == ("ok", [])
    assert row.verification.contract_class == "contract-dependent"
    assert row.verification.contract[0] == "the next call overwrites the output"
    assert row.timing.harness_ns, "the harness dividend needs the organiser's own loop"


@pytest.mark.slow
def test_the_seed_is_on_disk_only_once_nothing_is_left_to_measure(tmp_path):
    seen = []

    def look(event):
        if event.kind == "row" and not seen:
            (folder,) = (tmp_path / "runs").iterdir()
            seen.append((open_run(folder).meta.seed, {path.name for path in folder.iterdir()}))

    path = tmp_path / "mine.py"
    path.write_text(HEAD + PLAIN)
    run = evaluate([SHAPE], [str(path)], runs_dir=tmp_path / "runs", on_event=look, **FAST)
    assert seen == [(None, {"run.json", "records.jsonl"})]
    assert run.meta.seed is not None and open_run(run.folder).meta.seed == run.meta.seed
    seconds = run.meta.spent_s
    assert set(seconds) == {"start-up", "set-up", "warm-up", "measurement", "verification", "other"}
    rest = sum(seconds[what] for what in ("start-up", "set-up", "other"))
    assert run.meta.overhead_share == pytest.approx(rest / sum(seconds.values()), abs=1e-3)
    assert not any(str(run.meta.seed) in record.model_dump_json() for record in run.records())


@pytest.mark.slow
def test_a_record_file_that_something_else_changes_while_the_run_goes_on_is_refused(tmp_path):
    """Without the sandbox a candidate can write to the folder; the digest is in the parent's memory."""
    path = tmp_path / "mine.py"
    runs = tmp_path / "runs"
    edit = (
        "import glob\n"
        f"for name in glob.glob({str(runs / '*' / 'records.jsonl')!r}):\n"
        "    text = open(name).read()\n"
        "    open(name, 'w').write(text.replace('\"warmups\":', '\"warmups\": '))\n"
    )
    path.write_text(HEAD + edit + PLAIN)
    with pytest.raises(EvaluationError, match="records.jsonl: the file changed while the run was in progress"):
        evaluate([SHAPE], [str(path)], runs_dir=runs, sandbox=False, **FAST | {"processes": 2})
    (folder,) = runs.iterdir()
    assert not open_run(folder).sealed
