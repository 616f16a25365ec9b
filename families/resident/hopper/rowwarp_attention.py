"""CUDA source of the row-warp kernel: keys and values, attention."""

from __future__ import annotations

ROWWARP_ATTENTION = r"""
// Keys (or values) of this warp's rows, as the right operands of the products that read them: a key's part of an
// accumulator tile is one already, a value's after a transposition of 8 x 8.
template <bool VALUES>
__device__ __forceinline__ void right_operand(
    u32 (&words)[2][TILES / TWINS], const u32 (&a)[STEPS][4], const u8* tile) {
#pragma unroll
  for (int first = 0; first < OWN_STEPS; first += SLICES) {
    float c[2 * SLICES][4] = {};
    project<SLICES>(c, a, tile + first * (STEPS * 512));
#pragma unroll
    for (int i = 0; i < 2 * SLICES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 pair = pack(c[i][2 * half], c[i][2 * half + 1]);
        words[half][2 * first + i] = VALUES ? transpose(pair) : pair;
      }
  }
}

// Where a lane's words of a head begin in a block: VECTOR of every lane side by side, so reads meet no bank twice.
__device__ __forceinline__ u32 lane_offset(u32 head, u32 lane) { return (head * LANE_WORDS * 32 + lane * VECTOR) * 4; }

// Write them to every program of the sequence: half-blocks of keys one behind the other, those of values in turn.
template <bool VALUES>
__device__ __forceinline__ void publish(const u32 (&words)[2][TILES / TWINS], const Place& place) {
  u32 offset = place.block * BLOCK_BYTES + (VALUES ? HELD * BLOCK_BYTES : 0);
  u8* own = place.keys + offset;
#pragma unroll
  for (int head = 0; head < OWN_HEADS; head++)
#pragma unroll
    for (int first = 0; first < LANE_WORDS; first += VECTOR) {
      u32 part[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; i++) {
        int word = first + i;
        part[i] = VALUES ? words[word % 2][head * HEAD_TILES + word / 2]
                         : words[word / HEAD_TILES][head * HEAD_TILES + word % HEAD_TILES];
      }
      u32 at = lane_offset(place.twin * OWN_HEADS + head, place.lane) + first * 128;
      if (VECTOR == 4)
        *(uint4*)(own + at) = make_uint4(part[0], part[1], part[2], part[VECTOR - 1]);
      else
        *(uint2*)(own + at) = make_uint2(part[0], part[1]);
#pragma unroll
      for (int i = 0; i < SPLIT - 1; i++) send(place.other[i] + offset + at, part, place.other_ready[i]);
    }
}

__device__ __forceinline__ void read_block(u32 (&words)[LANE_WORDS], const u8* from) {
#pragma unroll
  for (int first = 0; first < LANE_WORDS; first += VECTOR) {
    if (VECTOR == 4) {
      uint4 y = *(const uint4*)(from + first * 128);
      words[first] = y.x, words[first + 1] = y.y, words[first + 2] = y.z, words[first + VECTOR - 1] = y.w;
    } else {
      uint2 y = *(const uint2*)(from + first * 128);
      words[first] = y.x, words[first + 1] = y.y;
    }
  }
}

// The context of one head, rounded: a pair of columns of the upper row, one of the lower, a tile.
__device__ __forceinline__ void attend(u32 (*context)[2], const u32 (*q)[2], u32 head, const Place& place) {
  float s[BLOCKS][2][4], top[2] = {NEGATIVE, NEGATIVE};
  const u8* keys = place.keys + lane_offset(head, place.lane);
#pragma unroll
  for (int first = 0; first < BLOCKS; first += SPAN) {
    if (first <= int(place.last)) {
#pragma unroll
      for (int b = first; b < first + SPAN; b++) {
        u32 words[LANE_WORDS];
        read_block(words, keys + b * BLOCK_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int j = 0; j < 4; j++) s[b][half][j] = 0.0f;
#pragma unroll
          for (int i = 0; i + 1 < HEAD_TILES; i += 2) {
            u32 left[4] = {q[i][0], q[i][1], q[i + 1][0], q[i + 1][1]};
            mma(s[b][half], left, words[half * HEAD_TILES + i], words[half * HEAD_TILES + i + 1]);
          }
          constexpr int LAST = HEAD_TILES - 1;
          if (HEAD_TILES % 2) mma_narrow(s[b][half], q[LAST][0], q[LAST][1], words[half * HEAD_TILES + LAST]);
        }
      }
#pragma unroll
      for (int b = first; b < first + SPAN; b++)
        if (!(place.open >> b & 1)) {
#pragma unroll
          for (int i = 0; i < 8; i++)
            if (!(place.visible[i % 4 / 2] >> (b * 4 + i / 4 * 2 + i % 2) & 1)) s[b][i / 4][i % 4] = NEGATIVE;
        }
#pragma unroll
      for (int b = first; b < first + SPAN; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float left = fmaxf(s[b][0][2 * half], s[b][0][2 * half + 1]);
          float right = fmaxf(s[b][1][2 * half], s[b][1][2 * half + 1]);
          top[half] = fmaxf(top[half], fmaxf(left, right));
        }
    }
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  const u8* values = place.values + lane_offset(head, place.lane);
  float c[HEAD_TILES][4] = {}, sum[4] = {};
#pragma unroll
  for (int first = 0; first < BLOCKS; first += SPAN) {
    if (first <= int(place.last)) {
#pragma unroll
      for (int b = first; b < first + SPAN; b++) {
        u32 words[LANE_WORDS], p[4];
        read_block(words, values + b * BLOCK_BYTES);
#pragma unroll
        for (int i = 0; i < 8; i++) s[b][i / 4][i % 4] = exp2_fast(s[b][i / 4][i % 4] - top[i % 4 / 2]);
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = pack(s[b][i / 2][i % 2 * 2], s[b][i / 2][i % 2 * 2 + 1]);
        mma(sum, p, ONES, ONES);  // a product's columns of ones sum the rows of what the context sums
#pragma unroll
        for (int i = 0; i < HEAD_TILES; i++) mma(c[i], p, words[2 * i], words[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float scale = 1.0f / sum[2 * half];
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) context[i][half] = pack(c[i][2 * half] * scale, c[i][2 * half + 1] * scale);
  }
}
"""
