"""Each promise on its own: the forward that breaks it is named for it, and every shipped family keeps them all."""

import copy

import pytest
import torch

from rooflane.baseline import build_baseline
from rooflane.dispatch import optimize
from rooflane.eval.check.cases import MASK_NAMES, Case, draw_case
from rooflane.eval.check.promises import HELD, KEPT_CALLS, PROMISES, TRIALS
from rooflane.eval.check.truth import STRESSES
from rooflane.families import get_family, load_families
from rooflane.shapes import Shape

CPU = torch.device("cpu")
# Two layers, so that what padding leaves in one layer meets the next; more sequences than a padded one.
SHAPE = Shape("tiny", 3, 16, 16, 2, 24, 2, causal=True)
FULL = Shape("full", 2, 20, 32, 2, 32, 1, causal=False)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep tiny operations on one thread: handing them to a second costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def check(verify_here):
    """Return a function that verifies `wrap(model)`; a second model is wrapped the same way."""

    def run(wrap, shape=SHAPE, **options):
        model, reference = build_baseline(shape, CPU, 1), build_baseline(shape, CPU, 1)
        make = options.pop("make", lambda other: (wrap(other), other))
        return verify_here(wrap(model), model, reference, shape, make=make, **({"trials": 1} | options))

    return run


def as_if_contiguous(tensor):
    """Return what a kernel reads that takes a tensor for a contiguous one."""
    steps = torch.empty(tensor.shape, device="meta").stride()
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, steps
    )


def from_the_storages_start(model):
    def forward(x, mask=None):
        if not x.is_contiguous():
            return model(x, mask)
        start = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape, x.stride())
        return model(start, mask)

    return forward


def rounding_the_address_down(model):
    """A kernel that loads four floats at a time from the address, rounded down to where such loads may begin."""

    def forward(x, mask=None):
        if x.is_contiguous():
            offset = x.storage_offset() // 4 * 4
            x = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), offset, x.shape, x.stride())
        return model(x, mask)

    return forward


def sequences_follow_each_other(model):
    def forward(x, mask=None):
        # Asks for the last stride alone, as many a kernel does.
        return model(as_if_contiguous(x) if x.stride(-1) == 1 else x, mask)

    return forward


def mask_as_if_contiguous(model):
    return lambda x, mask=None: model(x, None if mask is None else as_if_contiguous(mask))


def mask_rows_as_they_lie(model):
    """A kernel that takes the mask's token stride and gets the batch stride from the length."""

    def forward(x, mask=None):
        if mask is not None and mask.stride(1) == 1 and mask.untyped_storage().nbytes() >= mask.numel():
            mask = as_if_contiguous(mask)
        return model(x, mask)

    return forward


def mask_of_the_first_sequence(model):
    """Takes a batch stride of 0 for a mask of one sequence and hides nothing in the others."""

    def forward(x, mask=None):
        if mask is not None and mask.stride(0) == 0:
            mask = torch.cat([mask[:1], torch.ones_like(mask[1:])])
        return model(x, mask)

    return forward


def ring(size):
    def wrap(model):
        held, calls = [], []

        def forward(x, mask=None):
            out = model(x, mask)
            if len(held) < size:
                held.append(torch.empty_like(out))
            calls.append(1)
            return held[len(calls) % len(held)].copy_(out)

        return forward

    return wrap


def by_address_and_version(model):
    last = {}

    def forward(x, mask=None):
        key = (x.data_ptr(), x._version, None if mask is None else (mask.data_ptr(), mask._version))
        if last.get("key") != key:
            # The weights are looked at, so that only the input's identity is taken for granted.
            last.update(key=key, out=model(x, mask))
        return last["out"].clone()

    return forward


def packed_at_load(model):
    """Packs when weights are loaded or moved, and never looks at them again."""
    held = {}

    def pack(*_):
        held["model"] = copy.deepcopy(model)

    pack()
    model.register_load_state_dict_post_hook(pack)
    apply = model._apply
    model._apply = lambda *given, **options: (apply(*given, **options), pack())[0]
    return lambda x, mask=None: held["model"](x, mask)


