// A weight [out_features, in_features] in the layout that packed_linear streams, in one buffer aligned to 64 bytes.
//
// The buffer begins with a PackedHeader and one PackedPart for every range of rows that has a storage of its own.
// A part is cut into blocks of kBlockColumns rows of the weight, which are columns of the product; missing rows of the
// last block are zeros. A block lies in memory in the order in which it is read, k (the input feature) outermost:
//
//   float32, float16   [k][column]
//   bfloat16           [k / 2][column][2]; a missing last k is zero
//   int8, int4         per group of k: scales [column], offsets [column] if the part has them, codes
//                      codes of int8: [k][column]; codes of int4: a 32-bit word holds 8 neighbouring k of a column, k =
//                      0, 2, 4, 6 from its lowest bits on and 1, 3, 5, 7 from bit 16 on: [k / 8][column], missing last
//                      codes are zero
#pragma once

#include "numbers.h"

namespace {

constexpr int64_t kBlockColumns = 32, kCodesPerWord = 8, kBufferAlignment = 64;
// A group of k is a multiple of this many, or all of a row.
constexpr int64_t kGroupUnit = 16;
constexpr uint32_t kPackedMagic = 0x32575043;

enum class Storage : int32_t { float32 = 0, bfloat16 = 1, float16 = 2, int8 = 3, int4 = 4 };
constexpr int kNumStorages = 5;

// The element_type of the C ABI, and the type of scales and offsets.
enum class ElementType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

struct PackedHeader {
    uint32_t magic;
    int32_t num_parts;
    int64_t in_features, out_features, num_blocks, num_bytes;
    // Whether both halves of the rows are cut into blocks alike, so that one can be the gate of the other.
    int64_t halves_match;
    int64_t unused[2];
};

struct PackedPart {
    Storage storage;
    ElementType scale_type;
    int32_t has_offsets, unused;
    // group_size: input features that share a scale; in_features where there are no scales.
    int64_t first_row, rows, group_size;
    // data_offset: from the start of the buffer. A block is num_groups groups of group_bytes.
    int64_t data_offset, group_bytes, block_bytes;
};

static_assert(sizeof(PackedHeader) == 64 && sizeof(PackedPart) == 64, "the layout of the buffer");

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
inline int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

inline bool is_quantized(Storage storage) { return storage == Storage::int8 || storage == Storage::int4; }

// Bytes of scales, or of offsets, of one group of a block.
inline int64_t scale_bytes(const PackedPart& part) {
    return kBlockColumns * (part.scale_type == ElementType::float16 ? 2 : 4);
}

inline int64_t codes_offset(const PackedPart& part) {
    return is_quantized(part.storage) ? scale_bytes(part) * (part.has_offsets ? 2 : 1) : 0;
}

inline int64_t code_bytes(Storage storage, int64_t count) {
    switch (storage) {
        case Storage::float32: return count * kBlockColumns * 4;
        case Storage::bfloat16: return round_up(count, 2) * kBlockColumns * 2;
        case Storage::float16: return count * kBlockColumns * 2;
        case Storage::int8: return count * kBlockColumns;
        default: return divide_up(count, kCodesPerWord) * kBlockColumns * 4;
    }
}

inline int64_t num_blocks(const PackedPart& part) { return divide_up(part.rows, kBlockColumns); }

inline PackedHeader read_header(const uint8_t* packed) { return read_as<PackedHeader>(packed); }
inline PackedPart read_part(const uint8_t* packed, int64_t index) {
    return read_as<PackedPart>(packed + sizeof(PackedHeader) + index * sizeof(PackedPart));
}

// One block: where it lies, and the rows of the weight in it.
struct Block {
    PackedPart part;
    int64_t part_index;
    const uint8_t* data;
    int64_t first_row, rows;
};

inline Block find_block(const uint8_t* packed, int64_t index) {
    PackedPart part = read_part(packed, 0);
    int64_t part_index = 0;
    while (index >= num_blocks(part)) {
        index -= num_blocks(part);
        part = read_part(packed, ++part_index);
    }
    const int64_t row = index * kBlockColumns, left = part.rows - row;
    return {part, part_index, packed + part.data_offset + index * part.block_bytes, part.first_row + row,
            left < kBlockColumns ? left : kBlockColumns};
}

}  // namespace
