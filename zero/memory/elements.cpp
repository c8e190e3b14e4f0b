#include <zero/memory/elements.h>

#include <cstring>

#include <ATen/ops/where.h>

#include <zero/memory/flat_buffer.h>
#include <zero/memory/kernel_type.h>

namespace zero::memory {

bool has_16_bits(const caffe2::TypeMeta& dtype) {
  const auto type = dtype.toScalarType();
  return type == at::kBFloat16 || type == at::kHalf;
}

void* element(const at::Tensor& dense, int64_t index) {
  return static_cast<char*>(dense.mutable_data_ptr()) + index * dense.itemsize();
}

void zero_elements(const at::Tensor& dense, int64_t begin, int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (dense.is_cpu()) {
    std::memset(element(dense, begin), 0, numel * dense.itemsize());
  } else {
    flat_view(dense, begin, numel).zero_();
  }
}

void copy_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (target.is_cpu() && source.is_cpu()) {
    std::memmove(
        element(target, target_begin), element(source, source_begin), numel * target.itemsize());
  } else {
    flat_view(target, target_begin, numel).copy_(flat_view(source, source_begin, numel));
  }
}

void convert_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (target.is_cpu() && source.is_cpu()) {
    kernels::convert(
        kernel_type(source.scalar_type()),
        element(source, source_begin),
        kernel_type(target.scalar_type()),
        element(target, target_begin),
        numel);
  } else {
    flat_view(target, target_begin, numel).copy_(flat_view(source, source_begin, numel));
  }
}

void accumulate_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (target.is_cpu() && source.is_cpu()) {
    kernels::accumulate(
        kernel_type(source.scalar_type()),
        element(source, source_begin),
        static_cast<float*>(element(target, target_begin)),
        numel);
  } else {
    flat_view(target, target_begin, numel).add_(flat_view(source, source_begin, numel));
  }
}

void follow_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (target.is_cpu() && source.is_cpu()) {
    kernels::follow(
        kernel_type(source.scalar_type()),
        element(source, source_begin),
        static_cast<float*>(element(target, target_begin)),
        numel);
  } else {
    const at::Tensor to = flat_view(target, target_begin, numel);
    const at::Tensor from = flat_view(source, source_begin, numel);
    to.copy_(at::where(to.to(from.scalar_type()).eq(from), to, from.to(to.scalar_type())));
  }
}

} // namespace zero::memory
