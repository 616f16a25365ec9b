"""The dispatched module: a built forward where the call allows it, the module's own everywhere else."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as _forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _forward_pre_hooks

from rooflane.baseline import BaselineTransformer, config_of, torch_dtype
from rooflane.dispatch.adapters.checks import (
    check_hooks,
    check_norms,
    check_parameters,
    check_same_forward,
    drops,
)
from rooflane.dispatch.adapters.mapping import Call, OptimizeError, Request, Sizes, Unserved
from rooflane.dispatch.device import device_profile
from rooflane.dispatch.profile import Profile, ProfileError
from rooflane.dispatch.route import Route, RouteError, route
from rooflane.families import registry
from rooflane.families.runtime.watch import StructureChanged, note_writes
from rooflane.shapes import DTYPE_BYTES, Form, Shape, ShapeError

if TYPE_CHECKING:
    from rooflane.families.spec import Forward

_log = logging.getLogger("rooflane")
DTYPE_NAMES = {torch_dtype(name): name for name in DTYPE_BYTES}
SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


# (batch_size, seq_len, causal, whether a call brings a bias of the scores)
Key = tuple[int, int, bool, bool]


@dataclass
class Built:
    """A forward and the route that chose it; or, with `forward` None, the reason why there is none.

    `build_s` is what building took, the first call included, which compiles; `called` says whether there was one.
    """

    forward: Forward | None
    route: Route | None = None
    reason: str = ""
    build_s: float = 0.0
    called: bool = False


# For calls without tokens, of which no shape speaks.
NOTHING = Built(lambda x, *given: torch.empty_like(x), called=True)


class BuiltForwards:
    """Hold at most `size` forwards; each keeps packed weights and, on CUDA, graphs of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Key, Built] = OrderedDict()

    def get(self, key: Key) -> Built | None:
        """Return the entry and note its use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Key, entry: Built) -> None:
        """Add an entry; what is pushed out may still run on the device, so that is awaited before its memory goes."""
        self._entries[key] = entry
        if len(self._entries) > self.size:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._entries.popitem(last=False)

    def __getstate__(self) -> dict[str, object]:
        """Leave the forwards out of copies and pickles: they hold graphs and device memory of their own."""
        return {"size": self.size, "_entries": OrderedDict()}


def profile_of(device: torch.device) -> Profile:
    """Return the profile of a torch device; raises `ProfileError` when there is none."""
    if device.type == "cpu":
        return device_profile(None)
    if device.type != "cuda":
        raise ProfileError(f"no profile describes devices of type {device.type!r}; use cuda or cpu")
    if not torch.cuda.is_available():
        raise ProfileError(f"the device asked for is {device}, but torch finds no CUDA device; use cpu")
    return device_profile(torch.cuda.get_device_name(device))


class Dispatched(nn.Module):
    """Share a module's weights and submodules, and compute its function by built forwards.

    A subclass reads one kind of module: `describe` checks it, `read` turns its calls into the families' form, `view`
    shows its weights as a baseline's, `original` runs its own forward.
    """

    def __init__(self, model: nn.Module, request: Request) -> None:
        nn.Module.__init__(self)
        # The dictionaries themselves: what is replaced, moved or loaded through one module is so in the other.
        self.__dict__.update({name: getattr(model, name) for name in SHARED})
        self.training = model.training
        # The module itself, kept out of the submodules so that state_dict keys stay its own: it is the forward to fall
        # back to, and what a family packs its weights from without ever calling back into this module.
        self.__dict__["_model"] = model
        self._lock = RLock()
        self._request = request
        self._sizes: Sizes = self.describe(model)
        if dtype_of(model) not in DTYPE_NAMES:
            raise OptimizeError(
                f"{type(model).__name__} is {dtype_of(model)}; the families take {', '.join(DTYPE_BYTES)}; cast it"
            )
        self._find_droppers()
        self._asked: dict[Key, Shape] = {}
        self._routes: dict[Key, Route] = {}
        self._built = BuiltForwards(request.cache_size)
        self._warned: set[str] = set()
        self._outdated = False
        self._forget()

    def _find_droppers(self) -> None:
        self.__dict__["_droppers"] = [module for module in self._model.modules() if self.drops(module)]

    @staticmethod
    def drops(module: nn.Module) -> bool:
        """Return whether a module computes something else while it trains."""
        return drops(module)

    @property
    def route(self) -> Route:
        """The choice for the first shape asked for, with its reasons."""
        return self._routes[next(iter(self._asked))]

    @property
    def routes(self) -> list[Route]:
        """The choice for every shape asked for or built since."""
        return list(self._routes.values())

    def routes_on(self, profile: Profile) -> list[Route]:
        """Return what a device would get for every shape asked for or built since; raises `RouteError`."""
        return [self._route_on(chosen.shape, profile, key[3]) for key, chosen in self._routes.items()]

    @property
    def form(self) -> Form:
        """How the layers compute, beside their sizes."""
        return self._sizes.form

    @property
    def shape(self) -> Shape:
        """The first shape asked for."""
        return next(iter(self._asked.values()))

    def ask(self, shapes: Sequence[tuple[Shape, bool]]) -> None:
        """Route shapes, each with or without a bias, and build them where the weights are on the device asked for."""
        for shape, biased in shapes:
            self._check(shape, dtype_of(self._model))
            key = (shape.batch_size, shape.seq_len, shape.causal, biased)
            self._asked[key] = shape
            self._routes[key] = self._route(shape, self._request.device, biased)
        weight = next(self._model.parameters())
        if weight.device.type == self._request.device.type:
            self._settle(weight)
            for key in self._asked:
                self._built.put(key, self._build(key))

    def _check(self, shape: Shape, dtype: torch.dtype) -> None:
        for name in (field.name for field in fields(Sizes) if field.name != "form"):
            own = getattr(self._sizes, name)
            if own is not None and own != getattr(shape, name):
                raise OptimizeError(
                    f"shape {shape.id} has {name} {getattr(shape, name)}, the model {own}; pass a shape with the "
                    "model's own sizes"
                )
        if torch_dtype(shape.dtype) != dtype:
            raise OptimizeError(
                f"shape {shape.id} is {shape.dtype}, the model's weights are {dtype}; cast the model or set the "
                "shape's dtype"
            )

    def confirm(self) -> None:
        """Raise `OptimizeError` when the module does not compute what its description says."""

    def shape_of(self, x: Tensor, causal: bool) -> Shape:
        """Return the shape of a call with `x [B, S, D]`; raises `ShapeError` for sizes no shape has."""
        own = {name: value for name, value in vars(self._sizes).items() if name not in ("causal", "form")}
        batch, length = x.shape[:2]
        name = f"{batch}x{length}"
        return Shape(id=name, batch_size=batch, seq_len=length, causal=causal, dtype=DTYPE_NAMES[x.dtype], **own)

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Return a call in the families' form; raises `Unserved` where they cannot take it."""
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        return self._model(*args, **kwargs)

    def wrap(self, out: Tensor) -> Any:
        """Return a built forward's output the way the module returns its own."""
        return out

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        """Run the built forward for a call, or the module's own and say why."""
        # A trace, a compiled or an exported program takes the module's own operations, which read the weights at every
        # call. A built forward would leave nothing in it but constants.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            if self._request.on_unseen == "error":
                raise OptimizeError(
                    "a dispatched module is traced, compiled or exported by its own operations, not by a built "
                    'forward, and on_unseen="error" allows no other; do it with the original module'
                )
            return self.original(*args, **kwargs)
        try:
            return self.wrap(self._compute(self.read(*args, **kwargs)))
        except Unserved as obstacle:
            self._note(obstacle)
            return self.original(*args, **kwargs)

    def _compute(self, call: Call) -> Tensor:
        """Return the built forward's output; raises `Unserved` when none takes the call."""
        x, valid, causal, bias = call
        # Threads share built forwards, whose graphs have one input and one output memory; a launch takes microseconds.
        with self._lock:
            if self._outdated:
                self._describe_again()
            built = self._find(x, valid, causal, bias is not None)
            try:
                if built.called:
                    return built.forward(x, valid) if bias is None else built.forward(x, valid, bias)
                return self._first_call(built, call)
            except StructureChanged:
                self._describe_again()
            return self._first_call(self._find(x, valid, causal, bias is not None), call)

    def _first_call(self, built: Built, call: Call) -> Tensor:
        """Call a built forward for the first time, which compiles what is in no cache, and say how long it took."""
        x, valid, _, bias = call
        start = perf_counter()
        out = built.forward(x, valid) if bias is None else built.forward(x, valid, bias)
        built.called, built.build_s = True, built.build_s + perf_counter() - start
        _log.info(
            "%s for %s was built in %.2g s, its first call included; compiled kernels stay on the disk and are found "
            "by the next process", built.route.family, built.route.shape.label(), built.build_s,
        )  # fmt: skip
        return out

    def _describe_again(self) -> None:
        """Read a module whose parts or settings were changed; raises `Unserved` unless it is one as before."""
        self._outdated = True
        self._forget()
        try:
            sizes = self.describe(self._model)
            self.confirm()
        except OptimizeError as error:
            raise Unserved("structure", f"the module was changed after optimize(): {error}") from None
        if sizes != self._sizes:
            raise Unserved("structure", "the module has other sizes than at optimize(); call optimize() again")
        self._find_droppers()
        self._outdated = False

    def repack(self) -> None:
        """Read the weights again at the next call, after a write that torch does not record.

        On a GPU such writes are those through `.data`, views of numpy or DLPack, kernels of your own and replays of a
        captured training step. Optimisers, loading, moves and other in-place operations need no call.
        """
        note_writes()

    def _note(self, obstacle: Unserved) -> None:
        """Warn of a kind of obstacle once, or raise it when the caller asked for that."""
        if self._request.on_unseen == "error":
            raise OptimizeError(f"no built forward takes this call: {obstacle}") from None
        if obstacle.about not in self._warned:
            self._warned.add(obstacle.about)
            warnings.warn(f"this call runs the module's own forward: {obstacle}", stacklevel=6)

    def _find(self, x: Tensor, valid: Tensor | None, causal: bool, biased: bool) -> Built:
        """Return what was built for a call; raises `Unserved` when nothing takes it."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            raise Unserved("tensor", f"x is a {type(x).__name__}; every family takes plain tensors")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unserved("transform", "it runs inside a transform of torch.func, such as vmap, grad or jvp")
        if _forward_hooks or _forward_pre_hooks:
            raise Unserved("hooks", "a forward hook is registered on all modules, which no built forward calls")
        if x.dim() != 3 or x.is_nested:
            raise Unserved("shape", "x is no plain [batch, sequence, width] tensor, which every family takes")
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self._model.parameters())):
            raise Unserved(
                "gradients", "it needs gradients, which no family computes; call under torch.inference_mode()"
            )
        for module in self._droppers:
            if module.training:
                raise Unserved("training", "the module is in training mode and drops values; call eval() first")
        batch, length, width = x.shape
        if valid is not None and (valid.shape != (batch, length) or valid.dtype != torch.bool):
            wanted = f"not {(batch, length)} of bool"
            raise Unserved("mask", f"the mask is {tuple(valid.shape)} of {valid.dtype}, {wanted}")
        if valid is not None and valid.device != x.device:
            raise Unserved("mask", f"x is on {x.device}, the mask on {valid.device}")
        if width != self._sizes.d_model:
            raise Unserved("shape", f"x is {tuple(x.shape)}, the module's width is {self._sizes.d_model}")
        if x.dtype is not self._dtype or x.device != self._device:
            self._move(x)
        if not batch or not length:
            return NOTHING
        entry = self._built.get((batch, length, causal, biased)) or self._first(x, causal, biased)
        if entry.forward is None:
            raise Unserved("shape", entry.reason)
        return entry

    def _first(self, x: Tensor, causal: bool, biased: bool) -> Built:
        """Build for a shape that has no forward, if it was asked for or every shape is to be built."""
        key = (x.shape[0], x.shape[1], causal, biased)
        if key not in self._asked and self._request.on_unseen != "build":
            served = ", ".join(map(self._call_text, self._asked))
            raise Unserved("shape", f"x is {self._call_text(key)}, the dispatched forward was built for {served}")
        try:
            entry = self._build(key)
        except (OptimizeError, ProfileError, RouteError, ShapeError) as error:
            entry = Built(None, reason=str(error))
        self._built.put(key, entry)
        return entry

    def _call_text(self, key: Key) -> str:
        how = "" if self._sizes.causal is not None else " causal" if key[2] else " not causal"
        return f"{(*key[:2], self._sizes.d_model)}{how}" + " with a bias on the scores" * key[3]

    def _move(self, x: Tensor) -> None:
        """Check the weights again for an x of another dtype or device; drop what was built for the old ones."""
        weight = next(self._model.parameters())
        if weight.device != x.device:
            raise Unserved("device", f"x is on {x.device}, the weights are on {weight.device}")
        if weight.dtype != x.dtype:
            raise Unserved("dtype", f"x is {x.dtype}, the weights are {weight.dtype}")
        if weight.dtype not in DTYPE_NAMES:
            raise Unserved("weights", f"the weights are {weight.dtype}; the families take {', '.join(DTYPE_BYTES)}")
        self._forget()
        self._settle(weight)

    def _settle(self, weight: Tensor) -> None:
        self._device, self._dtype = weight.device, weight.dtype

    def _form(self, biased: bool) -> Form:
        return replace(self._sizes.form, score_bias=biased)

    def _route(self, shape: Shape, device: torch.device, biased: bool) -> Route:
        given = self._request.profile
        profile = given if given is not None and given.kind == device.type else profile_of(device)
        return self._route_on(shape, profile, biased)

    def _route_on(self, shape: Shape, profile: Profile, biased: bool) -> Route:
        return route(shape, profile, self._request.rules, self._form(biased), may_compile=self._request.may_compile)

    def _build(self, key: Key) -> Built:
        shape = self._asked.get(key) or self.shape_of(
            torch.empty(*key[:2], 0, dtype=self._dtype, device=self._device), key[2]
        )
        shape = replace(shape, dtype=DTYPE_NAMES[self._dtype])
        chosen = self._route(shape, self._device, key[3])
        self._routes[key] = chosen
        start = perf_counter()
        spec = registry.load_families()[chosen.family]
        view = self.view(config_of(shape), self._form(key[3]))
        if hasattr(view, "packed"):
            view.packed = self._packed
        # What is packed during an inference-mode call must be writable when weights change outside that mode.
        with torch.inference_mode(False), torch.no_grad():
            forward = spec.build(view, shape, self._device, **chosen.options)
        return Built(forward, chosen, build_s=perf_counter() - start)

    def _forget(self) -> None:
        self._built = BuiltForwards(self._request.cache_size)
        self._packed: dict[torch.dtype, Any] = {}
        self._device: torch.device | None = None
        self._dtype: torch.dtype | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move or cast the weights as any module does, and drop what was built from the old ones."""
        self._forget()
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> nn.Module:
        """Set the mode of this module and of the one it shares its submodules with."""
        self._model.training = mode
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """Look up what this module lacks in the module it replaces."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self._model, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the built forwards out of copies and pickles; a copy builds its own at its first call."""
        return self.__dict__ | {"_device": None, "_dtype": None, "_lock": None, "_packed": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another one, with a lock of its own."""
        super().__setstate__(state | {"_lock": RLock()})


class DispatchedTransformer(Dispatched, BaselineTransformer):
    """A baseline whose forward is the routed family's, sharing the given model's submodules."""

    @staticmethod
    def describe(model: nn.Module) -> Sizes:
        """Return the model's sizes; raises `OptimizeError` when its parts do not make the baseline's function."""
        check_hooks(model)
        check_parameters(model)
        norms = {f"layers.{i}.{n}": getattr(part, n) for i, part in enumerate(model.layers) for n in ("norm1", "norm2")}
        config = model.config
        check_norms(norms | {"final_norm": model.final_norm}, config.d_model)
        if len(model.layers) != config.num_layers:
            raise OptimizeError(f"the model has {len(model.layers)} layers, its config says {config.num_layers}")
        for index, layer in enumerate(model.layers):
            attention = layer.attention
            linears = {
                f"attention.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
            }
            for name, part in {**linears, "ffn_in": layer.ffn_in, "ffn_out": layer.ffn_out}.items():
                check_same_forward(part, nn.Linear, ("forward",), f"layers.{index}.{name}")
            width = config.d_model // config.num_heads
            if (attention.num_heads, attention.head_dim) != (config.num_heads, width) or attention.scale != width**-0.5:
                raise OptimizeError(
                    f"layers.{index}.attention has other heads or another scale than the config: "
                    f"{attention.num_heads} heads of {attention.head_dim}, scale {attention.scale:g}"
                )
        return Sizes(config.d_model, config.num_heads, config.ffn_dim, config.num_layers, config.causal)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the stack's output `[B, S, D]` for `x [B, S, D]` and `valid_token_mask [B, S]` bool or None."""
        return self._serve(x, valid_token_mask)

    def read(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Call:
        """Return the call as the families take it."""
        return Call(x, valid_token_mask, self._sizes.causal)

    def view(self, config: Any, form: Form) -> nn.Module:
        """Return the model itself: families read it as it is."""
        return self._model


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first parameter; raises `OptimizeError` when it has none."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise OptimizeError(f"{type(model).__name__} has no parameters; there is nothing to optimise")
    return parameter.dtype
