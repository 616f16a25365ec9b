"""CUDA source of the row-block kernel: attention of a block of rows."""

from __future__ import annotations

ROWBLOCK_ATTENTION = r"""
// This warp's share of its head: key blocks share, share + SHARE, ... up to `block`; the partial context, its sums and
// tops go to shared memory. `visible` holds four bits a key block for each of the thread's two rows.
__device__ __forceinline__ void attend(
    const u32* scratch, const int* flags, int block, int layer, const u32 (&visible)[2], u32 q_operand,
    const Place& place) {
  u32 head = place.warp / SHARE, share = place.warp % SHARE;
  u32 q[SHARE][4];
  read_left<SHARE>(q, q_operand + head * (HD * 2), place);
  int awaited = share + place.lane * SHARE;
  bool ready = place.lane >= ITEMS || awaited >= block;
  while (!__all_sync(~0u, ready)) {
    if (!ready) ready = load_flag(flags + awaited) > layer;
  }
  __syncwarp();
  const u32* from = scratch + (int(share) - block) * SCRATCH_WORDS + (head * 32 + place.lane) * LANE_WORDS;
  u32 keys[ITEMS][2][LANE_WORDS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        read_words<LANE_WORDS>(keys[item][half], from + item * SHARE * SCRATCH_WORDS + half * (SCRATCH_WORDS / 4));
    }
  }
  u32 seen[2] = {opaque(visible[0]), opaque(visible[1])};
  float s[ITEMS][2][4], top[2] = {NEGATIVE, NEGATIVE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++) s[item][half][j] = 0.0f;
#pragma unroll
        for (int k = 0; k < SHARE; k++) mma(s[item][half], q[k], keys[item][half][2 * k], keys[item][half][2 * k + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (!(seen[j / 2] >> (item * 4 + half * 2 + j % 2) & 1)) s[item][half][j] = NEGATIVE;
#pragma unroll
        for (int j = 0; j < 4; j++) top[j / 2] = fmaxf(top[j / 2], s[item][half][j]);
      }
    }
  }
  // Asked for here and not with the keys: both at once do not fit the registers.
  from += SCRATCH_WORDS / 2 + (head * 32 + place.lane) * LANE_WORDS;
  u32 values[ITEMS][2 * LANE_WORDS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++)
    if (share + item * SHARE <= block) read_words<2 * LANE_WORDS>(values[item], from + item * SHARE * SCRATCH_WORDS);
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  float c[LANE_WORDS][4] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
      u32 p[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          s[item][half][j] = exp2_fast(s[item][half][j] - top[j / 2]);
          sum[j / 2] += s[item][half][j];
        }
        p[2 * half] = pack(s[item][half][0], s[item][half][1]);
        p[2 * half + 1] = pack(s[item][half][2], s[item][half][3]);
      }
#pragma unroll
      for (int n = 0; n < LANE_WORDS; n++) mma(c[n], p, values[item][2 * n], values[item][2 * n + 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = quad_sum(sum[half]);
    u32 row = place.lane / 4 + 8 * half;
    if (place.lane % 4 == 0) store_pair(place.tops + (place.warp * ROWS + row) * 8, top[half], total);
    u32 to = place.parts + ((place.warp * ROWS + row) * PART_FLOATS + place.lane % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < LANE_WORDS; n++) store_pair(to + n * 32, c[n][2 * half], c[n][2 * half + 1]);
  }
}

// This warp's 16 columns of the context, from the parts of its head's warps.
__device__ __forceinline__ void combine(float (&y)[2][4], const Place& place) {
  u32 first = place.warp / SHARE * SHARE, column = place.warp % SHARE * 16 + place.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 row = place.lane / 4 + 8 * half;
    float2 part[SHARE];
    float top = NEGATIVE, total = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      part[i] = load_shared(place.tops + ((first + i) * ROWS + row) * 8);
      top = fmaxf(top, part[i].x);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      part[i].x = exp2_fast(part[i].x - top);
      total += part[i].x * part[i].y;
    }
    // A row without a visible key, which no mask keeps, may find no key block at all.
    float scale = 1.0f / (total == 0.0f ? 1.0f : total);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 c = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        float2 p = load_shared(place.parts + (((first + i) * ROWS + row) * PART_FLOATS + column + n * 8) * 4);
        c.x += part[i].x * p.x;
        c.y += part[i].x * p.y;
      }
      y[n][2 * half] = c.x * scale;
      y[n][2 * half + 1] = c.y * scale;
    }
  }
}
"""