def in_a_shared_store(store, keep):
    """Packed weights in a store of the module's own, by shape; `keep` says whether what is there already stays."""

    def wrap(model):
        seen = []

        def forward(x, mask=None):
            versions = [(weight.data_ptr(), weight._version) for weight in model.parameters()]
            first = not seen
            if seen != versions:
                seen[:] = versions
                if not (keep and first and "packed" in store):
                    store["packed"] = copy.deepcopy(model)
            return store["packed"](x, mask)

        return forward

    return wrap


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (from_the_storages_start, {"odd offset"}),
        (rounding_the_address_down, {"odd offset"}),
        (sequences_follow_each_other, {"sliced input"}),
        (mask_as_if_contiguous, {"strided mask", "expanded mask"}),
        (mask_rows_as_they_lie, {"expanded mask"}),
        (mask_of_the_first_sequence, {"expanded mask"}),
        (ring(2), {"kept outputs"}),
        (ring(3), {"kept outputs"}),
        (ring(KEPT_CALLS - 1), {"kept outputs"}),
        (packed_at_load, {"weights updated"}),
        (in_a_shared_store({}, keep=False), {"beside a second model", "second model"}),
        (in_a_shared_store({}, keep=True), {"second model"}),
    ],
)  # fmt: skip
def test_an_ordinary_bug_ends_with_the_promise_it_breaks(check, wrap, names):
    found = check(wrap)
    assert (found.status, found.reason, found.missed) == ("ok", "", [])
    assert found.contract_class == "contract-dependent"
    # A finding may go on to say what was seen, after a colon.
    assert {line.split(":")[0] for line in found.contract} == {PROMISES[name].finding for name in names}


@pytest.mark.parametrize("wrap", [ring(KEPT_CALLS), packed_at_load], ids=["a ring of nine", "packed at load"])
def test_what_a_check_cannot_see_is_no_finding(check, wrap):
    # Nine outputs fit into a ring of nine: a caller who keeps ten meets the bug, the check does not.
    found = check(wrap)
    kept = {PROMISES["kept outputs"].finding, PROMISES["kept output"].finding}
    assert not {line.split(":")[0] for line in found.contract} & kept


def test_an_address_used_again_is_certain(check):
    found = check(by_address_and_version)
    # In which check the allocator gives an address again is chance; the promise makes it certain.
    assert found.status == "incorrect" or PROMISES["reused address"].finding in found.contract


def prefix(model):
    def forward(x, mask=None):
        if mask is not None:
            mask = torch.arange(mask.shape[1])[None] < mask.sum(1, keepdim=True)
        return model(x, mask)

    return forward


def to_the_last_valid_token(model):
    """Right for padding on the right, and for a sequence of padding alone."""

    def forward(x, mask=None):
        if mask is not None:
            places = torch.arange(1, mask.shape[1] + 1)
            mask = places[None] <= (mask * places).amax(1, keepdim=True)
        return model(x, mask)

    return forward


def nothing_to_average(model):
    """Divides by the number of valid tokens and multiplies by the mask what it leaves."""

    def forward(x, mask=None):
        out = model(x, mask)
        if mask is None:
            return out
        count = mask.sum(1)[:, None, None]
        return out * count / count

    return forward


def one_token_at_least(model):
    """Takes a sequence of padding alone for one of a single token."""

    def forward(x, mask=None):
        if mask is not None:
            mask = mask.clone()
            mask[~mask.any(1), 0] = True
        return model(x, mask)

    return forward


def softmax_of_nothing(model):
    """Leaves NaN where no key is seen, and multiplies by the mask in place of filling."""

    def forward(x, mask=None):
        out = model(x, mask)
        if mask is None:
            return out
        seen = torch.where(mask.any(1), 1.0, float("nan"))
        return out * seen[:, None, None] * mask[:, :, None]

    return forward


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (prefix, "left padding"),
        (to_the_last_valid_token, "left padding"),
        (nothing_to_average, "padding alone"),
        (one_token_at_least, "padding alone"),
        (softmax_of_nothing, "padding alone"),
    ],
)
def test_a_mask_that_is_misread_is_an_incorrect_output(check, wrap, name):
    found = check(wrap)
    assert (found.status, found.contract_class) == ("incorrect", "incorrect")
    assert found.reason.startswith(f"mask check {name!r}: ")


