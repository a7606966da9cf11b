// Element types and vectors of float that all kernels share.
//
// A vector is the machine's own width in GCC's vector extension, so one source serves every instruction path: 16 lanes
// with AVX-512, 8 with AVX2, 4 elsewhere. All arithmetic is float; narrower types are only stored, but for bfloat16
// where the machine multiplies it (tile.h).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct bfloat16 {
    uint16_t bits;
};

struct float16 {
    uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Reads an object of type To at any address, or the bits of another object of the same size.
template <typename To>
inline To read_as(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Floats broadcast(float value) { return value - Floats{}; }
inline Ints broadcast(int32_t value) { return value - Ints{}; }
inline Words broadcast(uint32_t value) { return value - Words{}; }

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    return read_as<float>(&wide);
}
inline float to_float(float16 value) {
    // Subnormal and normal numbers alike become right by one multiplication; infinities and NaNs are set apart.
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
    const uint32_t scaled = magnitude << 13;
    const float number = read_as<float>(&scaled) * 0x1p112f;
    uint32_t bits = read_as<uint32_t>(&number);
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    bits |= sign;
    return read_as<float>(&bits);
}

template <typename T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
    return value;
}
template <>
inline bfloat16 from_float<bfloat16>(float value) {
    const uint32_t wide = read_as<uint32_t>(&value);
    // Round to nearest, ties to even; a NaN keeps its top bits and stays a NaN.
    if (value != value) return {static_cast<uint16_t>((wide >> 16) | 0x40)};
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}
template <>
inline float16 from_float<float16>(float value) {
    const uint32_t wide = read_as<uint32_t>(&value), magnitude = wide & 0x7fffffff;
    const uint16_t sign = static_cast<uint16_t>((wide >> 16) & 0x8000);
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (magnitude < 0x38800000) {
        // Below the normal numbers: adding 0.5 lets the float unit shift and round to multiples of 2^-24.
        const float shifted = read_as<float>(&magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (read_as<uint32_t>(&shifted) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

// kLanes numbers at any address as floats.
inline Floats load(const float* from) { return read_as<Floats>(from); }
inline Floats load(const bfloat16* from) {
    const Words wide = __builtin_convertvector(read_as<HalfWords>(from), Words) << 16;
    return read_as<Floats>(&wide);
}
inline Floats load(const float16* from) {
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return read_as<Floats>(&wide);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return read_as<Floats>(&wide);
#else
    Floats wide;
    for (int lane = 0; lane < kLanes; ++lane) wide[lane] = to_float(from[lane]);
    return wide;
#endif
}
inline Floats load(const int8_t* from) {
    // GCC makes many instructions of the conversion from bytes.
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read_as<__m128i>(from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(read_as<SignedBytes>(from), Floats);
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }
inline void store(bfloat16* to, Floats values) {
    const Words wide = read_as<Words>(&values);
    const Words rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    const Words chosen = values != values ? (wide >> 16) | 0x40 : rounded;
    const HalfWords narrow = __builtin_convertvector(chosen, HalfWords);
    std::memcpy(to, &narrow, sizeof(narrow));
}
inline void store(float16* to, Floats values) {
#if defined(__AVX512F__)
    const __m256i narrow = _mm512_cvtps_ph(read_as<__m512>(&values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &narrow, sizeof(narrow));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i narrow = _mm256_cvtps_ph(read_as<__m256>(&values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &narrow, sizeof(narrow));
#else
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = from_float<float16>(values[lane]);
#endif
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline float sum_of_lanes(Floats values) {
    float parts[kLanes];
    std::memcpy(parts, &values, sizeof(parts));
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) parts[lane] += parts[lane + width];
    return parts[0];
}

inline float largest_lane(Floats values) {
    float parts[kLanes];
    std::memcpy(parts, &values, sizeof(parts));
    float largest = parts[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = parts[lane] > largest ? parts[lane] : largest;
    return largest;
}

// exp for x <= 0, to about one unit in the last place; 0 below -87, NaN for NaN.
// Range reduction and coefficients after Cephes' expf (S. L. Moshier).
inline Floats exp_of_nonpositive(Floats x) {
    const Floats lowest = broadcast(-87.0f);
    const Floats clamped = x < lowest ? lowest : x;
    const Floats finite = clamped != clamped ? Floats{} : clamped;
    // Conversion cuts towards zero, so this is the nearest whole number.
    const Ints whole = __builtin_convertvector(finite * 1.44269504f - 0.5f, Ints);
    const Floats n = __builtin_convertvector(whole, Floats);
    const Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Ints bits = (whole + 127) << 23;
    return x < lowest ? Floats{} : p * read_as<Floats>(&bits);
}

}  // namespace
