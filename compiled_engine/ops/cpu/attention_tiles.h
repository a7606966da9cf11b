// The arithmetic of attention over one tile of keys: packing, scores, softmax weights, weighted sums of values.
//
// Each score is one chain of multiply-adds over head_dim, each element of a weighted sum one chain over the keys of a
// split, both in ascending order whatever is blocked how: a result depends on the tile's place alone, never on which
// queries are computed together. A key that a query does not see has the weight 0, which leaves every chain as it is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kTile = 64;          // keys of a tile; tiles start at multiples of it
constexpr int kMaxBlockRows = 6;   // query rows in registers at a time
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // vectors of keys or of dimensions in registers at a time
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(kTile % (kLanes * kVectors) == 0, "a tile is whole vectors");

// Where the keys and the values of a tile are, head_dim elements each; zeros in place of those that no query sees.
template <typename T>
struct TileRows {
    const T* keys[kTile];
    const T* values[kTile];
};

// The part of a tile that somebody sees: keys begin to end.
struct Range {
    int64_t begin, end;
    bool empty() const { return begin >= end; }
};

inline Range intersection(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

inline Range whole_vectors(Range keys) {
    return {keys.begin / kLanes * kLanes, (keys.end + kLanes - 1) / kLanes * kLanes};
}

// Rows of the next block when `rows` are left: blocks of like size rather than a small one at the end.
inline int64_t block_rows(int64_t rows) {
    const int64_t blocks = (rows + kMaxBlockRows - 1) / kMaxBlockRows;
    return (rows + blocks - 1) / blocks;
}

// Reads kLanes rows of kLanes 32-bit words and gives their columns.
#if defined(__AVX2__)
#if defined(__AVX512F__)
using Register = __m512;
inline Register unpack_low(Register a, Register b) { return _mm512_unpacklo_ps(a, b); }
inline Register unpack_high(Register a, Register b) { return _mm512_unpackhi_ps(a, b); }
inline Words low_pairs(Register a, Register b) {
    const __m512d pairs = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    return read_as<Words>(&pairs);
}
inline Words high_pairs(Register a, Register b) {
    const __m512d pairs = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    return read_as<Words>(&pairs);
}
// Four words of each of the rows 0, 4, 8 and 12.
template <typename T>
inline Register gather_quarters(const T* const* rows, int64_t first) {
    const auto quarter = [&](int i) { return read_as<__m128>(rows[4 * i] + first); };
    const Register two = _mm512_insertf32x4(_mm512_castps128_ps512(quarter(0)), quarter(1), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(two, quarter(2), 2), quarter(3), 3);
}
#else
using Register = __m256;
inline Register unpack_low(Register a, Register b) { return _mm256_unpacklo_ps(a, b); }
inline Register unpack_high(Register a, Register b) { return _mm256_unpackhi_ps(a, b); }
inline Words low_pairs(Register a, Register b) {
    const __m256d pairs = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    return read_as<Words>(&pairs);
}
inline Words high_pairs(Register a, Register b) {
    const __m256d pairs = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    return read_as<Words>(&pairs);
}
// Four words of each of the rows 0 and 4.
template <typename T>
inline Register gather_quarters(const T* const* rows, int64_t first) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(read_as<__m128>(rows[0] + first)),
                                read_as<__m128>(rows[4] + first), 1);
}
#endif
template <typename T>
inline void load_columns(const T* const* rows, int64_t first, Words* columns) {
    for (int column = 0; column < kLanes; column += 4) {
        // Part j holds rows j, j + 4, ...: unpacking goes on within quarters of 16 bytes and so puts rows in order.
        Register part[4];
        for (int j = 0; j < 4; ++j) part[j] = gather_quarters(rows + j, first + column * 4 / sizeof(T));
        const Register low01 = unpack_low(part[0], part[1]), high01 = unpack_high(part[0], part[1]);
        const Register low23 = unpack_low(part[2], part[3]), high23 = unpack_high(part[2], part[3]);
        columns[column] = low_pairs(low01, low23);
        columns[column + 1] = high_pairs(low01, low23);
        columns[column + 2] = low_pairs(high01, high23);
        columns[column + 3] = high_pairs(high01, high23);
    }
}
#else
template <typename T>
inline void load_columns(const T* const* rows, int64_t first, Words* columns) {
    for (int row = 0; row < kLanes; ++row) {
        const Words words = read_as<Words>(rows[row] + first);
        for (int column = 0; column < kLanes; ++column) columns[column][row] = words[column];
    }
}
#endif

