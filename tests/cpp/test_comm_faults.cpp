// Ranks that part ways, come late, leave or never come: named errors, no hangs.

#include "catch.h"
#include "ranks.h"
#include "transports.h"

#include <atomic>
#include <chrono>
#include <csignal>

#include <ATen/ATen.h>

#include <zero/comm/communicator.h>

using namespace zero::comm;
using zero::test::check_contains;
using zero::test::contains_all;
using zero::test::error_of;
using zero::test::Group;
using zero::test::make_communicator_over;
using zero::test::run_ranks;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

} // namespace

TEST_CASE("ranks in different operations get an error that names both, every one") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(2, 3);
  const int which = GENERATE(0, 1, 2, 3, 4);
  std::vector<std::string> errors(size);
  std::vector<std::string> later(size);
  const auto start = Clock::now();
  run_ranks(size, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 30.0);
    const bool odd = rank == 1;
    auto whole = at::zeros({size * 8});
    auto part = at::zeros({8});
    const Tag tag{.what = "bucket 2 (blocks.3.up.weight ...)", .id = 2, .step = 7};
    const Tag other{.what = "bucket 0 (head.weight)", .id = 0, .step = 7};
    errors[rank] = error_of([&] {
      switch (which) {
      case 0: // the kind
        odd ? comm->all_gather(whole, part, other)->wait()
            : comm->reduce_scatter(part, whole, {}, tag)->wait();
        break;
      case 1: // the id
        comm->reduce_scatter(part, whole, {}, odd ? other : tag)->wait();
        break;
      case 2: // the size
        comm->reduce_scatter(
                odd ? at::zeros({9}) : part, odd ? at::zeros({size * 9}) : whole, {}, tag)
            ->wait();
        break;
      case 3: // the step
        comm->broadcast(whole, 0, {.what = "w", .step = odd ? 8 : 7})->wait();
        break;
      default: // a barrier against a message
        odd ? comm->barrier(other) : static_cast<void>(comm->exchange(part.to(at::kByte), tag));
      }
    });
    later[rank] = error_of([&] { comm->barrier({}); });
  });
  const std::vector<std::vector<std::string>> parts{
      {"rank 0 is in reduce_scatter of bucket 2 (blocks.3.up.weight ...) at step 7",
       "rank 1 is in all_gather of bucket 0 (head.weight) at step 7"},
      {"rank 0 is in reduce_scatter of bucket 2", "rank 1 is in reduce_scatter of bucket 0"},
      {"32 bytes a rank", "36 bytes a rank"},
      {"rank 0 is in broadcast of w at step 7", "rank 1 is in broadcast of w at step 8"},
      {"rank 0 is in exchange of bucket 2", "rank 1 is in barrier of bucket 0"}};
  for (int64_t rank = 0; rank < size; ++rank) {
    INFO("rank " << rank << ", case " << which);
    REQUIRE(contains_all(errors[rank], {"[zero.comm] ranks disagree"}) == "");
    REQUIRE(contains_all(errors[rank], parts[which]) == "");
    REQUIRE(contains_all(later[rank], {"after an earlier failure: [zero.comm] ranks"}) == "");
  }
  REQUIRE(seconds_since(start) < 25.0);
}

TEST_CASE("ranks in different operations don't see each other's payload") {
  const std::string transport = EACH_TRANSPORT;
  constexpr int64_t size = 3;
  constexpr int64_t count = 100'000;
  run_ranks(size, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 30.0);
    auto whole = at::full({size, count}, -1.0);
    const auto part = at::full({count}, static_cast<double>(rank));
    comm->all_gather(whole, part, {.what = "bucket 0"})->wait();
    whole.fill_(-1.0);
    check_contains(
        error_of([&] {
          comm->all_gather(whole, part, {.what = "bucket 1", .step = rank == 1})->wait();
        }),
        {"ranks disagree"});
    for (int64_t peer = 0; peer < size; ++peer) {
      const bool same_operation = (peer == 1) == (rank == 1);
      TORCH_CHECK(same_operation || whole[peer].eq(-1.0).all().item<bool>(), "saw rank ", peer);
    }
  });
}

