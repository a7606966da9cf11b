// Activation functions on vectors, to about 2e-7 of the value.
#pragma once

#include "block_numbers.h"

namespace {

enum class Activation : int64_t {
    none = 0,
    gelu_erf = 1,
    gelu_tanh = 2,
    silu = 3,
    silu_and_multiply = 4,
    gelu_tanh_and_multiply = 5,
    gelu_erf_and_multiply = 6,
};

// Whether the product's first half of columns is the gate of its second half.
inline bool is_gated(Activation activation) { return activation >= Activation::silu_and_multiply; }

inline Activation without_gate(Activation activation) {
    switch (activation) {
        case Activation::silu_and_multiply: return Activation::silu;
        case Activation::gelu_tanh_and_multiply: return Activation::gelu_tanh;
        case Activation::gelu_erf_and_multiply: return Activation::gelu_erf;
        default: return activation;
    }
}

inline Floats magnitude(Floats x) { return x < 0.0f ? -x : x; }

// 1 / (1 + exp(-x)); the small side is computed as such, so it keeps its relative precision.
inline Floats sigmoid(Floats x) {
    const Floats e = exp_of_nonpositive(-magnitude(x));
    return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

// x / 2 * (1 + tanh(u)), and (1 + tanh(u)) / 2 = sigmoid(2 u).
inline Floats gelu_tanh(Floats x) {
    return x * sigmoid(1.59576912f * x * (1.0f + 0.044715f * x * x));
}

// The normal distribution's integral up to -|x|: erfc(|x| / sqrt(2)) / 2.
// erfc(z) exp(z^2) = t P(t) with t = 1 / (1 + 0.3 z); P is our own fit for z from 0 to 10, its relative error 2e-8.
inline Floats normal_tail(Floats x) {
    const Floats z = magnitude(x) * 0.707106781f;
    const Floats t = 1.0f / (1.0f + 0.3f * z);
    Floats p = broadcast(-0.12952271f);
    p = p * t + 0.485562295f;
    p = p * t - 0.512276232f;
    p = p * t + 0.547717988f;
    p = p * t - 0.0946494f;
    p = p * t + 0.214925513f;
    p = p * t + 0.148339301f;
    p = p * t + 0.170715213f;
    p = p * t + 0.169188008f;
    // What rounding took off x^2 counts: it is the exponent.
    const Floats square = x * x, lost = multiply_add(x, x, -square);
    const Floats power = exp_of_nonpositive(-0.5f * square);
    return 0.5f * t * p * (power - power * (0.5f * lost));
}

inline Floats gelu_erf(Floats x) {
    const Floats tail = normal_tail(x);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// The activation without its gate.
inline Floats activate(Activation activation, Floats x) {
    switch (activation) {
        case Activation::gelu_erf: return gelu_erf(x);
        case Activation::gelu_tanh: return gelu_tanh(x);
        case Activation::silu: return silu(x);
        default: return x;
    }
}

}  // namespace
