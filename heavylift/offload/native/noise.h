// Random bits for stochastic rounding: heavylift/offload/noise.py bit for bit.

#pragma once

#include "floats.h"

namespace {

// The 32 random bits of an element, from its index.
HL_INLINE uint32_t noise_bits(uint32_t key, uint32_t index) {
  uint32_t x = index * 0x9e3779b9u + key;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

}  // namespace
