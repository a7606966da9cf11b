// Kernels of the CPU backend, a plain C ABI: built by the C++ compiler in seconds, called through ctypes.
//
// Caches are [num_blocks, block_size, 2, num_kv_heads, head_dim]: the key of a token's head lies num_kv_heads *
// head_dim elements before its value. Element types are float, bfloat16 and float16; all arithmetic is float.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <omp.h>

namespace {

struct bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof(value));
        return value;
    }
    bfloat16() = default;
    explicit bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof(wide));
        // Round to nearest, ties to even; a NaN keeps its top bits and stays a NaN.
        bits = std::isnan(value) ? static_cast<uint16_t>((wide >> 16) | 0x40)
                                 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
};

// exp for x <= 0, to about one unit in the last place; a plain expression, so that loops over it become vector code.
// Range reduction and coefficients after Cephes' expf (S. L. Moshier).
inline float exp_of_negative(float x) {
    x = std::max(x, -87.0f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return p * power;
}

inline void softmax(float* scores, int64_t length) {
    float largest = -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < length; ++i) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < length; ++i) {
        scores[i] = exp_of_negative(scores[i] - largest);
        sum += scores[i];
    }
    const float inverse = 1 / sum;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) scores[i] *= inverse;
}

struct Sizes {
    int64_t block_size, num_kv_heads, queries_per_kv, head_dim;
    int64_t token_stride() const { return 2 * num_kv_heads * head_dim; }
    int64_t value_offset() const { return num_kv_heads * head_dim; }
};

// Where the visible tokens of one request are.
struct Context {
    const int32_t* block_table;
    int64_t start, seq_len;

    // Calls visit(index, offset of the token in the cache) for every visible token, in order.
    template <typename Visit>
    void for_each_token(const Sizes& sizes, Visit visit) const {
        const int64_t stride = sizes.token_stride();
        for (int64_t position = start; position < seq_len;) {
            const int64_t block = position / sizes.block_size;
            const int64_t end = std::min(seq_len, (block + 1) * sizes.block_size);
            int64_t offset =
                (block_table[block] * sizes.block_size + position - block * sizes.block_size) * stride;
            for (; position < end; ++position, offset += stride) visit(position - start, offset);
        }
    }
};

// The query heads of KV heads first to last of one request with one new token. Every key and value is read once, and
// neighbouring KV heads together, because they lie together. DIM: head_dim where it is known at compile time, else 0.
template <typename T, int DIM>
void attend_heads(const T* query, int64_t query_head_stride, T* out, const T* cache, const Context& context,
                  int64_t first, int64_t last, float scale, float soft_cap, const Sizes& sizes,
                  std::vector<float>& scratch) {
    const int64_t dim = DIM ? DIM : sizes.head_dim, group = sizes.queries_per_kv;
    const int64_t heads = (last - first) * group, length = context.seq_len - context.start;
    scratch.resize(heads * (length + 2 * dim));
    float* scores = scratch.data();
    float* queries = scores + heads * length;
    float* sums = queries + heads * dim;
    query += first * group * query_head_stride;
    for (int64_t head = 0; head < heads; ++head)
        for (int64_t i = 0; i < dim; ++i)
            queries[head * dim + i] = static_cast<float>(query[head * query_head_stride + i]) * scale;
    context.for_each_token(sizes, [&](int64_t index, int64_t offset) {
        const T* key = cache + offset + first * dim;
        __builtin_prefetch(key + 2 * sizes.token_stride());
        for (int64_t head = 0; head < heads; ++head) {
            const T* its_key = key + head / group * dim;
            const float* its_query = queries + head * dim;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < dim; ++i) sum += its_query[i] * static_cast<float>(its_key[i]);
            scores[head * length + index] = sum;
        }
    });
    if (soft_cap > 0)
        for (int64_t i = 0; i < heads * length; ++i) scores[i] = soft_cap * std::tanh(scores[i] / soft_cap);
    for (int64_t head = 0; head < heads; ++head) softmax(scores + head * length, length);
    std::fill(sums, sums + heads * dim, 0.0f);
    context.for_each_token(sizes, [&](int64_t index, int64_t offset) {
        const T* value = cache + offset + sizes.value_offset() + first * dim;
        __builtin_prefetch(value + 2 * sizes.token_stride());
        for (int64_t head = 0; head < heads; ++head) {
            const T* its_value = value + head / group * dim;
            const float weight = scores[head * length + index];
            float* its_sums = sums + head * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; ++i) its_sums[i] += weight * static_cast<float>(its_value[i]);
        }
    });
    out += first * group * dim;
    for (int64_t i = 0; i < heads * dim; ++i) out[i] = static_cast<T>(sums[i]);
}

