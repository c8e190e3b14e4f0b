#pragma once

// Operators of ATen on fake tensors: the CPU's kernels over the same memory.

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace zero::fake {

bool is_fake(const at::Tensor& tensor);

// A boxed kernel. Arguments on the device become CPU tensors over the same memory, and
// the CPU's kernel runs; in-place and out arguments are written in place, views of an
// argument become views of the device's tensor, and new results are copied into memory
// of the device. One operation in the trace; none for operators that only make views.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace zero::fake
