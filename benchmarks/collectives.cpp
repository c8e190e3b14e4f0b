// One rank of a benchmark of collectives between processes of one host, each done by
// torch's own Gloo group, by Zero over Gloo and over the host's memory, and beside them
// a memcpy of the bytes that a rank has to get from others. collectives.py starts the
// ranks and prints what rank 0 writes, a JSON document. Zero's are measured once more
// beside computation, as a step has them: how long they take then, and what they cost it.
//
//   torchrun --no-python --nproc-per-node 2 build/bench_collectives ROUNDS KIB...

#include <algorithm>
#include <chrono>
#include <exception>
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
#include "collective_ways.h"

namespace {

using namespace zero::benchmarks;

constexpr double kTimeoutSeconds = 60.0;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPieces = 500; // of computation, to learn how long one takes

struct Options {
  int64_t rounds = 0;
  std::vector<int64_t> kib;
};

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

// [collective] The tensor of every rank, stacked.
at::Tensor of_all(const Ranks& ranks, const at::Tensor& own) {
  std::vector<std::vector<at::Tensor>> all(1);
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    all[0].push_back(at::empty_like(own));
  }
  std::vector<at::Tensor> inputs = {own};
  ranks.group->allgather(all, inputs)->wait();
  return at::stack(all[0]);
}

// [collective] Seconds a call, ways x rounds: from when the first rank began to when
// the last one ended.
at::Tensor seconds_of(const Ranks& ranks, const Case& work, const at::Tensor& times) {
  const auto everyone = of_all(ranks, times);
  const auto began = everyone.select(-1, 0).amin(0);
  const auto ended = everyone.select(-1, 1).amax(0);
  return (ended - began).to(at::kDouble) / (1e9 * static_cast<double>(work.calls));
}

// ---- beside computation ----

// Some microseconds of arithmetic in a core's cache.
class Computation {
 public:
  void piece() {
    at::mm_out(product_, left_, right_);
  }

 private:
  at::Tensor left_ = at::full({64, 64}, 0.5);
  at::Tensor right_ = at::full({64, 64}, 0.25);
  at::Tensor product_ = at::empty({64, 64});
};

// [collective] rounds x (seconds a call, seconds of computation that a call cost this
// rank). A rank goes on computing until its call is done, and starts the next one then;
// what a piece takes while all ranks compute, it learns just before.
at::Tensor time_beside(const Ranks& ranks, const Case& work, const Way& way, int64_t rounds) {
  Computation computation;
  const auto figures = at::empty({rounds, 2}, at::kDouble);
  auto* figure = figures.mutable_data_ptr<double>();
  for (int64_t round = 0; round < rounds; ++round, figure += 2) {
    way.call();
    ranks.over_host->barrier({"a benchmark"});
    const auto learning = now_ns();
    for (int64_t i = 0; i < kPieces; ++i) {
      computation.piece();
    }
    const double piece = static_cast<double>(now_ns() - learning) / kPieces;
    ranks.over_host->barrier({"a benchmark"});
    int64_t pieces = 0;
    const auto began = now_ns();
    for (int64_t i = 0; i < work.calls; ++i) {
      const auto started = way.start();
      do {
        computation.piece();
        ++pieces;
      } while (!started->done());
      started->wait();
    }
    const auto took = static_cast<double>(now_ns() - began);
    const double scale = 1e9 * static_cast<double>(work.calls);
    figure[0] = took / scale;
    figure[1] = (took - static_cast<double>(pieces) * piece) / scale;
  }
  return figures;
}

bool beside_computation(const Case& work) {
  return work.dtype == at::kFloat &&
      (work.kind == Kind::reduce_scatter || work.kind == Kind::all_gather);
}

// ---- what is written ----

std::string json_of(const at::Tensor& row) {
  std::ostringstream json;
  json << "[";
  for (int64_t i = 0; i < row.numel(); ++i) {
    json << (i == 0 ? "" : ", ") << row[i].item<double>();
  }
  json << "]";
  return json.str();
}

std::string run(const Ranks& ranks, const Case& work, int64_t rounds) {
  const auto buffers = make_buffers(ranks, work);
  const auto ways = ways_of(ranks, work, buffers);
  for (const auto& way : ways) {
    check(ranks, work, buffers, way);
  }
  const auto seconds = seconds_of(ranks, work, time_ways(ranks, work, ways, rounds));
  std::ostringstream json;
  json << "{\"collective\": \"" << name_of(work.kind) << "\", \"dtype\": \""
       << c10::toString(work.dtype) << "\", \"bytes\": " << work.bytes()
       << ", \"calls\": " << work.calls << ", \"seconds\": {";
  for (size_t way = 0; way < ways.size(); ++way) {
    json << (way == 0 ? "\"" : ", \"") << ways[way].name
         << "\": " << json_of(seconds[static_cast<int64_t>(way)]);
  }
  json << "}";
  if (beside_computation(work)) {
    json << ", \"beside\": {";
    const char* separator = "";
    for (const auto& way : ways) {
      if (!way.start) {
        continue;
      }
      const auto figures = of_all(ranks, time_beside(ranks, work, way, rounds)).mean(0);
      json << separator << "\"" << way.name << "\": {\"seconds\": " << json_of(figures.select(1, 0))
           << ", \"taken\": " << json_of(figures.select(1, 1)) << "}";
      separator = ", ";
    }
    json << "}";
  }
  json << "}";
  return json.str();
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
      for (const int64_t kib : options.kib) {
        // Shards of whole cache lines, as in Zero's buffers.
        const int64_t lines = (kib * kKiB + 64 * ranks - 1) / (64 * ranks) * ranks;
        const auto numel = lines * 64 / static_cast<int64_t>(at::elementSize(dtype));
        const int64_t calls = 32 * kMiB / (kib * kKiB);
        cases.push_back({kind, dtype, numel, std::clamp<int64_t>(calls, 1, 32)});
      }
    }
  }
  return cases;
}

Options parse(int argc, char** argv) {
  if (argc < 3) {
    throw std::invalid_argument("usage: bench_collectives ROUNDS KIB...");
  }
  Options options{number(argv[1]), {}};
  for (int i = 2; i < argc; ++i) {
    options.kib.push_back(number(argv[i]));
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
