// Paged attention for any mix of decodes and prompt chunks: one call stores a step's keys and values and attends.
//
// Caches are [num_blocks, block_size, 2, num_kv_heads, head_dim], blocks possibly further apart than they are long.
// The cached tokens of a request are cut into splits of kSplit positions, counted from position 0, and those into
// tiles. Within a split softmax is online (Milakov and Gimelshein, 2018; Dao et al., 2022); the splits' results are
// merged in order. The cut is the same whether splits are computed by one thread or by many, and whatever else is in
// the batch, and so is a token's result, bit for bit.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_tiles.h"
#include "numbers.h"
#include "threads.h"

// One layer. sliding_window 0: none. soft_cap 0: none. Mirrored in ops/cpu/kernels.py, as is Step.
struct AttentionLayer {
    int64_t num_kv_heads, queries_per_kv, head_dim, sliding_window;
    float scale, soft_cap;
};

// The requests of a step. See AttentionMetadata in context/forward_context.py.
struct AttentionStep {
    const int32_t *query_start_loc, *seq_lens, *block_table;
    int64_t num_requests, max_blocks;
};

namespace {

constexpr int64_t kSplit = 512;
constexpr int64_t kMaxTileRows = 96;         // query rows, tokens times queries_per_kv, that share one packed tile
constexpr int64_t kFewRows = 16;             // so few rows that their splits are always worth sharing out
constexpr int64_t kMaxPartials = 4 << 20;    // floats of splits' results that wait to be merged
constexpr int64_t kSmallWrite = 128 << 10;   // bytes of keys and values that one thread stores at once
constexpr double kPackingCost = 8;  // of a key, in rows that it is multiplied with
constexpr double kTinyCost = 1.5e5;  // multiply-adds that one thread does before another would have woken up

static_assert(kSplit % kTile == 0, "a split is whole tiles");

// Rows of tokens in which heads follow each other, in elements.
template <typename T>
struct Rows {
    T* data;
    int64_t row_stride, head_stride;
    T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

template <typename T>
struct Call {
    const AttentionLayer& layer;
    const AttentionStep& step;
    Rows<const T> query, key, value;
    Rows<T> out;
    T* cache;
    int64_t block_size, block_stride;
    const int64_t* slots;
    int64_t num_tokens;
    const float* sinks;

    int64_t padded_dim() const { return (layer.head_dim + kLanes - 1) / kLanes * kLanes; }
    int64_t state_size() const { return States{nullptr, padded_dim()}.size(); }
    T* slot(int64_t block, int64_t offset) const {
        return cache + block * block_stride + offset * 2 * layer.num_kv_heads * layer.head_dim;
    }
};

struct Work;

// The tile of a work that starts at a position; work null: none.
struct TilePlace {
    const Work* work;
    int64_t start;
};

// Consecutive queries of one request with the query heads of one KV head, and what of the cache any of them sees.
struct Work {
    int64_t request, first_row, num_tokens, first_position, kv_head;
    Range seen;
    int64_t partials = -1;  // where the results of its splits wait to be merged; -1: one thread computes them all

    int64_t first_split() const { return seen.begin / kSplit; }
    TilePlace first_tile(int64_t split) const {
        return {this, std::max(split * kSplit, seen.begin / kTile * kTile)};
    }
    int64_t num_splits() const { return (seen.end - 1) / kSplit + 1 - first_split(); }
};

// What one thread takes at a time: a work, or one split of it where they are shared out.
struct Piece {
    int64_t work, split;
};

// Memory that starts at a cache line, grows to what is asked for and stays.
template <typename T>
class Buffer {
  public:
    T* of_size(int64_t size) {
        const size_t needed = size + kCacheLine / sizeof(T);
        if (storage_.size() < needed) storage_.resize(needed);
        const uintptr_t past_line = reinterpret_cast<uintptr_t>(storage_.data()) % kCacheLine;
        return storage_.data() + (kCacheLine - past_line) % kCacheLine / sizeof(T);
    }

  private:
    std::vector<T> storage_;
};

// What a thread needs for one work.
template <typename T>
struct Scratch {
    Buffer<float> floats;
    Buffer<T> zeros;
    float *queries, *keys, *values, *scores, *result, *split_result;
    const T* zero_row;

