#include <zero/memory/elements.h>

#include <cstring>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/memory/flat_buffer.h>
#include <zero/memory/kernel_type.h>

namespace zero::memory {
namespace {

using Kernels = kernels::DeviceKernels;
using Stream = kernels::StreamHandle;

struct Elements {
  const at::Tensor& target;
  int64_t target_begin;
  const at::Tensor& source;
  int64_t source_begin;
  int64_t numel;
};

void copy_between(const Elements& x) {
  const Quiet quiet;
  flat_view(x.target, x.target_begin, x.numel)
      .copy_(flat_view(x.source, x.source_begin, x.numel), /*non_blocking=*/!x.target.is_cpu());
}

// The source where the target is: itself, or a copy of these elements.
Elements beside_target(const Elements& x, at::Tensor& copy) {
  if (x.source.device() == x.target.device()) {
    return x;
  }
  const Quiet quiet;
  copy = flat_view(x.source, x.source_begin, x.numel).to(x.target.device());
  return {x.target, x.target_begin, copy, 0, x.numel};
}

// Works on the memory of both: on the CPU, or by the device's kernels.
template <typename OnHost, typename OnDevice>
void between(const Elements& given, const OnHost& on_host, const OnDevice& on_device) {
  at::Tensor copy;
  const Elements x = beside_target(given, copy);
  void* const target = element(x.target, x.target_begin);
  const void* const source = element(x.source, x.source_begin);
  const c10::Device device = x.target.device();
  if (device.is_cpu()) {
    on_host(target, source);
  } else {
    on_device(device_kernels(device.type()), current_handle(device), target, source);
  }
}

} // namespace

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
    const Quiet quiet;
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
    copy_between({target, target_begin, source, source_begin, numel});
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
  const auto from_type = kernel_type(source.scalar_type());
  const auto to_type = kernel_type(target.scalar_type());
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) { kernels::convert(from_type, from, to_type, to, numel); },
      [&](const Kernels& on, Stream stream, void* to, const void* from) {
        on.convert(stream, from_type, from, to_type, to, numel);
      });
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
  const auto type = kernel_type(source.scalar_type());
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) {
        kernels::accumulate(type, from, static_cast<float*>(to), numel);
      },
      [&](const Kernels& on, Stream stream, void* to, const void* from) {
        on.accumulate(stream, type, from, static_cast<float*>(to), numel);
      });
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
  const auto type = kernel_type(source.scalar_type());
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) {
        kernels::follow(type, from, static_cast<float*>(to), numel);
      },
      [&](const Kernels& on, Stream stream, void* to, const void* from) {
        on.follow(stream, type, from, static_cast<float*>(to), numel);
      });
}

} // namespace zero::memory
