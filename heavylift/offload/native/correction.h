// Loop bodies that take an AdamW step back, wholly (undo) or in part (correct): heavylift/offload/correction.py bit for
// bit, which also says why these operations in this order.

#pragma once

#include <cmath>

#include "floats.h"

namespace {

struct CorrectionJob {
  float *master, *exp_avg, *exp_avg_sq;
  const void *grad;
  void *out;
  bool grad_is_bf16, out_is_bf16, update, first_step;
  float grad_scale, clipped_scale, decay, one_minus_beta1, inverse_beta1, beta2, one_minus_beta2, bias2_sqrt, eps,
      neg_step_size;
};

// `yes` where `condition`, else `no`, in integers: from a ?: the compiler makes branches and then no vector loop.
HL_INLINE float select(bool condition, float yes, float no) {
  uint32_t yes_bits, no_bits;
  std::memcpy(&yes_bits, &yes, sizeof yes);
  std::memcpy(&no_bits, &no, sizeof no);
  const uint32_t mask = 0u - uint32_t(condition), bits = (yes_bits & mask) | (no_bits & ~mask);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What the step added to the decayed master.
HL_INLINE float update_of(const CorrectionJob &job, float m, float v) {
  return (job.neg_step_size * m) / (std::sqrt(v) / job.bias2_sqrt + job.eps);
}

// exp_avg before the step: solved for, then corrected by what the step would make of the solution.
HL_INLINE float first_moment_before(const CorrectionJob &job, float m, float g) {
  const float x = (m - job.one_minus_beta1 * g) * job.inverse_beta1;
  const float again = x + job.one_minus_beta1 * (g - x);
  const float before = x + (m - again) * job.inverse_beta1;
  return select(job.first_step, 0.0f, before);
}

// beta2 times exp_avg_sq before the step.
HL_INLINE float decayed_second_moment(const CorrectionJob &job, float v, float g) {
  const float decayed = v - (job.one_minus_beta2 * g) * g;
  return select(job.first_step, 0.0f, decayed);
}

struct Correct {
  template <class Grad, class Out, bool Update>
  static inline __attribute__((always_inline)) void body(const CorrectionJob &shared, int64_t begin, int64_t end) {
    const CorrectionJob job = shared;  // a copy: stores to the tensors cannot change it
    float *__restrict master = job.master;
    float *__restrict exp_avg = job.exp_avg;
    float *__restrict exp_avg_sq = job.exp_avg_sq;
    const Grad *__restrict grad = static_cast<const Grad *>(job.grad);
    Out *__restrict out = static_cast<Out *>(job.out);
    for (int64_t i = begin; i < end; ++i) {
      const float g = to_float(grad[i]) * job.grad_scale, clipped = to_float(grad[i]) * job.clipped_scale;
      const float m = exp_avg[i], v = exp_avg_sq[i];
      const float m_before = first_moment_before(job, m, g);
      const bool same = g == 0.0f;
      const float m_clipped = select(same, m, m_before + job.one_minus_beta1 * (clipped - m_before));
      const float v_clipped =
          select(same, v, decayed_second_moment(job, v, g) + (job.one_minus_beta2 * clipped) * clipped);
      exp_avg[i] = m_clipped;
      exp_avg_sq[i] = v_clipped;
      float p = master[i];
      if (Update) {
        const float moved = (p - update_of(job, m, v)) + update_of(job, m_clipped, v_clipped);
        p = select(same, p, moved);
        master[i] = p;
      }
      store(out + i, p);
    }
  }
};

struct Undo {
  template <class Grad, class Out, bool Update>
  static inline __attribute__((always_inline)) void body(const CorrectionJob &shared, int64_t begin, int64_t end) {
    const CorrectionJob job = shared;
    float *__restrict master = job.master;
    float *__restrict exp_avg = job.exp_avg;
    float *__restrict exp_avg_sq = job.exp_avg_sq;
    const Grad *__restrict grad = static_cast<const Grad *>(job.grad);
    Out *__restrict out = static_cast<Out *>(job.out);
    for (int64_t i = begin; i < end; ++i) {
      const float g = to_float(grad[i]) * job.grad_scale;
      const float m = exp_avg[i], v = exp_avg_sq[i];
      const float v_before = decayed_second_moment(job, v, g) / job.beta2;
      exp_avg[i] = first_moment_before(job, m, g);
      exp_avg_sq[i] = select(job.first_step, 0.0f, v_before);  // beta2 may be 0
      float p = master[i];
      if (Update) {
        p = (p - update_of(job, m, v)) / job.decay;
        master[i] = p;
      }
      store(out + i, p);
    }
  }
};

template <class Kind, class Grad, bool Update>
HL_INLINE void correction_by_out(const CorrectionJob &job, int64_t begin, int64_t end) {
  if (job.out == nullptr)
    Kind::template body<Grad, nothing, Update>(job, begin, end);
  else if (job.out_is_bf16)
    Kind::template body<Grad, bf16, Update>(job, begin, end);
  else
    Kind::template body<Grad, float, Update>(job, begin, end);
}

template <class Kind>
HL_INLINE void correction_any(const CorrectionJob &job, int64_t begin, int64_t end) {
  if (job.grad_is_bf16)
    job.update ? correction_by_out<Kind, bf16, true>(job, begin, end)
               : correction_by_out<Kind, bf16, false>(job, begin, end);
  else
    job.update ? correction_by_out<Kind, float, true>(job, begin, end)
               : correction_by_out<Kind, float, false>(job, begin, end);
}

HL_INLINE void correct_any(const CorrectionJob &job, int64_t begin, int64_t end) {
  correction_any<Correct>(job, begin, end);
}
HL_INLINE void undo_any(const CorrectionJob &job, int64_t begin, int64_t end) { correction_any<Undo>(job, begin, end); }

}  // namespace
