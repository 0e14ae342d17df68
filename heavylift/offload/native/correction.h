// Loop bodies that take an AdamW step back, wholly (undo) or in part (correct): heavylift/offload/correction.py bit for
// bit, which also says why these operations in this order.

#pragma once

#include <cmath>

#include "step.h"

namespace {

struct CorrectionJob {
  StepTensors tensors;
  StepFactors step;
  CorrectionFactors more;
};

// What the step added to the decayed master.
HL_INLINE float update_of(const CorrectionJob &job, float m, float v) {
  return (job.step.neg_step_size * m) / (std::sqrt(v) / job.step.bias2_sqrt + job.step.eps);
}

// exp_avg before the step: solved for, then corrected by what the step would make of the solution.
HL_INLINE float first_moment_before(const CorrectionJob &job, float m, float g) {
  const float x = (m - job.step.one_minus_beta1 * g) * job.more.inverse_beta1;
  const float again = x + job.step.one_minus_beta1 * (g - x);
  const float before = x + (m - again) * job.more.inverse_beta1;
  return select(job.more.first_step != 0, 0.0f, before);
}

// beta2 times exp_avg_sq before the step.
HL_INLINE float decayed_second_moment(const CorrectionJob &job, float v, float g) {
  const float decayed = v - (job.step.one_minus_beta2 * g) * g;
  return select(job.more.first_step != 0, 0.0f, decayed);
}

struct Correct {
  template <class Grad, class Out, bool Update>
  static inline __attribute__((always_inline)) void body(const CorrectionJob &shared, int64_t begin, int64_t end) {
    const CorrectionJob job = shared;  // a copy: stores to the tensors cannot change it
    float *__restrict master = job.tensors.master;
    float *__restrict exp_avg = job.tensors.exp_avg;
    float *__restrict exp_avg_sq = job.tensors.exp_avg_sq;
    const Grad *__restrict grad = static_cast<const Grad *>(job.tensors.grad);
    Out *__restrict out = static_cast<Out *>(job.tensors.out);
    for (int64_t i = begin; i < end; ++i) {
      const float g = to_float(grad[i]) * job.step.grad_scale, clipped = to_float(grad[i]) * job.more.clipped_scale;
      const float m = exp_avg[i], v = exp_avg_sq[i];
      const float m_before = first_moment_before(job, m, g);
      const bool same = g == 0.0f;
      const float m_clipped = select(same, m, m_before + job.step.one_minus_beta1 * (clipped - m_before));
      const float v_clipped =
          select(same, v, decayed_second_moment(job, v, g) + (job.step.one_minus_beta2 * clipped) * clipped);
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
    float *__restrict master = job.tensors.master;
    float *__restrict exp_avg = job.tensors.exp_avg;
    float *__restrict exp_avg_sq = job.tensors.exp_avg_sq;
    const Grad *__restrict grad = static_cast<const Grad *>(job.tensors.grad);
    Out *__restrict out = static_cast<Out *>(job.tensors.out);
    for (int64_t i = begin; i < end; ++i) {
      const float g = to_float(grad[i]) * job.step.grad_scale;
      const float m = exp_avg[i], v = exp_avg_sq[i];
      const float v_before = decayed_second_moment(job, v, g) / job.step.beta2;
      exp_avg[i] = first_moment_before(job, m, g);
      exp_avg_sq[i] = select(job.more.first_step != 0, 0.0f, v_before);  // beta2 may be 0
      float p = master[i];
      if (Update) {
        p = (p - update_of(job, m, v)) / job.step.decay;
        master[i] = p;
      }
      store(out + i, p);
    }
  }
};

}  // namespace