template <typename T, int DIM>
void decode_attention(const T* query, int64_t query_row_stride, int64_t query_head_stride, T* out, const T* cache,
                      const int32_t* rows, const int32_t* requests, int64_t num_rows, const int32_t* block_table,
                      int64_t max_blocks, const int32_t* seq_lens, int64_t sliding_window, float scale,
                      float soft_cap, const Sizes& sizes) {
    const int64_t row_size = sizes.num_kv_heads * sizes.queries_per_kv * sizes.head_dim;
    // With few requests the KV heads of one are shared out among the threads.
    const int64_t parts = num_rows < 4 * omp_get_max_threads() ? sizes.num_kv_heads : 1;
    const int64_t heads_per_part = sizes.num_kv_heads / parts;
#pragma omp parallel
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_rows * parts; ++item) {
            const int64_t index = item / parts, first = item % parts * heads_per_part;
            const int64_t request = requests[index], row = rows[index], seq_len = seq_lens[request];
            const int64_t start = sliding_window > 0 ? std::max<int64_t>(0, seq_len - sliding_window) : 0;
            const Context context{block_table + request * max_blocks, start, seq_len};
            attend_heads<T, DIM>(query + row * query_row_stride, query_head_stride, out + row * row_size, cache,
                                 context, first, first + heads_per_part, scale, soft_cap, sizes, scratch);
        }
    }
}

template <typename T, typename... Arguments>
void decode_attention_of_any_size(const Sizes& sizes, Arguments... arguments) {
    switch (sizes.head_dim) {
        case 64: return decode_attention<T, 64>(arguments..., sizes);
        case 128: return decode_attention<T, 128>(arguments..., sizes);
        case 256: return decode_attention<T, 256>(arguments..., sizes);
        default: return decode_attention<T, 0>(arguments..., sizes);
    }
}

template <typename T>
void write_kv(const T* key, const T* value, int64_t key_row_stride, int64_t key_head_stride, int64_t value_row_stride,
              int64_t value_head_stride, T* cache, const int64_t* slots, int64_t num_tokens, const Sizes& sizes) {
    const int64_t bytes = sizes.head_dim * sizeof(T);
    for (int64_t row = 0; row < num_tokens; ++row) {
        T* token = cache + slots[row] * sizes.token_stride();
        for (int64_t head = 0; head < sizes.num_kv_heads; ++head) {
            T* place = token + head * sizes.head_dim;
            std::memcpy(place, key + row * key_row_stride + head * key_head_stride, bytes);
            std::memcpy(place + sizes.value_offset(), value + row * value_row_stride + head * value_head_stride, bytes);
        }
    }
}

}  // namespace

// Strides are in elements; the last dimension of every tensor is dense. See ops/cpu/kernels.py for the shapes.
#define DEFINE_KERNELS(suffix, T)                                                                                     \
    extern "C" void decode_attention_##suffix(                                                                        \
        const void* query, int64_t query_row_stride, int64_t query_head_stride, void* out, const void* cache,          \
        const int32_t* rows, const int32_t* requests, int64_t num_rows, const int32_t* block_table,                   \
        int64_t max_blocks, const int32_t* seq_lens, int64_t sliding_window, float scale, float soft_cap,             \
        int64_t block_size, int64_t num_kv_heads, int64_t queries_per_kv, int64_t head_dim) {                         \
        decode_attention_of_any_size<T>(Sizes{block_size, num_kv_heads, queries_per_kv, head_dim},                    \
                                        static_cast<const T*>(query), query_row_stride, query_head_stride,            \
                                        static_cast<T*>(out), static_cast<const T*>(cache), rows, requests, num_rows, \
                                        block_table, max_blocks, seq_lens, sliding_window, scale, soft_cap);          \
    }                                                                                                                 \
    extern "C" void write_kv_##suffix(const void* key, const void* value, int64_t key_row_stride,                     \
                                      int64_t key_head_stride, int64_t value_row_stride, int64_t value_head_stride,   \
                                      void* cache, const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads,    \
                                      int64_t head_dim) {                                                             \
        write_kv(static_cast<const T*>(key), static_cast<const T*>(value), key_row_stride, key_head_stride,           \
                 value_row_stride, value_head_stride, static_cast<T*>(cache), slots, num_tokens,                      \
                 Sizes{1, num_kv_heads, 1, head_dim});                                                                \
    }

DEFINE_KERNELS(float32, float)
DEFINE_KERNELS(bfloat16, bfloat16)
#ifdef __FLT16_MANT_DIG__
DEFINE_KERNELS(float16, _Float16)
#endif
