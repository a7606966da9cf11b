// What pieces compiled by AOTInductor call: kernels over torch's tensor handles, without Python in between.
//
// torch's own part of it is its stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h), whose functions reach this
// library as pointers: torch's libraries are in no global namespace, and linking with them would tie this one to them.
#include <cstdint>
#include <cstdio>

#include "packed_weight.h"

using AtenTensorHandle = void*;

// In the order of TORCH_FUNCTIONS in shims.py.
struct TorchFunctions {
    int32_t (*get_data_ptr)(AtenTensorHandle tensor, void** data);
    int32_t (*get_dim)(AtenTensorHandle tensor, int64_t* num_dimensions);
    int32_t (*get_sizes)(AtenTensorHandle tensor, int64_t** sizes);
    int32_t (*get_strides)(AtenTensorHandle tensor, int64_t** strides);
    int32_t (*get_dtype)(AtenTensorHandle tensor, int32_t* dtype);
    int32_t (*get_storage_size)(AtenTensorHandle tensor, int64_t* num_bytes);
    int32_t (*get_storage_offset)(AtenTensorHandle tensor, int64_t* num_elements);
    int32_t (*empty_strided)(int64_t num_dimensions, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                             int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);
    int32_t (*dtype_float32)();
    int32_t (*dtype_bfloat16)();
    int32_t (*dtype_float16)();
    int32_t (*device_type_cpu)();
};

extern "C" void packed_linear(const void* input, int64_t input_row_stride, int64_t num_rows, int32_t element_type,
                              const uint8_t* packed_weight, const void* bias, const void* residual,
                              int64_t residual_row_stride, void* out, int64_t activation);

namespace {

constexpr int64_t kMostDimensions = 8;

TorchFunctions torch;

// A tensor seen as rows of its last dimension.
struct Rows {
    const void* data = nullptr;
    int64_t num_rows = 1, row_stride = 0, num_columns = 0;
    int64_t num_dimensions = 0, *sizes = nullptr;
    int32_t dtype = 0;
    bool dense = true;
};

Rows rows_of(AtenTensorHandle tensor) {
    Rows rows;
    void* data;
    int64_t* strides;
    torch.get_data_ptr(tensor, &data);
    torch.get_dim(tensor, &rows.num_dimensions);
    torch.get_sizes(tensor, &rows.sizes);
    torch.get_strides(tensor, &strides);
    torch.get_dtype(tensor, &rows.dtype);
    rows.data = data;
    const int64_t last = rows.num_dimensions - 1;
    rows.num_columns = rows.sizes[last];
    rows.dense = rows.num_columns == 1 || strides[last] == 1;
    rows.row_stride = rows.num_columns;
    // Leading dimensions collapse into one as long as each is as far apart as the ones inside it are long.
    for (int64_t dimension = last - 1; dimension >= 0; --dimension) {
        if (rows.sizes[dimension] == 1) continue;
        if (rows.num_rows == 1) rows.row_stride = strides[dimension];
        rows.dense = rows.dense && strides[dimension] == rows.row_stride * rows.num_rows;
        rows.num_rows *= rows.sizes[dimension];
    }
    return rows;
}

int32_t element_type(int32_t dtype) {
    if (dtype == torch.dtype_float32()) return 0;
    if (dtype == torch.dtype_bfloat16()) return 1;
    if (dtype == torch.dtype_float16()) return 2;
    return -1;
}

// Whether the whole of a packed weight lies behind the view of its head that a graph sees.
bool is_packed_weight(AtenTensorHandle weight, const uint8_t* data) {
    int64_t available, offset;
    torch.get_storage_size(weight, &available);
    torch.get_storage_offset(weight, &offset);
    available -= offset;
    if (available < static_cast<int64_t>(sizeof(PackedHeader))) return false;
    const PackedHeader header = read_header(data);
    return header.magic == kPackedMagic && header.num_bytes <= available;
}

int32_t refuse(const char* reason) {
    std::fprintf(stderr, "compiled_engine::packed_linear: %s\n", reason);
    return 1;
}

}  // namespace

extern "C" void connect_torch(const TorchFunctions* functions) { torch = *functions; }

// The op compiled_engine::packed_linear. Returns 0, or 1 after a line on stderr for tensors that it cannot take.
extern "C" int32_t aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias,
                                                AtenTensorHandle* residual, int64_t out_features, int64_t activation,
                                                AtenTensorHandle* result) {
    const Rows rows = rows_of(input);
    const int32_t type = element_type(rows.dtype);
    if (type < 0) return refuse("the input is neither float32 nor bfloat16 nor float16");
    if (rows.num_dimensions > kMostDimensions) return refuse("the input has too many dimensions");
    if (!rows.dense) return refuse("the rows of the input are not dense or not evenly apart");
    void *packed_weight, *bias_data = nullptr, *out;
    torch.get_data_ptr(weight, &packed_weight);
    if (!is_packed_weight(weight, static_cast<const uint8_t*>(packed_weight)))
        return refuse("the weight is no packed weight");
    if (read_header(static_cast<const uint8_t*>(packed_weight)).in_features != rows.num_columns)
        return refuse("the input has another number of columns than the weight");
    if (bias) torch.get_data_ptr(*bias, &bias_data);
    Rows added;
    if (residual) added = rows_of(*residual);
    if (residual && (!added.dense || added.dtype != rows.dtype || added.num_columns != out_features ||
                     added.num_rows != rows.num_rows))
        return refuse("the residual is not of the result's shape and dtype, or its rows are not dense");
    int64_t sizes[kMostDimensions], strides[kMostDimensions], stride = 1;
    for (int64_t dimension = rows.num_dimensions - 1; dimension >= 0; --dimension) {
        sizes[dimension] = dimension == rows.num_dimensions - 1 ? out_features : rows.sizes[dimension];
        strides[dimension] = stride;
        stride *= sizes[dimension];
    }
    if (torch.empty_strided(rows.num_dimensions, sizes, strides, rows.dtype, torch.device_type_cpu(), 0,
                                 result))
        return 1;
    torch.get_data_ptr(*result, &out);
    packed_linear(rows.data, rows.row_stride, rows.num_rows, type, static_cast<const uint8_t*>(packed_weight), bias_data,
                  added.data, added.row_stride, out, activation);
    return 0;
}
