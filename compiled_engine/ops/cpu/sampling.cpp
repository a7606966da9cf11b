// Sampling one token per row of logits: ops/sampling.py defines what is computed; here no vocabulary is sorted for it.
//
// Filters turn a row into a shorter row of the tokens that are left, in the order of their ids.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "logit_rows.h"
#include "numbers.h"
#include "threads.h"
#include "top_p.h"

// The rows of one step. Arrays have one entry per row unless said otherwise. Filled in by ops/cpu/sampling.py.
struct SamplingRows {
    int64_t num_rows, vocab_size, row_stride, max_logprobs;
    const float* temperature;  // 0: greedy
    const int64_t* top_k;      // 0: all
    const float *top_p, *min_p;
    const int64_t *seeds, *positions;
    // The forbidden token ids of row i, ascending, are those from forbidden_starts[i] up to forbidden_starts[i + 1].
    const int64_t *forbidden_ids, *forbidden_starts;
    const int64_t* num_logprobs;  // -1: none
    int64_t* token_ids;
    float* maxima;          // the largest logit; where it is not finite, no token is chosen
    float* token_logprobs;  // of the chosen token
    int64_t* top_ids;       // [num_rows, max_logprobs], most likely first
    float* top_logprobs;    // [num_rows, max_logprobs]
};

namespace {

// Leaves of the candidates the k with the largest logits, and those equal to the last of them.
void keep_top_k(int64_t k, Workspace& workspace) {
    Candidates& candidates = workspace.candidates;
    if (k >= candidates.size()) return;
    candidates.keep(kth_largest(candidates.logits, k, workspace.scratch), candidates.size() - 1);
}

// A logit below which all tokens of the row together have less than the share of `total` that top_p leaves out.
float bound_of_top_p(float top_p, double total, int64_t size, const Scale& scale) {
    const double left_out = (1 - static_cast<double>(top_p)) * total / static_cast<double>(size);
    // A little less, for the rounding of the sums.
    return scale.smallest_logit_at(static_cast<float>(std::min(std::log(left_out), 0.0) - 1e-3));
}

struct Filters {
    int64_t top_k;
    float top_p, min_p;
};

// The token of a row whose largest logit, scale.top, is finite.
template <typename T>
int64_t sample_random(const Row<T>& row, const Filters& filters, const Scale& scale, double number,
                      Workspace& workspace, TopP& top_p) {
    const bool has_top_k = filters.top_k > 0 && filters.top_k < row.size, has_top_p = filters.top_p < 1;
    const bool is_cut = has_top_k || filters.min_p > 0;
    if (!is_cut && !has_top_p) return inverse_cdf(row, scale, number, workspace);
    Candidates& candidates = workspace.candidates;
    if (is_cut) {
        float bound = -kInfinity;
        if (filters.min_p > 0) bound = scale.smallest_logit_at(static_cast<float>(std::log(double{filters.min_p})));
        if (has_top_k) {
            gather_largest(row, filters.top_k, bound, workspace);
            keep_top_k(filters.top_k, workspace);
        } else {
            gather(row, bound, workspace);
        }
    }
    if (has_top_p) {
        const double total = is_cut ? find_sums(candidates.row(), scale, workspace) : find_sums(row, scale, workspace);
        if (!is_cut) gather(row, bound_of_top_p(filters.top_p, total, row.size, scale), workspace);
        const int64_t last = top_p.last_kept(candidates.row(), scale, filters.top_p * total);
        candidates.keep(candidates.logits[last], last);
    }
    return candidates.ids[inverse_cdf(candidates.row(), scale, number, workspace)];
}

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011) with the position as counter and the seed as key: its first
// two words as a number in [0, 1) with 53 random bits.
double uniform(int64_t seed, int64_t position) {
    const auto high_word = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); };
    uint32_t counter[4] = {static_cast<uint32_t>(position), high_word(position)};
    uint32_t key[2] = {static_cast<uint32_t>(seed), high_word(seed)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t product_0 = uint64_t{0xD2511F53} * counter[0], product_1 = uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<uint32_t>(product_1 >> 32) ^ counter[1] ^ key[0];
        counter[2] = static_cast<uint32_t>(product_0 >> 32) ^ counter[3] ^ key[1];
        counter[1] = static_cast<uint32_t>(product_1);
        counter[3] = static_cast<uint32_t>(product_0);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    const uint64_t mantissa = static_cast<uint64_t>(counter[0] >> 5) << 26 | counter[1] >> 6;
    return static_cast<double>(mantissa) * 0x1p-53;
}

