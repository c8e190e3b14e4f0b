// Which ranks can have an NCCL group, and the errors of those that cannot.

#include "catch.h"
#include "ranks.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <zero/comm/nccl_group.h>

using namespace zero::comm;
using zero::test::contains_all;
using zero::test::error_of;

TEST_CASE("NCCL connects ranks that have a GPU each, and only those") {
  REQUIRE(nccl_obstacle({"a"}).empty());
  REQUIRE(nccl_obstacle({"a", "b", "c"}).empty());
  REQUIRE(nccl_obstacle({""}) == "no rank has a GPU");
  REQUIRE(nccl_obstacle({"", ""}) == "no rank has a GPU");
  REQUIRE(nccl_obstacle({"a", "", "b", ""}) == "no GPU is there for rank 1, 3");
  REQUIRE(nccl_obstacle({"b", "a", "c", "a"}) == "ranks 1 and 3 are on the same GPU (a)");
  REQUIRE(nccl_obstacle({"", "a", "a"}) == "ranks 1 and 2 are on the same GPU (a)");
}

TEST_CASE("an NCCL group without GPUs is an error on every rank that says why") {
  const int64_t size = 2;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  zero::test::run_threads(size, [&](int64_t rank) {
    const c10::Device device(c10::DeviceType::CUDA, 0); // one for both, should there be a GPU
    errors[rank] = error_of(
        [&] { make_nccl_backend(store, rank, size, 20.0, device, /*high_priority=*/true); });
  });
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto which = "rank " + std::to_string(rank) + " of 2";
    if (has_nccl()) {
      REQUIRE(
          contains_all(errors[rank], {"a GPU of its own for each rank", which, "LOCAL_RANK"}) ==
          "");
    } else {
      REQUIRE(
          contains_all(errors[rank], {"a build of Zero with NCCL", which, "ZERO_WITH_CUDA=ON"}) ==
          "");
    }
  }
}

TEST_CASE("a device that is not this process's own kind is refused before any meeting") {
  if (!has_nccl()) {
    REQUIRE_FALSE(gpu_of(0).has_value());
    return;
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error =
      error_of([&] { make_nccl_backend(store, 0, 2, 20.0, c10::Device("cpu"), false); });
  REQUIRE(contains_all(error, {"expected a CUDA device", "got cpu", "rank 0 of 2"}) == "");
  const auto null =
      error_of([&] { make_nccl_backend(nullptr, 0, 1, 20.0, c10::Device("cuda:0"), false); });
  REQUIRE(contains_all(null, {"c10d::Store", "null"}) == "");
}
