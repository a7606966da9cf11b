// x W^T from a packed weight (packed_weight.h), with bias, activation and residual.
//
// Every number of the product is a sum over k in one fixed order: chunks of kChunk are summed from zero with one fused
// multiply-add per k, and the sums of the chunks are added in order. It depends on nothing but the row, the weight's
// numbers and the machine's instructions: not on the other rows, the number of threads, or how the numbers are stored.
//
// One exception: machines with AVX512_BF16 multiply bfloat16 input and weights that are stored as bfloat16 as they are,
// at twice the speed, with one instruction per pair of k. Its sums are rounded in another order, so that such a weight
// gives other last bits than the same numbers in another storage.
#include "activations.h"
#include "threads.h"
#include "tile.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
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
    const void* input;
    int64_t input_row_stride, num_rows;
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

// Floats that grow when needed and stay for the next call of the same thread.
class Scratch {
public:
    float* floats(int64_t count) {
        if (count > size_) {
            data_.reset(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{kBufferAlignment})));
            size_ = count;
        }
        return data_.get();
    }

private:
    struct Free {
        void operator()(float* data) const { ::operator delete(data, std::align_val_t{kBufferAlignment}); }
    };
    std::unique_ptr<float, Free> data_;
    int64_t size_ = 0;
};

// Rows of the input that are multiplied together.
struct Panel {
    int64_t first_row, rows;
};

inline int64_t num_panels(int64_t num_rows) { return divide_up(num_rows, kMaxPanelRows); }

