// The innermost loop: a few rows of the input times a block of the weight, sums in registers.
#pragma once

#include "block_numbers.h"

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

// Memory that will be needed soon, fetched a little with every step of a tile.
struct Prefetch {
    const uint8_t* next;
    int64_t bytes_per_step;

    inline __attribute__((always_inline)) void step() {
        for (int64_t offset = 0; offset < bytes_per_step; offset += kBufferAlignment) __builtin_prefetch(next + offset);
        next += bytes_per_step;
    }
};

struct TileWork {
    const PackedPart& part;
    const uint8_t* block;
    int64_t begin, end;
    // The panel's input from begin on: [k / kStep][row][kStep].
    const float* input;
    // [rows][kBlockColumns]. Set by the chunk that begins at 0, added to by the others.
    float* sums;
    bool is_first;
    Prefetch prefetch;
};

using MultiplyTile = void (*)(const TileWork&);

// sum + *x * w in all lanes. With AVX-512 the multiplication reads and repeats x itself: compilers load it into a
// register for the second vector, and on Zen 4 that load takes a cycle from the multiplications.
inline __attribute__((always_inline)) void add_product(Floats& sum, const float* x, Floats w) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
#else
    sum = multiply_add(broadcast(*x), w, sum);
#endif
}

template <int rows>
struct TileSums {
    const float* input;
    Prefetch prefetch;
    Floats sums[rows][2];

    inline __attribute__((always_inline)) void add(int64_t j, Floats w0, Floats w1) {
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row) {
            const float* x = input + row * kStep + j;
            add_product(sums[row][0], x, w0);
            add_product(sums[row][1], x, w1);
        }
    }
    inline __attribute__((always_inline)) void advance() {
        input += rows * kStep;
        prefetch.step();
    }
};

template <Storage storage, int rows>
void multiply_tile(const TileWork& work) {
    for (int64_t column = 0; column < kBlockColumns; column += kTileColumns) {
        TileSums<rows> tile{work.input, work.prefetch, {}};
        read_block<storage>(work.part, work.block, column, work.begin, work.end, tile);
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row)
            for (int i = 0; i < 2; ++i) {
                float* sum = work.sums + row * kBlockColumns + column + i * kLanes;
                store(sum, work.is_first ? tile.sums[row][i] : load(sum) + tile.sums[row][i]);
            }
    }
}

template <Storage storage, int... counts>
MultiplyTile tile_of_rows(int64_t rows, std::integer_sequence<int, counts...>) {
    static constexpr MultiplyTile functions[] = {multiply_tile<storage, counts + 1>...};
    return functions[rows - 1];
}

// rows: 1 to kMaxPanelRows.
inline MultiplyTile tile_function(Storage storage, int64_t rows) {
    constexpr std::make_integer_sequence<int, kMaxPanelRows> counts;
    switch (storage) {
        case Storage::float32: return tile_of_rows<Storage::float32>(rows, counts);
        case Storage::bfloat16: return tile_of_rows<Storage::bfloat16>(rows, counts);
        case Storage::float16: return tile_of_rows<Storage::float16>(rows, counts);
        case Storage::int8: return tile_of_rows<Storage::int8>(rows, counts);
        default: return tile_of_rows<Storage::int4>(rows, counts);
    }
}

}  // namespace
