// One rank of test_host_processes: RANK SIZE TIMEOUT TRANSPORT. For each line "STORE
// SEED" of its standard input it meets the others there, says "ready" and runs random
// operations until rank 0's input has more, or ends. Then it says "done SEQUENCES", or
// "error NANOSECONDS TEXT" with the monotonic time at which it was thrown.

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
  int64_t rank;
  int64_t size;
  double timeout;
  std::string transport;
};

int64_t now_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

bool input_has_more() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  return poll(&input, 1, 0) > 0;
}

int64_t run(const Arguments& arguments, const std::string& path, uint64_t seed) {
  const auto store = c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(arguments.size));
  const auto channels = make_communicators_over(
      arguments.transport,
      store_group(store, arguments.rank, arguments.size),
      arguments.timeout,
      2);
  std::cout << "ready " << channels[0]->transport() << std::endl;
  Generator common(seed);
  Generator own(seed + 1 + static_cast<uint64_t>(arguments.rank));
  for (int64_t sequences = 0;; ++sequences) {
    auto stop = at::full({1}, input_has_more() ? 1 : 0, at::kByte);
    channels[0]->broadcast(stop, 0, {.what = "whether to stop"})->wait();
    if (stop.item<uint8_t>() != 0) {
      return sequences;
    }
    run_sequence(channels, common, own, /*large=*/300);
  }
}

bool run_and_report(const Arguments& arguments, const std::string& path, uint64_t seed) {
  int64_t caught = 0;
  const auto error = error_of([&] {
    try {
      const int64_t sequences = run(arguments, path, seed);
      std::cout << "done " << sequences << std::endl;
    } catch (...) {
      caught = now_nanoseconds();
      throw;
    }
  });
  if (!error.empty()) {
    std::cout << "error " << caught << " " << error.substr(0, error.find('\n')) << std::endl;
  }
  return error.empty();
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    return 2;
  }
  const Arguments arguments{std::atoll(argv[1]), std::atoll(argv[2]), std::atof(argv[3]), argv[4]};
  bool good = true;
  std::string path;
  for (uint64_t seed = 0; std::cin >> path >> seed;) {
    good = run_and_report(arguments, path, seed);
  }
  return good ? 0 : 1;
}
