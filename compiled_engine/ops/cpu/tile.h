// The innermost loop: a few rows of the input times a block of the weight, sums in registers.
//
// The input's Element is float, times numbers of any storage as floats, or bfloat16, times bfloat16 or codes in pairs
// of k.
#pragma once

#include "code_pairs.h"

#include <type_traits>
#include <utility>

namespace {

// Sums are made of chunks of this many k. It is part of the arithmetic: see linear.cpp.
constexpr int64_t kChunk = 256;

// Rows of a tile: with two vectors of columns its sums fill most of the 32 or 16 vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kMaxPanelRows = 12;
#else
constexpr int64_t kMaxPanelRows = 6;
#endif

// Whether bfloat16 input is multiplied as it is with weights in bfloat16 and with codes.
#if defined(__AVX512BF16__)
constexpr bool kHasPairProducts = true;
#else
constexpr bool kHasPairProducts = false;
#endif

// Memory that will be needed soon, fetched a little with every step of a tile.
struct Prefetch {
    const uint8_t* next;
    int64_t bytes_per_step;

    inline __attribute__((always_inline)) void step() {
        for (int64_t offset = 0; offset < bytes_per_step; offset += kBufferAlignment) __builtin_prefetch(next + offset);
        next += bytes_per_step;
    }
};

template <typename Element>
struct TileWork {
    const PackedPart& part;
    const uint8_t* block;
    int64_t begin, end;
    // The panel's input from begin on: [k / kStep][row][kStep].
    const Element* input;
    // [rows][kBlockColumns]. Set by the chunk that begins at 0, added to by the others.
    float* sums;
    bool is_first;
    // Of the spans from begin to end, [span][row], where codes are multiplied in pairs and have offsets; null elsewhere.
    const float* input_sums;
    Prefetch prefetch;
};

template <typename Element>
using MultiplyTile = void (*)(const TileWork<Element>&);

// sum + *x * w in all lanes. With AVX-512 the multiplication reads and repeats x itself: compilers load it into a
// register for the second vector, and on Zen 4 that load takes a cycle from the multiplications.
inline __attribute__((always_inline)) void add_product(Floats& sum, const float* x, Floats w) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
#else
    sum = multiply_add(broadcast(*x), w, sum);
#endif
}

#if defined(__AVX512BF16__)
// sum + x[0] * w[0] + x[1] * w[1] in all lanes. Products are exact, sums are rounded to nearest, and subnormal numbers
// count as zero.
inline __attribute__((always_inline)) void add_product(Floats& sum, const bfloat16* x, Words w) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const bfloat16(*)[2]>(x)));
}
#endif

template <typename Element, int rows>
struct TileSums {
    const Element* input;
    Prefetch prefetch;
    Floats sums[rows][2];

    template <typename Numbers>
    inline __attribute__((always_inline)) void add(int64_t j, Numbers w0, Numbers w1) {
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row) {
            const Element* x = input + row * kStep + j;
            add_product(sums[row][0], x, w0);
            add_product(sums[row][1], x, w1);
        }
    }
    inline __attribute__((always_inline)) void advance() {
        input += rows * kStep;
        prefetch.step();
    }
};

template <typename Element, Storage storage, int rows>
void multiply_tile(const TileWork<Element>& work) {
    for (int64_t column = 0; column < kBlockColumns; column += kTileColumns) {
        TileSums<Element, rows> tile{work.input, work.prefetch, {}};
        if constexpr (std::is_same_v<Element, bfloat16>)
            read_pairs(pairs_of(work.block, column, work.begin), work.end - work.begin, tile);
        else
            read_block<storage>(work.part, work.block, column, work.begin, work.end, tile);
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row)
            for (int i = 0; i < 2; ++i) {
                float* sum = work.sums + row * kBlockColumns + column + i * kLanes;
                store(sum, work.is_first ? tile.sums[row][i] : load(sum) + tile.sums[row][i]);
            }
    }
}