    void fit(const Call<T>& call, int64_t rows) {
        const int64_t dim = call.padded_dim(), states = rows * call.state_size();
        queries = floats.of_size(rows * dim + 2 * kTile * dim + kMaxBlockRows * kTile + 2 * states);
        keys = queries + rows * dim;
        values = keys + kTile * dim;
        scores = values + kTile * dim;
        result = scores + kMaxBlockRows * kTile;
        split_result = result + states;
        T* row = zeros.of_size(dim);
        std::memset(static_cast<void*>(row), 0, dim * sizeof(T));
        zero_row = row;
    }
};

// The state of rows that have seen nothing.
void clear(int64_t rows, const States& states) {
    std::memset(states.data, 0, rows * states.size() * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) states.largest(row) = -kInfinity;
}

// Adds the states of a split to those of the splits before it.
void merge(int64_t rows, const States& split, const States& into) {
    for (int64_t row = 0; row < rows; ++row) {
        const float largest = std::max(into.largest(row), split.largest(row)), reference = reference_for(largest);
        const float old_factor = exp_of_difference(into.largest(row), reference);
        const float new_factor = exp_of_difference(split.largest(row), reference);
        float* sums = into.sums(row);
        for (int64_t i = 0; i < into.dim + kLanes; i += kLanes)
            store(sums + i, load(sums + i) * old_factor + load(split.sums(row) + i) * new_factor);
        into.largest(row) = largest;
    }
}

// Divides by the sums of weights, each with its head's sink, and stores the rows of `work`.
template <typename T>
void finish(const Call<T>& call, const Work& work, const States& states) {
    const int64_t group = call.layer.queries_per_kv, head_dim = call.layer.head_dim;
    const int64_t whole = head_dim / kLanes * kLanes;
    for (int64_t row = 0; row < work.num_tokens * group; ++row) {
        const int64_t head = work.kv_head * group + row % group;
        float sum = sum_of_lanes(load(states.weights(row))), scale = 1;
        if (call.sinks != nullptr) {
            const float sink = call.sinks[head], largest = states.largest(row);
            const float reference = reference_for(std::max(largest, sink));
            scale = exp_of_difference(largest, reference);
            sum = sum * scale + exp_of_difference(sink, reference);
        }
        const float factor = scale / sum;
        const float* sums = states.sums(row);
        T* out = call.out.at(work.first_row + row / group, head);
        for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(sums + i) * factor);
        for (int64_t i = whole; i < head_dim; ++i) out[i] = from_float<T>(sums[i] * factor);
    }
}

// The queries of `work`, scaled, [rows][padded_dim].
template <typename T>
void pack_queries(const Call<T>& call, const Work& work, float* packed) {
    const int64_t group = call.layer.queries_per_kv, head_dim = call.layer.head_dim;
    const int64_t whole = head_dim / kLanes * kLanes;
    for (int64_t row = 0; row < work.num_tokens * group; ++row, packed += call.padded_dim()) {
        const T* query = call.query.at(work.first_row + row / group, work.kv_head * group + row % group);
        for (int64_t i = 0; i < whole; i += kLanes) store(packed + i, load(query + i) * call.layer.scale);
        for (int64_t i = whole; i < head_dim; ++i) packed[i] = to_float(query[i]) * call.layer.scale;
    }
}

// Finds the keys and values of a tile, and what of it any query of the work sees.
template <typename T>
Range find_rows(const Call<T>& call, TilePlace place, const T* zeros, TileRows<T>& tile) {
    const AttentionLayer& layer = call.layer;
    Range seen{0, 0};
    if (place.work != nullptr) {
        const Work& work = *place.work;
        seen = intersection({work.seen.begin - place.start, work.seen.end - place.start}, {0, kTile});
        const int64_t first = place.start + seen.begin, step = 2 * layer.num_kv_heads * layer.head_dim;
        const int32_t* block = call.step.block_table + work.request * call.step.max_blocks + first / call.block_size;
        int64_t offset = first % call.block_size;
        for (int64_t i = seen.begin; i < seen.end; ++block, offset = 0) {
            const int64_t end = std::min(seen.end, i + call.block_size - offset);
            const T* key = call.slot(*block, offset) + work.kv_head * layer.head_dim;
            for (; i < end; ++i, key += step) {
                tile.keys[i] = key;
                tile.values[i] = key + step / 2;
            }
        }
    }
    for (const T** rows : {tile.keys, tile.values}) {
        std::fill(rows, rows + seen.begin, zeros);
        std::fill(rows + seen.end, rows + kTile, zeros);
    }
    return seen;
}

// Asks for the rows of the next tile that this one, of which less is seen, has not asked for on its way.
template <typename T>
void prefetch_rest(Range asked, const TileRows<T>& ahead, Range seen, int64_t head_dim) {
    for (int64_t key = seen.begin; key < seen.end; ++key) {
        if (key >= asked.begin && key < asked.end) continue;
        for (int64_t dim = 0; dim < head_dim; dim += kCacheLine / sizeof(T)) {
            prefetch_line(ahead.keys[key], dim);
            prefetch_line(ahead.values[key], dim);
        }
    }
}

// What a query at `position` sees.
template <typename T>
Range seen_from(const Call<T>& call, int64_t position) {
    const int64_t window = call.layer.sliding_window;
    return {window > 0 ? std::max<int64_t>(0, position - window + 1) : 0, position + 1};
}

// Attends to a tile of which `seen` is seen, and meanwhile has the next one, `ahead`, brought near.
template <typename T>
void attend_tile(const Call<T>& call, const Work& work, int64_t start, Range seen, const TileRows<T>& tile,
                 const TileRows<T>& ahead, Scratch<T>& scratch, const States& states) {
    const int64_t group = call.layer.queries_per_kv, head_dim = call.layer.head_dim, dim = states.dim;
    const int64_t rows = work.num_tokens * group;
    // One pass over keys and values is cheaper straight from the cache.
    const bool packs_keys = rows > kMaxBlockRows, packs_values = packs_keys || dim != head_dim;
    const float* packed[kTile];
    if (packs_keys) pack_keys(tile.keys, ahead.keys, seen, head_dim, scratch.keys);
    if (packs_values) {
        pack_values(tile.values, ahead.values, seen, head_dim, dim, scratch.values);
        for (int key = 0; key < kTile; ++key) packed[key] = scratch.values + key * dim;
    }
    for (int64_t first = 0, count; first < rows; first += count) {
        count = block_rows(rows - first);
        const auto seen_by = [&](int64_t row) {
            const Range range = seen_from(call, work.first_position + row / group);
            return intersection({range.begin - start, range.end - start}, seen);
        };
        const Range by_block{seen_by(first).begin, seen_by(first + count - 1).end};
        if (by_block.empty()) continue;
        const States block = states.from(first);
        const float* queries = scratch.queries + first * dim;
        if (packs_keys)
            score(count, queries, dim, scratch.keys, head_dim, by_block, scratch.scores);
        else
            score_cached(count, queries, dim, tile.keys, ahead.keys, head_dim, by_block, scratch.scores);
        const Range computed = whole_vectors(by_block);
        for (int64_t row = 0; row < count; ++row)
            cap_and_mask(scratch.scores + row * kTile, computed, seen_by(first + row), call.layer.soft_cap);
        weigh(count, scratch.scores, computed, block);
        if (packs_values)
            add_values<float>(count, scratch.scores, packed, nullptr, dim, by_block, block.data, block.size());
        else
            add_values(count, scratch.scores, tile.values, ahead.values, dim, by_block, block.data, block.size());
    }
}

// One split of `work`, from nothing: its tiles in order. `after`: what this thread computes next.
template <typename T>
void attend_split(const Call<T>& call, const Work& work, int64_t split, TilePlace after, Scratch<T>& scratch,
                  const States& states) {
    clear(work.num_tokens * call.layer.queries_per_kv, states);
    const int64_t end = std::min((split + 1) * kSplit, work.seen.end);
    TileRows<T> tiles[2];
    TilePlace place = work.first_tile(split);
    Range seen = find_rows(call, place, scratch.zero_row, tiles[0]);
    for (int turn = 0; place.start < end; turn = 1 - turn) {
        const TilePlace next = place.start + kTile < end ? TilePlace{&work, place.start + kTile} : after;
        const Range next_seen = find_rows(call, next, scratch.zero_row, tiles[1 - turn]);
        attend_tile(call, work, place.start, seen, tiles[turn], tiles[1 - turn], scratch, states);
        prefetch_rest(seen, tiles[1 - turn], next_seen, call.layer.head_dim);
        place.start += kTile;
        seen = next_seen;
    }
}

// The pieces of one call and where their threads meet. Kept by the calling thread, so that no call allocates.
struct Plan {
    std::vector<Work> works;
    std::vector<Piece> pieces;
    std::vector<int32_t> splits_left;  // by work
    Buffer<float> memory;
    float* partials;

