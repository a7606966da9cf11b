// Rows of logits, as sampling reads them: in blocks of 128 tokens, as floats.
//
// The maxima of the blocks come first: they tell the largest logit, the first block that has it, a bound below the k
// largest, and which blocks a bound leaves out. Every sum has one order, whatever the number of threads: float within a
// block, double over blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "threads.h"

namespace {

constexpr int64_t kBlock = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Threads are woken for no less than this many logits.
constexpr int64_t kWorthSharing = 1 << 16;
constexpr int64_t kSharedBlocks = 64;  // blocks of a row that one thread takes at a time

template <typename T>
struct Row {
    const T* logits;
    int64_t size;
    const int64_t *forbidden = nullptr, *forbidden_end = nullptr;

    int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
    int64_t block_length(int64_t index) const { return std::min(kBlock, size - index * kBlock); }

    // Block `index` as kBlock floats, in place or in `buffer`; forbidden tokens and those beyond the end are -inf.
    const float* block(int64_t index, float* buffer) const {
        const int64_t first = index * kBlock, length = block_length(index);
        const int64_t* its_forbidden = std::lower_bound(forbidden, forbidden_end, first);
        const int64_t* its_end = std::lower_bound(its_forbidden, forbidden_end, first + length);
        if constexpr (std::is_same_v<T, float>)
            if (length == kBlock && its_forbidden == its_end) return logits + first;
        if (length == kBlock) {
            for (int64_t i = 0; i < kBlock; i += kLanes) store(buffer + i, load(logits + first + i));
        } else {
            std::fill(buffer, buffer + kBlock, -kInfinity);
            for (int64_t i = 0; i < length; ++i) buffer[i] = to_float(logits[first + i]);
        }
        for (; its_forbidden < its_end; ++its_forbidden) buffer[*its_forbidden - first] = -kInfinity;
        return buffer;
    }
};

// Tokens that filters have left, in the order of their ids.
struct Candidates {
    std::vector<float> logits;
    std::vector<int32_t> ids;

    int64_t size() const { return static_cast<int64_t>(logits.size()); }
    Row<float> row() const { return {logits.data(), size()}; }

    void resize(int64_t size) {
        logits.resize(size);
        ids.resize(size);
    }

    // Takes the chance, not the place, of all but those with logits above `smallest` and, of those equal to it,
    // the ones up to place `last`.
    void keep(float smallest, int64_t last) {
        float* its_logits = logits.data();
        for (int64_t place = 0; place <= last; ++place)
            its_logits[place] = its_logits[place] >= smallest ? its_logits[place] : -kInfinity;
        for (int64_t place = last + 1; place < size(); ++place)
            its_logits[place] = its_logits[place] > smallest ? its_logits[place] : -kInfinity;
    }
};

// What one thread needs for a row, kept for its next one.
struct Workspace {
    // How many threads share one row.
    int num_threads = 1;
    std::vector<float> maxima, sums, scratch;
    Candidates candidates;

    int threads_for(int64_t size) const { return size >= kWorthSharing ? num_threads : 1; }
};

inline bool any_lane(Ints mask) {
    int32_t parts[kLanes], any = 0;
    std::memcpy(parts, &mask, sizeof(parts));
    for (const int32_t part : parts) any |= part;
    return any != 0;
}

// By vectors of four, without largest_lane's chain of comparisons: it is needed once for every block.
inline float largest_of_lanes(Floats values) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[kLanes / 4];
    std::memcpy(parts, &values, sizeof(parts));
    Four largest = parts[0];
    for (int i = 1; i < kLanes / 4; ++i) largest = parts[i] > largest ? parts[i] : largest;
    const float low = largest[0] > largest[1] ? largest[0] : largest[1];
    const float high = largest[2] > largest[3] ? largest[2] : largest[3];
    return low > high ? low : high;
}

// Fills workspace.maxima, of every block its largest logit. Returns the row's; NaN if there is one, -inf for no tokens.
template <typename T>
float find_maxima(const Row<T>& row, Workspace& workspace) {
    const int64_t num_blocks = row.num_blocks();
    workspace.maxima.resize(num_blocks);
    float* maxima = workspace.maxima.data();
    std::atomic<bool> has_nan{false};
    share_out_ranges(num_blocks, kSharedBlocks, workspace.threads_for(row.size), [&](int64_t first, int64_t last) {
        alignas(64) float buffer[kBlock];
        Ints nan_lanes{};
        for (int64_t index = first; index < last; ++index) {
            const float* logits = row.block(index, buffer);
            Floats largest = broadcast(-kInfinity);
            for (int64_t i = 0; i < kBlock; i += kLanes) {
                const Floats next = load(logits + i);
                largest = maximum(next, largest);
                nan_lanes |= next != next;
            }
            maxima[index] = largest_of_lanes(largest);
        }
        if (any_lane(nan_lanes)) has_nan.store(true, std::memory_order_relaxed);
    });
    if (has_nan) return std::numeric_limits<float>::quiet_NaN();
    return std::accumulate(maxima, maxima + num_blocks, -kInfinity, [](float a, float b) { return std::max(a, b); });
}

