#pragma once

// The payload phase of each collective over PeerExchange, between its open() and
// its close().

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/comm/arguments.h>
#include <zero/comm/peer_exchange.h>

namespace zero::comm {

// What reductions receive into, kept from one to the next.
class ReduceScratch {
 public:
  // `count` spans of kChunkBytes, each aligned as the kernels want it.
  Span span(int64_t index, int64_t count);

  static constexpr int64_t kChunkBytes = int64_t{1} << 20;

 private:
  at::Tensor buffer_;
};

// Each sends (size - 1) shards. Return the bytes that this rank sent.
int64_t
reduce_scatter(PeerExchange& peers, const ReduceArguments& arguments, ReduceScratch& scratch);
int64_t all_gather(PeerExchange& peers, const GatherArguments& arguments);

// A binomial tree from `root`.
int64_t broadcast(PeerExchange& peers, const at::Tensor& tensor, int64_t root);

// `headers` carry each rank's length, and its message where that is short.
std::vector<at::Tensor>
exchange(PeerExchange& peers, const at::Tensor& bytes, const std::vector<OperationHeader>& headers);

} // namespace zero::comm
