// One rank of a benchmark of collectives between processes of one host, each done by
// torch's own Gloo group, by Zero over Gloo and over the host's memory, and beside them
// a memcpy of the bytes that a rank has to get from others. collectives.py starts the
// ranks and prints what rank 0 writes, a JSON document.
//
//   torchrun --no-python --nproc-per-node 2 build/bench_collectives ROUNDS MIB...

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <zero/comm/communicator.h>
#include <zero/comm/init.h>
#include <zero/memory/flat_buffer.h>

#include "arguments.h"

namespace {

using zero::comm::Kind;
using Call = std::function<void()>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Communicator = std::shared_ptr<zero::comm::Communicator>;

constexpr double kTimeoutSeconds = 60.0;
constexpr int64_t kMiB = int64_t{1} << 20;

struct Options {
  int64_t rounds = 0;
  std::vector<int64_t> mib;
};

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

Call with_gloo(const Group& group, Kind kind, const Buffers& buffers) {
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

Call with_zero(const Communicator& communicator, Kind kind, const Buffers& buffers) {
  const zero::comm::Tag tag{"a benchmark"};
  switch (kind) {
  case Kind::reduce_scatter:
    return [=] { communicator->reduce_scatter(buffers.shard, buffers.whole, {}, tag)->wait(); };
  case Kind::all_gather:
    return [=] { communicator->all_gather(buffers.whole, buffers.shard, tag)->wait(); };
  case Kind::all_reduce:
    return [=] { communicator->all_reduce(buffers.whole, {}, tag)->wait(); };
  default:
    return [=] { communicator->barrier(tag); };
  }
}

// An all-reduce is a reduce-scatter and an all-gather.
Call with_memcpy(const Ranks& ranks, const Case& work, const Buffers& buffers) {
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

std::vector<Way> ways_of(const Ranks& ranks, const Case& work, const Buffers& buffers) {
  std::vector<Way> ways = {
      {"gloo", with_gloo(ranks.group, work.kind, buffers)},
      {"group", with_zero(ranks.over_group, work.kind, buffers)},
      {"host", with_zero(ranks.over_host, work.kind, buffers)},
  };
  if (work.bytes() >= kMiB) {
    ways.push_back({"memcpy", with_memcpy(ranks, work, buffers)});
  }
  return ways;
}

// ---- one case ----

// Written in full: pages that nobody has written share one page of zeros.
Buffers make_buffers(const Ranks& ranks, const Case& work) {
  const auto account = std::make_shared<zero::memory::Account>();
  const auto filled = [&](int64_t numel) {
    const zero::memory::FlatBuffer buffer(
        numel,
        at::TensorOptions(work.dtype),
        zero::memory::Purpose::buffers,
        account,
        ranks.over_host->buffers().get());
    return buffer.tensor().fill_(0);
  };
  return {filled(work.numel), filled(work.numel / ranks.size()), filled(work.numel)};
}

// Each rank gives its rank + 1. Leaves zeros, whose sums stay what they are.
void check(const Ranks& ranks, const Case& work, const Buffers& buffers, const Way& way) {
  if (work.kind == Kind::barrier || way.name == "memcpy") {
    return;
  }
  const bool gathers = work.kind == Kind::all_gather;
  const auto& input = gathers ? buffers.shard : buffers.whole;
  const auto& output = work.kind == Kind::reduce_scatter ? buffers.shard : buffers.whole;
  input.fill_(ranks.rank() + 1);
  way.call();
  const auto own = at::arange(1, ranks.size() + 1, output.options());
  const auto expected = gathers ? own.unsqueeze(1) : own.sum();
  if (!output.view({gathers ? ranks.size() : 1, -1}).eq(expected).all().item<bool>()) {
    throw std::runtime_error(way.name + ": wrong result of " + name_of(work.kind));
  }
  buffers.whole.zero_();
  buffers.shard.zero_();
}

// The clock is the host's: all ranks read the same one.
int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// [collective] When this rank began and ended: ways x rounds x 2, in nanoseconds. The
// ways take turns; a call that is not timed comes first, since the turn before left the
// caches and the connections to another way.
at::Tensor
time_ways(const Ranks& ranks, const Case& work, const std::vector<Way>& ways, int64_t rounds) {
  const auto times = at::empty({static_cast<int64_t>(ways.size()), rounds, 2}, at::kLong);
  auto* time = times.mutable_data_ptr<int64_t>();
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t way = 0; way < ways.size(); ++way) {
      const auto& call = ways[way].call;
      call();
      ranks.over_host->barrier({"a benchmark"});
      auto* const own = time + 2 * (static_cast<int64_t>(way) * rounds + round);
      own[0] = now_ns();
      for (int64_t i = 0; i < work.calls; ++i) {
        call();
      }
      own[1] = now_ns();
    }
  }
  return times;
}

// [collective] Seconds a call, ways x rounds: from when the first rank began to when
// the last one ended.
at::Tensor seconds_of(const Ranks& ranks, const Case& work, const at::Tensor& times) {
  std::vector<std::vector<at::Tensor>> all(1);
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    all[0].push_back(at::empty_like(times));
  }
  std::vector<at::Tensor> own = {times};
  ranks.group->allgather(all, own)->wait();
  const auto everyone = at::stack(all[0]);
  const auto began = everyone.select(-1, 0).amin(0);
  const auto ended = everyone.select(-1, 1).amax(0);
  return (ended - began).to(at::kDouble) / (1e9 * static_cast<double>(work.calls));
}

