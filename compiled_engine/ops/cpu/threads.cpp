#include "threads.h"

#include <atomic>
#include <cstdint>

#include <omp.h>

namespace {

std::atomic<int> chosen{0};

}  // namespace

int num_threads() {
    const int count = chosen.load(std::memory_order_relaxed);
    return count > 0 ? count : omp_get_max_threads();
}

// For every kernel of this library from now on, at least 1.
extern "C" void set_num_threads(int64_t count) { chosen.store(static_cast<int>(count), std::memory_order_relaxed); }

// For what compiled pieces do themselves in the calling thread: OpenMP's own number.
extern "C" void set_piece_threads(int64_t count) { omp_set_num_threads(static_cast<int>(count)); }