    TilePlace first_tile(int64_t piece) const {
        const Work& work = works[pieces[piece].work];
        return work.first_tile(work.first_split() + std::max<int64_t>(0, pieces[piece].split));
    }
};

template <typename T>
void list_works(const Call<T>& call, std::vector<Work>& works) {
    const AttentionStep& step = call.step;
    const int64_t tokens_per_work = std::max<int64_t>(1, kMaxTileRows / call.layer.queries_per_kv);
    works.clear();
    for (int64_t request = 0; request < step.num_requests; ++request) {
        const int64_t first_row = step.query_start_loc[request];
        const int64_t num_tokens = step.query_start_loc[request + 1] - first_row;
        const int64_t num_computed = step.seq_lens[request] - num_tokens;
        // The last queries see most: they come first, so that no thread is left with much at the end.
        for (int64_t first = (num_tokens - 1) / tokens_per_work * tokens_per_work; first >= 0;
             first -= tokens_per_work) {
            const int64_t count = std::min(tokens_per_work, num_tokens - first), position = num_computed + first;
            const Range seen{seen_from(call, position).begin, position + count};
            for (int64_t head = 0; head < call.layer.num_kv_heads && count > 0; ++head)
                works.push_back({request, first_row + first, count, position, head, seen});
        }
    }
}

// Fills `plan`. Splits are shared out where a work has few rows, which costs little, or where works are few.
template <typename T>
void make_plan(const Call<T>& call, int threads, Plan& plan) {
    list_works(call, plan.works);
    plan.pieces.clear();
    plan.splits_left.assign(plan.works.size(), 0);
    const int64_t num_works = plan.works.size(), group = call.layer.queries_per_kv;
    const bool few_works = num_works < 4 * threads;
    int64_t used = 0;
    for (int64_t index = 0; index < num_works; ++index) {
        Work& work = plan.works[index];
        const int64_t rows = work.num_tokens * group, splits = work.num_splits();
        const int64_t size = splits * rows * call.state_size();
        if (threads == 1 || splits == 1 || !(few_works || rows <= kFewRows) || used + size > kMaxPartials) {
            plan.pieces.push_back({index, -1});
            continue;
        }
        work.partials = used;
        used += size;
        plan.splits_left[index] = static_cast<int32_t>(splits);
        for (int64_t split = 0; split < splits; ++split) plan.pieces.push_back({index, split});
    }
    plan.partials = plan.memory.of_size(used);
}

template <typename T>
void attend_work(const Call<T>& call, const Work& work, TilePlace after, Scratch<T>& scratch) {
    const int64_t rows = work.num_tokens * call.layer.queries_per_kv, first = work.first_split();
    const int64_t last = first + work.num_splits() - 1;
    const States result{scratch.result, call.padded_dim()}, split_result{scratch.split_result, call.padded_dim()};
    for (int64_t split = first; split <= last; ++split) {
        const States& states = split == first ? result : split_result;
        attend_split(call, work, split, split < last ? work.first_tile(split + 1) : after, scratch, states);
        if (split > first) merge(rows, split_result, result);
    }
    finish(call, work, result);
}

// Computes one split of a work; the thread that computes the last one merges them all, in order.
template <typename T>
void attend_shared(const Call<T>& call, const Work& work, int64_t split, TilePlace after, float* partials,
                   int32_t& splits_left, Scratch<T>& scratch) {
    const int64_t rows = work.num_tokens * call.layer.queries_per_kv;
    const States all{partials, call.padded_dim()};
    attend_split(call, work, work.first_split() + split, after, scratch, all.from(split * rows));
    if (__atomic_sub_fetch(&splits_left, 1, __ATOMIC_ACQ_REL) > 0) return;
    for (int64_t other = 1; other < work.num_splits(); ++other) merge(rows, all.from(other * rows), all);
    finish(call, work, all);
}

// `likely_next`: the piece that this thread probably computes after this one.
template <typename T>
void attend_piece(const Call<T>& call, Plan& plan, int64_t index, int64_t likely_next) {
    thread_local Scratch<T> scratch;
    const Piece piece = plan.pieces[index];
    const Work& work = plan.works[piece.work];
    const TilePlace after = likely_next < static_cast<int64_t>(plan.pieces.size()) ? plan.first_tile(likely_next)
                                                                                    : TilePlace{nullptr, 0};
    scratch.fit(call, work.num_tokens * call.layer.queries_per_kv);
    pack_queries(call, work, scratch.queries);
    if (piece.split < 0) return attend_work(call, work, after, scratch);
    attend_shared(call, work, piece.split, after, plan.partials + work.partials, plan.splits_left[piece.work], scratch);
}

// Stores the keys or the values of one KV head: padding rows share a slot, so the rows of a head are one thread's.
template <typename T>
void write_head(const Call<T>& call, int64_t kv_head, bool is_value) {
    const AttentionLayer& layer = call.layer;
    const Rows<const T>& rows = is_value ? call.value : call.key;
    const int64_t place = (is_value ? layer.num_kv_heads + kv_head : kv_head) * layer.head_dim;
    for (int64_t row = 0; row < call.num_tokens; ++row) {
        const int64_t slot = call.slots[row];
        std::memcpy(static_cast<void*>(call.slot(slot / call.block_size, slot % call.block_size) + place),
                    static_cast<const void*>(rows.at(row, kv_head)), layer.head_dim * sizeof(T));
    }
}

// Threads that the works are worth: all, or one when waking another would take longer.
template <typename T>
int threads_for(const Call<T>& call) {
    const int threads = num_threads();
    if (threads == 1) return 1;
    double cost = 0;
    const AttentionStep& step = call.step;
    for (int64_t request = 0; request < step.num_requests; ++request) {
        const int64_t num_tokens = step.query_start_loc[request + 1] - step.query_start_loc[request];
        if (num_tokens == 0) continue;
        const int64_t first_position = step.seq_lens[request] - num_tokens;
        const int64_t keys = step.seq_lens[request] - seen_from(call, first_position).begin;
        cost += static_cast<double>(keys) * (kPackingCost + num_tokens * call.layer.queries_per_kv);
    }
    return cost * call.layer.num_kv_heads * call.layer.head_dim < kTinyCost ? 1 : threads;
}

template <typename T>
void write_and_attend(const Call<T>& call) {
    thread_local Plan plan_of_thread;
    Plan& plan = plan_of_thread;
    const int threads = threads_for(call);
    const int64_t num_writes = call.key.data == nullptr ? 0 : 2 * call.layer.num_kv_heads;
    make_plan(call, threads, plan);
    const int64_t bytes_per_write = call.num_tokens * call.layer.head_dim * static_cast<int64_t>(sizeof(T));
    const int writers = num_writes * bytes_per_write < kSmallWrite ? 1 : threads;
    share_out(num_writes, writers, [&](int64_t i) { write_head(call, i / 2, i % 2 == 1); });
    share_out(plan.pieces.size(), threads, [&](int64_t i) { attend_piece(call, plan, i, i + threads); });
}

}  // namespace

