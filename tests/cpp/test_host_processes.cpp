// The host transport between processes: results, and ranks that are killed or stopped
// at any moment. See host_worker.cpp.

#include "catch.h"
#include "ranks.h"
#include "workers.h"

#include <csignal>
#include <ctime>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

using zero::test::check_contains;
using zero::test::mappings_of;
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

// Ranks 0 to size - 1, which meet again and again.
class Ranks {
 public:
  Ranks(int64_t size, double timeout_seconds, std::string transport)
      : workers(size),
        timeout_(std::to_string(timeout_seconds)),
        transport_(std::move(transport)) {}

  // Starts those that are missing. Returns when all are ready, and how bytes travel.
  std::string meet(uint64_t seed) {
    const auto store = folder.path / ("store" + std::to_string(++meetings_));
    std::string how;
    for (std::size_t rank = 0; rank < workers.size(); ++rank) {
      if (!workers[rank]) {
        workers[rank] = std::make_unique<Worker>(std::vector<std::string>{
            ZERO_HOST_WORKER,
            std::to_string(rank),
            std::to_string(workers.size()),
            timeout_,
            transport_});
      }
      workers[rank]->say(store.string() + " " + std::to_string(seed));
    }
    for (const auto& worker : workers) {
      const auto line = worker->line(kStart);
      TORCH_CHECK(line.rfind("ready ", 0) == 0, "expected a worker to be ready, got '", line, "'");
      how = line.substr(6);
    }
    return how;
  }

  void end(int status) {
    for (const auto& worker : workers) {
      worker->end_input();
      const int found = worker->join();
      TORCH_CHECK(WIFEXITED(found) && WEXITSTATUS(found) == status, "exit status ", found);
    }
  }

  Workers workers;
  const TemporaryFolder folder;

 private:
  const std::string timeout_;
  const std::string transport_;
  int64_t meetings_ = 0;
};

struct Failure {
  int64_t nanoseconds = 0;
  std::string text;
};

Failure failure_of(Worker& worker) {
  std::istringstream line(worker.line(kEnd));
  std::string word;
  Failure failure;
  line >> word >> failure.nanoseconds;
  std::getline(line, failure.text);
  TORCH_CHECK(word == "error", "expected an error, got '", line.str(), "'");
  return failure;
}

// Kills a rank after `seconds` of work; the longest time until another said so.
double kill_one(Ranks& ranks, std::size_t victim, double seconds) {
  sleep_for(seconds);
  auto& killed = ranks.workers[victim];
  const auto start = now_nanoseconds();
  killed->send(SIGKILL);
  double longest = 0.0;
  for (std::size_t rank = 0; rank < ranks.workers.size(); ++rank) {
    if (rank != victim) {
      const auto failure = failure_of(*ranks.workers[rank]);
      check_contains(
          failure.text, {c10::str("rank ", victim, " (pid ", killed->pid(), ") died during")});
      longest = std::max(longest, static_cast<double>(failure.nanoseconds - start) * 1e-9);
    }
  }
  const int status = killed->join(); // a zombie meanwhile
  TORCH_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status ", status);
  killed.reset();
  return longest;
}

} // namespace

TEST_CASE("random operations between processes are right") {
  const std::string transport = GENERATE(as<std::string>{}, "host", "staged");
  const int64_t size = GENERATE(2, 3, 4);
  Ranks ranks(size, 60.0, transport);
  const auto how = ranks.meet(1234 + size);
  if (transport == "staged" || how == "host (shared windows)") {
    REQUIRE(how == "host (shared windows)");
    if (transport == "host") {
      WARN("processes may not read each other's memory here: windows are used");
    }
  }
  sleep_for(1.0);
  for (const auto& worker : ranks.workers) {
    const auto process = std::to_string(worker->pid());
    REQUIRE(mappings_of(process, "memfd:zero (") == 1);
    REQUIRE(
        mappings_of(process, "memfd:zero buffers") == (how.find("buffers") == how.npos ? 0 : size));
    REQUIRE(mappings_of(process, "/dev/shm/") == 0);
  }
  ranks.workers[0]->end_input();
  for (const auto& worker : ranks.workers) {
    const auto line = worker->line(kEnd);
    INFO(line);
    REQUIRE(line.rfind("done ", 0) == 0);
    REQUIRE(std::stoll(line.substr(5)) > 10);
  }
  ranks.end(0);
  REQUIRE(ranks.folder.names().size() <= 1);
}

// The others go on with a new process in its place.
TEST_CASE("a rank that is killed is named by all others, within two seconds") {
  std::mt19937 engine(5);
  std::uniform_real_distribution<double> moment(0.0, 0.03);
  double longest = 0.0;
  for (const int64_t size : {2, 3, 4}) {
    Ranks ranks(size, 60.0, "host");
    const int kills = size == 2 ? kKills / 2 : kKills / 4;
    for (int i = 0; i < kills; ++i) {
      const std::size_t victim = engine() % static_cast<unsigned>(size);
      INFO("kill " << i << ", " << size << " ranks, victim " << victim);
      ranks.meet(engine());
      longest = std::max(longest, kill_one(ranks, victim, moment(engine)));
      REQUIRE(longest < 2.0);
    }
    for (const auto& name : ranks.folder.names()) {
      REQUIRE(name.rfind("store", 0) == 0);
    }
  }
  std::cout << "killed ranks were noticed within " << longest << " s\n";
}

TEST_CASE("a rank that is stopped is named within the timeout, and ends with an error") {
  const int64_t size = GENERATE(2, 3);
  Ranks ranks(size, 1.0, "host");
  ranks.meet(77);
  sleep_for(0.1);
  const auto stopped = now_nanoseconds();
  ranks.workers[1]->send(SIGSTOP);
  for (int64_t rank = 0; rank < size; ++rank) {
    if (rank != 1) {
      const auto failure = failure_of(*ranks.workers[rank]);
      INFO(failure.text);
      REQUIRE(failure.text.find("within 1 s") != std::string::npos);
      REQUIRE(failure.text.find("rank 1") != std::string::npos);
      REQUIRE(static_cast<double>(failure.nanoseconds - stopped) * 1e-9 < 3.0);
    }
  }
  ranks.workers[1]->send(SIGCONT);
  const auto failure = failure_of(*ranks.workers[1]);
  INFO(failure.text);
  REQUIRE(failure.text.find("[zero.comm]") != std::string::npos);
  ranks.end(1);
}
