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
constexpr int kColumns = 4;  // words of each row that are turned into columns at a time
constexpr int kColumnVectors = kLanes == 16 ? 2 : 1;  // vectors of keys that are turned into columns at a time
constexpr int64_t kCacheLine = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(kTile % (kLanes * kVectors) == 0, "a tile is whole vectors");

// Where the keys and the values of a tile are, head_dim elements each; zeros in place of those that no query sees.
template <typename T>
struct TileRows {
    const T* keys[kTile];
    const T* values[kTile];
};

// Asks for a cache line of a row of the tile that comes next, at the place where this tile's row is being read: spread
// over the arithmetic, requests to memory do not wait for each other. Into the second level: two tiles fill the first.
template <typename T>
inline void prefetch_line(const T* row, int64_t dim) {
    if (dim % (kCacheLine / static_cast<int64_t>(sizeof(T))) == 0) __builtin_prefetch(row + dim, 0, 2);
}

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

// Reads kColumns 32-bit words of each of kLanes rows and gives their columns.
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
    // Masked broadcasts from memory, unlike inserts, leave the units that shuffle to the unpacking.
    const auto quarter = [&](int i) { return read_as<__m128>(rows[4 * i] + first); };
    Register all = _mm512_castps128_ps512(quarter(0));
    all = _mm512_mask_broadcast_f32x4(all, 0x00f0, quarter(1));
    all = _mm512_mask_broadcast_f32x4(all, 0x0f00, quarter(2));
    return _mm512_mask_broadcast_f32x4(all, 0xf000, quarter(3));
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
    // Part j holds rows j, j + 4, ...: unpacking goes on within quarters of 16 bytes and so puts rows in order.
    Register part[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) part[j] = gather_quarters(rows + j, first);
    const Register low01 = unpack_low(part[0], part[1]), high01 = unpack_high(part[0], part[1]);
    const Register low23 = unpack_low(part[2], part[3]), high23 = unpack_high(part[2], part[3]);
    columns[0] = low_pairs(low01, low23);
    columns[1] = high_pairs(low01, low23);
    columns[2] = low_pairs(high01, high23);
    columns[3] = high_pairs(high01, high23);
}
#else
template <typename T>
inline void load_columns(const T* const* rows, int64_t first, Words* columns) {
    for (int row = 0; row < kLanes; ++row)
        for (int column = 0; column < kColumns; ++column)
            columns[column][row] = read_as<uint32_t>(rows[row] + first + column * sizeof(Words) / sizeof(T) / kLanes);
}
#endif

// The numbers in a vector of words, one or two in each, as floats.
inline void split(Words words, const float*, Floats* parts) { parts[0] = read_as<Floats>(&words); }
inline void split(Words words, const bfloat16*, Floats* parts) {
    const Words low = words << 16, high = words & 0xffff0000u;
    parts[0] = read_as<Floats>(&low);
    parts[1] = read_as<Floats>(&high);
}
inline void split(Words words, const float16*, Floats* parts) {
    const HalfWords low = __builtin_convertvector(words & 0xffffu, HalfWords);
    const HalfWords high = __builtin_convertvector(words >> 16, HalfWords);
    float16 halves[2 * kLanes];
    std::memcpy(halves, &low, sizeof(low));
    std::memcpy(halves + kLanes, &high, sizeof(high));
    parts[0] = load(halves);
    parts[1] = load(halves + kLanes);
}

// Columns of kLanes rows as floats, those of a number of dimensions that fills kColumns words.
template <typename T>
struct Columns {
    static constexpr int parts = sizeof(uint32_t) / sizeof(T);
    static constexpr int count = kColumns * parts;
    Floats at[count];

    void read(const T* const* rows, int64_t dim) {
        Words words[kColumns];
        load_columns(rows, dim, words);
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i) split(words[i], rows[0], at + i * parts);
    }
};

// One dimension of kLanes rows.
template <typename T>
inline Floats read_column(const T* const* rows, int64_t dim) {
    float column[kLanes];
    for (int i = 0; i < kLanes; ++i) column[i] = to_float(rows[i][dim]);
    return load(column);
}

// Keys as floats [head_dim][kTile], those of the vectors that hold `seen`. `ahead`: the keys of the next tile.
template <typename T>
void pack_keys(const T* const* keys, const T* const* ahead, Range seen, int64_t head_dim, float* packed) {
    for (int64_t key = seen.begin / kLanes * kLanes; key < seen.end; key += kLanes) {
        int64_t dim = 0;
        for (; dim + Columns<T>::count <= head_dim; dim += Columns<T>::count) {
            for (int i = 0; i < kLanes; ++i) prefetch_line(ahead[key + i], dim);
            Columns<T> columns;
            columns.read(keys + key, dim);
            for (int i = 0; i < Columns<T>::count; ++i) store(packed + (dim + i) * kTile + key, columns.at[i]);
        }
        for (; dim < head_dim; ++dim) store(packed + dim * kTile + key, read_column(keys + key, dim));
    }
}

