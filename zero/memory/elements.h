#pragma once

// Raw work on elements of dense tensors (no dispatch, so invisible to autograd and to
// observers): copies, zeros and changes of dtype.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace zero::memory {

// bfloat16 and float16.
bool has_16_bits(const caffe2::TypeMeta& dtype);

// Pointer to an element of a dense tensor's memory.
void* element(const at::Tensor& dense, int64_t index);

// Sets elements [begin, begin + numel) of a dense tensor's memory to zero.
void zero_elements(const at::Tensor& dense, int64_t begin, int64_t numel);

// target[target_begin + k] = source[source_begin + k] for k < numel; both dense,
// of one dtype.
void copy_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel);

// The same between float dtypes, rounded once.
void convert_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel);

// target[...] += source[...]; the target is fp32.
void accumulate_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel);

// Where the fp32 target, rounded, is not the source, it becomes the source.
void follow_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel);

} // namespace zero::memory
