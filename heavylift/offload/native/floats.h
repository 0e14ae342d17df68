// Loads and stores that round as the specification does. What rounds in between is plain C++ arithmetic, which the
// build keeps from contracting to fused multiply-adds.

#pragma once

#ifdef __FAST_MATH__
#error "the kernel must round as the specification does: compile without -ffast-math"
#endif

#include <cstdint>
#include <cstring>

#define HL_INLINE static inline __attribute__((always_inline))

namespace {

struct bf16 {
  uint16_t bits;
};
struct nothing {};  // the element type of an absent output

HL_INLINE float to_float(float x) { return x; }
HL_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

HL_INLINE void store(float *out, float x) { *out = x; }
HL_INLINE void store(nothing *, float) {}
HL_INLINE void store(bf16 *out, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // to nearest, ties to even, in integers: the bf16 instructions of AVX-512 flush denormals to zero
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

}  // namespace
