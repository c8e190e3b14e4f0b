// The host transport alone, for ranks as threads: random operations against
// arithmetic done here, the bits of the group transport, and what it leaves behind.

#include "catch.h"
#include "random_operations.h"
#include "ranks.h"
#include "transports.h"

#include <filesystem>

using namespace zero::comm;
using zero::test::below;
using zero::test::Communicators;
using zero::test::error_of;
using zero::test::Generator;
using zero::test::Group;
using zero::test::make_communicators_over;
using zero::test::mappings_of;
using zero::test::run_host_ranks;
using zero::test::run_ranks;

namespace {

constexpr uint64_t kSeed = 20240607;
#ifdef __SANITIZE_THREAD__
constexpr int64_t kPart = 4; // of the sequences: each takes so much longer
#elif defined(__SANITIZE_ADDRESS__)
constexpr int64_t kPart = 2;
#else
constexpr int64_t kPart = 1;
#endif

#define EACH_HOST_TRANSPORT GENERATE(as<std::string>{}, "host", "staged")

void run_sequences(const std::string& transport, int64_t size, int64_t count) {
  run_host_ranks(size, [&](int64_t rank, const Group& group) {
    const auto channels = make_communicators_over(transport, group, 60.0, 2);
    Generator common(kSeed + size);
    Generator own(kSeed + 100 + rank);
    for (int64_t i = 0; i < count; ++i) {
      const auto error =
          error_of([&] { zero::test::run_sequence(channels, common, own, /*large=*/10); });
      TORCH_CHECK(error.empty(), "seed ", kSeed, ", sequence ", i, ", ", transport, ": ", error);
    }
  });
}

// Any bits but NaN, whose payload may depend on the order of operands.
[[maybe_unused]] at::Tensor any_bits(int64_t count, at::ScalarType type, Generator& generator) {
  auto tensor = at::empty({count}, type);
  auto* bytes = static_cast<char*>(tensor.mutable_data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<char>(generator());
  }
  return tensor.masked_fill_(tensor.isnan(), std::numeric_limits<double>::infinity());
}

[[maybe_unused]] std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

struct Left {
  std::size_t files = 0; // open file descriptors
  std::size_t threads = 0;
  int64_t segments = 0;

  bool operator==(const Left&) const = default;
};

Left look() {
  const auto entries = [](const char* path) {
    const std::filesystem::directory_iterator directory(path);
    return static_cast<std::size_t>(std::distance(begin(directory), end(directory)));
  };
  return {entries("/proc/self/fd"), entries("/proc/self/task"), mappings_of("self", "memfd:zero")};
}

std::ostream& operator<<(std::ostream& out, const Left& left) {
  return out << left.files << " files, " << left.threads << " threads, " << left.segments
             << " segments";
}

} // namespace

TEST_CASE("transports say how bytes travel") {
  run_host_ranks(2, [](int64_t, const Group& group) {
    TORCH_CHECK(make_communicator(group, 60.0, "host")->transport() == "host (threads)");
    TORCH_CHECK(make_communicator(group, 60.0)->transport() == "host (threads)");
    const auto staged = make_communicators_over("staged", group, 60.0, 1);
    TORCH_CHECK(staged[0]->transport() == "host (shared windows)");
  });
}

TEST_CASE("random sequences of operations over two channels of two ranks") {
  run_sequences(EACH_HOST_TRANSPORT, 2, 2500 / kPart);
}

TEST_CASE("random sequences of operations over two channels of three ranks") {
  run_sequences(EACH_HOST_TRANSPORT, 3, 1500 / kPart);
}

TEST_CASE("random sequences of operations over two channels of four ranks") {
  run_sequences(EACH_HOST_TRANSPORT, 4, 1000 / kPart);
}

TEST_CASE("operations of several pieces and windows") {
  const std::string transport = EACH_HOST_TRANSPORT;
  const int64_t size = GENERATE(2, 3, 4);
  run_host_ranks(size, [&](int64_t rank, const Group& group) {
    const auto channels = make_communicators_over(transport, group, 60.0, 2);
    Generator common(kSeed);
    Generator own(rank);
    for (int64_t i = 0; i < 20 / kPart; ++i) {
      zero::test::run_sequence(channels, common, own, /*large=*/1000);
    }
  });
}

// Gloo is not instrumented.
#ifndef __SANITIZE_THREAD__
TEST_CASE("bits are those of the group transport, for any bits of the inputs") {
  const int64_t size = GENERATE(2, 3, 4);
  run_ranks(size, [&](int64_t rank, const Group& group) {
    Communicators all;
    for (const char* name : {"group", "host", "staged"}) {
      all.push_back(make_communicators_over(name, group, 60.0, 1).front());
    }
    Generator common(kSeed);
    Generator own(kSeed + rank);
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (int64_t i = 0; i < 25; ++i) {
        const auto shard = below(common, i % 5 == 0 ? 100000 : 700);
        const auto whole = any_bits(size * shard, type, own);
        const auto addend = i % 2 == 0 ? any_bits(shard, type, own) : at::Tensor();
        const double divisor = i % 3 == 0 ? 1.0 : 3.0;
        std::vector<std::string> results;
        for (const auto& comm : all) {
          auto part = at::empty({shard}, type);
          comm->reduce_scatter(part, whole, {divisor, addend}, {})->wait();
          auto copy = whole.clone();
          comm->all_reduce(copy, {divisor, addend}, {})->wait();
          results.push_back(bytes_of(part) + bytes_of(copy));
        }
        TORCH_CHECK(results[1] == results[0] && results[2] == results[0], type, ", number ", i);
      }
    }
  });
}
#endif

TEST_CASE("nothing is left of communicators that were dropped") {
  const std::string transport = EACH_HOST_TRANSPORT;
  const auto make = [&](int64_t, const Group& group) {
    const auto channels = make_communicators_over(transport, group, 60.0, 2);
    channels[1]->all_reduce(at::ones({3 * 4000}), {}, {})->wait();
    channels[0]->barrier({});
    TORCH_CHECK(mappings_of("self", "memfd:zero") > 0);
    TORCH_CHECK(mappings_of("self", "/dev/shm/") == 0);
  };
  run_host_ranks(3, make); // what is made once stays
  const auto before = look();
  REQUIRE(before.segments == 0);
  for (int i = 0; i < 50; ++i) {
    run_host_ranks(3, make);
  }
  REQUIRE(look() == before);
}
