// The host transport when something goes wrong, for ranks as threads: who is named,
// that nobody reads freed memory, and that all go on after recover().

#include "catch.h"
#include "random_operations.h"
#include "ranks.h"
#include "transports.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

using namespace zero::comm;
using zero::test::below;
using zero::test::check_contains;
using zero::test::Communicators;
using zero::test::draw;
using zero::test::error_of;
using zero::test::Flight;
using zero::test::Generator;
using zero::test::Group;
using zero::test::make_communicators_over;
using zero::test::MeetingPoint;
using zero::test::run_host_ranks;

namespace {

#define EACH_HOST_TRANSPORT GENERATE(as<std::string>{}, "host", "staged")

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int64_t kEpochs = 60;
#else
constexpr int64_t kEpochs = 200;
#endif

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void sleep_for_microseconds(int64_t count) {
  std::this_thread::sleep_for(std::chrono::microseconds(count));
}

// What each rank knows of the others in an epoch: `common` is drawn alike.
struct Rank {
  int64_t rank;
  Communicators channels;
  Generator common;
  Generator own;
  MeetingPoint& point;

  int64_t size() const {
    return channels[0]->size();
  }
  Communicator& channel(int64_t index) const {
    return *channels[index];
  }
};

// Operations that don't block, alternately in both channels.
std::vector<Flight> launch_some(Rank& self) {
  std::vector<Flight> flights;
  const int64_t count = 1 + below(self.common, 5);
  for (int64_t i = 0; i < count; ++i) {
    auto drawn = draw(self.common, self.size(), /*large=*/100);
    drawn.kind = drawn.blocks() ? Kind::all_gather : drawn.kind;
    try {
      flights.emplace_back(self.channel(i % 2), drawn, i);
    } catch (const c10::DistBackendError&) {
      // Failed already: a peer was quick.
    }
  }
  return flights;
}

// Each has succeeded, or failed of what `parts` say.
void finish_all(std::vector<Flight>& flights, const std::vector<std::string>& parts) {
  for (auto& flight : flights) {
    if (const auto error = error_of([&] { flight.finish(); }); !error.empty()) {
      check_contains(error, parts);
    }
  }
}

void recover(Rank& self) {
  for (const auto& channel : self.channels) {
    channel->recover();
    TORCH_CHECK(!channel->recoverable());
  }
  for (int i = 0; i < 2; ++i) {
    zero::test::run_sequence(self.channels, self.common, self.own, /*large=*/20);
  }
  self.point.meet(); // a rank that is quick would give up what others are still in
}

std::string fail_one(Rank& self, const std::string& what) {
  return error_of([&] {
    const int64_t channel = below(self.common, 2);
    const Tag tag{.what = what, .id = what.front()};
    self.channel(channel).all_reduce(at::ones({self.size() * 8}), {}, tag)->wait();
  });
}

// One rank gives up; the others, which wait for it, all learn why.
void one_aborts(Rank& self, int64_t epoch) {
  const int64_t who = below(self.common, self.size());
  const auto why = c10::str("the reason of epoch ", epoch);
  const std::vector<std::string> parts{c10::str("rank ", who, " gave up: ", why)};
  auto flights = launch_some(self);
  const int64_t channel = below(self.common, 2);
  if (self.rank == who) {
    sleep_for_microseconds(below(self.own, 400));
    self.channel(channel).abort(why);
    TORCH_CHECK(self.channel(channel).recoverable());
    const auto later = error_of([&] { self.channel(channel).barrier({}); });
    check_contains(later, {"[zero.comm] after an earlier failure: [zero.comm] " + why});
    finish_all(flights, {why});
    return;
  }
  finish_all(flights, parts);
  check_contains(error_of([&] { self.channel(channel).barrier({.what = "alone"}); }), parts);
}

void all_abort(Rank& self, int64_t epoch) {
  const auto why = c10::str("all, in epoch ", epoch);
  auto flights = launch_some(self);
  sleep_for_microseconds(below(self.own, 100));
  self.channel(below(self.own, 2)).abort(why);
  finish_all(flights, {why});
}

void ranks_disagree(Rank& self, int64_t epoch) {
  auto flights = launch_some(self);
  const auto odd = below(self.common, self.size());
  const auto what = c10::str(self.rank == odd ? "odd " : "even ", epoch);
  check_contains(
      fail_one(self, what),
      {"ranks disagree: rank 0 is in",
       c10::str("odd ", epoch, " at step"),
       c10::str("even ", epoch, " at step")});
  finish_all(flights, {"ranks disagree"});
}

} // namespace

