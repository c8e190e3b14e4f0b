#pragma once

// The collectives that collectives.cpp times, and the ways to do one.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/communicator.h>

namespace zero::benchmarks {

using comm::Kind;
using Call = std::function<void()>;
using Start = std::function<comm::WorkPtr()>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Communicator = std::shared_ptr<comm::Communicator>;

constexpr int64_t kKiB = int64_t{1} << 10;

struct Case {
  Kind kind;
  at::ScalarType dtype;
  int64_t numel; // of the whole tensor
  int64_t calls; // back to back in a round

  int64_t bytes() const {
    return numel * static_cast<int64_t>(at::elementSize(dtype));
  }
};

// Flat buffers as Zero has them (large ones in huge pages, where peers can read them),
// and one set for all ways, so that none has the caches to itself.
struct Buffers {
  at::Tensor whole;
  at::Tensor shard;
  at::Tensor copied; // what memcpy reads
};

struct Way {
  std::string name;
  Call call;
  Start start = nullptr; // the call, not waited for
};

struct Ranks {
  Group group;
  Communicator over_group;
  Communicator over_host;

  int64_t rank() const {
    return group->getRank();
  }
  int64_t size() const {
    return group->getSize();
  }
};

// ---- the ways ----

inline Call with_gloo(const Group& group, Kind kind, const Buffers& buffers) {
  // The group's own names of these two changed between torch's versions.
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  const auto wait = [](const c10::intrusive_ptr<c10d::Work>& work) { work->wait(); };
  switch (kind) {
  case Kind::reduce_scatter:
    return [=, shard = buffers.shard, whole = buffers.whole]() mutable {
      wait(backend->_reduce_scatter_base(shard, whole, {.asyncOp = false}));
    };
  case Kind::all_gather:
    return [=, shard = buffers.shard, whole = buffers.whole]() mutable {
      wait(backend->_allgather_base(whole, shard, {.asyncOp = false}));
    };
  case Kind::all_reduce:
    return [=, tensors = std::vector<at::Tensor>{buffers.whole}]() mutable {
      wait(group->allreduce(tensors, {.asyncOp = false}));
    };
  default:
    c10d::BarrierOptions options;
    options.device = at::kCPU;
    options.asyncOp = false;
    return [=] { wait(group->barrier(options)); };
  }
}

inline Way
with_zero(const char* name, const Communicator& communicator, Kind kind, const Buffers& buffers) {
  const comm::Tag tag{"a benchmark"};
  Start start;
  switch (kind) {
  case Kind::reduce_scatter:
    start = [=] { return communicator->reduce_scatter(buffers.shard, buffers.whole, {}, tag); };
    break;
  case Kind::all_gather:
    start = [=] { return communicator->all_gather(buffers.whole, buffers.shard, tag); };
    break;
  case Kind::all_reduce:
    start = [=] { return communicator->all_reduce(buffers.whole, {}, tag); };
    break;
  default:
    return {name, [=] { communicator->barrier(tag); }};
  }
  return {name, [=] { start()->wait(); }, start};
}

// An all-reduce is a reduce-scatter and an all-gather.
inline Call with_memcpy(const Ranks& ranks, const Case& work, const Buffers& buffers) {
  auto* to = static_cast<char*>(buffers.whole.mutable_data_ptr());
  const auto* from = static_cast<const char*>(buffers.copied.const_data_ptr());
  const auto bytes = static_cast<size_t>(work.bytes() / ranks.size() * (ranks.size() - 1));
  const int times = work.kind == Kind::all_reduce ? 2 : 1;
  return [=] {
    for (int i = 0; i < times; ++i) {
      std::memcpy(to, from, bytes);
    }
  };
}

inline std::vector<Way> ways_of(const Ranks& ranks, const Case& work, const Buffers& buffers) {
  std::vector<Way> ways = {
      {"gloo", with_gloo(ranks.group, work.kind, buffers)},
      with_zero("group", ranks.over_group, work.kind, buffers),
      with_zero("host", ranks.over_host, work.kind, buffers),
  };
  if (work.bytes() >= kKiB) {
    ways.push_back({"memcpy", with_memcpy(ranks, work, buffers)});
  }
  return ways;
}

} // namespace zero::benchmarks