@pytest.mark.parametrize(
    "shape", [SHAPE, FULL, Shape("one", 1, 5, 16, 2, 16, 2, causal=True)], ids=lambda shape: shape.id
)
def test_the_baseline_gives_zero_where_there_is_padding_alone_and_is_right_elsewhere(shape):
    model = build_baseline(shape, CPU, 1)
    for name in ("left padding", "padding alone"):
        x, mask = draw_case(Case(3, kind="mask", name=name), shape, CPU)
        with torch.inference_mode():
            out, true = model(x, mask), copy.deepcopy(model).double()(x.double(), mask)
            assert not out[~mask].any(), "rows of padding are exactly 0"
            assert torch.isfinite(out).all()
            assert (out - true).abs().max() < 1e-4
            for index in range(shape.batch_size):
                # A sequence alone, its padding cut off, is what valid rows must equal.
                if mask[index].any():
                    cut = x[index : index + 1, mask[index]]
                    assert (model(cut)[0] - out[index, mask[index]]).abs().max() < 1e-5
        assert mask.any(1).all() == (name == "left padding")
        assert name != "left padding" or mask[:, -1].all() and not mask[-1, 0]


def test_an_exception_is_told_with_its_finding(check):
    def picky(model):
        def forward(x, mask=None):
            if mask is not None and len(set(mask.sum(1).tolist())) > 1 and x.storage_offset() % 4:
                raise ValueError("x must begin at a multiple of 16 bytes")
            return model(x, mask)

        return forward

    def forgetful(model):
        seen = []

        def forward(x, mask=None):
            if mask is not None and any(held is mask and version != mask._version for held, version in seen):
                raise KeyError("a mask of another version")
            seen[:] = [] if mask is None else [(mask, mask._version)]
            return model(x, mask)

        return forward

    found = check(picky)
    # A layout may be refused, loudly: it is noted, and no promise is broken.
    assert found.contract == []
    assert [note for note in found.notes if note.startswith("refused: odd offset (ValueError: x must begin")]
    found = check(forgetful)
    (finding,) = found.contract
    assert finding.startswith(f"{PROMISES['mask updated'].finding}: KeyError: 'a mask of another version'")


def test_a_forward_that_a_call_breaks_for_good_is_incorrect(check):
    def fragile(model):
        broken = []

        def forward(x, mask=None):
            if x.storage_offset() % 4:
                broken.append(1)
            if broken:
                raise RuntimeError("misaligned address")
            return model(x, mask)

        return forward

    found = check(fragile)
    assert found.status == "incorrect"
    assert found.reason.startswith(f"{PROMISES['odd offset'].finding}: RuntimeError: misaligned address")
    assert found.reason.count("misaligned address") == 2, "the refusal, and the ordinary call that it broke"


def test_memory_that_does_not_suffice_for_a_second_model_is_missed(check):
    def no_room(model):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    found = check(lambda model: model, make=no_room)
    assert (found.status, found.contract) == ("ok", [])
    assert [line.split(": ")[0] for line in found.missed] == [
        "promise 'beside a second model'",
        "promise 'second model'",
    ]
    assert all("out of memory" in line for line in found.missed)


