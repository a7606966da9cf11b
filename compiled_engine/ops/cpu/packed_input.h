// The rows of the input as tiles read them: panels of a few rows, chunk by chunk of k, as floats or bfloat16.
#pragma once

#include "scratch.h"
#include "tile.h"

#include <algorithm>
#include <type_traits>

namespace {

// The input [num_rows, in_features] of T, row_stride elements apart.
struct InputRows {
    const void* data;
    int64_t row_stride, num_rows, in_features;

    template <typename T>
    const T* row(int64_t index) const {
        return static_cast<const T*>(data) + index * row_stride;
    }
};

// Rows of the input that are multiplied together.
struct Panel {
    int64_t first_row, rows;
};

inline int64_t num_panels(int64_t num_rows) { return divide_up(num_rows, kMaxPanelRows); }

// The rows are shared out evenly among as few panels as can be.
inline Panel panel_at(int64_t index, int64_t num_rows) {
    const int64_t count = num_panels(num_rows), each = num_rows / count, larger = num_rows % count;
    return {index * each + std::min(index, larger), each + (index < larger)};
}

// The input as Element, one stream for all panels of a chunk: [k / kChunk][panel][k % kChunk / kStep][row][kStep].
// Rows of a panel that lay as far apart as they come would fall on one another in the cache.
template <typename Element>
struct PackedInput {
    Element* data;
    int64_t num_rows, in_features;

    // k: the first of a chunk.
    Element* at(const Panel& panel, int64_t k) const {
        const int64_t length = std::min(kChunk, round_up(in_features - k, kStep));
        return data + k * num_rows + panel.first_row * length;
    }
};

// The input's sums over the spans of k that share an offset (for_each_span), for every part of the weight:
// [part][k / kChunk][panel][span][row], with room for spans of kGroupUnit. Parts without offsets leave theirs unused.
struct InputSums {
    float* data;
    int64_t num_rows, in_features;

    int64_t part_size() const { return num_rows * divide_up(in_features, kGroupUnit); }

    // k: the first of a chunk. Null for a part that needs none.
    float* at(const PackedPart& part, int64_t part_index, const Panel& panel, int64_t k) const {
        if (data == nullptr || !part.has_offsets) return nullptr;
        const int64_t length = std::min(kChunk, round_up(in_features - k, kGroupUnit));
        return data + part_index * part_size() + (k * num_rows + panel.first_row * length) / kGroupUnit;
    }
};

// What the parts of a weight are multiplied with. data is null where no part needs it.
struct PackedInputs {
    PackedInput<float> floats;
    PackedInput<bfloat16> pairs;
    InputSums sums;
};

// Whether input of type T is multiplied in pairs with the parts whose numbers or codes are exact in bfloat16.
template <typename T>
constexpr bool kCanPair = kHasPairProducts && std::is_same_v<T, bfloat16>;

template <typename T>
inline bool is_paired(const PackedPart& part) {
    return kCanPair<T> && (part.storage == Storage::bfloat16 || is_quantized(part.storage));
}

// Calls use with the input that the part is multiplied with.
template <typename T, typename Use>
inline void with_input(const PackedPart& part, const PackedInputs& inputs, const Use& use) {
    if constexpr (kCanPair<T>) {
        if (is_paired<T>(part)) return use(inputs.pairs);
    }
    use(inputs.floats);
}

// Room in scratch for what the weight's parts need.
template <typename T>
PackedInputs make_inputs(const InputRows& rows, const uint8_t* packed, Scratch& scratch) {
    const int64_t num_parts = read_header(packed).num_parts;
    int64_t num_paired = 0, num_summed = 0;
    for (int64_t index = 0; index < num_parts; ++index) {
        const PackedPart part = read_part(packed, index);
        num_paired += is_paired<T>(part);
        num_summed += is_paired<T>(part) && part.has_offsets;
    }
    PackedInputs inputs{{nullptr, rows.num_rows, rows.in_features},
                        {nullptr, rows.num_rows, rows.in_features},
                        {nullptr, rows.num_rows, rows.in_features}};
    const int64_t count = rows.num_rows * round_up(rows.in_features, kStep);
    const int64_t num_floats = num_paired < num_parts ? count : 0, floats_of_pairs = num_paired > 0 ? count / 2 : 0;
    const int64_t num_sums = num_summed > 0 ? num_parts * inputs.sums.part_size() : 0;
    float* data = scratch.floats(num_floats + floats_of_pairs + num_sums);
    if (num_floats > 0) inputs.floats.data = data;
    if (floats_of_pairs > 0) inputs.pairs.data = reinterpret_cast<bfloat16*>(data + num_floats);
    if (num_sums > 0) inputs.sums.data = data + num_floats + floats_of_pairs;
    return inputs;
}

template <typename T>
inline void convert(T from, float& to) {
    to = to_float(from);
}
inline void convert(bfloat16 from, bfloat16& to) { to = from; }

// Missing last k become zeros.
template <typename T, typename Element>
void pack_panel(const InputRows& rows, const Panel& panel, const PackedInput<Element>& packed) {
    for (int64_t begin = 0; begin < rows.in_features; begin += kChunk) {
        const int64_t end = std::min(rows.in_features, begin + kChunk);
        for (int64_t row = 0; row < panel.rows; ++row) {
            const T* from = rows.row<T>(panel.first_row + row);
            Element* to = packed.at(panel, begin) + row * kStep;
            int64_t k = begin;
            for (; k + kStep <= end; k += kStep, to += panel.rows * kStep)
                for (int64_t j = 0; j < kStep; ++j) convert(from[k + j], to[j]);
            if (k < end)
                for (int64_t j = 0; j < kStep; ++j) convert(k + j < end ? from[k + j] : T{}, to[j]);
        }
    }
}

// The lanes are added up once at the end, the last few numbers in turn.
inline float sum_of(const bfloat16* from, int64_t count) {
    Floats sums{};
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) sums += load(from + k);
    float sum = sum_of_lanes(sums);
    for (; k < count; ++k) sum += to_float(from[k]);
    return sum;
}

inline void sum_panel(const InputRows& rows, const Panel& panel, const PackedPart& part, int64_t part_index,
                      const InputSums& sums) {
    for (int64_t begin = 0; begin < rows.in_features; begin += kChunk) {
        float* to = sums.at(part, part_index, panel, begin);
        for_each_span(part, begin, std::min(rows.in_features, begin + kChunk), [&](const Span& span) {
            for (int64_t row = 0; row < panel.rows; ++row)
                *to++ = sum_of(rows.row<bfloat16>(panel.first_row + row) + span.begin, span.end - span.begin);
        });
    }
}

// Writes the panel's rows to all that inputs has room for.
template <typename T>
void pack_panel(const InputRows& rows, const Panel& panel, const uint8_t* packed, const PackedInputs& inputs) {
    if (inputs.floats.data != nullptr) pack_panel<T>(rows, panel, inputs.floats);
    if constexpr (kCanPair<T>) {
        if (inputs.pairs.data != nullptr) pack_panel<T>(rows, panel, inputs.pairs);
        if (inputs.sums.data == nullptr) return;
        for (int64_t index = 0; index < read_header(packed).num_parts; ++index) {
            const PackedPart part = read_part(packed, index);
            if (part.has_offsets) sum_panel(rows, panel, part, index, inputs.sums);
        }
    }
}

}  // namespace
