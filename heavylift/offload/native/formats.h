// States that are not stored as float32: heavylift/offload/formats.py bit for bit, which also says why so. And float16.
//
// They are unpacked and packed block by block; a block of floats stays in the first-level cache.

#pragma once

#include "halves.h"
#include "noise.h"
#include "quantised.h"
#include "step.h"

namespace {

constexpr int64_t kBlock = 1024;
static_assert(kBlock % kScaleBlock == 0, "a piece of work begins with a block of codes");

HL_INLINE int64_t bytes_of(int32_t type) { return type == kFloat32 ? 4 : 2; }

// The same tensors from element `start` on, with codes a multiple of a block.
HL_INLINE StepTensors from_element(const StepTensors &tensors, int64_t start) {
  StepTensors moved = tensors;
  if (tensors.master != nullptr) moved.master += start;
  if (tensors.master_low != nullptr) moved.master_low += start;
  if (tensors.exp_avg != nullptr) {
    moved.exp_avg += start;
    moved.exp_avg_sq += start;
  }
  if (tensors.exp_avg_16 != nullptr) {
    moved.exp_avg_16 += start;
    moved.exp_avg_sq_16 += start;
  }
  if (tensors.exp_avg_8 != nullptr) {
    moved.exp_avg_8 += start;
    moved.exp_avg_sq_8 += start;
    moved.exp_avg_scales += start / kScaleBlock;
    moved.exp_avg_sq_scales += start / kScaleBlock;
  }
  moved.noise_first += uint32_t(start);
  if (tensors.grad != nullptr)
    moved.grad = static_cast<const char *>(tensors.grad) + start * bytes_of(tensors.grad_type);
  if (tensors.out != nullptr) moved.out = static_cast<char *>(tensors.out) + start * bytes_of(tensors.out_type);
  return moved;
}

// master = (param, less one where the sign of exp_avg_sq says that it was rounded up; low half); the sign is cleared.
HL_INLINE void join_masters(const StepTensors &split, float *__restrict master, int64_t n) {
  const uint16_t *__restrict low = split.master_low;
  const bf16 *__restrict param = static_cast<const bf16 *>(split.out);
  float *__restrict exp_avg_sq = split.exp_avg_sq;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t marked = bits_of(exp_avg_sq[i]);
    const uint32_t high = uint32_t(param[i].bits) - (marked >> 31);
    master[i] = from_bits(high << 16 | low[i]);
    exp_avg_sq[i] = from_bits(marked & 0x7fffffffu);
  }
}

HL_INLINE void split_masters(const StepTensors &split, const float *__restrict master, int64_t n) {
  uint16_t *__restrict low = split.master_low;
  const bf16 *__restrict param = static_cast<const bf16 *>(split.out);
  float *__restrict exp_avg_sq = split.exp_avg_sq;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(master[i]);
    const uint32_t up = (uint32_t(param[i].bits) - (bits >> 16)) & 1u;  // 0 for NaN, which only gets its quiet bit
    low[i] = uint16_t(bits);
    exp_avg_sq[i] = from_bits((bits_of(exp_avg_sq[i]) & 0x7fffffffu) | up << 31);
  }
}

HL_INLINE void unpack_moments(const StepTensors &rounded, float *__restrict exp_avg, float *__restrict exp_avg_sq,
                              int64_t n) {
  for (int64_t i = 0; i < n; ++i) exp_avg[i] = to_float(rounded.exp_avg_16[i]);
  for (int64_t i = 0; i < n; ++i) exp_avg_sq[i] = to_float(rounded.exp_avg_sq_16[i]);
}

HL_INLINE void store_stochastically(bf16 *out, float x, uint32_t random_16) {
  bf16 nearest;
  store(&nearest, x);
  const uint32_t bits = bits_of(x);
  const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
  out->bits = uint16_t(select_bits(finite, (bits + random_16) >> 16, nearest.bits));
}

HL_INLINE void pack_moments(const StepTensors &rounded, const float *__restrict exp_avg,
                            const float *__restrict exp_avg_sq, int64_t n) {
  bf16 *__restrict first = rounded.exp_avg_16;
  bf16 *__restrict second = rounded.exp_avg_sq_16;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = noise_bits(rounded.noise_key, rounded.noise_first + uint32_t(i));
    store_stochastically(first + i, exp_avg[i], bits & 0xffffu);
    store_stochastically(second + i, exp_avg_sq[i], bits >> 16);
  }
}

// `Halves`: who converts float16.
template <class Kind, class Halves, class Job>
HL_INLINE void body_by_format(const Job &job, int64_t begin, int64_t end) {
  alignas(64) float master[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock], grad[kBlock], out[kBlock];
  const bool split = job.tensors.master_low != nullptr, rounded = job.tensors.exp_avg_16 != nullptr;
  const bool coded = job.tensors.exp_avg_8 != nullptr;
  const bool half_grad = job.tensors.grad_type == kFloat16;
  const bool half_out = job.tensors.out != nullptr && job.tensors.out_type == kFloat16;
  const int64_t block = split || rounded || coded || half_grad || half_out ? kBlock : end - begin;
  for (int64_t start = begin; start < end; start += block) {
    const int64_t n = end - start < block ? end - start : block;
    const StepTensors stored = from_element(job.tensors, start);
    Job plain = job;
    plain.tensors = stored;
    if (split) {
      join_masters(stored, master, n);
      plain.tensors.master = master;
    }
    if (rounded) {
      unpack_moments(stored, exp_avg, exp_avg_sq, n);
    }
    if (coded) decode_moments(stored, exp_avg, exp_avg_sq, n);
    if (rounded || coded) {
      plain.tensors.exp_avg = exp_avg;
      plain.tensors.exp_avg_sq = exp_avg_sq;
    }
    if (half_grad) {
      Halves::widen(static_cast<const f16 *>(stored.grad), grad, n);
      plain.tensors.grad = grad;
      plain.tensors.grad_type = kFloat32;
    }
    if (half_out) {
      plain.tensors.out = out;
      plain.tensors.out_type = kFloat32;
    }
    body_by_types<Kind>(plain, 0, n);
    if (split) split_masters(stored, master, n);
    if (rounded) pack_moments(stored, exp_avg, exp_avg_sq, n);
    if (coded) encode_moments(stored, exp_avg, exp_avg_sq, n);
    if (half_out) Halves::narrow(out, static_cast<f16 *>(stored.out), n);
  }
}

}  // namespace
