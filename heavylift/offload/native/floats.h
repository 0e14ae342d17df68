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
struct f16 {
  uint16_t bits;
};
struct nothing {};  // the element type of an absent output

// The element types of gradients and parameters in the C API.
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

HL_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

HL_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// `yes` where `condition`, else `no`, in integers: from a ?: the compiler makes branches and then no vector loop.
HL_INLINE uint32_t select_bits(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - uint32_t(condition);
  return (yes & mask) | (no & ~mask);
}

HL_INLINE float select(bool condition, float yes, float no) {
  return from_bits(select_bits(condition, bits_of(yes), bits_of(no)));
}

HL_INLINE float to_float(float x) { return x; }
HL_INLINE float to_float(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

// Halves are converted in integers too. One code for every instruction set, which the compiler makes vector loops of.
HL_INLINE float to_float(f16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13, sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t normal = magnitude + (112u << 23);  // the exponent counts from -15 there, from -127 here
  // m * 2^-24 = (2^-14 + m * 2^-24) - 2^-14, exactly: no float denormals on the way, which are slow on some processors
  const uint32_t denormal = bits_of(from_bits(magnitude + (113u << 23)) - 0x1p-14f);
  const uint32_t not_finite = magnitude | 0x7f800000u;
  const uint32_t bits = select_bits(magnitude < (1u << 23), denormal,
                                    select_bits(magnitude >= (31u << 23), not_finite, normal));
  return from_bits(bits | sign);
}

HL_INLINE void store(float *out, float x) { *out = x; }
HL_INLINE void store(nothing *, float) {}
HL_INLINE void store(bf16 *out, float x) {
  const uint32_t bits = bits_of(x);
  // to nearest, ties to even, in integers: the bf16 instructions of AVX-512 flush denormals to zero
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
HL_INLINE void store(f16 *out, float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u, magnitude = bits_of(x) ^ sign;
  // to nearest, ties to even; what rounds to 2^16 carries into the exponent of infinity
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // beside 0.5 the last bit of a float counts 2^-24, as in a half's denormals: the addition rounds
  const uint32_t denormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t overflow = select_bits(magnitude > 0x7f800000u, 0x7e00u | (magnitude >> 13 & 0x3ffu), 0x7c00u);
  const uint32_t bits = select_bits(magnitude < (113u << 23), denormal,
                                    select_bits(magnitude >= (143u << 23), overflow, normal));
  out->bits = uint16_t(bits | sign >> 16);
}

}  // namespace
