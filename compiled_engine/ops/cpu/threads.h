// Sharing work out among the threads of this library.
#pragma once

#include <algorithm>
#include <cstdint>

// How many threads a kernel may use, the calling one included. Set by set_num_threads; OpenMP's number until then.
int num_threads();

// Calls run(context, index) for every index below num_items, on up to `threads` threads, and returns when all calls have.
// Whoever is free takes the next index. A thread that another process keeps from its core holds up the index that it
// has taken and no other; OpenMP would wait for it at the end of every loop, even if it had taken none.
void share_out(int64_t num_items, int threads, void (*run)(const void* context, int64_t index), const void* context);

template <typename Run>
void share_out(int64_t num_items, int threads, const Run& run) {
    share_out(
        num_items, threads, [](const void* context, int64_t index) { (*static_cast<const Run*>(context))(index); },
        &run);
}

// The same for ranges of `size` neighbouring indices: run(first, last).
template <typename Run>
void share_out_ranges(int64_t num_items, int64_t size, int threads, const Run& run) {
    share_out((num_items + size - 1) / size, threads, [&](int64_t index) {
        run(index * size, std::min(num_items, (index + 1) * size));
    });
}