TEST_CASE("after an abort all ranks go on, many times in a row") {
  const std::string transport = EACH_HOST_TRANSPORT;
  const int64_t size = GENERATE(2, 3);
  MeetingPoint point(size);
  run_host_ranks(size, [&](int64_t rank, const Group& group) {
    Rank self{
        rank,
        make_communicators_over(transport, group, 60.0, 2),
        Generator(size),
        Generator(100 + rank),
        point};
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      one_aborts(self, epoch);
      recover(self);
    }
  });
}

TEST_CASE("after all ranks aborted, or disagreed, they go on") {
  const std::string transport = EACH_HOST_TRANSPORT;
  const int64_t size = GENERATE(2, 4);
  MeetingPoint point(size);
  run_host_ranks(size, [&](int64_t rank, const Group& group) {
    Rank self{
        rank,
        make_communicators_over(transport, group, 60.0, 2),
        Generator(size),
        Generator(100 + rank),
        point};
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      epoch % 2 == 0 ? all_abort(self, epoch) : ranks_disagree(self, epoch);
      recover(self);
    }
  });
}

TEST_CASE("recover() of what has not failed returns at once") {
  run_host_ranks(2, [](int64_t rank, const Group& group) {
    const auto comm = make_communicator(group, 60.0, "host");
    if (rank == 0) {
      comm->recover(); // alone
    }
    comm->barrier({});
  });
}

// Gloo is not instrumented.
#ifndef __SANITIZE_THREAD__
TEST_CASE("over a group there is nothing to abort and to recover") {
  zero::test::run_ranks(2, [](int64_t, const Group& group) {
    const auto comm = make_communicator(group, 60.0, "group");
    comm->abort("no effect");
    comm->recover();
    TORCH_CHECK(!comm->recoverable());
    comm->barrier({});
  });
}
#endif

TEST_CASE("recover() names a rank that closed its communicator, and one that is late") {
  const bool closes = GENERATE(true, false);
  MeetingPoint point(3);
  run_host_ranks(3, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator(group, closes ? 60.0 : 1.0, "host");
    point.meet();
    if (rank == 2) {
      comm->abort("enough");
      if (closes) {
        comm.reset();
      }
      point.meet();
      return;
    }
    const auto first = error_of([&] { comm->barrier({}); });
    const auto start = Clock::now();
    const auto error = error_of([&] { comm->recover(); });
    const auto seconds = seconds_since(start);
    const auto later = error_of([&] { comm->barrier({}); });
    point.meet();
    check_contains(first, {"rank 2 gave up: enough"});
    const std::string what = closes ? "closed its communicator" : "within 1 s";
    check_contains(error, {"rank 2", what, "the recovery from an error"});
    check_contains(later, {"after an earlier failure"});
    TORCH_CHECK(comm->recoverable());
    TORCH_CHECK(seconds < 3.0, "took ", seconds, " s");
  });
}

TEST_CASE("a rank that is stuck in the other channel is named with what it does there") {
  const std::string transport = EACH_HOST_TRANSPORT;
  run_host_ranks(2, [&](int64_t rank, const Group& group) {
    const auto channels = make_communicators_over(transport, group, rank == 0 ? 1.0 : 30.0, 2);
    if (rank == 1) {
      const auto error = error_of([&] {
        channels[1]
            ->all_gather(at::empty({4}), at::ones({2}), {.what = "unit 3", .step = 7})
            ->wait();
      });
      check_contains(error, {"rank 0 gave up: rank 1 did not take part in all_reduce of bucket 2"});
      return;
    }
    const auto error =
        error_of([&] { channels[0]->all_reduce(at::ones({4}), {}, {.what = "bucket 2"})->wait(); });
    check_contains(
        error,
        {"rank 1 did not take part in all_reduce of bucket 2",
         "within 1 s",
         "meanwhile on rank 1: in all_gather of unit 3 at step 7"});
  });
}

