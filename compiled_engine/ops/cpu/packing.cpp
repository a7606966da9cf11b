// Packing weights into the layout of packed_weight.h, and back.
#include "block_numbers.h"
#include "threads.h"

#include <algorithm>
#include <vector>

namespace {

// Rows of a weight as they come: numbers (row_stride elements apart), or codes with scales (dense). See packing.py.
struct PartSource {
    Storage storage;
    ElementType scale_type;
    const uint8_t *numbers, *scales, *offsets;
    int64_t rows, row_stride, group_size;
};

// Writes rows [rows][count], row_stride elements apart, as [count][kBlockColumns]; missing columns are zero.
template <typename T>
void transpose(const T* from, int64_t row_stride, int64_t rows, int64_t count, T* to) {
    constexpr int64_t kTile = 64;
    for (int64_t begin = 0; begin < count; begin += kTile) {
        const int64_t end = std::min(count, begin + kTile);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t k = begin; k < end; ++k) to[k * kBlockColumns + row] = from[row * row_stride + k];
        if (rows < kBlockColumns)
            for (int64_t k = begin; k < end; ++k)
                std::fill(to + k * kBlockColumns + rows, to + (k + 1) * kBlockColumns, T{});
    }
}

void transpose_pairs(const uint16_t* from, int64_t row_stride, int64_t rows, int64_t count, uint8_t* to) {
    constexpr int64_t kTile = 64;
    for (int64_t begin = 0; begin < count; begin += kTile) {
        const int64_t end = std::min(count, begin + kTile);
        for (int64_t row = 0; row < kBlockColumns; ++row)
            for (int64_t k = begin; k < end; k += 2) {
                const uint16_t* number = from + row * row_stride + k;
                const uint16_t pair[2] = {row < rows ? number[0] : uint16_t{},
                                          row < rows && k + 1 < end ? number[1] : uint16_t{}};
                std::memcpy(to + (k / 2 * kBlockColumns + row) * sizeof(pair), pair, sizeof(pair));
            }
    }
}

// The codes in bytes 0, 2, 4 and 6 side by side.
inline uint32_t pack_even_codes(uint64_t codes) {
    codes &= 0x000f000f000f000f;
    codes = (codes | codes >> 12) & 0x000000ff000000ff;
    return static_cast<uint32_t>((codes | codes >> 24) & 0xffff);
}

// Eight codes of one byte each, the first in the lowest byte, as one word.
inline uint32_t pack_codes(uint64_t codes) { return pack_even_codes(codes) | pack_even_codes(codes >> 8) << 16; }

// As transpose, with a word for every kCodesPerWord codes.
void pack_words(const uint8_t* from, int64_t row_stride, int64_t rows, int64_t count, uint8_t* to) {
    constexpr int64_t kTile = 512;
    for (int64_t begin = 0; begin < count; begin += kTile) {
        const int64_t end = std::min(count, begin + kTile);
        for (int64_t row = 0; row < kBlockColumns; ++row)
            for (int64_t k = begin; k < end; k += kCodesPerWord) {
                uint64_t codes = 0;
                const uint8_t* place = from + row * row_stride + k;
                if (row < rows && k + kCodesPerWord <= end)
                    std::memcpy(&codes, place, kCodesPerWord);
                else if (row < rows)
                    for (int64_t j = 0; j < end - k; ++j) codes |= static_cast<uint64_t>(place[j]) << (8 * j);
                const uint32_t word = pack_codes(codes);
                std::memcpy(to + (k / kCodesPerWord * kBlockColumns + row) * sizeof(word), &word, sizeof(word));
            }
    }
}

// Scales or offsets of one group: a column of [rows][num_groups].
template <typename T>
void pack_scales(const T* from, int64_t num_groups, int64_t rows, T* to) {
    for (int64_t row = 0; row < kBlockColumns; ++row) to[row] = row < rows ? from[row * num_groups] : T{};
}

void pack_scales(ElementType type, const uint8_t* from, int64_t num_groups, int64_t index, int64_t rows, uint8_t* to) {
    if (type == ElementType::float16)
        pack_scales(reinterpret_cast<const uint16_t*>(from) + index, num_groups, rows, reinterpret_cast<uint16_t*>(to));
    else
        pack_scales(reinterpret_cast<const float*>(from) + index, num_groups, rows, reinterpret_cast<float*>(to));
}

// Rows first_row to first_row + rows of the part, quantised.
void pack_groups(const PartSource& source, const PackedPart& part, int64_t in_features, int64_t first_row, int64_t rows,
                 uint8_t* block) {
    const int64_t num_groups = in_features / part.group_size;
    const int64_t scale_size = part.scale_type == ElementType::float16 ? 2 : 4;
    const int64_t first_scale = first_row * num_groups * scale_size;
    for (int64_t index = 0; index < num_groups; ++index, block += part.group_bytes) {
        pack_scales(part.scale_type, source.scales + first_scale, num_groups, index, rows, block);
        if (part.has_offsets)
            pack_scales(part.scale_type, source.offsets + first_scale, num_groups, index, rows,
                        block + scale_bytes(part));
        const uint8_t* codes = source.numbers + first_row * source.row_stride + index * part.group_size;
        if (part.storage == Storage::int8)
            transpose(codes, source.row_stride, rows, part.group_size, block + codes_offset(part));
        else
            pack_words(codes, source.row_stride, rows, part.group_size, block + codes_offset(part));
    }
}

