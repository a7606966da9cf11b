// x W^T from a packed weight (packed_weight.h), with bias, activation and residual.
//
// Every number of the product is a sum over k in one fixed order: chunks of kChunk are summed from zero with one fused
// multiply-add per k, and the sums of the chunks are added in order. It depends on nothing but the row, the weight's
// numbers and the machine's instructions: not on the other rows, the number of threads, or how the numbers are stored.
//
// One exception: machines with AVX512_BF16 multiply bfloat16 input as it is with weights that are stored as bfloat16
// and with the codes of quantised ones, at twice the speed, with one instruction per pair of k. Its sums are rounded in
// another order, and scales and offsets are applied to the sums of groups (multiply_codes in tile.h), so that such a
// weight gives other last bits than the same numbers in another storage.
#include "activations.h"
#include "packed_input.h"
#include "threads.h"

#include <algorithm>
#include <limits>
#include <type_traits>

namespace {

// How far ahead of its use a packed weight is fetched when it streams by.
constexpr int64_t kPrefetchDistance = 3072;
// Panels of one task: their input for a chunk and their sums stay in the second-level cache.
constexpr int64_t kMaxGroupPanels = 192 / kMaxPanelRows;
// Units of one task share the input that is in that cache; there are enough tasks for threads to end together.
constexpr int64_t kMaxTaskUnits = 4, kTasksPerThread = 8;
// Most rows that are multiplied straight from the packed numbers: making those takes registers too.
constexpr int64_t kMaxFewRows = kMaxPanelRows == 12 ? 12 : 4;

struct Call {
    InputRows input;
    const uint8_t* packed;
    const void *bias, *residual;
    int64_t residual_row_stride;
    void* out;
    Activation activation;
    PackedHeader header;

    bool gated() const { return is_gated(activation); }
    // Blocks whose columns become one block of columns of out: one, or a gate and what it multiplies.
    int64_t blocks_per_unit() const { return gated() ? 2 : 1; }
    int64_t num_units() const { return header.num_blocks / blocks_per_unit(); }
    int64_t out_columns() const { return header.out_features / blocks_per_unit(); }
};

// Part of a row of bias or residual as floats; zeros where there is none.
template <typename T>
inline void load_columns(const void* from, int64_t first, int64_t count, float* to) {
    if (from == nullptr) {
        std::fill(to, to + kBlockColumns, 0.0f);
    } else if (count == kBlockColumns) {
        for (int64_t column = 0; column < kBlockColumns; column += kLanes)
            store(to + column, load(static_cast<const T*>(from) + first + column));
    } else {
        for (int64_t column = 0; column < kBlockColumns; ++column)
            to[column] = column < count ? to_float(static_cast<const T*>(from)[first + column]) : 0.0f;
    }
}

template <typename T>
inline void store_columns(const float* from, int64_t count, T* to) {
    if (count == kBlockColumns) {
        for (int64_t column = 0; column < kBlockColumns; column += kLanes) store(to + column, load(from + column));
    } else {
        for (int64_t column = 0; column < count; ++column) to[column] = from_float<T>(from[column]);
    }
}

// Sums [blocks_per_unit][rows][kBlockColumns] to numbers of out.
template <typename T>
void finish(const Call& call, const Block* blocks, const Panel& panel, float* sums) {
    const Block& block = blocks[0];
    const Activation activation = without_gate(call.activation);
    float bias[2][kBlockColumns], residual[kBlockColumns];
    for (int64_t i = 0; i < call.blocks_per_unit(); ++i)
        load_columns<T>(call.bias, blocks[i].first_row, block.rows, bias[i]);
    for (int64_t row = 0; row < panel.rows; ++row) {
        float* first = sums + row * kBlockColumns;
        const float* second = first + panel.rows * kBlockColumns;
        const int64_t out_row = panel.first_row + row;
        if (call.residual != nullptr)
            load_columns<T>(static_cast<const T*>(call.residual) + out_row * call.residual_row_stride, block.first_row,
                            block.rows, residual);
        for (int64_t column = 0; column < kBlockColumns; column += kLanes) {
            Floats y = load(first + column);
            if (call.bias != nullptr) y += load(bias[0] + column);
            y = activate(activation, y);
            if (call.gated()) {
                Floats up = load(second + column);
                if (call.bias != nullptr) up += load(bias[1] + column);
                y *= up;
            }
            if (call.residual != nullptr) y += load(residual + column);
            store(first + column, y);
        }
        store_columns(first, block.rows,
                      static_cast<T*>(call.out) + out_row * call.out_columns() + block.first_row);
    }
}

// The blocks of a unit.
void find_blocks(const Call& call, int64_t unit, Block* blocks) {
    for (int64_t i = 0; i < call.blocks_per_unit(); ++i)
        blocks[i] = find_block(call.packed, unit + i * call.num_units());
}

// A block times one panel.
template <typename Element>
void multiply_block(const Block& block, const Panel& panel, const PackedInput<Element>& input,
                    const InputSums& input_sums, float* sums) {
    const int64_t in_features = input.in_features;
    const MultiplyTile<Element> multiply = tile_function<Element>(block.part.storage, panel.rows);
    const int64_t bytes_per_step = divide_up(block.part.block_bytes * kStep, in_features);
    for (int64_t k = 0; k < in_features; k += kChunk) {
        const uint8_t* ahead = block.data + block.part.block_bytes * k / in_features + kPrefetchDistance;
        multiply({block.part, block.data, k, std::min(in_features, k + kChunk), input.at(panel, k), sums, k == 0,
                  input_sums.at(block.part, block.part_index, panel, k), {ahead, bytes_per_step}});
    }
}

// One panel: numbers are made in registers from the packed ones as they stream by.
template <typename T>
void few_rows(const Call& call, int64_t unit, const PackedInputs& inputs) {
    const Panel panel{0, call.input.num_rows};
    Block blocks[2];
    find_blocks(call, unit, blocks);
    alignas(kBufferAlignment) float sums[2 * kMaxPanelRows * kBlockColumns];
    for (int64_t i = 0; i < call.blocks_per_unit(); ++i)
        with_input<T>(blocks[i].part, inputs, [&](const auto& input) {
            multiply_block(blocks[i], panel, input, inputs.sums, sums + i * panel.rows * kBlockColumns);
        });
    finish<T>(call, blocks, panel, sums);
}

// Units and panels that are computed together.
struct Task {
    int64_t first_unit, num_units, first_panel, last_panel, first_row, num_rows;

