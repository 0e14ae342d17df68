// A step whose gradients or parameters lie on the device: piece by piece through small places on the host.
//
// The place that became free last is used next, before the processor's last-level cache has lost it: what passes through
// need not go through host memory, which is what limits the step. Three things go on at once, none of which needs
// Python's lock: the pool's threads take chunks in order and wait where a piece has not arrived; the calling thread has
// pieces copied down ahead of them, and sends the new parameters of each piece up as soon as it is whole. Copies of a
// megabyte leave gaps between them in which a copy engine serves others.
//
// The training program has the same cores, and a thread of the pool that it interrupts holds its piece for some
// milliseconds. So there are many more places than are used while nobody is interrupted, and pieces leave in any order.
// Nothing here knows CUDA: the functions are its driver's, or a test's.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "formats.h"
#include "step.h"
#include "thread_pool.h"

namespace {

// Elements of one piece of work. Never depends on the number of threads, so neither does a sum over them.
constexpr int64_t kChunk = 32768;
static_assert(kChunk % kScaleBlock == 0, "a piece of work begins with a block of codes");

inline int64_t chunks_of(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

// Each returns 0, or what went wrong.
struct Driver {
  int (*copy_down)(void *target, uint64_t source, size_t bytes, void *stream);        // cuMemcpyDtoHAsync
  int (*copy_up)(uint64_t target, const void *source, size_t bytes, void *stream);    // cuMemcpyHtoDAsync
  int (*record)(void *event, void *stream);                                           // cuEventRecord
  int (*query)(void *event);                                                          // cuEventQuery; or kNotReady
  int (*wait)(void *stream, void *event, unsigned flags);                             // cuStreamWaitEvent
};

// Where on the device a range of the parameters lies.
struct Shard {
  int64_t start, stop;
  uint64_t address;  // of `start`
};

// A place for one piece.
struct Slot {
  void *param;
  void *grad;      // null where gradients lie on the host
  void *fetched;   // event behind the copies down into this place
  void *sent;      // event behind the last copy up out of it
};

struct Traffic {
  Driver driver;
  void *down, *up;  // streams
  const Shard *shards;
  int64_t num_shards;
  uint64_t grads;          // address on the device; 0: they lie on the host
  int64_t fetches_params;  // 1 where the parameters before the step are part of the states
  const Slot *slots;
  int64_t num_slots;
  int64_t ahead;     // pieces to be fetched beyond those that have been begun
  int64_t piece;     // elements, a multiple of kScaleBlock
  double starved_s;  // set: how long there was nothing to step, because it had not arrived
};

constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY
constexpr double kPatience = 2;  // seconds: the pool shall end, and nothing has moved

template <class Job>
class Pieces {
 public:
  static constexpr int64_t kMaxSlots = 64;

  Pieces(Pool *pool, const Job &job, void (*body)(const Job &, int64_t, int64_t), Traffic &traffic)
      : pool_(pool),
        job_(job),
        body_(body),
        traffic_(traffic),
        n_(job.tensors.n),
        num_pieces_(chunks_of(n_, traffic.piece)),
        chunks_per_piece_(chunks_of(traffic.piece, kChunk)),
        pieces_(new (std::nothrow) Piece[size_t(num_pieces_)]) {
    for (int64_t slot = traffic.num_slots - 1; slot >= 0; --slot) free_[num_free_++] = &traffic.slots[slot];
  }
  ~Pieces() { delete[] pieces_; }
  Pieces(const Pieces &) = delete;
  Pieces &operator=(const Pieces &) = delete;

  // Returns 0 or the driver's error, after which the states are not whole.
  int run_all() {
    if (num_pieces_ == 0) return 0;
    if (pieces_ == nullptr) return kOutOfMemory;
    // copies of the call before may still be on their way up to where the parameters are fetched from
    for (int64_t s = 0; traffic_.fetches_params && s < traffic_.num_slots; ++s)
      note(traffic_.driver.wait(traffic_.down, traffic_.slots[s].sent, 0));
    const int64_t num_chunks = (num_pieces_ - 1) * chunks_per_piece_ + chunks_in(num_pieces_ - 1);
    if (begin_run(pool_, run_chunk, this, num_chunks, true)) {
      manage(false);
      end_run(pool_);
    } else {
      DefaultFloatState float_state;
      manage(true);
    }
    return error_.load(std::memory_order_relaxed);
  }

 private:
  struct Piece {
    const Slot *slot = nullptr;
    std::atomic<int64_t> left{0};  // chunks that are not done
  };

  static void run_chunk(const void *opaque, int64_t chunk) {
    const_cast<Pieces *>(static_cast<const Pieces *>(opaque))->work(chunk);
  }

  int64_t length(int64_t piece) const {
    const int64_t rest = n_ - piece * traffic_.piece;
    return rest < traffic_.piece ? rest : traffic_.piece;
  }
  int64_t chunks_in(int64_t piece) const { return chunks_of(length(piece), kChunk); }
  bool fetches() const { return traffic_.grads != 0 || traffic_.fetches_params; }

  void note(int error) {
    int none = 0;
    if (error != 0) error_.compare_exchange_strong(none, error, std::memory_order_relaxed);
  }
  bool failed() const { return error_.load(std::memory_order_relaxed) != 0; }

  void work(int64_t chunk) {
    const int64_t piece = chunk / chunks_per_piece_, begin = chunk % chunks_per_piece_ * kChunk;
    for (int spin = 0; arrived_.load(std::memory_order_acquire) <= piece && !failed(); ++spin)
      spin % 1024 == 1023 ? void(sched_yield()) : relax();
    if (failed()) return;
    const int64_t end = begin + kChunk < length(piece) ? begin + kChunk : length(piece);
    Job job = job_;
    job.tensors = from_element(job_.tensors, piece * traffic_.piece);
    job.tensors.out = pieces_[piece].slot->param;
    if (traffic_.grads != 0) job.tensors.grad = pieces_[piece].slot->grad;
    body_(job, begin, end);
    pieces_[piece].left.fetch_sub(1, std::memory_order_release);
  }

  // On the calling thread. `alone`: there are no others, it works too.
  void manage(bool alone) {
    int64_t issued = 0, sent = 0, num_working = 0;
    int64_t working[kMaxSlots];  // pieces that have arrived and have not been sent
    double idle_since = now_s(), moved_at = idle_since;
    while (sent < num_pieces_ && !failed()) {
      const int64_t begun = alone ? sent : begun_chunks(pool_) / chunks_per_piece_;
      for (; issued < num_pieces_ && issued < begun + traffic_.ahead && num_free_ > 0; ++issued) fetch(issued);
      const int64_t arrived = arrived_.load(std::memory_order_relaxed);
      bool moved = false;
      if (arrived < issued && has_arrived(*pieces_[arrived].slot)) {
        if (num_working == 0) traffic_.starved_s += now_s() - idle_since;
        working[num_working++] = arrived;
        arrived_.store(arrived + 1, std::memory_order_release);
        for (int64_t c = 0; alone && c < chunks_in(arrived); ++c) work(arrived * chunks_per_piece_ + c);
        moved = true;
      }
      for (int64_t w = 0; w < num_working; ++w) {
        if (pieces_[working[w]].left.load(std::memory_order_acquire) != 0) continue;
        send(working[w]);
        working[w--] = working[--num_working];
        ++sent;
        moved = true;
        if (num_working == 0) idle_since = now_s();
      }
      if (moved) {
        moved_at = now_s();
        continue;
      }
      // a program that ends must not wait for a device, or another rank, that never answers
      if (pool_->closing.load(std::memory_order_relaxed) && now_s() - moved_at > kPatience) note(kNotReady);
      rest();
    }
  }

  // Between two looks: a spinning thread would take a core from the pool, and the driver's lock from the program.
  static void rest() {
    const timespec pause{0, 20'000};
    nanosleep(&pause, nullptr);
  }

  template <class Copy>
  void for_each_shard(int64_t piece, Copy copy) {
    const int64_t first = piece * traffic_.piece, stop = first + length(piece);
    const int64_t item = bytes_of(job_.tensors.out_type);
    char *param = static_cast<char *>(pieces_[piece].slot->param);
    for (int64_t s = 0; s < traffic_.num_shards; ++s) {
      const Shard &shard = traffic_.shards[s];
      const int64_t begin = shard.start > first ? shard.start : first, end = shard.stop < stop ? shard.stop : stop;
      if (begin < end)
        note(copy(param + (begin - first) * item, shard.address + uint64_t((begin - shard.start) * item),
                  size_t((end - begin) * item)));
    }
  }

  void fetch(int64_t piece) {
    const Driver &driver = traffic_.driver;
    const Slot &slot = *free_[--num_free_];
    pieces_[piece].slot = &slot;
    pieces_[piece].left.store(chunks_in(piece), std::memory_order_relaxed);
    if (!fetches()) return;
    note(driver.wait(traffic_.down, slot.sent, 0));
    if (traffic_.grads != 0) {
      const int64_t item = bytes_of(job_.tensors.grad_type);
      note(driver.copy_down(slot.grad, traffic_.grads + uint64_t(piece * traffic_.piece * item),
                            size_t(length(piece) * item), traffic_.down));
    }
    if (traffic_.fetches_params)
      for_each_shard(piece, [&](void *host, uint64_t device, size_t bytes) {
        return driver.copy_down(host, device, bytes, traffic_.down);
      });
    note(driver.record(slot.fetched, traffic_.down));
  }

  // Whether the place holds all that is to be in it; where nothing is, whether what was in it has left.
  bool has_arrived(const Slot &slot) {
    const int error = traffic_.driver.query(fetches() ? slot.fetched : slot.sent);
    if (error == kNotReady) return false;
    note(error);
    return error == 0;
  }

  void send(int64_t piece) {
    const Driver &driver = traffic_.driver;
    for_each_shard(piece, [&](void *host, uint64_t device, size_t bytes) {
      return driver.copy_up(device, host, bytes, traffic_.up);
    });
    note(driver.record(pieces_[piece].slot->sent, traffic_.up));
    free_[num_free_++] = pieces_[piece].slot;
  }

  Pool *pool_;
  const Job &job_;
  void (*body_)(const Job &, int64_t, int64_t);
  Traffic &traffic_;
  const int64_t n_, num_pieces_, chunks_per_piece_;
  Piece *pieces_;
  const Slot *free_[kMaxSlots];  // the last one is used next
  int64_t num_free_ = 0;
  std::atomic<int64_t> arrived_{0};  // pieces that may be worked on
  std::atomic<int> error_{0};
};

}  // namespace