template <typename Element, Storage storage, int... counts>
MultiplyTile<Element> tile_of_rows(int64_t rows, std::integer_sequence<int, counts...>) {
    static constexpr MultiplyTile<Element> functions[] = {multiply_tile<Element, storage, counts + 1>...};
    return functions[rows - 1];
}

using TileRowCounts = std::make_integer_sequence<int, kMaxPanelRows>;

// The tile for numbers of a storage and rows from 1 to kMaxPanelRows.
template <typename Element>
MultiplyTile<Element> tile_function(Storage storage, int64_t rows);

template <>
inline MultiplyTile<float> tile_function<float>(Storage storage, int64_t rows) {
    switch (storage) {
        case Storage::float32: return tile_of_rows<float, Storage::float32>(rows, TileRowCounts());
        case Storage::bfloat16: return tile_of_rows<float, Storage::bfloat16>(rows, TileRowCounts());
        case Storage::float16: return tile_of_rows<float, Storage::float16>(rows, TileRowCounts());
        case Storage::int8: return tile_of_rows<float, Storage::int8>(rows, TileRowCounts());
        default: return tile_of_rows<float, Storage::int4>(rows, TileRowCounts());
    }
}

#if defined(__AVX512BF16__)
// Adds dots * scale + input_sums * offset to sums. input_sums: null without offsets.
template <int rows>
inline __attribute__((always_inline)) void add_scaled(const TileSums<bfloat16, rows>& dots, const Scales& scales,
                                                      const float* input_sums, float* sums) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row, sums += kBlockColumns)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            Floats sum = multiply_add(dots.sums[row][i], scales.scale[i], load(sums + i * kLanes));
            if (input_sums != nullptr) sum = multiply_add(broadcast(input_sums[row]), scales.offset[i], sum);
            store(sums + i * kLanes, sum);
        }
}

// Codes are multiplied as they are: a group's sum of products starts at zero and is scaled when the group, or the
// chunk, ends. The sums over all groups stay in memory, as the registers are full.
template <typename Codes, int rows>
void multiply_codes(const TileWork<bfloat16>& work) {
    static_assert(kBlockColumns == kTileColumns, "a block is one tile");
    const Codes pairs;
    const int64_t first_code = codes_offset(work.part);
    const float* input_sums = work.input_sums;
    TileSums<bfloat16, rows> dots{work.input, work.prefetch, {}};
    if (work.is_first)
        for (int64_t i = 0; i < rows * kBlockColumns; i += kLanes) store(work.sums + i, Floats{});
    for_each_span(work.part, work.begin, work.end, [&](const Span& span) __attribute__((always_inline)) {
        const uint8_t* group = work.block + span.group * work.part.group_bytes;
        const int64_t group_begin = span.group * work.part.group_size;
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row) dots.sums[row][0] = dots.sums[row][1] = Floats{};
        pairs.read(group + first_code, span.begin - group_begin, span.end - group_begin, dots);
        add_scaled(dots, pairs.scales(work.part, group), input_sums, work.sums);
        if (input_sums != nullptr) input_sums += rows;
    });
}

template <typename Codes, int... counts>
MultiplyTile<bfloat16> codes_tile_of_rows(int64_t rows, std::integer_sequence<int, counts...>) {
    static constexpr MultiplyTile<bfloat16> functions[] = {multiply_codes<Codes, counts + 1>...};
    return functions[rows - 1];
}

// storage: one that is multiplied in pairs.
template <>
inline MultiplyTile<bfloat16> tile_function<bfloat16>(Storage storage, int64_t rows) {
    switch (storage) {
        case Storage::int8: return codes_tile_of_rows<Int8Pairs>(rows, TileRowCounts());
        case Storage::int4: return codes_tile_of_rows<Int4Pairs>(rows, TileRowCounts());
        default: return tile_of_rows<bfloat16, Storage::bfloat16>(rows, TileRowCounts());
    }
}
#endif

}  // namespace
