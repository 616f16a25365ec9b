"""The translation units of the Hopper kernels: compile-time sizes, the products they need, their code."""

from __future__ import annotations

from rooflane.families.resident.hopper.parts import PARTS
from rooflane.families.resident.hopper.rowblocks import ROWBLOCKS
from rooflane.families.resident.hopper.warpgroups import WARPGROUPS

PRODUCT = """template <>
__device__ __forceinline__ void product<{n}>(float (&c)[{n} / 2], const u32* a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{add}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, {{%{a0}, %{a1}, %{a2}, %{a3}}}, %{b}, p, 1, 1, 0;\\n}}"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}}
template <>
__device__ __forceinline__ void wait_products<{n}>(float (&c)[{n} / 2]) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");
}}
"""
DECLARATIONS = """template <int N>
__device__ void product(float (&c)[N / 2], const u32* a, u64 b, int add);
template <int N>
__device__ void wait_products(float (&c)[N / 2]);
"""
# Where the shared parts stand, behind the constants they read; where the products do, behind the descriptor they take.
PARTS_MARK, PRODUCTS_MARK = "// ---- shared parts", "// ---- pieces"


def warpgroup_source(sizes: dict[str, int]) -> str:
    """Return the translation unit of the warpgroup kernel for compile-time sizes (see warpgroups.py)."""
    widths = sorted({64, sizes["D"], sizes["HD"]})
    dtype = "bf16" if sizes["BF16"] else "f16"
    products = DECLARATIONS + "".join(_product(n, dtype) for n in widths)
    return _unit(sizes, WARPGROUPS.replace(PRODUCTS_MARK, products + PRODUCTS_MARK, 1))


def rowblock_source(sizes: dict[str, int]) -> str:
    """Return the translation unit of the row-block kernel for compile-time sizes (see rowblocks.py)."""
    return _unit(sizes, ROWBLOCKS)


def _unit(sizes: dict[str, int], code: str) -> str:
    defines = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    return defines + code.replace(PARTS_MARK, PARTS, 1)


def _product(n: int, dtype: str) -> str:
    """Return the wrappers of the warpgroup product of N columns."""
    count = n // 2
    names = {f"a{i}": count + i for i in range(4)} | {"b": count + 4, "add": count + 5}
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return PRODUCT.format(n=n, dtype=dtype, registers=registers, outputs=outputs, **names)