// The numbers in a vector of words, one or two in each, as floats at packed, packed + kTile.
inline void store_parts(Words words, const float*, float* packed) { store(packed, read_as<Floats>(&words)); }
inline void store_parts(Words words, const bfloat16*, float* packed) {
    const Words low = words << 16, high = words & 0xffff0000u;
    store(packed, read_as<Floats>(&low));
    store(packed + kTile, read_as<Floats>(&high));
}
inline void store_parts(Words words, const float16*, float* packed) {
    const HalfWords low = __builtin_convertvector(words & 0xffffu, HalfWords);
    const HalfWords high = __builtin_convertvector(words >> 16, HalfWords);
    float16 halves[2 * kLanes];
    std::memcpy(halves, &low, sizeof(low));
    std::memcpy(halves + kLanes, &high, sizeof(high));
    store(packed, load(halves));
    store(packed + kTile, load(halves + kLanes));
}

// Keys as floats [head_dim][kTile], those of the vectors that hold `seen`.
template <typename T>
void pack_keys(const TileRows<T>& tile, Range seen, int64_t head_dim, float* packed) {
    constexpr int parts = sizeof(Words) / sizeof(T) / kLanes;  // numbers in a word
    for (int64_t key = seen.begin / kLanes * kLanes; key < seen.end; key += kLanes) {
        const T* const* rows = tile.keys + key;
        int64_t dim = 0;
        for (; dim + kLanes * parts <= head_dim; dim += kLanes * parts) {
            Words columns[kLanes];
            load_columns(rows, dim, columns);
            for (int i = 0; i < kLanes; ++i)
                store_parts(columns[i], rows[0], packed + (dim + i * parts) * kTile + key);
        }
        for (; dim < head_dim; ++dim)
            for (int i = 0; i < kLanes; ++i) packed[dim * kTile + key + i] = to_float(rows[i][dim]);
    }
}

// Values as floats [kTile][padded_dim], those that are seen; what head_dim lacks to padded_dim is 0.
template <typename T>
void pack_values(const TileRows<T>& tile, Range seen, int64_t head_dim, int64_t padded_dim, float* packed) {
    const int64_t whole = head_dim / kLanes * kLanes;
    for (int64_t key = seen.begin; key < seen.end; ++key) {
        float* row = packed + key * padded_dim;
        for (int64_t dim = 0; dim < whole; dim += kLanes) store(row + dim, load(tile.values[key] + dim));
        for (int64_t dim = whole; dim < padded_dim; ++dim)
            row[dim] = dim < head_dim ? to_float(tile.values[key][dim]) : 0.0f;
    }
}

