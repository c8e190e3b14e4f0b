#include <zero/comm/reduce_elements.h>

#include <cstring>
#include <type_traits>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <zero/memory/kernel_type.h>

namespace zero::comm {
namespace {

constexpr std::uintptr_t kAlignment = 64;

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kAlignment == 0;
}

// Elements may lie anywhere: read and written as bytes.
template <typename Integer>
void sum_integers(
    char* out,
    const std::vector<const void*>& inputs,
    const char* addend,
    int64_t count) {
  constexpr int64_t size = sizeof(Integer);
  const auto at = [](const void* data, int64_t i) {
    Integer value;
    std::memcpy(&value, static_cast<const char*>(data) + i * size, size);
    return value;
  };
  for (int64_t i = 0; i < count; ++i) {
    Integer sum = addend == nullptr ? Integer{0} : at(addend, i);
    for (const void* input : inputs) {
      sum = static_cast<Integer>(sum + at(input, i));
    }
    std::memcpy(out + i * size, &sum, size);
  }
}

void reduce_floats(
    const ReduceArguments& arguments,
    char* out,
    const std::vector<const void*>& inputs,
    const char* addend,
    int64_t count) {
  const auto bytes = count * arguments.out_item_size;
  // Shards of a flat layout are aligned; other callers' need not be.
  at::Tensor aligned_out;
  at::Tensor aligned_addend;
  char* target = out;
  if (!is_aligned(out)) {
    aligned_out = at::empty({bytes}, at::kByte);
    target = static_cast<char*>(aligned_out.mutable_data_ptr());
  }
  if (addend != nullptr && !is_aligned(addend)) {
    aligned_addend = at::empty({bytes}, at::kByte);
    auto* copy = static_cast<char*>(aligned_addend.mutable_data_ptr());
    std::memcpy(copy, addend, bytes);
    addend = copy;
  }
  kernels::reduce_ranks(
      {.type = memory::kernel_type(arguments.dtype),
       .inputs = inputs.data(),
       .input_count = static_cast<int64_t>(inputs.size()),
       .out_type = memory::kernel_type(arguments.out_dtype),
       .out = target,
       .addend = addend,
       .divisor = arguments.divisor},
      count);
  if (target != out) {
    std::memcpy(out, target, bytes);
  }
}

} // namespace

void reduce_elements(
    const ReduceArguments& arguments,
    char* out,
    const std::vector<const void*>& inputs,
    const char* addend,
    int64_t count) {
  switch (arguments.dtype) {
  case at::kByte:
  case at::kChar: // two's complement: the sums' bits are the same
    return sum_integers<uint8_t>(out, inputs, addend, count);
  case at::kShort:
  case at::kUInt16:
    return sum_integers<uint16_t>(out, inputs, addend, count);
  case at::kInt:
  case at::kUInt32:
    return sum_integers<uint32_t>(out, inputs, addend, count);
  case at::kLong:
  case at::kUInt64:
    return sum_integers<uint64_t>(out, inputs, addend, count);
  default:
    return reduce_floats(arguments, out, inputs, addend, count);
  }
}

} // namespace zero::comm
