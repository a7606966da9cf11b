// How far top_p reaches among the tokens that other filters have left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "logit_rows.h"
#include "numbers.h"

namespace {

// Looks for the last of the candidates that top_p keeps. Those among which it may be are its members: first all, then
// by histograms over the scaled logits fewer and fewer, until few are left to be sorted. Used row after row.
class TopP {
  public:
    // The place of the last candidate needed for a mass of `limit`, by falling logits, equal ones by their places.
    int64_t last_kept(const Row<float>& candidates, const Scale& scale, double limit) {
        start(candidates, scale);
        double mass = 0;
        while (size() > kFew && narrow(limit, mass)) {
        }
        std::vector<int32_t> order(size());
        std::iota(order.begin(), order.end(), 0);
        const auto more_likely = [&](int32_t a, int32_t b) {
            const float logit_a = candidates.logits[places_[a]], logit_b = candidates.logits[places_[b]];
            return logit_a != logit_b ? logit_a > logit_b : a < b;
        };
        if (!std::is_sorted(order.begin(), order.end(), more_likely))
            std::sort(order.begin(), order.end(), more_likely);
        for (const int32_t member : order) {
            mass += weights_[member];
            if (mass >= limit) return places_[member];
        }
        return places_[order.back()];
    }

  private:
    static constexpr int64_t kFew = 64;
    static constexpr int kBins = 1024;
    // Weights below this scaled logit are 0, so that their order does not matter.
    static constexpr float kLowest = -88;
    // Within less, bins would be too narrow for float.
    static constexpr float kSmallestRange = 1e-30f;

    int64_t size() const { return static_cast<int64_t>(places_.size()); }

    void resize(int64_t size) {
        scaled_.resize(size);
        weights_.resize(size);
        places_.resize(size);
        bins_.resize(size);
    }

    // Makes all candidates members.
    void start(const Row<float>& candidates, const Scale& scale) {
        resize(candidates.num_blocks() * kBlock);
        float buffer[kBlock];
        Floats lowest{};
        for (int64_t first = 0; first < candidates.size; first += kBlock) {
            const float* logits = candidates.block(first / kBlock, buffer);
            for (int64_t i = 0; i < kBlock; i += kLanes) {
                const Floats scaled = maximum(scale.scaled(load(logits + i)), broadcast(kLowest));
                lowest = scaled < lowest ? scaled : lowest;
                store(scaled_.data() + first + i, scaled);
            }
            scale.weights(logits, weights_.data() + first);
        }
        low_ = -largest_lane(-lowest);
        high_ = 0;
        resize(candidates.size);
        std::iota(places_.begin(), places_.end(), 0);
    }

    // Leaves only the members of the bin in which the mass reaches `limit` and adds the mass of those before it to
    // `mass`. False if they lie too near together.
    bool narrow(double limit, double& mass) {
        if (high_ - low_ < kSmallestRange) return false;
        const int64_t size = this->size();
        const float high = high_, bins_per_unit = (kBins - 1) / (high_ - low_);
        int32_t *bins = bins_.data(), *places = places_.data();
        float *scaled = scaled_.data(), *weights = weights_.data();
        for (int64_t i = 0; i < size; ++i) bins[i] = static_cast<int32_t>((high - scaled[i]) * bins_per_unit);
        double masses[kBins] = {};
        for (int64_t i = 0; i < size; ++i) masses[bins[i]] += weights[i];
        const int32_t last = static_cast<int32_t>((high - low_) * bins_per_unit);
        int32_t bin = 0;
        for (; bin < last && mass + masses[bin] < limit; ++bin) mass += masses[bin];
        int64_t kept = 0;
        for (int64_t i = 0; i < size; ++i) {
            scaled[kept] = scaled[i];
            weights[kept] = weights[i];
            places[kept] = places[i];
            // No branch: which are kept cannot be predicted.
            kept += bins[i] == bin;
        }
        resize(kept);
        low_ = *std::min_element(scaled, scaled + kept);
        high_ = *std::max_element(scaled, scaled + kept);
        return true;
    }

    // Members: scaled logit, weight, place among the candidates, bin of the histogram. In the order of their places.
    std::vector<float> scaled_, weights_;
    std::vector<int32_t> places_, bins_;
    // The range of the scaled logits.
    float low_ = 0, high_ = 0;
};

}  // namespace