std::string json_of(const Case& work, const std::vector<Way>& ways, const at::Tensor& seconds) {
  std::ostringstream json;
  json << "{\"collective\": \"" << name_of(work.kind) << "\", \"dtype\": \""
       << c10::toString(work.dtype) << "\", \"bytes\": " << work.bytes()
       << ", \"calls\": " << work.calls << ", \"seconds\": {";
  for (size_t way = 0; way < ways.size(); ++way) {
    json << (way == 0 ? "\"" : ", \"") << ways[way].name << "\": [";
    const auto row = seconds[static_cast<int64_t>(way)];
    for (int64_t round = 0; round < row.numel(); ++round) {
      json << (round == 0 ? "" : ", ") << row[round].item<double>();
    }
    json << "]";
  }
  json << "}}";
  return json.str();
}

std::string run(const Ranks& ranks, const Case& work, int64_t rounds) {
  const auto buffers = make_buffers(ranks, work);
  const auto ways = ways_of(ranks, work, buffers);
  for (const auto& way : ways) {
    check(ranks, work, buffers, way);
  }
  return json_of(work, ways, seconds_of(ranks, work, time_ways(ranks, work, ways, rounds)));
}

// ---- all of them ----

// A barrier has no tensor; an all-reduce takes a multiple of the ranks.
std::vector<Case> cases_of(const Options& options, int64_t ranks) {
  constexpr int64_t tiny_calls = 100;
  std::vector<Case> cases = {
      {Kind::barrier, at::kFloat, 0, tiny_calls},
      {Kind::all_reduce, at::kFloat, std::max<int64_t>(2, ranks), tiny_calls},
  };
  for (const Kind kind : {Kind::reduce_scatter, Kind::all_gather, Kind::all_reduce}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t mib : options.mib) {
        // Shards of whole cache lines, as in Zero's buffers.
        const int64_t lines = (mib * kMiB + 64 * ranks - 1) / (64 * ranks) * ranks;
        const auto numel = lines * 64 / static_cast<int64_t>(at::elementSize(dtype));
        cases.push_back({kind, dtype, numel, std::max<int64_t>(1, 32 / mib)});
      }
    }
  }
  return cases;
}

Options parse(int argc, char** argv) {
  if (argc < 3) {
    throw std::invalid_argument("usage: bench_collectives ROUNDS MIB...");
  }
  Options options{zero::benchmarks::number(argv[1]), {}};
  for (int i = 2; i < argc; ++i) {
    options.mib.push_back(zero::benchmarks::number(argv[i]));
  }
  return options;
}

Ranks meet() {
  const auto group = zero::init(kTimeoutSeconds);
  if (!group || group->getSize() < 2) {
    throw std::runtime_error(
        "expected two ranks or more; start it with collectives.py or torchrun");
  }
  const auto communicator = [&](const char* transport) {
    return zero::comm::make_communicator(group, kTimeoutSeconds, transport);
  };
  return {group, communicator("group"), communicator("host")};
}

void measure(const Options& options) {
  const auto ranks = meet();
  std::ostringstream json;
  json << "{\"ranks\": " << ranks.size() << ", \"torch\": \"" << TORCH_VERSION
       << "\", \"rounds\": " << options.rounds << ", \"transports\": {\"group\": \""
       << ranks.over_group->transport() << "\", \"host\": \"" << ranks.over_host->transport()
       << "\"}, \"cases\": [";
  const char* separator = "\n ";
  for (const auto& work : cases_of(options, ranks.size())) {
    json << separator << run(ranks, work, options.rounds);
    separator = ",\n ";
  }
  if (ranks.rank() == 0) {
    std::cout << json.str() << "\n]}\n" << std::flush;
  }
  ranks.over_host->barrier({"the end"});
}

} // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(1);
    measure(parse(argc, argv));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "bench_collectives: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
