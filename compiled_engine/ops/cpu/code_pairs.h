// The codes of a quantised block as pairs of bfloat16, which holds them exactly: 4 bits as -8 to 7, 8 bits as they are.
#pragma once

#include "block_numbers.h"

#if defined(__AVX512BF16__)

namespace {

// The lowest four bits of both halves of words.
class LowestCodePairs {
public:
    LowestCodePairs() {
        bfloat16 codes[2 * kLanes];
        for (int index = 0; index < 2 * kLanes; ++index) codes[index] = from_float<bfloat16>(index % 16 - 8);
        table_ = read_as<__m512i>(codes);
    }
    // A permutation looks at the lowest five bits, and the table repeats itself.
    Words of(Words words) const {
        return reinterpret_cast<Words>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(words), table_));
    }

private:
    __m512i table_;
};

// The low half is first, the high half second. Such small whole numbers have no bits in a float's lower half.
inline Words code_pair(Floats first, Floats second) {
    return read_as<Words>(&first) >> 16 | read_as<Words>(&second);
}

// Readers of codes.
// read: calls sink.add(j, w0, w1) with two vectors of pairs for every two neighbouring k, j = 0, 2, 4, 6 in turn, and
// sink.advance() after every eighth k. codes: a group's; begin, end: k of the group. In place of missing last k there
// may be any codes.
// scales: of a group, as they count for these codes.
class Int4Pairs {
public:
    template <typename Sink>
    inline __attribute__((always_inline)) void read(const uint8_t* codes, int64_t begin, int64_t end,
                                                    Sink& sink) const {
        const uint8_t* data = codes + begin / kCodesPerWord * kBlockColumns * 4;
        for (int64_t k = begin; k < end; k += kStep, data += kBlockColumns * 4) {
            const Words words[2] = {read_as<Words>(data), read_as<Words>(data + 4 * kLanes)};
#pragma GCC unroll 4
            for (int64_t j = 0; j < kStep; j += 2)
                sink.add(j, lowest_.of(words[0] >> 2 * j), lowest_.of(words[1] >> 2 * j));
            sink.advance();
        }
    }

    // What is stored is 8 more than these codes. Without offsets that is what is meant.
    Scales scales(const PackedPart& part, const uint8_t* group) const {
        Scales scales = read_scales(part, group, 0);
        for (int i = 0; i < 2; ++i) scales.offset[i] = multiply_add(broadcast(8.0f), scales.scale[i], scales.offset[i]);
        return scales;
    }

private:
    LowestCodePairs lowest_;
};

struct Int8Pairs {
    Scales scales(const PackedPart& part, const uint8_t* group) const { return read_scales(part, group, 0); }

    template <typename Sink>
    inline __attribute__((always_inline)) void read(const uint8_t* codes, int64_t begin, int64_t end,
                                                    Sink& sink) const {
        const int8_t* data = reinterpret_cast<const int8_t*>(codes) + begin * kBlockColumns;
        for (int64_t k = begin; k < end; k += kStep) {
            const int64_t now = end - k < kStep ? end - k : kStep;
            for (int64_t j = 0; j < now; j += 2, data += 2 * kBlockColumns) {
                // The last pair of an odd count has the last code twice.
                const int8_t* second = data + (j + 1 < now ? kBlockColumns : 0);
                sink.add(j, code_pair(load(data), load(second)), code_pair(load(data + kLanes), load(second + kLanes)));
            }
            sink.advance();
        }
    }
};

}  // namespace

#endif
