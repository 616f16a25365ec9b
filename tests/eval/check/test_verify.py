"""Verification on tiny models: honest forwards pass, each kind of wrong one is caught with its own reason."""

import re
import time

import pytest
import torch

from rooflane.baseline import build_baseline
from rooflane.eval.check.cases import MASK_NAMES
from rooflane.eval.check.outputs import poison
from rooflane.eval.check.promises import IS_BASELINE, PROMISES
from rooflane.eval.check.truth import STRESSES
from rooflane.shapes import Shape

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep tiny operations on one thread: handing them to a second costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def check(verify_here):
    """Return a function that verifies `wrap(model)` against a second model with the same weights."""

    def run(shape, wrap, models=None, **options):
        model, reference = models or (build_baseline(shape, CPU, 1), build_baseline(shape, CPU, 1))
        options.setdefault("make", lambda other: (wrap(other), other))
        return verify_here(wrap(model), model, reference, shape, **options)

    return run


def test_the_baseline_itself_passes_everything(check, tiny_shape):
    found = check(tiny_shape, lambda model: model)
    assert (found.status, found.reason, found.contract, found.notes) == ("ok", "", [], [IS_BASELINE])
    assert found.contract_class == "pure"
    assert found.trials == 5
    assert found.gate.use == 0
    assert set(found.ragged) == {"padding 0.3", "one token", "left padding", "padding alone", "holes", "no mask"}
    assert found.missed == []
    assert [check.name for check in found.truth] == [stress.name for stress in STRESSES]


@pytest.mark.parametrize("sizes", [(1, 1, 4, 1, 4, 1), (1, 7, 4, 2, 4, 1), (2, 1, 4, 1, 4, 1)])
def test_sizes_of_one_are_no_special_case(check, sizes):
    found = check(Shape("edge", *sizes), lambda model: model)
    assert (found.status, found.reason) == ("ok", "")


def test_an_error_within_the_gate_passes_and_one_beyond_it_does_not(check, tiny_shape):
    # The offset stands on valid rows only; fp64 cannot excuse it, since eager's own error is far smaller.
    def offset(size):
        return lambda model: lambda x, mask=None: model(x, mask) + size

    assert check(tiny_shape, offset(0.0015), level="trials").status == "ok"
    found = check(tiny_shape, offset(0.03), level="trials")
    assert found.status == "incorrect"
    assert "accuracy trial 1, 2, 3, 4, 5" in found.reason
    assert found.gate.failed > 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out, x: out[:, :-1], "shape (3, 15, 16), expected (3, 16, 16)"),
        (lambda out, x: out.double(), "dtype torch.float64"),
        (lambda out, x: out.as_subclass(type("Lazy", (torch.Tensor,), {})), "is a Lazy, not a torch.Tensor"),
        (lambda out, x: (out,), "is a tuple"),
        (lambda out, x: out.masked_fill(out == out.max(), float("nan")), "not finite"),
        (lambda out, x: x.copy_(out), "lies in the memory of the input"),
        (lambda out, x: (x.zero_(), out)[1], "changed its input"),
    ],
)
def test_a_wrong_kind_of_output_is_named(check, tiny_shape, spoil, reason):
    found = check(tiny_shape, lambda model: lambda x, mask=None: spoil(model(x, mask), x), level="trials")
    assert found.status == "incorrect"
    assert reason in found.reason


def test_elements_left_unwritten_show(check, tiny_shape):
    def forgetful(model):
        def forward(x, mask=None):
            out = torch.empty_like(x)
            right = model(x, mask)
            out[:-1] = right[:-1]
            return out

        return forward

    assert check(tiny_shape, forgetful, level="trials").status == "incorrect"


def test_an_output_cannot_be_found_in_freed_memory(check, tiny_shape):
    # Returning unwritten memory passes only if an old answer lies there; poison leaves NaN instead.
    found = check(tiny_shape, lambda model: lambda x, mask=None: torch.empty_like(x), level="trials")
    assert found.status == "incorrect"


def test_whatever_a_candidate_raises_becomes_its_status(check, tiny_shape):
    def raising(error):
        def forward(x, mask=None):
            raise error

        return lambda model: forward

    found = check(tiny_shape, raising(KeyError("lost")))
    # The candidate's author is told the place in their own file: this one.
    assert found.status == "error" and re.fullmatch(
        r"KeyError: 'lost' \(test_verify\.py:\d+ in forward\)", found.reason
    )
    assert check(tiny_shape, raising(torch.cuda.OutOfMemoryError("CUDA out of memory"))).status == "oom"
    assert check(tiny_shape, raising(RuntimeError("DefaultCPUAllocator: can't allocate memory"))).status == "oom"


def test_a_forward_that_ignores_the_mask_is_caught_by_ragged_masks(check, tiny_shape):
    found = check(tiny_shape, lambda model: lambda x, mask=None: model(x, torch.ones_like(x[..., 0], dtype=torch.bool)))
    assert found.status == "incorrect"
    assert "mask check" in found.reason


