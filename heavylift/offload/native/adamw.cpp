// The CPU AdamW step: one pass over memory, on its own threads (thread_pool.h), called through ctypes.
//
// Phases: loop bodies (those that take a step back are in correction.h); one set of them per instruction set; work in
// chunks; the C API.
// Every result is bit-identical to heavylift/offload/adamw.py (the specification), whatever the instruction set and
// the number of threads: single IEEE float32 operations in its order, no fused multiply-add, no fast-math.
// Left out: tensors that overlap.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "correction.h"
#include "floats.h"
#include "formats.h"
#include "pieces.h"
#include "step.h"
#include "thread_pool.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define HL_API extern "C" __attribute__((visibility("default")))

namespace {

// ---- loop bodies ----------------------------------------------------------------------------------------------

struct AdamWJob {
  StepTensors tensors;
  StepFactors step;
};

// Streaming stores for `out` were tried and left out: 1 to 5% faster on a 16-core Xeon, 9% slower on one Zen 4 core.
// Factors of 1 need no branch: x * 1.0f is x. `Update` false (lr 0) leaves the master alone, also -0.0.
struct AdamW {
  template <class Grad, class Out, bool Update>
  static inline __attribute__((always_inline)) void body(const AdamWJob &job, int64_t begin, int64_t end) {
    const StepFactors step = job.step;  // a copy: stores to the tensors cannot change it
    float *__restrict master = job.tensors.master;
    float *__restrict exp_avg = job.tensors.exp_avg;
    float *__restrict exp_avg_sq = job.tensors.exp_avg_sq;
    const Grad *__restrict grad = static_cast<const Grad *>(job.tensors.grad);
    Out *__restrict out = static_cast<Out *>(job.tensors.out);
    for (int64_t i = begin; i < end; ++i) {
      const float g = to_float(grad[i]) * step.grad_scale;
      const float m = exp_avg[i] + step.one_minus_beta1 * (g - exp_avg[i]);
      const float v = exp_avg_sq[i] * step.beta2 + (step.one_minus_beta2 * g) * g;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      float p = master[i];
      if (Update) {
        const float denom = std::sqrt(v) / step.bias2_sqrt + step.eps;
        p = p * step.decay + (step.neg_step_size * m) / denom;
        master[i] = p;
      }
      store(out + i, p);
    }
  }
};

struct AccumulateJob {
  float *acc;
  const void *grad;
  int32_t type;
};

template <class Grad>
HL_INLINE void accumulate_body(const AccumulateJob &job, int64_t begin, int64_t end) {
  float *__restrict acc = job.acc;
  const Grad *__restrict grad = static_cast<const Grad *>(job.grad);
  for (int64_t i = begin; i < end; ++i) acc[i] += to_float(grad[i]);
}

template <class Halves>
HL_INLINE void accumulate_any(const AccumulateJob &job, int64_t begin, int64_t end) {
  if (job.type == kBFloat16) return accumulate_body<bf16>(job, begin, end);
  if (job.type == kFloat32) return accumulate_body<float>(job, begin, end);
  alignas(64) float grad[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t n = end - start < kBlock ? end - start : kBlock;
    Halves::widen(static_cast<const f16 *>(job.grad) + start, grad, n);
    accumulate_body<float>(AccumulateJob{job.acc + start, grad, kFloat32}, 0, n);
  }
}

struct SumSquaresJob {
  const void *x;
  int32_t type;
};

// 16 partial sums, whatever the width of a vector register: the order of additions is part of the result.
template <class T>
HL_INLINE double sum_squares_body(const SumSquaresJob &job, int64_t begin, int64_t end) {
  constexpr int kLanes = 16;
  const T *x = static_cast<const T *>(job.x);
  double lanes[kLanes] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = to_float(x[i + lane]);
      lanes[lane] += value * value;
    }
  for (int lane = 0; i < end; ++i, ++lane) {
    const double value = to_float(x[i]);
    lanes[lane] += value * value;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

HL_INLINE double sum_squares_any(const SumSquaresJob &job, int64_t begin, int64_t end) {
  if (job.type == kBFloat16) return sum_squares_body<bf16>(job, begin, end);
  if (job.type == kFloat16) return sum_squares_body<f16>(job, begin, end);
  return sum_squares_body<float>(job, begin, end);
}

// The memory traffic of a step with bf16 gradient and output, with next to no arithmetic: what a step is held against.
struct ProbeJob {
  float *a, *b, *c;
  const bf16 *in;
  bf16 *out;
};

HL_INLINE void probe_any(const ProbeJob &job, int64_t begin, int64_t end) {
  float *__restrict a = job.a;
  float *__restrict b = job.b;
  float *__restrict c = job.c;
  const bf16 *__restrict in = job.in;
  bf16 *__restrict out = job.out;
  for (int64_t i = begin; i < end; ++i) {
    const bf16 source = in[i];
    const float x = to_float(source);
    a[i] += x;
    b[i] += x;
    c[i] += x;
    out[i].bits = source.bits;
  }
}

// ---- one set of functions per instruction set -----------------------------------------------------------------

struct Kernels {
  const char *name;
  bool (*supported)();
  void (*adamw)(const AdamWJob &, int64_t, int64_t);
  void (*correct)(const CorrectionJob &, int64_t, int64_t);
  void (*undo)(const CorrectionJob &, int64_t, int64_t);
  void (*accumulate)(const AccumulateJob &, int64_t, int64_t);
  double (*sum_squares)(const SumSquaresJob &, int64_t, int64_t);
  void (*probe)(const ProbeJob &, int64_t, int64_t);
};

#define HL_KERNELS(isa, halves, attributes)                                                                            \
  attributes void adamw_##isa(const AdamWJob &j, int64_t b, int64_t e) { body_by_format<AdamW, halves>(j, b, e); }     \
  attributes void correct_##isa(const CorrectionJob &j, int64_t b, int64_t e) {                                        \
    body_by_format<Correct, halves>(j, b, e);                                                                          \
  }                                                                                                                    \
  attributes void undo_##isa(const CorrectionJob &j, int64_t b, int64_t e) { body_by_format<Undo, halves>(j, b, e); }  \
  attributes void accumulate_##isa(const AccumulateJob &j, int64_t b, int64_t e) { accumulate_any<halves>(j, b, e); }  \
  attributes double sum_squares_##isa(const SumSquaresJob &j, int64_t b, int64_t e) {                                  \
    return sum_squares_any(j, b, e);                                                                                   \
  }                                                                                                                    \
  attributes void probe_##isa(const ProbeJob &j, int64_t b, int64_t e) { probe_any(j, b, e); }                         \
  constexpr Kernels k_##isa = {#isa,       has_##isa,        adamw_##isa,       correct_##isa,                         \
                               undo_##isa, accumulate_##isa, sum_squares_##isa, probe_##isa};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