// Log-probabilities of one row: of `token_id`, and of the `count` most likely tokens.
struct Logprobs {
    int64_t token_id, count;
    float* token_logprob;
    int64_t* top_ids;
    float* top_logprobs;
};

// Those of the raw logits: `row` has no forbidden tokens, workspace.maxima and `top` are its own.
template <typename T>
void find_logprobs(const Row<T>& row, float top, const Logprobs& wanted, Workspace& workspace) {
    const double log_of_sum = std::log(find_sums(row, Scale{top, 1}, workspace));
    const auto logprob = [=](double logit) { return static_cast<float>(logit - top - log_of_sum); };
    *wanted.token_logprob = logprob(to_float(row.logits[wanted.token_id]));
    if (wanted.count == 0) return;
    gather_largest(row, wanted.count, -kInfinity, workspace);
    const Candidates& candidates = workspace.candidates;
    std::vector<int32_t> order(candidates.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + wanted.count, order.end(), [&](int32_t a, int32_t b) {
        const float logit_a = candidates.logits[a], logit_b = candidates.logits[b];
        return logit_a != logit_b ? logit_a > logit_b : a < b;
    });
    for (int64_t i = 0; i < wanted.count; ++i) {
        wanted.top_ids[i] = candidates.ids[order[i]];
        wanted.top_logprobs[i] = logprob(candidates.logits[order[i]]);
    }
}

template <typename T>
void sample_row(const T* logits, const SamplingRows& rows, int64_t index, Workspace& workspace, TopP& top_p) {
    const Row<T> raw{logits + index * rows.row_stride, rows.vocab_size};
    Row<T> row = raw;
    row.forbidden = rows.forbidden_ids + rows.forbidden_starts[index];
    row.forbidden_end = rows.forbidden_ids + rows.forbidden_starts[index + 1];
    float top = rows.maxima[index] = find_maxima(row, workspace);
    if (!std::isfinite(top)) return;
    const Scale scale{top, rows.temperature[index]};
    if (scale.temperature > 0) {
        const Filters filters{rows.top_k[index], rows.top_p[index], rows.min_p[index]};
        const double number = uniform(rows.seeds[index], rows.positions[index]);
        rows.token_ids[index] = sample_random(row, filters, scale, number, workspace, top_p);
    } else {
        rows.token_ids[index] = first_of_largest(row, top, workspace);
    }
    if (rows.num_logprobs[index] < 0) return;
    if (row.forbidden != row.forbidden_end) top = rows.maxima[index] = find_maxima(raw, workspace);
    if (!std::isfinite(top)) return;
    const int64_t first = index * rows.max_logprobs, count = std::min(rows.num_logprobs[index], rows.vocab_size);
    find_logprobs(raw, top,
                  {rows.token_ids[index], count, rows.token_logprobs + index, rows.top_ids + first,
                   rows.top_logprobs + first},
                  workspace);
}

// Returns the first row of which no token can be chosen, -1 if there is none.
template <typename T>
int64_t sample_rows(const T* logits, const SamplingRows& rows) {
    const int count = rows.num_rows * rows.vocab_size >= kWorthSharing ? num_threads() : 1;
    // With fewer rows than threads, each row is shared out among the threads in its turn.
    const bool shares_rows = rows.num_rows < count;
    share_out(rows.num_rows, shares_rows ? 1 : count, [&](int64_t index) {
        thread_local Workspace workspace;
        thread_local TopP top_p;
        workspace.num_threads = shares_rows ? count : 1;
        sample_row(logits, rows, index, workspace, top_p);
    });
    for (int64_t index = 0; index < rows.num_rows; ++index)
        if (!std::isfinite(rows.maxima[index])) return index;
    return -1;
}

}  // namespace

extern "C" int64_t sample_rows_float32(const void* logits, const SamplingRows* rows) {
    return sample_rows(static_cast<const float*>(logits), *rows);
}
extern "C" int64_t sample_rows_bfloat16(const void* logits, const SamplingRows* rows) {
    return sample_rows(static_cast<const bfloat16*>(logits), *rows);
}
extern "C" int64_t sample_rows_float16(const void* logits, const SamplingRows* rows) {
    return sample_rows(static_cast<const float16*>(logits), *rows);
}