TEST_CASE("a rank that doesn't come is named within the timeout") {
  const std::string transport = EACH_TRANSPORT;
  std::vector<std::string> errors(3);
  std::atomic<int> waiting{2};
  run_ranks(3, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 1.0);
    comm->barrier({});
    if (rank == 1) {
      while (waiting > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    auto whole = at::zeros({3 * 8});
    const auto start = Clock::now();
    auto work = comm->all_reduce(whole, {}, {.what = "bucket 2", .id = 2});
    auto queued = comm->all_reduce(whole, {}, {.what = "bucket 3", .id = 3});
    errors[rank] = error_of([&] { work->wait(); });
    --waiting;
    TORCH_CHECK(seconds_since(start) < 15.0, "took ", seconds_since(start), " s");
    TORCH_CHECK(error_of([&] { work->wait(); }) == errors[rank]);
    check_contains(error_of([&] { queued->wait(); }), {"after an earlier failure"});
    check_contains(error_of([&] { comm->barrier({}); }), {"after an earlier failure"});
  });
  for (const int64_t rank : {0, 2}) {
    REQUIRE(
        contains_all(
            errors[rank],
            {"rank 1 did not take part in all_reduce of bucket 2",
             "within 1 s",
             "rank " + std::to_string(rank) + " of 3 was waiting"}) == "");
  }
}

TEST_CASE("a rank that leaves is named, in a type that callers of c10d know") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(2, 3);
  std::signal(SIGPIPE, SIG_DFL); // as in a C++ program; not every write finds a reader here
  std::vector<std::string> errors(size);
  run_ranks(size, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 30.0);
    auto whole = at::zeros({size * 8});
    comm->all_reduce(whole, {}, {})->wait();
    if (rank == 1) {
      return;
    }
    const auto start = Clock::now();
    errors[rank] = error_of([&] {
      try {
        comm->all_reduce(whole, {}, {.what = "bucket 5", .id = 5})->wait();
      } catch (const c10::DistBackendError&) {
        throw;
      } catch (const std::exception& error) {
        TORCH_CHECK(false, "expected DistBackendError, got ", error.what());
      }
    });
    TORCH_CHECK(seconds_since(start) < 25.0);
  });
  for (int64_t rank = 0; rank < size; ++rank) {
    if (rank != 1) {
      INFO(errors[rank]);
      REQUIRE(contains_all(errors[rank], {"rank 1", "all_reduce of bucket 5"}) == "");
      REQUIRE(contains_all(errors[rank], {"closed its"}) == "");
    }
  }
}

TEST_CASE("destruction doesn't hang on operations that nobody joins") {
  const std::string transport = EACH_TRANSPORT;
  std::atomic<bool> closed{false};
  run_ranks(2, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    comm->barrier({});
    if (rank == 1) {
      while (!closed) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      check_contains(
          error_of([&] { comm->all_reduce(at::zeros({4}), {}, {.what = "late"})->wait(); }),
          {"rank 0", "closed its communicator during all_reduce of lost", "late"});
      return;
    }
    auto work = comm->all_reduce(at::zeros({4}), {}, {.what = "lost"});
    const auto start = Clock::now();
    comm.reset();
    closed = true;
    TORCH_CHECK(seconds_since(start) < 5.0, "took ", seconds_since(start), " s");
    check_contains(
        error_of([&] { work->wait(); }), {"rank 0 of 2 closed its communicator", "lost"});
  });
}

TEST_CASE("an idle communicator closes at once, whatever the peers do") {
  const std::string transport = EACH_TRANSPORT;
  const auto start = Clock::now();
  run_ranks(4, [&](int64_t, const Group& group) {
    for (int i = 0; i < 5; ++i) {
      auto comm = make_communicator_over(transport, group, 60.0);
      auto x = at::ones({4});
      comm->all_reduce(x, {}, {})->wait();
      comm->barrier({});
    }
  });
  REQUIRE(seconds_since(start) < 25.0);
}

TEST_CASE("ranks that don't meet are named") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto text = error_of([&] { zero::make_gloo_group(store, 1, 3, 0.3); });
  REQUIRE(contains_all(text, {"3 ranks to meet within 0.3 s", "no sign of rank 0, 2"}) == "");
}