TEST_CASE("of two channels that fail at once the others hear one whole reason") {
  MeetingPoint point(2);
  run_host_ranks(2, [&](int64_t rank, const Group& group) {
    const auto channels = make_communicators_over("host", group, 60.0, 2);
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      const std::vector<std::string> reasons{std::string(1500, 'a'), std::string(1500, 'b')};
      if (rank == 0) {
        std::atomic<int> ready{0};
        const auto abort = [&](int64_t channel) {
          for (++ready; ready < 2;) {
          }
          channels[channel]->abort(reasons[channel]);
        };
        std::thread other(abort, 1);
        abort(0);
        other.join();
      } else {
        const auto error = error_of([&] { channels[epoch % 2]->barrier({}); });
        const bool first = error.find(" gave up: " + reasons[0] + " (in") != std::string::npos;
        const bool second = error.find(" gave up: " + reasons[1] + " (in") != std::string::npos;
        TORCH_CHECK(first || second, "epoch ", epoch, ": ", error);
      }
      channels[0]->recover();
      channels[1]->recover();
      point.meet();
    }
  });
}

// With the address sanitizer: buffers go when wait() has thrown.
TEST_CASE("nobody reads a rank's memory after its operation has failed") {
  const std::string transport = EACH_HOST_TRANSPORT;
  MeetingPoint point(3);
  run_host_ranks(3, [&](int64_t rank, const Group& group) {
    const auto channels = make_communicators_over(transport, group, 60.0, 2);
    Generator common(7);
    Generator own(rank);
    for (int64_t epoch = 0; epoch < kEpochs / 2; ++epoch) {
      const int64_t who = epoch % 3;
      const int64_t count = 3 * (200000 + below(common, 800000));
      auto whole = at::ones({count});
      auto gathered = at::empty({count});
      auto reduce = channels[0]->all_reduce(whole, {}, {});
      auto gather =
          channels[1]->all_gather(gathered, gathered.narrow(0, rank * count / 3, count / 3), {});
      if (rank == who) {
        sleep_for_microseconds(below(own, 4000));
        channels[below(own, 2)]->abort("enough");
      }
      const bool reduced = error_of([&] { reduce->wait(); }).empty();
      whole = at::Tensor();
      const bool moved = error_of([&] { gather->wait(); }).empty();
      gathered = at::Tensor();
      if (rank != who) {
        TORCH_CHECK(!error_of([&] { channels[0]->barrier({}); }).empty(), reduced, moved);
      }
      channels[0]->recover();
      channels[1]->recover();
      point.meet();
    }
  });
}

TEST_CASE("a rank that keeps a finished operation but no communicator is seen to be gone") {
  MeetingPoint point(2);
  run_host_ranks(2, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator(group, 30.0, "host");
    const auto work = comm->all_reduce(at::ones({2}), {}, {});
    work->wait();
    if (rank == 1) {
      comm.reset();
      point.meet();
      return;
    }
    const auto start = Clock::now();
    const auto error = error_of([&] { comm->barrier({.what = "more"}); });
    const auto seconds = seconds_since(start);
    point.meet();
    check_contains(error, {"rank 1", "closed its communicator before barrier of more"});
    TORCH_CHECK(seconds < 3.0, "took ", seconds, " s");
  });
}

TEST_CASE("a forked child that drops its copy takes nothing from its parent") {
  run_host_ranks(2, [](int64_t rank, const Group& group) {
    auto comm = make_communicator(group, 5.0, "host");
    comm->barrier({});
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        comm.reset();
        _exit(0);
      }
      int status = 0;
      waitpid(child, &status, 0);
      TORCH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status ", status);
    }
    comm->barrier({.what = "after the fork"});
  });
}
