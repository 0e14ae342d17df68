// A persistent pool of pinned threads that runs numbered pieces of work ("chunks"), each exactly once.
//
// Each thread owns one run of neighbouring chunks (its own pages stay its own) and takes from the others when it is
// done. Idle threads spin shortly, then sleep. Nothing here depends on OMP_NUM_THREADS.
// Fork: threads do not survive fork(). In the child a pool computes on the calling thread; the results are the same.
// Exit: sleeping threads hold nothing; a process may end without destroy_pool.
// pthreads, not std::thread: the library then loads beside an older libstdc++ than the compiler's.
// Left out: NUMA placement; the caller chooses the CPUs.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Rounding to nearest with denormals kept, whatever the calling thread has set (torch.set_flush_denormal).
struct DefaultFloatState {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  DefaultFloatState() { _mm_setcsr(0x1f80); }
  ~DefaultFloatState() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  DefaultFloatState() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~DefaultFloatState() { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }
#else
  DefaultFloatState() {}
#endif
};

// Some 20 to 100 us: back-to-back calls find the threads awake, and between training steps they sleep.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// When a thread worked for one run: for pictures. The last kSpans of each thread are kept.
struct Span {
  double start_s, stop_s;
};
constexpr uint64_t kSpans = 4096;

using RunChunk = void (*)(const void *job, int64_t chunk);

struct Pool;

struct alignas(64) Worker {
  std::atomic<int64_t> next_chunk{0};  // of this thread's own run of chunks; others take from it when they are done
  int64_t end_chunk = 0;
  Pool *pool = nullptr;
  int index = 0;
  pthread_t thread{};
  std::atomic<int64_t> thread_id{0};  // the operating system's; 0 before the thread has begun
  Span *spans = nullptr;              // number i is at i % kSpans
  std::atomic<uint64_t> num_spans{0};
};

struct Pool {
  pthread_mutex_t run_mutex = PTHREAD_MUTEX_INITIALIZER;  // one caller at a time
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;      // guards the two conditions
  pthread_cond_t work_ready = PTHREAD_COND_INITIALIZER;
  pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;
  std::atomic<uint64_t> generation{0};
  std::atomic<int> num_busy{0};
  std::atomic<bool> stopped{false};
  std::atomic<bool> closing{false};  // somebody waits in destroy_pool
  const void *job = nullptr;
  RunChunk run_chunk = nullptr;
  pid_t owner = 0;
  int num_threads = 0;
  Worker *workers = nullptr;
  Span *spans = nullptr;
};

uint64_t wait_for_work(Pool &pool, uint64_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    uint64_t generation = pool.generation.load(std::memory_order_acquire);
    if (generation != seen) return generation;
    relax();
  }
  pthread_mutex_lock(&pool.mutex);
  while (pool.generation.load(std::memory_order_acquire) == seen) pthread_cond_wait(&pool.work_ready, &pool.mutex);
  pthread_mutex_unlock(&pool.mutex);
  return pool.generation.load(std::memory_order_acquire);
}

void *worker_main(void *argument) {
  Worker &self = *static_cast<Worker *>(argument);
  Pool &pool = *self.pool;
  DefaultFloatState float_state;
  self.thread_id.store(syscall(SYS_gettid), std::memory_order_relaxed);
  uint64_t seen = 0;
  for (;;) {
    seen = wait_for_work(pool, seen);
    if (pool.stopped.load(std::memory_order_acquire)) return nullptr;
    const double start_s = now_s();
    bool worked = false;
    for (int offset = 0; offset < pool.num_threads; ++offset) {
      Worker &victim = pool.workers[(self.index + offset) % pool.num_threads];
      for (;;) {
        int64_t chunk = victim.next_chunk.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= victim.end_chunk) break;
        pool.run_chunk(pool.job, chunk);
        worked = true;
      }
    }
    if (worked) {
      const uint64_t number = self.num_spans.load(std::memory_order_relaxed);
      self.spans[number % kSpans] = {start_s, now_s()};
      self.num_spans.store(number + 1, std::memory_order_release);
    }
    if (pool.num_busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      pthread_mutex_lock(&pool.mutex);
      pthread_cond_signal(&pool.work_done);
      pthread_mutex_unlock(&pool.mutex);
    }
  }
}

void wake_all(Pool &pool) {
  pthread_mutex_lock(&pool.mutex);
  pool.generation.fetch_add(1, std::memory_order_acq_rel);
  pthread_cond_broadcast(&pool.work_ready);
  pthread_mutex_unlock(&pool.mutex);
}