bool has_sse2() { return true; }
HL_KERNELS(avx512, F16cHalves, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
HL_KERNELS(avx2, F16cHalves, __attribute__((target("avx2"))))
HL_KERNELS(sse2, PortableHalves, )
constexpr const Kernels *kAll[] = {&k_avx512, &k_avx2, &k_sse2};
#elif defined(__aarch64__)
bool has_sve() { return (getauxval(AT_HWCAP) & (1ul << 22)) != 0; }  // HWCAP_SVE
bool has_neon() { return true; }
HL_KERNELS(sve, PortableHalves, __attribute__((target("+sve"))))
HL_KERNELS(neon, PortableHalves, )
constexpr const Kernels *kAll[] = {&k_sve, &k_neon};
#else
bool has_generic() { return true; }
HL_KERNELS(generic, PortableHalves, )
constexpr const Kernels *kAll[] = {&k_generic};
#endif

const Kernels *best() {
  for (const Kernels *kernels : kAll)
    if (kernels->supported()) return kernels;
  std::abort();  // the last of each list runs everywhere
}

std::atomic<const Kernels *> chosen{nullptr};

const Kernels &current() {
  const Kernels *kernels = chosen.load(std::memory_order_acquire);
  if (kernels == nullptr) chosen.store(kernels = best(), std::memory_order_release);
  return *kernels;
}

// ---- work in chunks -----------------------------------------------------------------------------------------------

template <class Job>
struct Ranged {
  const Job &job;
  void (*body)(const Job &, int64_t, int64_t);
  int64_t n;
  static void run_chunk(const void *opaque, int64_t chunk) {
    const Ranged &self = *static_cast<const Ranged *>(opaque);
    const int64_t begin = chunk * kChunk, end = begin + kChunk < self.n ? begin + kChunk : self.n;
    self.body(self.job, begin, end);
  }
};

template <class Job>
void run_ranged(void *pool, const Job &job, void (*body)(const Job &, int64_t, int64_t), int64_t n) {
  const Ranged<Job> ranged{job, body, n};
  run(static_cast<Pool *>(pool), Ranged<Job>::run_chunk, &ranged, chunks_of(n, kChunk));
}

// All at once, or piece by piece where something comes from or goes to the device.
template <class Job>
int run_step(void *pool, const Job &job, void (*body)(const Job &, int64_t, int64_t), Traffic *traffic) {
  if (traffic != nullptr) return Pieces<Job>(static_cast<Pool *>(pool), job, body, *traffic).run_all();
  run_ranged(pool, job, body, job.tensors.n);
  return 0;
}

constexpr int kMaxPartials = 4096;

struct SumChunks {
  SumSquaresJob job;
  double (*body)(const SumSquaresJob &, int64_t, int64_t);
  int64_t n, chunk_size;
  double *partials;
  static void run_chunk(const void *opaque, int64_t chunk) {
    const SumChunks &self = *static_cast<const SumChunks *>(opaque);
    const int64_t begin = chunk * self.chunk_size, limit = begin + self.chunk_size;
    self.partials[chunk] = self.body(self.job, begin, limit < self.n ? limit : self.n);
  }
};

}  // namespace

