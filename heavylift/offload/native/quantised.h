// Moments as 8-bit codes with a scale per block of 256: heavylift/offload/quantised.py bit for bit, which also says why.
// Integers only but for the scale: one code for every instruction set, which the compiler makes vector loops of.

#pragma once

#include "noise.h"
#include "step.h"

namespace {

constexpr int64_t kScaleBlock = 256;

// Numbers from 0 to 1 with 4 bits of fraction above 2^-End1, 3 above 2^-End2, 2 above 2^-End3, else 1.
template <bool IsSigned, int End1, int End2, int End3>
struct Grid {
  static constexpr bool kSigned = IsSigned;
  static constexpr int32_t kHighest = IsSigned ? 127 : 255;
  // exponent fields at the ends, and what the steps below them are fewer by
  static constexpr int32_t kEnd1 = 127 - End1, kEnd2 = 127 - End2, kEnd3 = 127 - End3;
  static constexpr int32_t kFewer1 = kEnd1 << 3, kFewer2 = kEnd2 << 2, kFewer3 = kEnd3 << 1;
  static constexpr int32_t kBase = kHighest - (127 << 4);
  static constexpr int32_t kCode1 = kBase + (kEnd1 << 4);
  static constexpr int32_t kCode2 = kBase + kFewer1 + (kEnd2 << 3);
  static constexpr int32_t kCode3 = kBase + kFewer1 + kFewer2 + (kEnd3 << 2);
};

using ExpAvgGrid = Grid<true, 2, 6, 14>;
using ExpAvgSqGrid = Grid<false, 4, 12, 28>;

// -1 where a < b, else 0.
HL_INLINE int32_t less(int32_t a, int32_t b) { return -int32_t(a < b); }

// The largest magnitude; NaN above infinity.
HL_INLINE float block_scale(const float *values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = int32_t(bits_of(values[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return from_bits(uint32_t(largest));
}

template <class G>
HL_INLINE float decode_one(uint8_t stored, float scale) {
  const int32_t code = stored & G::kHighest;
  const int32_t below1 = less(code, G::kCode1), below2 = less(code, G::kCode2), below3 = less(code, G::kCode3);
  const int32_t shortened =
      code - G::kBase - (below1 & G::kFewer1) - (below2 & G::kFewer2) - (below3 & G::kFewer3);
  const uint32_t magnitude = uint32_t(shortened) << (19 - below1 - below2 - below3);
  const uint32_t sign = G::kSigned ? uint32_t(stored & 128) << 24 : 0u;
  return from_bits((magnitude & uint32_t(less(0, code))) | sign) * scale;
}

// `random`: 16 bits; `value` over its scale is `x`, 0 to 1.
template <class G>
HL_INLINE uint8_t encode_one(float value, float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  const int32_t exponent = int32_t(bits >> 23);
  const int32_t below1 = less(exponent, G::kEnd1), below2 = less(exponent, G::kEnd2), below3 = less(exponent, G::kEnd3);
  const uint32_t more = uint32_t(-below1 - below2 - below3);  // dropped bits beyond 19
  const int32_t base = G::kBase + (below1 & G::kFewer1) + (below2 & G::kFewer2) + (below3 & G::kFewer3);
  const int32_t code = base + int32_t((bits + ((8 * random + 4) << more)) >> (19 + more));
  const uint32_t own = bits_of(value);
  const int32_t least = G::kSigned ? 0 : int32_t((own & 0x7fffffffu) != 0);
  const int32_t magnitude = code > least ? code : least;
  return uint8_t(magnitude | (G::kSigned ? int32_t(own >> 31 << 7) : 0));
}

template <class G>
HL_INLINE void decode(const uint8_t *__restrict codes, const float *__restrict scales, float *__restrict out, int64_t n) {
  for (int64_t start = 0; start < n; start += kScaleBlock) {
    const int64_t end = n - start < kScaleBlock ? n : start + kScaleBlock;
    const float scale = scales[start / kScaleBlock];
    for (int64_t i = start; i < end; ++i) out[i] = decode_one<G>(codes[i], scale);
  }
}

// One block. `random`: of each element's 32 bits those 16 above `Shift` round it.
template <class G, int Shift>
HL_INLINE void encode_block(const float *__restrict values, const uint32_t *__restrict random,
                            float *__restrict stored_scale, uint8_t *__restrict codes, int64_t n) {
  const float scale = block_scale(values, n);
  *stored_scale = scale;
  if (bits_of(scale) >= 0x7f800000u) {
    for (int64_t i = 0; i < n; ++i) codes[i] = 0;
    return;
  }
  const float divisor = bits_of(scale) == 0 ? 1.0f : scale;
  for (int64_t i = 0; i < n; ++i) {
    const float x = from_bits(bits_of(values[i]) & 0x7fffffffu) / divisor;
    codes[i] = encode_one<G>(values[i], x, random[i] >> Shift & 0xffffu);
  }
}

HL_INLINE void decode_moments(const StepTensors &coded, float *__restrict exp_avg, float *__restrict exp_avg_sq,
                              int64_t n) {
  decode<ExpAvgGrid>(coded.exp_avg_8, coded.exp_avg_scales, exp_avg, n);
  decode<ExpAvgSqGrid>(coded.exp_avg_sq_8, coded.exp_avg_sq_scales, exp_avg_sq, n);
}

HL_INLINE void encode_moments(const StepTensors &coded, const float *exp_avg, const float *exp_avg_sq, int64_t n) {
  alignas(64) uint32_t random[kScaleBlock];
  for (int64_t start = 0; start < n; start += kScaleBlock) {
    const int64_t length = n - start < kScaleBlock ? n - start : kScaleBlock, block = start / kScaleBlock;
    for (int64_t i = 0; i < length; ++i)
      random[i] = noise_bits(coded.noise_key, coded.noise_first + uint32_t(start + i));
    encode_block<ExpAvgGrid, 0>(exp_avg + start, random, coded.exp_avg_scales + block, coded.exp_avg_8 + start, length);
    encode_block<ExpAvgSqGrid, 16>(exp_avg_sq + start, random, coded.exp_avg_sq_scales + block,
                                   coded.exp_avg_sq_8 + start, length);
  }
}

}  // namespace
