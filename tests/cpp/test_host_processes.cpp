// The host transport between processes: results, and ranks that are killed or stopped
// at any moment. See host_worker.cpp.

#include "catch.h"
#include "ranks.h"
#include "workers.h"

#include <ctime>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

using zero::test::check_contains;
using zero::test::TemporaryFolder;
using zero::test::Worker;
using zero::test::Workers;

namespace {

constexpr double kStart = 60.0; // seconds; a loaded machine loads libraries slowly
constexpr double kEnd = 20.0;
#ifdef __SANITIZE_ADDRESS__
constexpr int kKills = 20;
#else
constexpr int kKills = 100;
#endif

int64_t now_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Started, and all ready. `how` is what the transport says of itself.
Workers start(
    const TemporaryFolder& folder,
    int64_t size,
    double timeout_seconds,
    const std::string& transport,
    uint64_t seed,
    std::string* how = nullptr) {
  Workers workers;
  for (int64_t rank = 0; rank < size; ++rank) {
    const std::vector<std::string> arguments{
        ZERO_HOST_WORKER,
        folder.path / "store",
        std::to_string(rank),
        std::to_string(size),
        std::to_string(timeout_seconds),
        transport,
        std::to_string(seed)};
    workers.push_back(std::make_unique<Worker>(arguments));
  }
  for (const auto& worker : workers) {
    const auto line = worker->line(kStart);
    TORCH_CHECK(line.rfind("ready ", 0) == 0, "expected a worker to be ready, got '", line, "'");
    if (how != nullptr) {
      *how = line.substr(6);
    }
  }
  return workers;
}

struct Failure {
  int64_t nanoseconds = 0;
  std::string text;
};

// That of a worker that ends with one.
Failure failure_of(Worker& worker) {
  std::istringstream line(worker.line(kEnd));
  std::string word;
  Failure failure;
  line >> word >> failure.nanoseconds;
  std::getline(line, failure.text);
  TORCH_CHECK(word == "error", "expected an error, got '", line.str(), "'");
  const int status = worker.join();
  TORCH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status ", status);
  return failure;
}

std::size_t shared_names() {
  const std::filesystem::directory_iterator directory("/dev/shm");
  return static_cast<std::size_t>(std::distance(begin(directory), end(directory)));
}

// Kills one of `size` ranks after `seconds` of work; what the others say of it, and
// the longest time until they did.
double kill_one(int64_t size, std::size_t victim, double seconds, uint64_t seed) {
  const TemporaryFolder folder;
  const auto workers = start(folder, size, 60.0, "host", seed);
  sleep_for(seconds);
  const auto killed = now_nanoseconds();
  workers[victim]->send(SIGKILL);
  double longest = 0.0;
  for (std::size_t rank = 0; rank < workers.size(); ++rank) {
    if (rank == victim) {
      continue;
    }
    const auto failure = failure_of(*workers[rank]);
    const auto name = c10::str("rank ", victim, " (pid ", workers[victim]->pid(), ") died during");
    check_contains(failure.text, {name});
    longest = std::max(longest, static_cast<double>(failure.nanoseconds - killed) * 1e-9);
  }
  // It was a zombie meanwhile.
  const int status = workers[victim]->join();
  TORCH_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status ", status);
  for (const auto& name : folder.names()) {
    TORCH_CHECK(name == "store", "left behind: ", name);
  }
  return longest;
}

} // namespace

TEST_CASE("random operations between processes are right") {
  const std::string transport = GENERATE(as<std::string>{}, "host", "staged");
  const int64_t size = GENERATE(2, 3, 4);
  const auto names = shared_names();
  const TemporaryFolder folder;
  std::string how;
  const auto workers = start(folder, size, 60.0, transport, 1234 + size, &how);
  if (transport == "staged" || how != "host (process_vm_readv)") {
    REQUIRE(how == "host (shared windows)");
    if (transport == "host") {
      WARN("processes may not read each other's memory here: windows are used");
    }
  }
  sleep_for(1.0);
  workers[0]->end_input();
  for (const auto& worker : workers) {
    const auto line = worker->line(kEnd);
    INFO(line);
    REQUIRE(line.rfind("done ", 0) == 0);
    REQUIRE(std::stoll(line.substr(5)) > 10);
    REQUIRE(worker->join() == 0);
  }
  REQUIRE(folder.names().size() <= 1);
  REQUIRE(shared_names() == names);
}

TEST_CASE("a rank that is killed is named by all others, within two seconds") {
  const auto names = shared_names();
  std::mt19937 engine(5);
  std::uniform_real_distribution<double> moment(0.0, 0.03);
  double longest = 0.0;
  for (int i = 0; i < kKills; ++i) {
    const int64_t size = i % 20 == 0 ? 4 : i % 4 == 1 ? 3 : 2;
    const std::size_t victim = engine() % static_cast<unsigned>(size);
    INFO("kill " << i << ", " << size << " ranks, victim " << victim);
    longest = std::max(longest, kill_one(size, victim, moment(engine), engine()));
    REQUIRE(longest < 2.0);
  }
  WARN("noticed within " << longest << " s");
  REQUIRE(shared_names() == names);
}

TEST_CASE("a rank that is stopped is named within the timeout, and ends with an error") {
  const int64_t size = GENERATE(2, 3);
  const TemporaryFolder folder;
  const auto workers = start(folder, size, 1.0, "host", 77);
  sleep_for(0.1);
  const auto stopped = now_nanoseconds();
  workers[1]->send(SIGSTOP);
  for (int64_t rank = 0; rank < size; ++rank) {
    if (rank != 1) {
      const auto failure = failure_of(*workers[rank]);
      INFO(failure.text);
      REQUIRE(failure.text.find("within 1 s") != std::string::npos);
      REQUIRE(failure.text.find("rank 1") != std::string::npos);
      REQUIRE(static_cast<double>(failure.nanoseconds - stopped) * 1e-9 < 3.0);
    }
  }
  workers[1]->send(SIGCONT);
  const auto failure = failure_of(*workers[1]);
  INFO(failure.text);
  REQUIRE(failure.text.find("[zero.comm]") != std::string::npos);
}