    // Of the block and the unit that hold it among the task's sums, [unit][panel][block][row][kBlockColumns].
    int64_t first_sum(int64_t unit, const Panel& panel, int64_t block, int64_t num_blocks) const {
        return (num_blocks * (unit * num_rows + panel.first_row - first_row) + block * panel.rows) * kBlockColumns;
    }
};

Task make_task(int64_t first_unit, int64_t last_unit, int64_t first_panel, int64_t last_panel, int64_t num_rows) {
    const int64_t first_row = panel_at(first_panel, num_rows).first_row;
    const Panel last = panel_at(last_panel - 1, num_rows);
    return {first_unit, last_unit - first_unit, first_panel, last_panel, first_row,
            last.first_row + last.rows - first_row};
}

// Numbers of a weight from begin to end of what is at data.
struct Numbers {
    Storage storage;
    const uint8_t* data;
    int64_t begin, end;
};

// The numbers of a chunk of a block as tiles for many panels read them: in place, or made as floats in a buffer.
template <typename Element>
Numbers chunk_numbers(const Block& block, int64_t begin, int64_t end, float* buffer) {
    const Storage storage = block.part.storage;
    if (std::is_same_v<Element, bfloat16> || storage == Storage::float32) return {storage, block.data, begin, end};
    block_to_floats(block.part, block.data, begin, end, buffer);
    return {Storage::float32, reinterpret_cast<const uint8_t*>(buffer), 0, end - begin};
}

// A chunk of a block, from begin to end, times the task's panels. sums_of(panel): where its sums are.
template <typename Element, typename SumsOf>
void multiply_chunk(const Block& block, int64_t begin, int64_t end, const Task& task, const PackedInput<Element>& input,
                    const InputSums& input_sums, float* buffer, const SumsOf& sums_of) {
    const int64_t in_features = input.in_features, steps = divide_up(end - begin, kStep);
    const Numbers numbers = chunk_numbers<Element>(block, begin, end, buffer);
    const int64_t bytes = block.part.block_bytes * (end - begin) / in_features;
    Prefetch prefetch{block.data + block.part.block_bytes * end / in_features,
                      divide_up(bytes, steps * (task.last_panel - task.first_panel))};
    for (int64_t index = task.first_panel; index < task.last_panel; ++index) {
        const Panel panel = panel_at(index, input.num_rows);
        tile_function<Element>(numbers.storage, panel.rows)(
            {block.part, numbers.data, numbers.begin, numbers.end, input.at(panel, begin), sums_of(panel), begin == 0,
             input_sums.at(block.part, block.part_index, panel, begin), prefetch});
        prefetch.next += prefetch.bytes_per_step * steps;
    }
}

// Many panels: the numbers of a chunk are made once for all of them, and the block's next chunk is fetched meanwhile.
template <typename T>
void many_rows(const Call& call, const Task& task, const PackedInputs& inputs, Scratch& scratch) {
    const int64_t in_features = call.header.in_features, num_blocks = call.blocks_per_unit();
    float* buffer = scratch.floats((kChunk + task.num_units * num_blocks * task.num_rows) * kBlockColumns);
    float* sums = buffer + kChunk * kBlockColumns;
    for (int64_t k = 0; k < in_features; k += kChunk) {
        const int64_t end = std::min(in_features, k + kChunk);
        for (int64_t unit = 0; unit < task.num_units; ++unit) {
            Block blocks[2];
            find_blocks(call, task.first_unit + unit, blocks);
            for (int64_t i = 0; i < num_blocks; ++i)
                with_input<T>(blocks[i].part, inputs, [&](const auto& input) {
                    multiply_chunk(blocks[i], k, end, task, input, inputs.sums, buffer, [&](const Panel& panel) {
                        return sums + task.first_sum(unit, panel, i, num_blocks);
                    });
                });
            if (end < in_features) continue;
            for (int64_t index = task.first_panel; index < task.last_panel; ++index) {
                const Panel panel = panel_at(index, call.input.num_rows);
                finish<T>(call, blocks, panel, sums + task.first_sum(unit, panel, 0, num_blocks));
            }
        }
    }
}

thread_local Scratch input_scratch, block_scratch;

template <typename T>
void linear_of_few_rows(const Call& call, int threads) {
    const int64_t num_units = call.num_units();
    // Whole runs of units, so that what is fetched ahead is used; several per thread, so that none waits long.
    const int64_t pieces_per_thread = std::min<int64_t>(8, divide_up(num_units, 5 * threads));
    const int64_t units_per_piece = divide_up(num_units, threads * pieces_per_thread);
    const PackedInputs inputs = make_inputs<T>(call.input, call.packed, input_scratch);
    pack_panel<T>(call.input, Panel{0, call.input.num_rows}, call.packed, inputs);
    share_out_ranges(num_units, units_per_piece, threads, [&](int64_t first, int64_t last) {
        for (int64_t unit = first; unit < last; ++unit) few_rows<T>(call, unit, inputs);
    });
}

template <typename T>
void linear_of_many_rows(const Call& call, int threads) {
    const PackedInputs inputs = make_inputs<T>(call.input, call.packed, input_scratch);
    const int64_t panels = num_panels(call.input.num_rows), num_groups = divide_up(panels, kMaxGroupPanels);
    const int64_t num_units = call.num_units();
    const int64_t units_per_task =
        std::clamp<int64_t>(num_units * num_groups / (threads * kTasksPerThread), 1, kMaxTaskUnits);
    const int64_t num_tasks = divide_up(num_units, units_per_task) * num_groups;
    share_out(panels, threads, [&](int64_t index) {
        pack_panel<T>(call.input, panel_at(index, call.input.num_rows), call.packed, inputs);
    });
    share_out(num_tasks, threads, [&](int64_t index) {
        // Tasks with the same weights follow one another.
        const int64_t unit = index / num_groups * units_per_task, group = index % num_groups;
        many_rows<T>(call,
                     make_task(unit, std::min(num_units, unit + units_per_task), panels * group / num_groups,
                               panels * (group + 1) / num_groups, call.input.num_rows),
                     inputs, block_scratch);
    });
}

// Below this much work one thread is done before another has woken up.
constexpr int64_t kSmallBytes = 32 << 10, kSmallProducts = 128 << 10;

template <typename T>
void linear(const Call& call) {
    // Callers check this; what does not is told by every number.
    if (call.gated() && !call.header.halves_match) {
        std::fill_n(static_cast<T*>(call.out), call.input.num_rows * call.out_columns(),
                    from_float<T>(std::numeric_limits<float>::quiet_NaN()));
        return;
    }
    const int64_t products = call.input.num_rows * call.header.in_features * call.header.out_features;
    const bool is_small = call.header.num_bytes < kSmallBytes && products < kSmallProducts;
    const int threads = is_small ? 1 : num_threads();
    if (call.input.num_rows <= kMaxFewRows)
        linear_of_few_rows<T>(call, threads);
    else
        linear_of_many_rows<T>(call, threads);
}

}  // namespace

extern "C" void packed_linear(const void* input, int64_t input_row_stride, int64_t num_rows, int32_t element_type,
                              const uint8_t* packed_weight, const void* bias, const void* residual,
                              int64_t residual_row_stride, void* out, int64_t activation) {
    if (num_rows == 0) return;
    const PackedHeader header = read_header(packed_weight);
    const Call call{{input, input_row_stride, num_rows, header.in_features},
                    packed_weight,
                    bias,
                    residual,
                    residual_row_stride,
                    out,
                    static_cast<Activation>(activation),
                    header};
    switch (static_cast<ElementType>(element_type)) {
        case ElementType::float32: return linear<float>(call);
        case ElementType::bfloat16: return linear<bfloat16>(call);
        case ElementType::float16: return linear<float16>(call);
    }
}