def test_a_forward_that_takes_the_mask_for_a_prefix_is_caught_by_left_padding(check, tiny_shape):
    def prefix(model):
        def forward(x, mask=None):
            if mask is not None:
                mask = torch.arange(mask.shape[1])[None] < mask.sum(1, keepdim=True)
            return model(x, mask)

        return forward

    found = check(tiny_shape, prefix)
    assert found.reason.startswith("mask check 'left padding'")


def test_weights_packed_once_are_caught_when_they_change(check, tiny_shape):
    def packed(model):
        own = build_baseline(tiny_shape, CPU, 1)
        return lambda x, mask=None: own(x, mask)

    found = check(tiny_shape, packed)
    assert found.status == "incorrect"
    assert "q_proj x 8" in found.reason


def test_weights_and_inputs_are_put_back_after_sharpening(check, tiny_shape):
    models = build_baseline(tiny_shape, CPU, 1), build_baseline(tiny_shape, CPU, 1)
    before = {name: value.clone() for name, value in models[0].state_dict().items()}
    check(tiny_shape, lambda model: model, models=models)
    for held in models:
        assert all(torch.equal(value, before[name]) for name, value in held.state_dict().items())


def test_changing_the_weights_is_found(check, tiny_shape):
    def meddling(model):
        def forward(x, mask=None):
            out = model(x, mask)
            model.final_norm.bias.data.add_(1e-7)
            return out

        return forward

    assert "weights differ" in check(tiny_shape, meddling, level="trials").reason


def test_broken_promises_are_findings_and_not_failures(check, tiny_shape):
    def one_buffer(model):
        kept = {}

        def forward(x, mask=None):
            out = model(x, mask)
            return kept.setdefault("out", torch.empty_like(out)).copy_(out)

        return forward

    def by_identity(model):
        last = {}

        def forward(x, mask=None):
            if last.get("x") is not x or last.get("mask") is not mask:
                last.update(x=x, mask=mask, out=model(x, mask))
            return last["out"].clone()

        return forward

    found = check(tiny_shape, one_buffer)
    assert found.status == "ok"
    assert found.contract[0] == "the next call overwrites the output"
    # Outputs 1 to 8 hold what call 9 wrote: the text of the finding says which.
    assert found.contract[1:] == [
        "a later call overwrites one of 9 kept outputs: after call 9, the output of call 1, 2, 3, 4, 5, 6, 7, 8 was no "
        "longer the same"
    ]
    assert found.contract_class == "contract-dependent"
    found = check(tiny_shape, by_identity)
    assert (found.status, found.contract_class) == ("ok", "contract-dependent")
    assert found.contract == [PROMISES[name].finding for name in ("input updated", "elements updated", "mask updated")]


def test_an_answer_remembered_by_address_is_found(check, tiny_shape):
    def by_address(model):
        known = {}

        def forward(x, mask=None):
            key = x.data_ptr(), x._version
            return known.setdefault(key, model(x, mask)).clone()

        return forward

    found = check(tiny_shape, by_address)
    assert (found.status, found.contract_class) != ("ok", "pure")


def test_weights_copied_at_the_first_call_are_found_when_loaded_anew(check, tiny_shape):
    def packed(model):
        own = build_baseline(tiny_shape, CPU, 1)
        # What the stress inputs change is followed, the rest is not.
        touched = {part for stress in STRESSES for part in stress.touches}
        follows = [name for name, _ in model.named_parameters() if any(part in name for part in touched)]
        seen = []

        def forward(x, mask=None):
            now = dict(model.named_parameters())
            version = [now[name]._version for name in follows]
            if seen != version:
                seen[:] = version
                for name in follows:
                    own.get_parameter(name).data.copy_(now[name])
            return own(x, mask)

        return forward

    found = check(tiny_shape, packed)
    names = ("weights loaded", "weights updated", "second model")
    assert found.contract == [PROMISES[name].finding for name in names]


def test_an_answer_that_varies_is_noted(check, tiny_shape):
    def unsteady(model):
        calls = []

        def forward(x, mask=None):
            calls.append(1)
            return model(x, mask) + 1e-6 * len(calls)

        return forward

    found = check(tiny_shape, unsteady)
    assert found.status == "ok"
    assert any("different bytes" in note for note in found.notes)


def test_a_layout_that_is_refused_is_noted_and_one_that_is_misread_is_a_finding(check, tiny_shape):
    def refusing(model):
        def forward(x, mask=None):
            if not x.is_contiguous():
                raise ValueError("built for contiguous inputs")
            return model(x, mask)

        return forward

    def misreading(model):
        return lambda x, mask=None: model(x.as_strided(x.shape, torch.empty(x.shape).stride()), mask)

    found = check(tiny_shape, refusing)
    assert found.contract_class == "pure"
    assert [note for note in found.notes if "refused: other strides" in note]
    assert [note for note in found.notes if "refused: sliced input" in note]
    assert found.missed == []
    assert check(tiny_shape, misreading).contract == [
        PROMISES[name].finding for name in ("other strides", "sliced input")
    ]


