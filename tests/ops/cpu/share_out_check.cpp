// Whether share_out calls every index once and is done when it returns; a program for test_share_out.py.
#include "threads.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

void check(std::mt19937& random, int most_items) {
    const int num_items = static_cast<int>(random() % most_items), threads = 1 + static_cast<int>(random() % 4);
    std::vector<int> calls(num_items, 0);
    const bool nested = random() % 50 == 0, slow = random() % 400 == 0;
    share_out(num_items, threads, [&](int64_t index) {
        ++calls[index];
        if (nested) share_out(3, 2, [](int64_t) {});
        if (slow && index == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    for (int index = 0; index < num_items; ++index) {
        if (calls[index] == 1) continue;
        std::fprintf(stderr, "index %d of %d was called %d times with %d threads\n", index, num_items, calls[index],
                     threads);
        std::exit(1);
    }
}

void check_often(unsigned seed, int count) {
    std::mt19937 random(seed);
    for (int i = 0; i < count; ++i) {
        check(random, i % 2 ? 5 : 60);
        // Now and then so long that the helpers fall asleep.
        if (random() % 300 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    }
}

}  // namespace

int main() {
    check_often(1, 10000);
    std::vector<std::thread> callers;
    for (unsigned seed = 2; seed < 5; ++seed) callers.emplace_back(check_often, seed, 2000);
    for (std::thread& caller : callers) caller.join();
    // The pool's threads never end.
    std::_Exit(0);
}
