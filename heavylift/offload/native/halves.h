// float16 in whole blocks, with the instructions that a processor has for it: the conversions of floats.h bit for bit
// (but for the payload of a NaN), several times as fast.

#pragma once

#include "floats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Left to the compiler, which makes vector loops of integer operations.
struct PortableHalves {
  static void widen(const f16 *in, float *out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(in[i]);
  }
  static void narrow(const float *in, f16 *out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(out + i, in[i]);
  }
};

#if defined(__x86_64__)
struct F16cHalves {
  __attribute__((target("avx2,f16c"))) static void widen(const f16 *in, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i))));
    for (; i < n; ++i) out[i] = to_float(in[i]);
  }
  __attribute__((target("avx2,f16c"))) static void narrow(const float *in, f16 *out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; ++i) store(out + i, in[i]);
  }
};
#endif

}  // namespace
