// One rank of test_host_processes: STORE RANK SIZE TIMEOUT TRANSPORT SEED. Says
// "ready", runs random operations until its standard input ends (rank 0's is asked),
// and says "done SEQUENCES", or "error NANOSECONDS TEXT" with the monotonic time at
// which it was thrown. A line each.

#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <iostream>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "random_operations.h"
#include "ranks.h"
#include "transports.h"

namespace {

using namespace zero::test;

struct Arguments {
  std::string store;
  int64_t rank;
  int64_t size;
  double timeout;
  std::string transport;
  uint64_t seed;
};

int64_t now_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

bool input_ended() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  return poll(&input, 1, 0) > 0;
}

int64_t run(const Arguments& arguments) {
  const auto store =
      c10::make_intrusive<c10d::FileStore>(arguments.store, static_cast<int>(arguments.size));
  const auto channels = make_communicators_over(
      arguments.transport,
      store_group(store, arguments.rank, arguments.size),
      arguments.timeout,
      2);
  std::cout << "ready " << channels[0]->transport() << std::endl;
  Generator common(arguments.seed);
  Generator own(arguments.seed + 1 + static_cast<uint64_t>(arguments.rank));
  for (int64_t sequences = 0;; ++sequences) {
    auto stop = at::full({1}, input_ended() ? 1 : 0, at::kByte);
    channels[0]->broadcast(stop, 0, {.what = "whether to stop"})->wait();
    if (stop.item<uint8_t>() != 0) {
      return sequences;
    }
    run_sequence(channels, common, own, /*large=*/300);
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    return 2;
  }
  const Arguments arguments{
      argv[1],
      std::atoll(argv[2]),
      std::atoll(argv[3]),
      std::atof(argv[4]),
      argv[5],
      std::strtoull(argv[6], nullptr, 10)};
  int64_t caught = 0;
  const auto error = error_of([&] {
    try {
      const int64_t sequences = run(arguments);
      std::cout << "done " << sequences << std::endl;
    } catch (...) {
      caught = now_nanoseconds();
      throw;
    }
  });
  if (!error.empty()) {
    std::cout << "error " << caught << " " << error.substr(0, error.find('\n')) << std::endl;
  }
  return error.empty() ? 0 : 1;
}