def test_stresses_reach_weights_of_any_name_and_what_cannot_be_loaded_is_named(verify_here):
    class Renamed(torch.nn.Module):
        """Keeps the baseline's weights packed under names of its own, and unpacks what is loaded."""

        def __init__(self, model, loads=True):
            super().__init__()
            self.inner = [copy.deepcopy(model)]
            names = [name.replace(".", "_") for name in model.state_dict()]
            for name, tensor in zip(names, model.state_dict().values(), strict=True):
                self.register_buffer(f"packed_{name}", tensor.clone())
            self.loads = loads

        def load_state_dict(self, weights, strict=True):
            if not self.loads:
                raise NotImplementedError("this module keeps what it was built with")
            with torch.no_grad():
                for tensor, value in zip(self.buffers(), weights.values(), strict=True):
                    tensor.copy_(value)

        def forward(self, x, mask=None):
            with torch.inference_mode(False), torch.no_grad():
                self.inner[0].load_state_dict(dict(zip(self.inner[0].state_dict(), self.buffers(), strict=True)))
            return self.inner[0](x, mask)

    def run(**options):
        reference = build_baseline(SHAPE, CPU, 1)
        mine = Renamed(build_baseline(SHAPE, CPU, 1), **options)

        def make(model):
            other = Renamed(model, **options)
            return other, other

        return verify_here(mine, mine, reference, SHAPE, make=make, trials=1)

    found = run()
    assert (found.status, found.reason, found.contract, found.missed) == ("ok", "", [], [])
    assert [check.name for check in found.truth] == [stress.name for stress in STRESSES]
    found = run(loads=False)
    touching = [stress.name for stress in STRESSES if stress.touches]
    expected = [f"stress input {name!r}: its weights cannot be loaded (NotImplementedError: this" for name in touching]
    assert [line[: len(start)] for line, start in zip(found.missed, expected, strict=True)] == expected
    assert found.contract[0].startswith(f"{PROMISES['weights loaded'].finding}: NotImplementedError")


def test_every_promise_has_a_trial_and_a_finding_of_its_own():
    assert {*PROMISES, HELD} == TRIALS.keys()
    findings = [promise.finding for promise in PROMISES.values()]
    assert len(set(findings)) == len(findings)
    # Two inputs of one seed, drawn in two processes, are the same bytes: the judge draws what the worker drew.
    for kind in {promise.kind for promise in PROMISES.values()}:
        one, two = (draw_case(Case(5, 0.0, kind), SHAPE, CPU) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))
    _, mask = draw_case(Case(5, 0.0, "ragged"), SHAPE, CPU)
    assert len(set(mask.sum(1).tolist())) > 1
    _, mask = draw_case(Case(5, 0.0, "one mask"), SHAPE, CPU)
    assert (mask == mask[:1]).all() and not mask.all()


# Every family of this package: a new one is tested without an entry here.
FAMILIES = [name for name, spec in load_families().items() if type(spec).__module__.startswith("rooflane.")]
OPTIONS = {"chunked": {"budget_gib": 1e-5}}
ON_A_CPU = [name for name in FAMILIES if name not in ("resident", "fused", "gemm_fp16")]


def verify_family(verify_here, name, shape, device):
    """Verify a family in full, its second model too."""
    device = torch.device(device)

    def make(model):
        return get_family(name).build(model, shape, device, **OPTIONS.get(name, {})), model

    reference, model = build_baseline(shape, device, 1), build_baseline(shape, device, 1)
    forward, weights = make(model)
    return verify_here(forward, weights, reference, shape, device, make=make, seed=3, trials=2)


def keeps_everything(found):
    """Assert that every check was run and none found anything."""
    assert (found.status, found.reason, found.contract, found.missed) == ("ok", "", [], [])
    assert not [note for note in found.notes if note.startswith("refused")]
    assert tuple(found.ragged) == MASK_NAMES
    assert [check.name for check in found.truth] == [stress.name for stress in STRESSES]


@pytest.mark.parametrize("shape", [SHAPE, FULL], ids=lambda shape: shape.id)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * get_family(name).compiles) for name in ON_A_CPU]
)
def test_a_family_keeps_every_promise_on_a_cpu(verify_here, name, shape):
    keeps_everything(verify_family(verify_here, name, shape, "cpu"))


def test_the_dispatched_module_keeps_every_promise(verify_here):
    def make(model):
        module = optimize(model, [SHAPE], device=CPU)
        return module, module

    reference = build_baseline(SHAPE, CPU, 1)
    forward, weights = make(build_baseline(SHAPE, CPU, 1))
    keeps_everything(verify_here(forward, weights, reference, SHAPE, make=make, trials=1))


# Sizes that every family takes: one ragged and causal, one of the length that the kernels like.
ON_A_GPU = [
    Shape("ragged", 3, 37, 48, 3, 96, 2, causal=True),
    Shape("even", 4, 128, 64, 4, 128, 2, causal=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ON_A_GPU, ids=lambda shape: shape.id)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_every_promise_on_a_gpu(verify_here, name, shape):
    keeps_everything(verify_family(verify_here, name, shape, "cuda"))
