// Memory that a thread keeps from one call to the next.
#pragma once

#include "packed_weight.h"

#include <memory>
#include <new>

namespace {

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

}  // namespace