// The rows are shared out evenly among as few panels as can be.
Panel panel_at(int64_t index, int64_t num_rows) {
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

// What the parts of a weight are multiplied with. data is null where no part is.
struct PackedInputs {
    PackedInput<float> floats;
    PackedInput<bfloat16> pairs;
};

// Whether input of type T is multiplied in pairs with the parts that are stored alike.
template <typename T>
constexpr bool kCanPair = kHasPairProducts && std::is_same_v<T, bfloat16>;

template <typename T>
inline bool is_paired(const PackedPart& part) {
    return kCanPair<T> && part.storage == Storage::bfloat16;
}

// Calls use with the input that the part is multiplied with.
template <typename T, typename Use>
inline void with_input(const PackedPart& part, const PackedInputs& inputs, const Use& use) {
    if constexpr (kCanPair<T>) {
        if (is_paired<T>(part)) return use(inputs.pairs);
    }
    use(inputs.floats);
}

// Room for what the weight's parts need.
template <typename T>
PackedInputs make_inputs(const Call& call, Scratch& scratch) {
    const int64_t in_features = call.header.in_features, num_parts = call.header.num_parts;
    int64_t num_paired = 0;
    for (int64_t index = 0; index < num_parts; ++index) num_paired += is_paired<T>(read_part(call.packed, index));
    const int64_t count = call.num_rows * round_up(in_features, kStep);
    const int64_t num_floats = num_paired < num_parts ? count : 0, num_in_pairs = num_paired > 0 ? count : 0;
    float* data = scratch.floats(num_floats + num_in_pairs / 2);
    return {{num_floats > 0 ? data : nullptr, call.num_rows, in_features},
            {num_in_pairs > 0 ? reinterpret_cast<bfloat16*>(data + num_floats) : nullptr, call.num_rows, in_features}};
}

template <typename T>
inline void convert(T from, float& to) {
    to = to_float(from);
}
inline void convert(bfloat16 from, bfloat16& to) { to = from; }

// Missing last k become zeros.
template <typename T, typename Element>
void pack_panel(const Call& call, const Panel& panel, const PackedInput<Element>& packed) {
    const int64_t in_features = call.header.in_features, rows = panel.rows;
    for (int64_t begin = 0; begin < in_features; begin += kChunk) {
        const int64_t end = std::min(in_features, begin + kChunk);
        for (int64_t row = 0; row < rows; ++row) {
            const T* from = static_cast<const T*>(call.input) + (panel.first_row + row) * call.input_row_stride;
            Element* to = packed.at(panel, begin) + row * kStep;
            int64_t k = begin;
            for (; k + kStep <= end; k += kStep, to += rows * kStep)
                for (int64_t j = 0; j < kStep; ++j) convert(from[k + j], to[j]);
            if (k < end)
                for (int64_t j = 0; j < kStep; ++j) convert(k + j < end ? from[k + j] : T{}, to[j]);
        }
    }
}

template <typename T>
void pack_panel(const Call& call, const Panel& panel, const PackedInputs& inputs) {
    if (inputs.floats.data != nullptr) pack_panel<T>(call, panel, inputs.floats);
    if constexpr (kCanPair<T>) {
        if (inputs.pairs.data != nullptr) pack_panel<T>(call, panel, inputs.pairs);
    }
}

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
void multiply_block(const Block& block, const Panel& panel, const PackedInput<Element>& input, float* sums) {
    const int64_t in_features = input.in_features;
    const MultiplyTile<Element> multiply = tile_function<Element>(block.part.storage, panel.rows);
    const int64_t bytes_per_step = divide_up(block.part.block_bytes * kStep, in_features);
    for (int64_t k = 0; k < in_features; k += kChunk) {
        const uint8_t* ahead = block.data + block.part.block_bytes * k / in_features + kPrefetchDistance;
        multiply({block.part, block.data, k, std::min(in_features, k + kChunk), input.at(panel, k), sums, k == 0,
                  {ahead, bytes_per_step}});
    }
}

// One panel: numbers are made in registers from the packed ones as they stream by.
template <typename T>
void few_rows(const Call& call, int64_t unit, const PackedInputs& inputs) {
    const Panel panel{0, call.num_rows};
    Block blocks[2];
    find_blocks(call, unit, blocks);
    alignas(kBufferAlignment) float sums[2 * kMaxPanelRows * kBlockColumns];
    for (int64_t i = 0; i < call.blocks_per_unit(); ++i)
        with_input<T>(blocks[i].part, inputs, [&](const auto& input) {
            multiply_block(blocks[i], panel, input, sums + i * panel.rows * kBlockColumns);
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

template <typename Element>
constexpr Storage kStorageOf = std::is_same_v<Element, float> ? Storage::float32 : Storage::bfloat16;

// The numbers of a chunk of a block as Element: in place, or made in a buffer.
template <typename Element>
const uint8_t* chunk_numbers(const Block& block, int64_t begin, int64_t end, float* buffer) {
    if (block.part.storage == kStorageOf<Element>) return block.data + begin * kBlockColumns * sizeof(Element);
    block_to_floats(block.part, block.data, begin, end, buffer);
    return reinterpret_cast<const uint8_t*>(buffer);
}

// A chunk of a block, from begin to end, times the task's panels. sums_of(panel): where its sums are.
template <typename Element, typename SumsOf>
void multiply_chunk(const Block& block, int64_t begin, int64_t end, const Task& task, const PackedInput<Element>& input,
                    float* buffer, const SumsOf& sums_of) {
    const int64_t in_features = input.in_features, steps = divide_up(end - begin, kStep);
    const uint8_t* numbers = chunk_numbers<Element>(block, begin, end, buffer);
    const int64_t bytes = block.part.block_bytes * (end - begin) / in_features;
    Prefetch prefetch{block.data + block.part.block_bytes * end / in_features,
                      divide_up(bytes, steps * (task.last_panel - task.first_panel))};
    const PackedPart part{};
    for (int64_t index = task.first_panel; index < task.last_panel; ++index) {
        const Panel panel = panel_at(index, input.num_rows);
        tile_function<Element>(kStorageOf<Element>, panel.rows)(
            {part, numbers, 0, end - begin, input.at(panel, begin), sums_of(panel), begin == 0, prefetch});
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
                    multiply_chunk(blocks[i], k, end, task, input, buffer, [&](const Panel& panel) {
                        return sums + task.first_sum(unit, panel, i, num_blocks);
                    });
                });
            if (end < in_features) continue;
            for (int64_t index = task.first_panel; index < task.last_panel; ++index) {
                const Panel panel = panel_at(index, call.num_rows);
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
    const PackedInputs inputs = make_inputs<T>(call, input_scratch);
    pack_panel<T>(call, Panel{0, call.num_rows}, inputs);
    share_out_ranges(num_units, units_per_piece, threads, [&](int64_t first, int64_t last) {
        for (int64_t unit = first; unit < last; ++unit) few_rows<T>(call, unit, inputs);
    });
}

template <typename T>
void linear_of_many_rows(const Call& call, int threads) {
    const PackedInputs inputs = make_inputs<T>(call, input_scratch);
    const int64_t panels = num_panels(call.num_rows), num_groups = divide_up(panels, kMaxGroupPanels);
    const int64_t num_units = call.num_units();
    const int64_t units_per_task =
        std::clamp<int64_t>(num_units * num_groups / (threads * kTasksPerThread), 1, kMaxTaskUnits);
    const int64_t num_tasks = divide_up(num_units, units_per_task) * num_groups;
    share_out(panels, threads,
              [&](int64_t index) { pack_panel<T>(call, panel_at(index, call.num_rows), inputs); });
    share_out(num_tasks, threads, [&](int64_t index) {
        // Tasks with the same weights follow one another.
        const int64_t unit = index / num_groups * units_per_task, group = index % num_groups;
        many_rows<T>(call,
                     make_task(unit, std::min(num_units, unit + units_per_task), panels * group / num_groups,
                               panels * (group + 1) / num_groups, call.num_rows),
                     inputs, block_scratch);
    });
}

// Below this much work one thread is done before another has woken up.
constexpr int64_t kSmallBytes = 32 << 10, kSmallProducts = 128 << 10;

template <typename T>
void linear(const Call& call) {
    // Callers check this; what does not is told by every number.
    if (call.gated() && !call.header.halves_match) {
        std::fill_n(static_cast<T*>(call.out), call.num_rows * call.out_columns(),
                    from_float<T>(std::numeric_limits<float>::quiet_NaN()));
        return;
    }
    const int64_t products = call.num_rows * call.header.in_features * call.header.out_features;
    const bool is_small = call.header.num_bytes < kSmallBytes && products < kSmallProducts;
    const int threads = is_small ? 1 : num_threads();
    if (call.num_rows <= kMaxFewRows)
        linear_of_few_rows<T>(call, threads);
    else
        linear_of_many_rows<T>(call, threads);
}

}  // namespace

extern "C" void packed_linear(const void* input, int64_t input_row_stride, int64_t num_rows, int32_t element_type,
                              const uint8_t* packed_weight, const void* bias, const void* residual,
                              int64_t residual_row_stride, void* out, int64_t activation) {
    if (num_rows == 0) return;
    const Call call{input,    input_row_stride,    num_rows, packed_weight,
                    bias,     residual,            residual_row_stride, out,
                    static_cast<Activation>(activation), read_header(packed_weight)};
    switch (static_cast<ElementType>(element_type)) {
        case ElementType::float32: return linear<float>(call);
        case ElementType::bfloat16: return linear<bfloat16>(call);
        case ElementType::float16: return linear<float16>(call);
    }
}