def test_half_precision_is_judged_against_fp64(check):
    shape = Shape("half", 2, 16, 32, 2, 32, 2, dtype="bfloat16")
    assert check(shape, lambda model: model).status == "ok"
    found = check(shape, lambda model: lambda x, mask=None: model(x, mask) + 0.25, level="trials")
    assert found.status == "incorrect"
    assert found.gate.use > 1


def test_a_hidden_row_in_float16_fails_the_wide_range_alone(check, tiny_shape):
    def narrow(model):
        for layer in model.layers:
            layer.ffn_in.register_forward_hook(lambda module, given, out: out.half().float())
        return model

    found = check(tiny_shape, narrow)
    assert (found.status, found.reason.partition(":")[0]) == ("incorrect", "stress input 'wide range'")
    assert [check.name for check in found.truth if not check.passed] == ["wide range"]


def test_a_float16_model_meets_no_weights_beyond_its_own_range(check):
    found = check(Shape("half", 2, 16, 32, 2, 32, 2, dtype="float16"), lambda model: model)
    assert (found.status, found.missed) == ("ok", [])
    assert [check.name for check in found.truth] == [stress.name for stress in STRESSES if stress.name != "wide range"]


def test_bf16_arithmetic_fails_the_gate_of_a_float32_model(check):
    shape = Shape("wide", 4, 64, 128, 4, 128, 4)

    def through_bf16(model):
        half = build_baseline(shape, CPU, 1).bfloat16()
        return lambda x, mask=None: half(x.bfloat16(), mask).float()

    found = check(shape, through_bf16, level="trials")
    assert found.status == "incorrect"


def test_checks_beyond_the_deadline_are_missed_by_name_and_one_trial_always_runs(check, tiny_shape):
    found = check(tiny_shape, lambda model: model, deadline=time.monotonic() - 1)
    assert (found.status, found.trials, found.ragged, found.truth) == ("ok", 1, {}, [])
    assert found.contract_class is None
    missed = [line.removesuffix(": its time for checks was spent") for line in found.missed]
    trials = [f"accuracy trial {number}" for number in (2, 3, 4, 5)]
    stresses = [f"stress input {stress.name!r}" for stress in STRESSES]
    again = ["accuracy trial with the weights loaded again"]
    promises = [f"promise {name!r}" for name, promise in PROMISES.items() if not promise.cuda_only]
    masks = [f"mask check {name!r}" for name in MASK_NAMES]
    assert missed == [*trials, *masks, *stresses, *again, *promises, "comparison of repeated calls"]


def test_a_slow_call_costs_the_checks_behind_it_alone(check, tiny_shape):
    # The time ends during the masks: what ran before counts, what comes after is missed.
    def slow(model):
        calls = []

        def forward(x, mask=None):
            calls.append(1)
            if len(calls) == 7:
                time.sleep(1.0)
            return model(x, mask)

        return forward

    found = check(tiny_shape, slow, deadline=time.monotonic() + 0.9)
    assert (found.status, found.trials, list(found.ragged)) == ("ok", 5, ["padding 0.3", "one token"])
    assert found.missed[0] == "mask check 'padding alone': its time for checks was spent"


def test_poisoned_memory_is_what_the_next_allocation_gets():
    # The allocator may hold a freed block of one size from earlier; it does not hold one of every size.
    poisoned = []
    for sizes in ((3, 16, 16), (5, 33, 17), (7, 19, 64), (2, 101, 31)):
        like = torch.zeros(sizes)
        poison(like)
        poisoned.append(torch.isnan(torch.empty_like(like)).any())
    assert any(poisoned)


def test_a_stored_answer_for_the_last_input_is_caught(check, tiny_shape):
    def lagging(model):
        last = []

        def forward(x, mask=None):
            last.append(model(x, mask))
            return last[-2].clone() if len(last) > 1 else last[-1].clone()

        return forward

    found = check(tiny_shape, lagging, level="trials")
    assert found.status == "incorrect"
    assert "accuracy trial 2, 3, 4, 5" in found.reason


def test_an_input_that_fails_however_it_comes_is_no_broken_promise(check, tiny_shape):
    """A candidate near the tolerance may pass it on the one changed element alone: that is accuracy."""

    def near(size):
        def wrap(model):
            last, nudged = [], []

            def forward(x, mask=None):
                if last and x.shape == last[0].shape and 1 <= int((x != last[0]).sum()) <= len(x):
                    nudged.append(x.clone())
                last[:] = [x.clone()]
                out = model(x, mask)
                if any(torch.equal(x, one) for one in nudged):
                    # Where the tolerance is absolute, and on a valid row.
                    out.view(-1)[out.abs().where(out != 0, torch.inf).argmin()] += size
                return out

            return forward

        return wrap

    found = check(tiny_shape, near(0.0025))
    assert found.status == "incorrect" and "an ordinary call on the input of promise 'elements updated'" in found.reason
    # Far outside it is said to be what it looks like.
    assert check(tiny_shape, near(1.0)).contract == ["a few elements changed in place are not seen"]
