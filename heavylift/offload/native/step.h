// What a step works on, as the C API takes it (mirrored in native/__init__.py), and the choice of the loop body for the
// element types at hand.

#pragma once

#include <cstdint>

#include "floats.h"

namespace {

struct StepTensors {
  float *master;  // null where they are split
  uint16_t *master_low;
  float *exp_avg, *exp_avg_sq;  // null where they are stored otherwise
  bf16 *exp_avg_16, *exp_avg_sq_16;
  uint8_t *exp_avg_8, *exp_avg_sq_8;  // codes, with the scales of their blocks
  float *exp_avg_scales, *exp_avg_sq_scales;
  const void *grad;
  void *out;  // null: nobody wants the parameters
  int64_t n;
  int32_t grad_type, out_type;
  uint32_t noise_key, noise_first;  // of moments that are rounded: heavylift/offload/noise.py
};

// AdamWHyper.scalars()
struct StepFactors {
  float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, bias2_sqrt, eps, neg_step_size;
  int32_t update;  // 0: the master stays
};

struct CorrectionFactors {
  float inverse_beta1, clipped_scale;
  int32_t first_step;
};

// `Kind` has a static function template body<Grad, Out, Update>(job, begin, end). float16 does not come here: formats.h
// makes floats of it.
template <class Kind, class Grad, bool Update, class Job>
HL_INLINE void body_by_out(const Job &job, int64_t begin, int64_t end) {
  if (job.tensors.out == nullptr)
    Kind::template body<Grad, nothing, Update>(job, begin, end);
  else if (job.tensors.out_type == kBFloat16)
    Kind::template body<Grad, bf16, Update>(job, begin, end);
  else
    Kind::template body<Grad, float, Update>(job, begin, end);
}

template <class Kind, bool Update, class Job>
HL_INLINE void body_by_grad(const Job &job, int64_t begin, int64_t end) {
  if (job.tensors.grad_type == kBFloat16)
    body_by_out<Kind, bf16, Update>(job, begin, end);
  else
    body_by_out<Kind, float, Update>(job, begin, end);
}

template <class Kind, class Job>
HL_INLINE void body_by_types(const Job &job, int64_t begin, int64_t end) {
  if (job.step.update != 0)
    body_by_grad<Kind, true>(job, begin, end);
  else
    body_by_grad<Kind, false>(job, begin, end);
}

}  // namespace
