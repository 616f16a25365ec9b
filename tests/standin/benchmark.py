"""Stand-in for the organiser's benchmark, written from a description of its behaviour, peculiarities included.

One process runs one configuration and prints its figures on standard output. Exit status 0: passed. 2: accuracy failed,
or a usage error of argparse. 1: any exception.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class TransformerConfig:
    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool

    def validate(self) -> None:
        for name in ("batch_size", "seq_len", "d_model", "num_heads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0")
        if self.d_model % self.num_heads:
            raise ValueError("d_model must be divisible by num_heads")
        for name in ("ffn_dim", "num_layers"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0")


class BaselineSelfAttention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        width = config.d_model
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, valid_token_mask=None, causal=False):
        batch, length, width = x.shape
        depth = width // self.heads

        def split(value):
            return value.view(batch, length, self.heads, depth).transpose(1, 2).contiguous()

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        scores = torch.matmul(q, k.transpose(-2, -1)) * depth**-0.5
        if causal:
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
            scores = scores.masked_fill(future, float("-inf"))
        if valid_token_mask is not None:
            scores = scores.masked_fill(~valid_token_mask[:, None, None, :], float("-inf"))
        context = torch.matmul(torch.softmax(scores.float(), dim=-1).to(x.dtype), v)
        out = self.out_proj(context.transpose(1, 2).contiguous().view(batch, length, width))
        return out if valid_token_mask is None else out.masked_fill(~valid_token_mask[:, :, None], 0)


class BaselineTransformerBlock(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attention = BaselineSelfAttention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.ffn_in = nn.Linear(config.d_model, config.ffn_dim)
        self.ffn_out = nn.Linear(config.ffn_dim, config.d_model)

    def forward(self, x, valid_token_mask=None, causal=False):
        x = x + self.attention(self.norm1(x), valid_token_mask, causal)
        x = x + self.ffn_out(functional.gelu(self.ffn_in(self.norm2(x)), approximate="none"))
        return x if valid_token_mask is None else x.masked_fill(~valid_token_mask[:, :, None], 0)


class BaselineTransformer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BaselineTransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model)

    def forward(self, x, valid_token_mask=None):
        for layer in self.layers:
            x = layer(x, valid_token_mask, self.config.causal)
        x = self.final_norm(x)
        return x if valid_token_mask is None else x.masked_fill(~valid_token_mask[:, :, None], 0)


class UserOptimizedTransformer(BaselineTransformer):
    def forward(self, x, valid_token_mask=None):
        return super().forward(x, valid_token_mask)


def copy_model_weights(source: nn.Module, target: nn.Module, strict: bool = True) -> None:
    result = target.load_state_dict(copy.deepcopy(source.state_dict()), strict=strict)
    if not strict and result.missing_keys:
        print(f"[warning] missing keys: {list(result.missing_keys)}")
    if not strict and result.unexpected_keys:
        print(f"[warning] unexpected keys: {list(result.unexpected_keys)}")


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("CUDA was requested but is not available")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "float16" and device.type == "cpu":
        print("[warning] float16 on CPU may be slow or unsupported")
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def generate_random_case(config, device, dtype, seed, padding_ratio, input_scale):
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    batch, length = config.batch_size, config.seq_len
    x = torch.randn(batch, length, config.d_model, generator=generator, device=device, dtype=dtype) * input_scale
    if padding_ratio <= 0:
        return x, torch.ones(batch, length, dtype=torch.bool, device=device)
    least = max(1, int(round(length * (1 - padding_ratio))))
    lengths = torch.randint(least, length + 1, (batch,), generator=generator, device=device)
    mask = torch.arange(length, device=device)[None, :] < lengths[:, None]
    return x.masked_fill(~mask[:, :, None], 0), mask


@dataclass
class AccuracyResult:
    passed: bool
    total_elements: int
    failed_elements: int
    max_abs_error: float
    max_relative_error: float
    mean_abs_error: float
    failed_feature_dims: list
    worst_index: tuple
    reference_at_worst: float
    optimized_at_worst: float


def compare_outputs(reference, optimized, rtol, atol) -> AccuracyResult:
    if reference.shape != optimized.shape:
        raise AssertionError(f"output shape mismatch: {tuple(reference.shape)} against {tuple(optimized.shape)}")
    if reference.dtype != optimized.dtype:
        print(f"[warning] output dtype mismatch: {reference.dtype} against {optimized.dtype}")
    ref, opt = reference.float(), optimized.float()
    error = (opt - ref).abs()
    finite = torch.isfinite(ref) & torch.isfinite(opt)
    failed = ~(finite & ((error <= atol) | (error <= rtol * ref.abs())))
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    dims = failed.any(dim=tuple(range(failed.dim() - 1))).nonzero().flatten().tolist()
    return AccuracyResult(
        passed=not bool(failed.any()),
        total_elements=error.numel(),
        failed_elements=int(failed.sum()),
        max_abs_error=float(error.max()),
        max_relative_error=float((error / ref.abs().clamp_min(1e-12)).max()),
        mean_abs_error=float(error.mean()),
        failed_feature_dims=dims,
        worst_index=worst,
        reference_at_worst=float(ref[worst]),
        optimized_at_worst=float(opt[worst]),
    )


def run_accuracy_tests(baseline, optimized, config, device, dtype, args) -> bool:
    print()
    print("=== Accuracy check ===")
    print(f"criterion: abs_error <= {args.atol:g} OR relative_error <= {args.rtol:.2%}")
    passed, worst_abs, worst_rel, failed, total = True, 0.0, 0.0, 0, 0
    # The inputs are made in here, so they are inference tensors; those of the timing are not.
    with torch.inference_mode():
        for trial in range(args.accuracy_trials):
            x, mask = generate_random_case(
                config, device, dtype, args.seed + trial, args.padding_ratio, args.input_scale
            )
            result = compare_outputs(baseline(x, mask), optimized(x, mask), args.rtol, args.atol)
            passed = passed and result.passed
            worst_abs = max(worst_abs, result.max_abs_error)
            worst_rel = max(worst_rel, result.max_relative_error)
            failed += result.failed_elements
            total += result.total_elements
            print(
                f"trial {trial + 1:02d}/{args.accuracy_trials}: {'PASS' if result.passed else 'FAIL'} | "
                f"max_abs={result.max_abs_error:.6g} | max_rel={result.max_relative_error:.6g} | "
                f"failed={result.failed_elements}/{result.total_elements}"
            )
            if not result.passed:
                print(
                    f"  worst_index={result.worst_index}, baseline={result.reference_at_worst:.8g}, "
                    f"optimized={result.optimized_at_worst:.8g}"
                )
                more = "..." if len(result.failed_feature_dims) > 16 else ""
                print(f"  failed output feature dims={result.failed_feature_dims[:16]}{more}")
    print(
        f"summary: {'PASS' if passed else 'FAIL'} | max_abs={worst_abs:.6g} | max_rel={worst_rel:.6g} | "
        f"failed={failed}/{total}"
    )
    return passed


def percentile(values, q) -> float:
    if not values:
        raise ValueError("percentile of an empty list")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass
class TimingResult:
    samples_ms: list[float]

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def p90_ms(self) -> float:
        return percentile(self.samples_ms, 0.90)

    @property
    def min_ms(self) -> float:
        return min(self.samples_ms)


def warmup_model(model, x, mask, count, device) -> None:
    with torch.inference_mode():
        for _ in range(count):
            model(x, mask)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def benchmark_once(model, x, mask, repeats, device) -> list[float]:
    with torch.inference_mode():
        if device.type != "cuda":
            samples = []
            for _ in range(repeats):
                start = time.perf_counter_ns()
                model(x, mask)
                samples.append((time.perf_counter_ns() - start) / 1e6)
            return samples
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        torch.cuda.synchronize(device)
        for start, end in zip(starts, ends, strict=True):
            start.record()
            model(x, mask)
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def benchmark_models(baseline, optimized, config, device, dtype, args) -> None:
    x, mask = generate_random_case(config, device, dtype, args.seed + 100000, args.padding_ratio, args.input_scale)
    warmup_model(baseline, x, mask, args.warmup, device)
    warmup_model(optimized, x, mask, args.warmup, device)
    times: dict[str, list[float]] = {"baseline": [], "optimized": []}
    for number in range(args.benchmark_rounds):
        sides = [("baseline", baseline), ("optimized", optimized)]
        for name, model in sides if number % 2 == 0 else reversed(sides):
            times[name] += benchmark_once(model, x, mask, args.repeats, device)
    print()
    print("=== Performance benchmark ===")
    print("The input is fixed and its generation is not timed.")
    if device.type == "cuda":
        print("Times are CUDA events on the current stream.")
    timings = {name: TimingResult(samples) for name, samples in times.items()}
    for name, timing in timings.items():
        print(
            f"{name:<9}: median={timing.median_ms:.4f} ms | mean={timing.mean_ms:.4f} ms | p90={timing.p90_ms:.4f} ms "
            f"| min={timing.min_ms:.4f} ms | "
            f"throughput={config.batch_size * config.seq_len * 1000 / timing.median_ms:.2f} token/s"
        )
    speedup = timings["baseline"].median_ms / timings["optimized"].median_ms
    print(f"speedup  : {speedup:.3f}x based on median latency")


def maybe_compile(model, enabled, mode):
    if not enabled:
        return model
    if not hasattr(torch, "compile"):
        raise RuntimeError("this PyTorch has no torch.compile")
    return torch.compile(model, mode=mode)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag, default in (
        ("--batch-size", 8), ("--seq-len", 128), ("--d-model", 512), ("--heads", 8), ("--ffn-dim", 2048),
        ("--layers", 6), ("--accuracy-trials", 5), ("--seed", 1234), ("--warmup", 20), ("--repeats", 100),
        ("--benchmark-rounds", 3),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=default)
    for flag, default in (("--padding-ratio", 0.0), ("--input-scale", 1.0), ("--rtol", 0.02), ("--atol", 0.002)):
        parser.add_argument(flag, type=float, default=default)
    for flag in (
        "--causal", "--benchmark-on-failure", "--compile-baseline", "--compile-user", "--non-strict-weight-copy",
    ):  # fmt: skip
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--compile-mode", choices=("default", "reduce-overhead", "max-autotune"), default="default")
    parser.add_argument("--matmul-precision", choices=("highest", "high", "medium"), default="high")
    parser.add_argument("--allow-tf32", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def validate_args(args: argparse.Namespace) -> None:
    checks = (
        (0 <= args.padding_ratio < 1, "padding_ratio must be in [0, 1)"),
        (args.input_scale > 0, "input_scale must be > 0"),
        (args.accuracy_trials > 0, "accuracy_trials must be > 0"),
        (args.rtol >= 0 and args.atol >= 0, "tolerances must be >= 0"),
        (args.warmup >= 0, "warmup must be >= 0"),
        (args.repeats > 0 and args.benchmark_rounds > 0, "repeats and benchmark_rounds must be > 0"),
    )
    for holds, text in checks:
        if not holds:
            raise ValueError(text)


def main() -> int:
    args = parse_args()
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    config = TransformerConfig(
        args.batch_size, args.seq_len, args.d_model, args.heads, args.ffn_dim, args.layers, args.causal
    )
    config.validate()
    validate_args(args)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision(args.matmul_precision)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
        torch.backends.cudnn.allow_tf32 = args.allow_tf32
    baseline = BaselineTransformer(config)
    optimized = UserOptimizedTransformer(config)
    # Copied on the CPU: what a constructor packed is stale from here on.
    copy_model_weights(baseline, optimized, strict=not args.non_strict_weight_copy)
    baseline = baseline.to(device=device, dtype=dtype).eval()
    optimized = optimized.to(device=device, dtype=dtype).eval()
    baseline = maybe_compile(baseline, args.compile_baseline, args.compile_mode)
    optimized = maybe_compile(optimized, args.compile_user, args.compile_mode)
    print("=== Configuration ===")
    print(config)
    print(f"device={device}, dtype={dtype}, torch={torch.__version__}")
    if device.type == "cuda":
        print(f"gpu={torch.cuda.get_device_name(device)}")
    passed = run_accuracy_tests(baseline, optimized, config, device, dtype, args)
    if not passed and not args.benchmark_on_failure:
        print()
        print("Accuracy failed: the benchmark is skipped.")
        print("Pass --benchmark-on-failure to time it all the same.")
        return 2
    benchmark_models(baseline, optimized, config, device, dtype, args)
    return 0 if passed else 2


if __name__ == "__main__":
    sys.exit(main())
