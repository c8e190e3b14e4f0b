#pragma once

// The arguments of a collective, checked on the caller's thread before anything
// is sent, as the pointers and sizes that the algorithms work on.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <zero/comm/communicator.h>

namespace zero::comm {

struct Place {
  int64_t rank = 0;
  int64_t size = 1;
  c10::Device device = at::kCPU; // where tensors must lie
};

// A reduction over `whole` (place.size shards) into `shard`, which may have a wider
// dtype, as the addend. The tensors keep the memory alive.
struct ReduceArguments {
  at::Tensor input;
  at::Tensor output;
  at::Tensor addend;
  const char* whole = nullptr;
  char* shard = nullptr;
  const char* addend_data = nullptr;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType out_dtype = at::kFloat;
  int64_t count = 0; // elements of a shard
  int64_t item_size = 0;
  int64_t out_item_size = 0;
  double divisor = 1.0;

  // Of what is sent.
  int64_t shard_bytes() const {
    return count * item_size;
  }
  // From bytes of a shard of the input to those of the output and the addend.
  int64_t out_bytes(int64_t bytes) const {
    return bytes / item_size * out_item_size;
  }
  const char* addend_at(int64_t bytes) const {
    return addend_data == nullptr ? nullptr : addend_data + out_bytes(bytes);
  }
};

struct GatherArguments {
  at::Tensor input;
  at::Tensor output;
  const char* shard = nullptr;
  char* whole = nullptr;
  int64_t shard_bytes = 0;
};

// The second half of an all-reduce.
GatherArguments gather_of(const ReduceArguments& all_reduce);

// All throw c10::ValueError or c10::TypeError that names the operation.
ReduceArguments check_reduce_scatter(
    const Place& place,
    const at::Tensor& output,
    const at::Tensor& input,
    const Reduction& reduction,
    const Tag& tag);
ReduceArguments check_all_reduce(
    const Place& place,
    const at::Tensor& tensor,
    const Reduction& reduction,
    const Tag& tag);
GatherArguments check_all_gather(
    const Place& place,
    const at::Tensor& output,
    const at::Tensor& input,
    const Tag& tag);
void check_broadcast(const Place& place, const at::Tensor& tensor, int64_t root, const Tag& tag);
void check_exchange(const Place& place, const at::Tensor& bytes, const Tag& tag);

} // namespace zero::comm