// Scores of ROWS queries [ROWS][padded_dim] with VECTORS vectors of packed keys.
template <int ROWS, int VECTORS>
inline void score_block(const float* queries, int64_t padded_dim, const float* keys, int64_t head_dim, float* scores) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = Floats{};
    for (int64_t dim = 0; dim < head_dim; ++dim) {
        Floats key[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) key[v] = load(keys + dim * kTile + v * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Floats query = broadcast(queries[row * padded_dim + dim]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[row][v] += query * key[v];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(scores + row * kTile + v * kLanes, sums[row][v]);
}

// Adds weights times values, keys of `seen` in order, to VECTORS vectors of each of ROWS sums.
template <int ROWS, int VECTORS, typename V>
inline void add_block(const float* weights, const V* const* values, int64_t dim, Range seen, float* sums,
                      int64_t stride) {
    Floats total[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) total[row][v] = load(sums + row * stride + dim + v * kLanes);
    for (int64_t key = seen.begin; key < seen.end; ++key) {
        Floats value[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) value[v] = load(values[key] + dim + v * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Floats weight = broadcast(weights[row * kTile + key]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) total[row][v] += weight * value[v];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(sums + row * stride + dim + v * kLanes, total[row][v]);
}

template <int ROWS>
void score_rows(const float* queries, int64_t padded_dim, const float* keys, int64_t head_dim, Range seen,
                float* scores) {
    int64_t key = seen.begin / kLanes * kLanes;
    for (; key + (kVectors - 1) * kLanes < seen.end; key += kVectors * kLanes)
        score_block<ROWS, kVectors>(queries, padded_dim, keys + key, head_dim, scores + key);
    for (; key < seen.end; key += kLanes) score_block<ROWS, 1>(queries, padded_dim, keys + key, head_dim, scores + key);
}

template <int ROWS, typename V>
void add_rows(const float* weights, const V* const* values, int64_t padded_dim, Range seen, float* sums,
              int64_t stride) {
    int64_t dim = 0;
    for (; dim + kVectors * kLanes <= padded_dim; dim += kVectors * kLanes)
        add_block<ROWS, kVectors>(weights, values, dim, seen, sums, stride);
    for (; dim < padded_dim; dim += kLanes) add_block<ROWS, 1>(weights, values, dim, seen, sums, stride);
}

// Scores of up to kMaxBlockRows queries with the keys that one of them sees, [rows][kTile].
inline void score(int64_t rows, const float* queries, int64_t padded_dim, const float* keys, int64_t head_dim,
                  Range seen, float* scores) {
    switch (rows) {
        case 1: return score_rows<1>(queries, padded_dim, keys, head_dim, seen, scores);
        case 2: return score_rows<2>(queries, padded_dim, keys, head_dim, seen, scores);
        case 3: return score_rows<3>(queries, padded_dim, keys, head_dim, seen, scores);
        case 4: return score_rows<4>(queries, padded_dim, keys, head_dim, seen, scores);
        case 5: return score_rows<5>(queries, padded_dim, keys, head_dim, seen, scores);
        default: return score_rows<6>(queries, padded_dim, keys, head_dim, seen, scores);
    }
}

// Adds the values of the keys that one of the rows sees to sums [rows][stride], each with its weight.
template <typename V>
void add_values(int64_t rows, const float* weights, const V* const* values, int64_t padded_dim, Range seen, float* sums,
                int64_t stride) {
    switch (rows) {
        case 1: return add_rows<1>(weights, values, padded_dim, seen, sums, stride);
        case 2: return add_rows<2>(weights, values, padded_dim, seen, sums, stride);
        case 3: return add_rows<3>(weights, values, padded_dim, seen, sums, stride);
        case 4: return add_rows<4>(weights, values, padded_dim, seen, sums, stride);
        case 5: return add_rows<5>(weights, values, padded_dim, seen, sums, stride);
        default: return add_rows<6>(weights, values, padded_dim, seen, sums, stride);
    }
}

// cap * tanh(score / cap).
inline Floats capped(Floats scores, float cap) {
    const Floats size = scores < 0 ? -scores : scores;
    const Floats decay = exp_of_nonpositive(size * (-2 / cap));
    const Floats result = cap * ((1 - decay) / (1 + decay));
    return scores < 0 ? -result : result;
}

inline float exp_of_difference(float value, float reference) {
    return exp_of_nonpositive(broadcast(value - reference))[0];
}

// What is subtracted before exp: the largest score, or 0 where there is none yet.
inline float reference_for(float largest) { return largest == -kInfinity ? 0.0f : largest; }

inline float largest_of(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(read_as<__m512>(&values));
#else
    return largest_lane(values);
#endif
}

// Makes the scores of the keys in `computed` final: capped, and -infinity where a query does not see the key.
inline void cap_and_mask(float* scores, Range computed, Range seen, float soft_cap) {
    if (soft_cap > 0)
        for (int64_t key = computed.begin; key < computed.end; key += kLanes)
            store(scores + key, capped(load(scores + key), soft_cap));
    if (seen.begin <= computed.begin && seen.end >= computed.end) return;
    for (int64_t key = computed.begin; key < computed.end; ++key)
        if (key < seen.begin || key >= seen.end) scores[key] = -kInfinity;
}

// What rows of queries have of a split so far, one after the other: `dim` sums of values, kLanes parts of the sum of
// weights, the largest score (and room to the next vector).
struct States {
    float* data;
    int64_t dim;
    int64_t size() const { return dim + 2 * kLanes; }
    float* sums(int64_t row) const { return data + row * size(); }
    float* weights(int64_t row) const { return sums(row) + dim; }
    float& largest(int64_t row) const { return sums(row)[dim + kLanes]; }
    States from(int64_t row) const { return {sums(row), dim}; }
};

// Turns final scores [rows][kTile] of the keys in `computed`, whole vectors, into softmax weights, not yet divided and
// relative to the largest score so far, and brings what the rows have of earlier tiles to the same reference.
inline void weigh(int64_t rows, float* scores, Range computed, const States& states) {
    float before[kMaxBlockRows];
    for (int64_t row = 0; row < rows; ++row) {
        Floats top = broadcast(states.largest(row));
        for (int64_t key = computed.begin; key < computed.end; key += kLanes)
            top = maximum(load(scores + row * kTile + key), top);
        before[row] = states.largest(row);
        states.largest(row) = largest_of(top);
    }
    for (int64_t row = 0; row < rows; ++row) {
        const float largest = states.largest(row);
        const Floats reference = broadcast(reference_for(largest));
        Floats total = {};
        for (int64_t key = computed.begin; key < computed.end; key += kLanes) {
            const Floats weights = exp_of_nonpositive(load(scores + row * kTile + key) - reference);
            store(scores + row * kTile + key, weights);
            total += weights;
        }
        float* sums = states.sums(row);
        if (largest != before[row]) {
            const float factor = exp_of_difference(before[row], reference[0]);
            for (int64_t i = 0; i < states.dim + kLanes; i += kLanes) store(sums + i, load(sums + i) * factor);
        }
        store(states.weights(row), load(states.weights(row)) + total);
    }
}

}  // namespace