// Hands chunks 0 .. num_chunks-1 to the threads, each once, and returns true: `end_run` must follow. `in_order`: they are
// begun in that order; else each thread begins with a run of its own. False, with nothing done, where the caller has to
// compute: too little to wake anybody for; a forked child; a pool destroyed while the caller was on its way.
bool begin_run(Pool *pool, RunChunk run_chunk, const void *job, int64_t num_chunks, bool in_order) {
  if (num_chunks <= 1 || pool->owner != getpid()) return false;
  pthread_mutex_lock(&pool->run_mutex);
  if (pool->stopped.load(std::memory_order_acquire)) {
    pthread_mutex_unlock(&pool->run_mutex);
    return false;
  }
  pool->job = job;
  pool->run_chunk = run_chunk;
  for (int t = 0; t < pool->num_threads; ++t) {
    // in order: all are the first thread's, and the others take from it
    const int64_t first = in_order ? (t == 0 ? 0 : num_chunks) : num_chunks * t / pool->num_threads;
    pool->workers[t].end_chunk = in_order ? num_chunks : num_chunks * (t + 1) / pool->num_threads;
    pool->workers[t].next_chunk.store(first, std::memory_order_relaxed);
  }
  pool->num_busy.store(pool->num_threads, std::memory_order_release);
  wake_all(*pool);
  return true;
}

// Of a run in order: how many chunks have been taken.
int64_t begun_chunks(const Pool *pool) {
  const int64_t next = pool->workers[0].next_chunk.load(std::memory_order_relaxed);
  return next < pool->workers[0].end_chunk ? next : pool->workers[0].end_chunk;
}

// Returns when all chunks are done.
void end_run(Pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  while (pool->num_busy.load(std::memory_order_acquire) != 0) pthread_cond_wait(&pool->work_done, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
  pthread_mutex_unlock(&pool->run_mutex);
}

// Runs chunks 0 .. num_chunks-1, each once. Returns when all are done.
void run(Pool *pool, RunChunk run_chunk, const void *job, int64_t num_chunks) {
  if (begin_run(pool, run_chunk, job, num_chunks, false)) return end_run(pool);
  DefaultFloatState float_state;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run_chunk(job, chunk);
}

bool start_worker(Pool *pool, int index, const int *cpu_ids) {
  Worker &worker = pool->workers[index];
  worker.pool = pool;
  worker.index = index;
  worker.spans = pool->spans + uint64_t(index) * kSpans;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  bool ok = true;
  if (cpu_ids != nullptr) {
    const int cpu = cpu_ids[index];
    const size_t bytes = cpu < 0 ? 0 : CPU_ALLOC_SIZE(cpu + 1);
    cpu_set_t *set = cpu < 0 ? nullptr : CPU_ALLOC(cpu + 1);
    ok = set != nullptr;
    if (ok) {
      CPU_ZERO_S(bytes, set);
      CPU_SET_S(cpu, bytes, set);
      ok = pthread_attr_setaffinity_np(&attributes, bytes, set) == 0;
      CPU_FREE(set);
    }
  }
  ok = ok && pthread_create(&worker.thread, &attributes, worker_main, &worker) == 0;
  pthread_attr_destroy(&attributes);
  if (ok) pthread_setname_np(worker.thread, "heavylift-cpu");
  return ok;
}

void stop_workers(Pool *pool, int num_started) {
  pool->stopped.store(true, std::memory_order_release);
  wake_all(*pool);
  for (int t = 0; t < num_started; ++t) pthread_join(pool->workers[t].thread, nullptr);
}

// Thread t runs on cpu_ids[t] only (null: wherever the creating thread may). Null when that is not possible.
Pool *create_pool(int num_threads, const int *cpu_ids) {
  if (num_threads < 1) return nullptr;
  Pool *pool = new (std::nothrow) Pool;
  if (pool == nullptr) return nullptr;
  pool->workers = new (std::nothrow) Worker[num_threads];
  pool->spans = new (std::nothrow) Span[uint64_t(num_threads) * kSpans];
  pool->owner = getpid();
  pool->num_threads = num_threads;
  sigset_t all, before;  // signals belong to Python's main thread: workers inherit a mask that blocks them
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int num_started = 0;
  const bool allocated = pool->workers != nullptr && pool->spans != nullptr;
  while (allocated && num_started < num_threads && start_worker(pool, num_started, cpu_ids))
    ++num_started;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (num_started == num_threads) return pool;
  if (num_started > 0) stop_workers(pool, num_started);
  delete[] pool->workers;
  delete[] pool->spans;
  delete pool;
  return nullptr;
}

// Copies what thread `index` has done since its first `seen` spans to `out`, which has room for kSpans, the newest where
// there are more. Returns how many there have been. A span that is being written just then is left for the next call;
// one that is kSpans old may be half overwritten.
uint64_t copy_spans(const Pool *pool, int index, uint64_t seen, Span *out) {
  const Worker &worker = pool->workers[index];
  const uint64_t count = worker.num_spans.load(std::memory_order_acquire);
  if (count - seen > kSpans) seen = count - kSpans;
  for (uint64_t number = seen; number < count; ++number) *out++ = worker.spans[number % kSpans];
  return count;
}

// Waits for the call in progress and ends the threads. The few bytes of the pool itself stay: a thread of the caller
// that comes too late finds a stopped pool instead of freed memory, and computes by itself.
void destroy_pool(Pool *pool) {
  if (pool->owner != getpid()) return;
  pool->closing.store(true, std::memory_order_relaxed);
  pthread_mutex_lock(&pool->run_mutex);
  if (!pool->stopped.load(std::memory_order_acquire)) {
    stop_workers(pool, pool->num_threads);
    delete[] pool->spans;
  }
  pthread_mutex_unlock(&pool->run_mutex);
}

}  // namespace
