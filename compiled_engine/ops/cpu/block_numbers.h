// Reading the numbers of a packed block as floats, in the order of k.
#pragma once

#include "packed_weight.h"

namespace {

// Inner loops run over this many neighbouring k. A chunk of k begins at a multiple of it.
constexpr int64_t kStep = 8;
// Columns that are read at once: two vectors.
constexpr int64_t kTileColumns = 2 * kLanes;
static_assert(kBlockColumns % kTileColumns == 0, "a block is whole tiles");

// a * b + c with one rounding where the machine has such an instruction.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// code * scale + offset with one rounding on every machine.
inline Floats scaled(Floats codes, Floats scale, Floats offset) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
    return multiply_add(codes, scale, offset);
#else
    Floats numbers;
    for (int lane = 0; lane < kLanes; ++lane)
        numbers[lane] = static_cast<float>(static_cast<double>(codes[lane]) * scale[lane] + offset[lane]);
    return numbers;
#endif
}

// Calls sink.add(j, w0, w1) with two vectors of columns for every k, j = 0..7 in turn, and sink.advance() after every
// eighth. data: the first of the tile's columns at the first k.
template <typename Sink>
inline __attribute__((always_inline)) void read_numbers(const float* data, int64_t count, Sink& sink) {
    for (; count > 0; count -= kStep) {
        const int64_t now = count < kStep ? count : kStep;
        for (int64_t j = 0; j < now; ++j, data += kBlockColumns) sink.add(j, load(data), load(data + kLanes));
        sink.advance();
    }
}

template <typename Sink>
inline __attribute__((always_inline)) void read_numbers(const float16* data, int64_t count, Sink& sink) {
    for (; count > 0; count -= kStep) {
        const int64_t now = count < kStep ? count : kStep;
        for (int64_t j = 0; j < now; ++j, data += kBlockColumns) sink.add(j, load(data), load(data + kLanes));
        sink.advance();
    }
}

inline Floats even_of_pair(Words pairs) {
    const Words wide = pairs << 16;
    return read_as<Floats>(&wide);
}
inline Floats odd_of_pair(Words pairs) {
    const Words wide = pairs & 0xffff0000u;
    return read_as<Floats>(&wide);
}

template <typename Sink>
inline __attribute__((always_inline)) void read_numbers(const bfloat16* data, int64_t count, Sink& sink) {
    for (; count > 0; count -= kStep) {
        const int64_t now = count < kStep ? count : kStep;
        for (int64_t j = 0; j < now; j += 2, data += 2 * kBlockColumns) {
            const Words first = read_as<Words>(data), second = read_as<Words>(data + 2 * kLanes);
            sink.add(j, even_of_pair(first), even_of_pair(second));
            if (j + 1 < now) sink.add(j + 1, odd_of_pair(first), odd_of_pair(second));
        }
        sink.advance();
    }
}

// The pairs of columns from column on at an even k of a block of bfloat16.
inline const bfloat16* pairs_of(const uint8_t* block, int64_t column, int64_t k) {
    return reinterpret_cast<const bfloat16*>(block) + k * kBlockColumns + 2 * column;
}

// Calls sink.add(j, w0, w1) with two vectors of pairs for every two neighbouring k, j = 0, 2, 4, 6 in turn, and
// sink.advance() after every eighth k. The last pair of an odd count has a zero.
template <typename Sink>
inline __attribute__((always_inline)) void read_pairs(const bfloat16* data, int64_t count, Sink& sink) {
    for (; count > 0; count -= kStep) {
        const int64_t now = count < kStep ? count : kStep;
        for (int64_t j = 0; j < now; j += 2, data += 2 * kBlockColumns)
            sink.add(j, read_as<Words>(data), read_as<Words>(data + 2 * kLanes));
        sink.advance();
    }
}

// The k from begin to end, all of one group.
struct Span {
    int64_t group, begin, end;
};

// Cuts the k from begin to end where groups end.
template <typename Use>
inline __attribute__((always_inline)) void for_each_span(const PackedPart& part, int64_t begin, int64_t end,
                                                         const Use& use) {
    for (int64_t group = begin / part.group_size; begin < end; ++group) {
        const int64_t group_end = (group + 1) * part.group_size, last = group_end < end ? group_end : end;
        use(Span{group, begin, last});
        begin = last;
    }
}

struct Scales {
    Floats scale[2], offset[2];
};

inline Scales read_scales(const PackedPart& part, const uint8_t* group, int64_t column) {
    Scales scales{};
    const int64_t bytes = scale_bytes(part);
    for (int i = 0; i < 2; ++i, column += kLanes) {
        if (part.scale_type == ElementType::float16) {
            scales.scale[i] = load(reinterpret_cast<const float16*>(group) + column);
            if (part.has_offsets) scales.offset[i] = load(reinterpret_cast<const float16*>(group + bytes) + column);
        } else {
            scales.scale[i] = load(reinterpret_cast<const float*>(group) + column);
            if (part.has_offsets) scales.offset[i] = load(reinterpret_cast<const float*>(group + bytes) + column);
        }
    }
    return scales;
}

// The lowest four bits of words as a number: 0 to 15, or -8 to 7 where there are no offsets.
class LowestCodes {
public:
#if defined(__AVX512F__)
    explicit LowestCodes(const PackedPart& part) {
        for (int code = 0; code < 16; ++code) table_[code] = static_cast<float>(part.has_offsets ? code : code - 8);
    }
    // A permutation looks at the lowest four bits alone.
    Floats of(Words words) const { return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words), table_); }