// The first token with logit `top`, which is the largest.
template <typename T>
int64_t first_of_largest(const Row<T>& row, float top, const Workspace& workspace) {
    const int64_t index = std::find(workspace.maxima.begin(), workspace.maxima.end(), top) - workspace.maxima.begin();
    float buffer[kBlock];
    const float* logits = row.block(index, buffer);
    return index * kBlock + (std::find(logits, logits + kBlock, top) - logits);
}

// How logits become weights: exp((logit - top) / temperature), 1 for the largest.
struct Scale {
    float top, temperature;

    Floats scaled(Floats logits) const { return (logits - top) / temperature; }
    float scaled(float logit) const { return (logit - top) / temperature; }

    // Weights of a block of logits; returns their sum.
    float weights(const float* logits, float* weights) const {
        Floats sum{};
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Floats weight = exp_of_nonpositive(scaled(load(logits + i)));
            store(weights + i, weight);
            sum += weight;
        }
        return sum_of_lanes(sum);
    }

    // The smallest finite logit whose scaled value is at least `limit`, which is at most 0. Subtraction and division
    // keep order when they round, so that it can be found by bisection, over the floats in order.
    float smallest_logit_at(float limit) const {
        int64_t below = key(-std::numeric_limits<float>::max()) - 1, reaches = key(top);
        while (reaches - below > 1) {
            const int64_t middle = below + (reaches - below) / 2;
            (scaled(logit_of(middle)) >= limit ? reaches : below) = middle;
        }
        return logit_of(reaches);
    }

  private:
    static int64_t key(float logit) {
        const int64_t magnitude = read_as<uint32_t>(&logit) & 0x7fffffff;
        return logit < 0 ? -magnitude : magnitude;
    }
    static float logit_of(int64_t key) {
        const uint32_t bits = key < 0 ? static_cast<uint32_t>(-key) | 0x80000000 : static_cast<uint32_t>(key);
        return read_as<float>(&bits);
    }
};

// Fills workspace.sums, of every block the sum of its weights, and returns their sum.
template <typename T>
double find_sums(const Row<T>& row, const Scale& scale, Workspace& workspace) {
    const int64_t num_blocks = row.num_blocks();
    workspace.sums.resize(num_blocks);
    float* sums = workspace.sums.data();
    share_out_ranges(num_blocks, kSharedBlocks, workspace.threads_for(row.size), [&](int64_t first, int64_t last) {
        alignas(64) float buffer[kBlock], weights[kBlock];
        for (int64_t index = first; index < last; ++index)
            sums[index] = scale.weights(row.block(index, buffer), weights);
    });
    return std::accumulate(sums, sums + num_blocks, 0.0);
}

// The index at which the running sum of values first exceeds `target`, which is below their sum, and the sum before it.
int64_t first_above(const float* values, int64_t size, double target, double& before) {
    before = 0;
    int64_t index = 0;
    for (; index + 1 < size && before + values[index] <= target; ++index) before += values[index];
    return index;
}

// The token at which the cumulative share of the weights first exceeds `number`, in [0, 1): first its block, then
// itself. The first value to exceed a target has weight, so that a token without is never taken.
template <typename T>
int64_t inverse_cdf(const Row<T>& row, const Scale& scale, double number, Workspace& workspace) {
    const double target = number * find_sums(row, scale, workspace);
    double before;
    const int64_t index = first_above(workspace.sums.data(), row.num_blocks(), target, before);
    float buffer[kBlock], weights[kBlock];
    scale.weights(row.block(index, buffer), weights);
    const double share = std::min((target - before) / workspace.sums[index], 1 - 0x1p-53);
    const double sum = std::accumulate(weights, weights + kBlock, 0.0);
    return index * kBlock + first_above(weights, row.block_length(index), share * sum, before);
}

// The k-th largest of values, 1 <= k <= their number.
float kth_largest(const std::vector<float>& values, int64_t k, std::vector<float>& scratch) {
    scratch = values;
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<float>());
    return scratch[k - 1];
}

// The tokens with logits of at least `bound`, into workspace.candidates.
template <typename T>
void gather(const Row<T>& row, float bound, Workspace& workspace) {
    Candidates& candidates = workspace.candidates;
    const auto reaches = [bound](float largest) { return largest >= bound; };
    candidates.resize(kBlock * std::count_if(workspace.maxima.begin(), workspace.maxima.end(), reaches));
    float buffer[kBlock];
    int64_t size = 0;
    for (int64_t index = 0; index < row.num_blocks(); ++index) {
        if (!reaches(workspace.maxima[index])) continue;
        const float* logits = row.block(index, buffer);
        for (int64_t i = 0; i < row.block_length(index); ++i) {
            candidates.logits[size] = logits[i];
            candidates.ids[size] = static_cast<int32_t>(index * kBlock + i);
            size += logits[i] >= bound;
        }
    }
    candidates.resize(size);
}

// Like gather, but may leave out tokens below the k-th largest: the k-th largest of the blocks' maxima is reached by k
// tokens or more. With fewer blocks than k, the smallest of the maxima is worth a try.
template <typename T>
void gather_largest(const Row<T>& row, int64_t k, float bound, Workspace& workspace) {
    const float guess = kth_largest(workspace.maxima, std::min(k, row.num_blocks()), workspace.scratch);
    gather(row, std::max(guess, bound), workspace);
    if (guess > bound && workspace.candidates.size() < k) gather(row, bound, workspace);
}

}  // namespace