// Stores key and value [num_tokens, num_kv_heads, head_dim] at `slots`, unless they are null, then attends with query
// [num_tokens, num_heads, head_dim] into out, which is dense. Strides are in elements; the last dimension of every
// tensor is dense. sinks: one score per query head that joins the softmax without a value, or null.
#define DEFINE_ATTENTION(suffix, T)                                                                                  \
    extern "C" void write_and_attend_##suffix(                                                                       \
        const AttentionLayer* layer, const AttentionStep* step, const void* query, int64_t query_row_stride,         \
        int64_t query_head_stride, const void* key, int64_t key_row_stride, int64_t key_head_stride,                 \
        const void* value, int64_t value_row_stride, int64_t value_head_stride, void* out, void* cache,              \
        int64_t block_size, int64_t block_stride, const int64_t* slots, int64_t num_tokens, const float* sinks) {    \
        const int64_t dim = layer->head_dim, num_heads = layer->num_kv_heads * layer->queries_per_kv;                \
        write_and_attend(Call<T>{*layer,                                                                             \
                                 *step,                                                                              \
                                 {static_cast<const T*>(query), query_row_stride, query_head_stride},                \
                                 {static_cast<const T*>(key), key_row_stride, key_head_stride},                      \
                                 {static_cast<const T*>(value), value_row_stride, value_head_stride},                \
                                 {static_cast<T*>(out), num_heads * dim, dim},                                       \
                                 static_cast<T*>(cache),                                                             \
                                 block_size,                                                                         \
                                 block_stride,                                                                       \
                                 slots,                                                                              \
                                 num_tokens,                                                                         \
                                 sinks});                                                                            \
    }

DEFINE_ATTENTION(float32, float)
DEFINE_ATTENTION(bfloat16, bfloat16)
DEFINE_ATTENTION(float16, float16)
