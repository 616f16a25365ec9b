"""The translation units of the Hopper kernels: compile-time sizes, the products they need, their code."""

from __future__ import annotations

from rooflane.families.resident.hopper.parts import PARTS, WARP_PRODUCT
from rooflane.families.resident.hopper.rowblock_attention import ROWBLOCK_ATTENTION
from rooflane.families.resident.hopper.rowblock_steps import ROWBLOCK_SIZES, ROWBLOCK_STEPS
from rooflane.families.resident.hopper.rowblocks import ROWBLOCKS
from rooflane.families.resident.hopper.rowwarp_attention import ROWWARP_ATTENTION
from rooflane.families.resident.hopper.rowwarp_steps import ROWWARP_SIZES, ROWWARP_STEPS
from rooflane.families.resident.hopper.rowwarps import ROWWARPS
from rooflane.families.resident.hopper.warpgroup_steps import WARPGROUP_OPERAND, WARPGROUP_SIZES, WARPGROUP_STEPS
from rooflane.families.resident.hopper.warpgroups import WARPGROUPS

# Operands in shared memory are named by the low word of their descriptor (see `operand`, warpgroup_steps.py); the high
# word is the same for all: 128 bytes from one core matrix to the next along the rows.
PRODUCT = """template <>
__device__ __forceinline__ void product<{n}>(float (&c)[{n} / 2], const u32* a, u32 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\n.reg .b64 right;\\nsetp.ne.b32 p, %{add}, 0;\\nmov.b64 right, {{%{b}, 8}};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, "
      "{{%{a0}, %{a1}, %{a2}, %{a3}}}, right, p, 1, 1, 0;\\n}}"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
}}
"""
PRODUCT_SHARED = """template <>
__device__ __forceinline__ void product_shared<{n}>(float (&c)[{n} / 2], u32 a, u32 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\n.reg .b64 left, right;\\nsetp.ne.b32 p, %{add}, 0;\\n"
      "mov.b64 left, {{%{a}, 8}};\\nmov.b64 right, {{%{b}, 8}};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, left, right, p, 1, 1, 0, 0;\\n}}"
      : {outputs}
      : "r"(a), "r"(b), "r"(add));
}}
"""
# The waits name what the products accumulate into, or it might be read too early.
FINISH = """template <>
__device__ __forceinline__ void finish_products<{n}>(float (&c)[{n} / 2]) {{
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");
}}
"""
DECLARATIONS = """template <int N>
__device__ void product(float (&c)[N / 2], const u32* a, u32 b, int add);
template <int N>
__device__ void product_shared(float (&c)[N / 2], u32 a, u32 b, int add);
template <int N>
__device__ void finish_products(float (&c)[N / 2]);
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void zero(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) c[i] = 0.0f;
}
"""
ROWS = 64  # of a warpgroup: what its products take of the left operand, and keys at a time


def warpgroup_source(sizes: dict[str, int]) -> str:
    """Return the translation unit of the warpgroup kernel for compile-time sizes (see warpgroup_steps.py)."""
    half, context = sizes["D"] // 2, sizes["HD"]
    if sizes["HEADS"] % 2:
        context //= 2
    dtype = "bf16" if sizes["BF16"] else "f16"
    products = DECLARATIONS + _product(PRODUCT, context, dtype)
    products += "".join(_product(PRODUCT_SHARED, n, dtype) for n in sorted({half, ROWS}))
    products += "".join(FINISH.format(n=n, outputs=_outputs(n // 2)) for n in sorted({half, ROWS, context}))
    return _unit(sizes, WARPGROUP_SIZES, PARTS, WARPGROUP_OPERAND, products, WARPGROUP_STEPS, WARPGROUPS)


def rowblock_source(sizes: dict[str, int]) -> str:
    """Return the translation unit of the row-block kernel for compile-time sizes (see rowblock_steps.py)."""
    return _unit(sizes, ROWBLOCK_SIZES, PARTS, WARP_PRODUCT, ROWBLOCK_STEPS, ROWBLOCK_ATTENTION, ROWBLOCKS)


def rowwarp_source(sizes: dict[str, int]) -> str:
    """Return the translation unit of the row-warp kernel for compile-time sizes (see rowwarp_steps.py)."""
    return _unit(sizes, ROWWARP_SIZES, PARTS, WARP_PRODUCT, ROWWARP_STEPS, ROWWARP_ATTENTION, ROWWARPS)


def _unit(sizes: dict[str, int], *texts: str) -> str:
    """Return one text of compile-time sizes and what stands behind them, in order of use."""
    return "".join(f"#define {name} {value}\n" for name, value in sizes.items()) + "".join(texts)


def _product(template: str, n: int, dtype: str) -> str:
    """Return the wrapper of the warpgroup product of N columns, left operand in registers or in shared memory."""
    count = n // 2
    lefts = {f"a{i}": count + i for i in range(4)} | {"b": count + 4, "add": count + 5}
    if template is PRODUCT_SHARED:
        lefts = {"a": count, "b": count + 1, "add": count + 2}
    registers = ", ".join(f"%{i}" for i in range(count))
    return template.format(n=n, dtype=dtype, registers=registers, outputs=_outputs(count), **lefts)


def _outputs(count: int) -> str:
    return ", ".join(f'"+f"(c[{i}])' for i in range(count))