void pack_block(const PartSource& source, const PackedPart& part, int64_t in_features, int64_t index, uint8_t* block) {
    const int64_t first_row = index * kBlockColumns, rows = std::min(kBlockColumns, part.rows - first_row);
    const int64_t first = first_row * source.row_stride;
    switch (part.storage) {
        case Storage::float32:
            return transpose(reinterpret_cast<const float*>(source.numbers) + first, source.row_stride, rows,
                             in_features, reinterpret_cast<float*>(block));
        case Storage::bfloat16:
            return transpose_pairs(reinterpret_cast<const uint16_t*>(source.numbers) + first, source.row_stride, rows,
                                   in_features, block);
        case Storage::float16:
            return transpose(reinterpret_cast<const uint16_t*>(source.numbers) + first, source.row_stride, rows,
                             in_features, reinterpret_cast<uint16_t*>(block));
        default: return pack_groups(source, part, in_features, first_row, rows, block);
    }
}

std::vector<PackedPart> lay_out(const PartSource* sources, int64_t num_parts, int64_t in_features,
                                PackedHeader* header) {
    std::vector<PackedPart> parts;
    *header = {kPackedMagic, static_cast<int32_t>(num_parts), in_features, 0, 0, 0, 0, {}};
    header->num_bytes = sizeof(PackedHeader) + num_parts * sizeof(PackedPart);
    for (int64_t index = 0; index < num_parts; ++index) {
        const PartSource& source = sources[index];
        PackedPart part{source.storage, source.scale_type, source.offsets != nullptr, 0, header->out_features,
                        source.rows, is_quantized(source.storage) ? source.group_size : in_features,
                        header->num_bytes, 0, 0};
        part.group_bytes = codes_offset(part) + code_bytes(part.storage, part.group_size);
        part.block_bytes = in_features / part.group_size * part.group_bytes;
        header->out_features += part.rows;
        header->num_blocks += num_blocks(part);
        header->num_bytes += round_up(num_blocks(part) * part.block_bytes, kBufferAlignment);
        parts.push_back(part);
    }
    return parts;
}

// packed: a buffer whose header and parts are written.
bool halves_match(const uint8_t* packed, const PackedHeader& header) {
    if (header.num_blocks % 2 || header.out_features % 2) return false;
    for (int64_t index = 0; index < header.num_blocks / 2; ++index) {
        const Block first = find_block(packed, index), second = find_block(packed, index + header.num_blocks / 2);
        if (second.first_row - first.first_row != header.out_features / 2 || second.rows != first.rows) return false;
    }
    return true;
}

}  // namespace

// Returns the bytes that the packed weight takes; writes it only if these are num_bytes, what out has room for. out is
// aligned to kBufferAlignment.
extern "C" int64_t pack_weight(const PartSource* sources, int64_t num_parts, int64_t in_features, uint8_t* out,
                               int64_t num_bytes) {
    PackedHeader header;
    const std::vector<PackedPart> parts = lay_out(sources, num_parts, in_features, &header);
    if (header.num_bytes != num_bytes) return header.num_bytes;
    std::memcpy(out + sizeof(header), parts.data(), parts.size() * sizeof(PackedPart));
    header.halves_match = halves_match(out, header);
    std::memcpy(out, &header, sizeof(header));
    for (int64_t index = 0; index < num_parts; ++index) {
        const PackedPart& part = parts[index];
        uint8_t* data = out + part.data_offset;
        const int64_t used = num_blocks(part) * part.block_bytes;
        share_out(num_blocks(part), num_threads(), [&](int64_t block) {
            pack_block(sources[index], part, in_features, block, data + block * part.block_bytes);
        });
        std::memset(data + used, 0, round_up(used, kBufferAlignment) - used);
    }
    return header.num_bytes;
}

// out: float [out_features, in_features].
extern "C" void unpack_weight(const uint8_t* packed, float* out) {
    const PackedHeader header = read_header(packed);
    share_out(header.num_blocks, num_threads(), [&](int64_t index) {
        std::vector<float> floats(header.in_features * kBlockColumns);
        const Block block = find_block(packed, index);
        block_to_floats(block.part, block.data, 0, header.in_features, floats.data());
        for (int64_t row = 0; row < block.rows; ++row)
            for (int64_t k = 0; k < header.in_features; ++k)
                out[(block.first_row + row) * header.in_features + k] = floats[k * kBlockColumns + row];
    });
}