// Values as floats [kTile][padded_dim], those that are seen; what head_dim lacks to padded_dim is 0.
template <typename T>
void pack_values(const T* const* values, const T* const* ahead, Range seen, int64_t head_dim, int64_t padded_dim,
                 float* packed) {
    const int64_t whole = head_dim / kLanes * kLanes;
    for (int64_t key = seen.begin; key < seen.end; ++key) {
        float* row = packed + key * padded_dim;
        for (int64_t dim = 0; dim < whole; dim += kLanes) {
            prefetch_line(ahead[key], dim);
            store(row + dim, load(values[key] + dim));
        }
        for (int64_t dim = whole; dim < padded_dim; ++dim)
            row[dim] = dim < head_dim ? to_float(values[key][dim]) : 0.0f;
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

// The same of keys where they are cached, which become columns in registers: for one block of queries alone it would
// not pay to store them. `ahead`: the keys of the next tile.
template <int ROWS, int VECTORS, typename T>
inline void score_cached_block(const float* queries, int64_t padded_dim, const T* const* keys, const T* const* ahead,
                               int64_t head_dim, float* scores) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = Floats{};
    int64_t dim = 0;
    for (; dim + Columns<T>::count <= head_dim; dim += Columns<T>::count) {
#pragma GCC unroll 32
        for (int i = 0; i < VECTORS * kLanes; ++i) prefetch_line(ahead[i], dim);
        Columns<T> columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) columns[v].read(keys + v * kLanes, dim);
#pragma GCC unroll 8
        for (int i = 0; i < Columns<T>::count; ++i)
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const Floats query = broadcast(queries[row * padded_dim + dim + i]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) sums[row][v] += query * columns[v].at[i];
            }
    }
    for (; dim < head_dim; ++dim)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const Floats column = read_column(keys + v * kLanes, dim);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) sums[row][v] += broadcast(queries[row * padded_dim + dim]) * column;
        }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(scores + row * kTile + v * kLanes, sums[row][v]);
}

// Adds weights times values, keys of `seen` in order, to VECTORS vectors of each of ROWS sums. `ahead`: the values of
// the next tile, or null where `values` are packed.
template <int ROWS, int VECTORS, typename V>
inline void add_block(const float* weights, const V* const* values, const V* const* ahead, int64_t dim, Range seen,
                      float* sums, int64_t stride) {
    Floats total[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) total[row][v] = load(sums + row * stride + dim + v * kLanes);
    for (int64_t key = seen.begin; key < seen.end; ++key) {
        Floats value[VECTORS];
        if (ahead != nullptr) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) prefetch_line(ahead[key], dim + v * kLanes);
        }
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

template <int ROWS, typename T>
void score_cached_rows(const float* queries, int64_t padded_dim, const T* const* keys, const T* const* ahead,
                       int64_t head_dim, Range seen, float* scores) {
    constexpr int64_t step = kColumnVectors * kLanes;
    int64_t key = seen.begin / kLanes * kLanes;
    for (; key + step - kLanes < seen.end && key + step <= kTile; key += step)
        score_cached_block<ROWS, kColumnVectors>(queries, padded_dim, keys + key, ahead + key, head_dim, scores + key);
    for (; key < seen.end; key += kLanes)
        score_cached_block<ROWS, 1>(queries, padded_dim, keys + key, ahead + key, head_dim, scores + key);
}

template <int ROWS, typename V>
void add_rows(const float* weights, const V* const* values, const V* const* ahead, int64_t padded_dim, Range seen,
              float* sums, int64_t stride) {
    int64_t dim = 0;
    for (; dim + kVectors * kLanes <= padded_dim; dim += kVectors * kLanes)
        add_block<ROWS, kVectors>(weights, values, ahead, dim, seen, sums, stride);
    for (; dim < padded_dim; dim += kLanes) add_block<ROWS, 1>(weights, values, ahead, dim, seen, sums, stride);
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

// The same with keys where they are cached.
template <typename T>
void score_cached(int64_t rows, const float* queries, int64_t padded_dim, const T* const* keys, const T* const* ahead,
                  int64_t head_dim, Range seen, float* scores) {
    switch (rows) {
        case 1: return score_cached_rows<1>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
        case 2: return score_cached_rows<2>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
        case 3: return score_cached_rows<3>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
        case 4: return score_cached_rows<4>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
        case 5: return score_cached_rows<5>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
        default: return score_cached_rows<6>(queries, padded_dim, keys, ahead, head_dim, seen, scores);
    }
}

// Adds the values of the keys that one of the rows sees to sums [rows][stride], each with its weight.
template <typename V>
void add_values(int64_t rows, const float* weights, const V* const* values, const V* const* ahead, int64_t padded_dim,
                Range seen, float* sums, int64_t stride) {
    switch (rows) {
        case 1: return add_rows<1>(weights, values, ahead, padded_dim, seen, sums, stride);
        case 2: return add_rows<2>(weights, values, ahead, padded_dim, seen, sums, stride);
        case 3: return add_rows<3>(weights, values, ahead, padded_dim, seen, sums, stride);
        case 4: return add_rows<4>(weights, values, ahead, padded_dim, seen, sums, stride);
        case 5: return add_rows<5>(weights, values, ahead, padded_dim, seen, sums, stride);
        default: return add_rows<6>(weights, values, ahead, padded_dim, seen, sums, stride);
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
    Ints lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    for (int64_t key = computed.begin; key < computed.end; key += kLanes) {
        const Ints from_begin = lanes + static_cast<int32_t>(key - seen.begin);
        const Ints from_end = lanes + static_cast<int32_t>(key - seen.end);
        store(scores + key, (from_begin >= 0) & (from_end < 0) ? load(scores + key) : broadcast(-kInfinity));
    }
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
        // Rows that have seen nothing have sums of 0 already.
        if (largest != before[row] && before[row] != -kInfinity) {
            const float factor = exp_of_difference(before[row], reference[0]);
            for (int64_t i = 0; i < states.dim + kLanes; i += kLanes) store(sums + i, load(sums + i) * factor);
        }
        store(states.weights(row), load(states.weights(row)) + total);
    }
}

}  // namespace
