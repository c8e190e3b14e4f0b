#include <zero/comm/device_reduce.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/memory/elements.h>
#include <zero/memory/kernel_type.h>

namespace zero::comm {
namespace {

// The sum of fp32 inputs that is to be rounded to 16 bits, after the addition.
void reduce_and_round(
    const at::Tensor& inputs,
    int64_t input_count,
    const at::Tensor& output,
    const at::Tensor& addend,
    double divisor) {
  const at::Tensor sum = at::empty({output.numel()}, inputs.options());
  at::Tensor widened;
  if (addend.defined()) {
    widened = at::empty({output.numel()}, inputs.options());
    memory::convert_elements(widened, 0, addend, 0, output.numel());
  }
  reduce_on_device(inputs, input_count, sum, widened, divisor);
  memory::convert_elements(output, 0, sum, 0, output.numel());
}

} // namespace

void reduce_on_device(
    const at::Tensor& inputs,
    int64_t input_count,
    const at::Tensor& output,
    const at::Tensor& addend,
    double divisor) {
  const int64_t count = output.numel();
  if (count == 0) {
    return;
  }
  if (!c10::isFloatingType(inputs.scalar_type())) {
    TORCH_INTERNAL_ASSERT(input_count == 1 && divisor == 1.0 && !addend.defined());
    copy_on_device(output, inputs);
    return;
  }
  const auto type = memory::kernel_type(inputs.scalar_type());
  const auto out_type = memory::kernel_type(output.scalar_type());
  if (type == kernels::Type::f32 && out_type != type) {
    reduce_and_round(inputs, input_count, output, addend, divisor);
    return;
  }
  const c10::Device device = output.device();
  memory::device_kernels(device.type())
      .reduce_ranks(
          memory::current_handle(device),
          {.type = type,
           .inputs = inputs.const_data_ptr(),
           .stride = count,
           .input_count = input_count,
           .out_type = out_type,
           .out = output.mutable_data_ptr(),
           .addend = addend.defined() ? addend.const_data_ptr() : nullptr,
           .divisor = divisor},
          count);
}

void copy_on_device(const at::Tensor& target, const at::Tensor& source) {
  if (target.const_data_ptr() != source.const_data_ptr()) {
    memory::copy_elements(target, 0, source, 0, target.numel());
  }
}

} // namespace zero::comm