private:
    Floats table_;
#else
    explicit LowestCodes(const PackedPart& part) : zero_(part.has_offsets ? 0.0f : 8.0f) {}
    Floats of(Words words) const {
        const Words codes = words & 15u;
        return __builtin_convertvector(read_as<Ints>(&codes), Floats) - zero_;
    }

private:
    float zero_;
#endif
};

template <typename Sink>
inline __attribute__((always_inline)) void read_words(const LowestCodes& lowest, const uint8_t* data, int64_t count,
                                                      const Scales& scales, Sink& sink) {
    for (; count > 0; count -= kStep, data += kBlockColumns * 4) {
        const int64_t now = count < kStep ? count : kStep;
        Words words[2] = {read_as<Words>(data), read_as<Words>(data + 4 * kLanes)};
        for (int64_t j = 0; j < now; j += 2) {
            sink.add(j, scaled(lowest.of(words[0]), scales.scale[0], scales.offset[0]),
                     scaled(lowest.of(words[1]), scales.scale[1], scales.offset[1]));
            if (j + 1 < now)
                sink.add(j + 1, scaled(lowest.of(words[0] >> 16), scales.scale[0], scales.offset[0]),
                         scaled(lowest.of(words[1] >> 16), scales.scale[1], scales.offset[1]));
            words[0] >>= 4;
            words[1] >>= 4;
        }
        sink.advance();
    }
}

template <typename Sink>
inline __attribute__((always_inline)) void read_bytes(const int8_t* data, int64_t count, const Scales& scales,
                                                      Sink& sink) {
    for (; count > 0; count -= kStep) {
        const int64_t now = count < kStep ? count : kStep;
        for (int64_t j = 0; j < now; ++j, data += kBlockColumns)
            sink.add(j, scaled(load(data), scales.scale[0], scales.offset[0]),
                     scaled(load(data + kLanes), scales.scale[1], scales.offset[1]));
        sink.advance();
    }
}

template <Storage storage, typename Sink>
inline __attribute__((always_inline)) void read_groups(const PackedPart& part, const uint8_t* block, int64_t column,
                                                       int64_t begin, int64_t end, Sink& sink) {
    const LowestCodes lowest(part);
    for_each_span(part, begin, end, [&](const Span& span) __attribute__((always_inline)) {
        const uint8_t* group = block + span.group * part.group_bytes;
        const uint8_t* codes = group + codes_offset(part);
        const int64_t first = span.begin - span.group * part.group_size, count = span.end - span.begin;
        const Scales scales = read_scales(part, group, column);
        if constexpr (storage == Storage::int8)
            read_bytes(reinterpret_cast<const int8_t*>(codes) + first * kBlockColumns + column, count, scales, sink);
        else
            read_words(lowest, codes + (first / kCodesPerWord * kBlockColumns + column) * 4, count, scales, sink);
    });
}

// Numbers of columns column to column + kTileColumns and of k from begin (a multiple of kStep) to end.
template <Storage storage, typename Sink>
inline __attribute__((always_inline)) void read_block(const PackedPart& part, const uint8_t* block, int64_t column,
                                                      int64_t begin, int64_t end, Sink& sink) {
    if constexpr (storage == Storage::float32)
        read_numbers(reinterpret_cast<const float*>(block) + begin * kBlockColumns + column, end - begin, sink);
    else if constexpr (storage == Storage::bfloat16)
        read_numbers(pairs_of(block, column, begin), end - begin, sink);
    else if constexpr (storage == Storage::float16)
        read_numbers(reinterpret_cast<const float16*>(block) + begin * kBlockColumns + column, end - begin, sink);
    else
        read_groups<storage>(part, block, column, begin, end, sink);
}

// Numbers as floats [k][kBlockColumns].
struct FloatSink {
    float* to;
    inline __attribute__((always_inline)) void add(int64_t j, Floats w0, Floats w1) {
        store(to + j * kBlockColumns, w0);
        store(to + j * kBlockColumns + kLanes, w1);
    }
    inline __attribute__((always_inline)) void advance() { to += kStep * kBlockColumns; }
};

template <Storage storage>
void block_to_floats(const PackedPart& part, const uint8_t* block, int64_t begin, int64_t end, float* to) {
    for (int64_t column = 0; column < kBlockColumns; column += kTileColumns) {
        FloatSink sink{to + column};
        read_block<storage>(part, block, column, begin, end, sink);
    }
}

// Writes the numbers of k from begin (a multiple of kStep) to end as floats [end - begin][kBlockColumns].
inline void block_to_floats(const PackedPart& part, const uint8_t* block, int64_t begin, int64_t end, float* to) {
    switch (part.storage) {
        case Storage::float32: return block_to_floats<Storage::float32>(part, block, begin, end, to);
        case Storage::bfloat16: return block_to_floats<Storage::bfloat16>(part, block, begin, end, to);
        case Storage::float16: return block_to_floats<Storage::float16>(part, block, begin, end, to);
        case Storage::int8: return block_to_floats<Storage::int8>(part, block, begin, end, to);
        case Storage::int4: return block_to_floats<Storage::int4>(part, block, begin, end, to);
    }
}

}  // namespace