// ---- the C API: pointers are host memory, n counts elements, `pool` comes from hl_pool_create -------------------

// Changes with every structure and signature here: a library left over from another version must not be called.
HL_API int hl_abi() { return 9; }

HL_API const char *hl_isa() { return current().name; }

// Takes another instruction set, for tests. Returns 0, or -1 when this CPU or this build lacks it.
HL_API int hl_set_isa(const char *name) {
  for (const Kernels *kernels : kAll)
    if (std::strcmp(kernels->name, name) == 0 && kernels->supported()) {
      chosen.store(kernels, std::memory_order_release);
      return 0;
    }
  return -1;
}

// The names known to this build in order of preference, supported by this CPU or not; null after the last.
HL_API const char *hl_isa_name(int index) {
  return index < int(sizeof kAll / sizeof *kAll) ? kAll[index]->name : nullptr;
}

HL_API void *hl_pool_create(int num_threads, const int *cpu_ids) { return create_pool(num_threads, cpu_ids); }

HL_API void hl_pool_destroy(void *pool) { destroy_pool(static_cast<Pool *>(pool)); }

HL_API int hl_pool_num_threads(void *pool) { return static_cast<Pool *>(pool)->num_threads; }

// The operating system's number of a thread of the pool.
HL_API int64_t hl_pool_thread_id(void *pool, int thread) {
  return static_cast<Pool *>(pool)->workers[thread].thread_id.load(std::memory_order_relaxed);
}

// When a thread of the pool worked since its first `seen` spans: pairs of seconds on CLOCK_MONOTONIC, of the newest at
// most hl_max_spans. Returns how many spans there have been.
HL_API uint64_t hl_pool_spans(void *pool, int thread, uint64_t seen, Span *out) {
  return copy_spans(static_cast<Pool *>(pool), thread, seen, out);
}

HL_API uint64_t hl_max_spans() { return kSpans; }

// One AdamW step. `traffic` may be null, here and below; what its driver returned is returned, 0 else.
HL_API int hl_take_step(void *pool, const StepTensors *tensors, const StepFactors *step, Traffic *traffic) {
  return run_step(pool, AdamWJob{*tensors, *step}, current().adamw, traffic);
}

// Turns the step just done into one with the gradient scaled by `clipped_scale` instead of `grad_scale`.
HL_API int hl_correct_step(void *pool, const StepTensors *tensors, const StepFactors *step,
                           const CorrectionFactors *more, Traffic *traffic) {
  return run_step(pool, CorrectionJob{*tensors, *step, *more}, current().correct, traffic);
}

// Takes the step just done back.
HL_API int hl_undo_step(void *pool, const StepTensors *tensors, const StepFactors *step, const CorrectionFactors *more,
                        Traffic *traffic) {
  return run_step(pool, CorrectionJob{*tensors, *step, *more}, current().undo, traffic);
}

// Places that a `Traffic` may have.
HL_API int64_t hl_max_slots() { return Pieces<AdamWJob>::kMaxSlots; }

// acc += float(grad)
HL_API void hl_accumulate(void *pool, float *acc, const void *grad, int grad_type, int64_t n) {
  run_ranged(pool, AccumulateJob{acc, grad, grad_type}, current().accumulate, n);
}

// Sum of squares in double. The same bits for every number of threads and every instruction set.
HL_API double hl_sum_squares(void *pool, const void *x, int type, int64_t n) {
  double partials[kMaxPartials];
  int64_t chunk_size = chunks_of(n, kMaxPartials);
  chunk_size = chunk_size < kChunk ? kChunk : (chunk_size + 15) / 16 * 16;
  const SumChunks sum{{x, type}, current().sum_squares, n, chunk_size, partials};
  const int64_t num_chunks = chunks_of(n, chunk_size);
  run(static_cast<Pool *>(pool), SumChunks::run_chunk, &sum, num_chunks);
  double total = 0;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) total += partials[chunk];
  return total;
}

// Reads and writes a, b, c (float), reads `in`, writes `out` (bf16): the bytes of a step, for measuring bandwidth.
HL_API void hl_bandwidth_probe(void *pool, float *a, float *b, float *c, const void *in, void *out, int64_t n) {
  run_ranged(pool, ProbeJob{a, b, c, static_cast<const bf16 *>(in), static_cast<bf16 *>(out)}, current().probe, n);
}
