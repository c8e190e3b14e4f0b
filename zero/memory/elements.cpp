#include <zero/memory/elements.h>

#include <cstring>

#include <ATen/ops/where.h>

#include <zero/memory/flat_buffer.h>
#include <zero/memory/kernel_type.h>

namespace zero::memory {
namespace {

struct Elements {
  const at::Tensor& target;
  int64_t target_begin;
  const at::Tensor& source;
  int64_t source_begin;
  int64_t numel;
};

// Works on the memory of both where the CPU has them, else on views by ATen.
template <typename OnHost, typename OnDevice>
void between(const Elements& x, const OnHost& on_host, const OnDevice& on_device) {
  if (x.numel == 0) {
    return;
  }
  if (x.target.is_cpu() && x.source.is_cpu()) {
    on_host(element(x.target, x.target_begin), element(x.source, x.source_begin));
  } else {
    on_device(
        flat_view(x.target, x.target_begin, x.numel), flat_view(x.source, x.source_begin, x.numel));
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
    flat_view(dense, begin, numel).zero_();
  }
}

void copy_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) { std::memmove(to, from, numel * target.itemsize()); },
      [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
}

void convert_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) {
        const auto from_type = kernel_type(source.scalar_type());
        kernels::convert(from_type, from, kernel_type(target.scalar_type()), to, numel);
      },
      [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
}

void accumulate_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) {
        const auto type = kernel_type(source.scalar_type());
        kernels::accumulate(type, from, static_cast<float*>(to), numel);
      },
      [](const at::Tensor& to, const at::Tensor& from) { to.add_(from); });
}

void follow_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  between(
      {target, target_begin, source, source_begin, numel},
      [&](void* to, const void* from) {
        const auto type = kernel_type(source.scalar_type());
        kernels::follow(type, from, static_cast<float*>(to), numel);
      },
      [](const at::Tensor& to, const at::Tensor& from) {
        const at::Tensor stays = to.to(from.scalar_type()).eq(from);
        to.copy_(at::where(stays, to, from.to(to.scalar_type())));
      });
}

} // namespace zero::memory
