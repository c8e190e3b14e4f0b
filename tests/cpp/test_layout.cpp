// The flat layout's properties, over every small case.

#include <algorithm>
#include <set>

#include "catch.h"

#include <c10/util/Exception.h>

#include <zero/layout/flat_layout.h>

using namespace zero::layout;

namespace {

void check_layout(
    const std::vector<ParameterSpec>& specs,
    const BucketOptions& options,
    const FlatLayout& layout) {
  std::set<int64_t> placed;
  REQUIRE(layout.slots.size() == specs.size());
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const Bucket& bucket = layout.buckets[b];
    const int64_t block = kAlignmentBytes / bucket.itemsize;
    REQUIRE(bucket.numel == bucket.shard_numel * options.world_size);
    REQUIRE(bucket.shard_numel % block == 0);
    int64_t used = 0;
    for (const int64_t index : bucket.parameters) {
      const Slot& slot = layout.slots[index];
      REQUIRE(placed.insert(index).second);
      REQUIRE(slot.bucket == static_cast<int64_t>(b));
      REQUIRE(slot.numel == specs[index].numel);
      REQUIRE(slot.offset % block == 0);
      REQUIRE(slot.offset >= used); // no overlap, in order
      REQUIRE(slot.offset - used < block); // no more padding than alignment asks
      REQUIRE(specs[index].family == bucket.family);
      used = slot.offset + slot.numel;
    }
    REQUIRE(used <= bucket.numel);
    REQUIRE(bucket.numel - used < options.world_size * block + block);
    const int64_t limit = b == 0 ? options.first_bucket_bytes : options.bucket_bytes;
    const auto filled =
        std::count_if(bucket.parameters.begin(), bucket.parameters.end(), [&](int64_t index) {
          return specs[index].numel > 0;
        });
    if (filled > 1) {
      REQUIRE(used * bucket.itemsize <= limit);
    }
    // Reverse order of registration.
    REQUIRE(std::is_sorted(bucket.parameters.rbegin(), bucket.parameters.rend()));
  }
  REQUIRE(placed.size() == specs.size());
}

void check_ownership(const FlatLayout& layout, int64_t world_size) {
  for (size_t i = 0; i < layout.slots.size(); ++i) {
    const Slot& slot = layout.slots[i];
    int64_t at = 0;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const Range part = owned(slot, layout.buckets[slot.bucket], rank);
      if (part.size() > 0) {
        REQUIRE(part.begin == at); // the ranks' parts follow each other
        at = part.end;
      }
    }
    REQUIRE(at == slot.numel); // and cover the parameter
  }
}

} // namespace

TEST_CASE("every element has one place and one owner", "[layout]") {
  const std::vector<int64_t> sizes = {0, 1, 15, 16, 17, 40};
  for (int64_t world_size = 1; world_size <= 5; ++world_size) {
    for (const int64_t a : sizes) {
      for (const int64_t b : sizes) {
        for (const int64_t c : sizes) {
          for (int64_t families = 0; families < 8; ++families) {
            for (const int64_t bytes : {1, 64, 200, 1 << 20}) {
              std::vector<ParameterSpec> specs;
              for (const int64_t numel : {a, b, c}) {
                const int64_t family = (families >> specs.size()) & 1;
                specs.push_back({numel, family == 0 ? 4 : 2, family});
              }
              const BucketOptions options{world_size, bytes, std::min<int64_t>(bytes, 64)};
              const FlatLayout layout = make_layout(specs, options);
              check_layout(specs, options, layout);
              check_ownership(layout, world_size);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("buckets fill in reverse order, the first one small", "[layout]") {
  const int64_t mib = 1024 * 1024 / 4;
  const std::vector<ParameterSpec> specs(60, {mib, 4, 0});
  const FlatLayout layout = make_layout(specs, {});
  REQUIRE(layout.buckets.size() == 4);
  REQUIRE(layout.buckets[0].parameters == std::vector<int64_t>{59});
  REQUIRE(layout.buckets[1].parameters.size() == 25);
  REQUIRE(layout.buckets[1].parameters.front() == 58);
  REQUIRE(layout.buckets[3].parameters.back() == 0);
}

TEST_CASE("a parameter larger than a bucket has one of its own", "[layout]") {
  const FlatLayout layout = make_layout({{10, 4, 0}, {1000, 4, 0}, {10, 4, 0}}, {2, 256, 256});
  REQUIRE(layout.buckets.size() == 3);
  REQUIRE(layout.buckets[1].parameters == std::vector<int64_t>{1});
  REQUIRE(layout.buckets[1].numel == 1024);
}

TEST_CASE("bad sizes are refused", "[layout]") {
  CHECK_THROWS_AS(make_layout({{-1, 4, 0}}, {}), c10::ValueError);
  CHECK_THROWS_AS(make_layout({{1, 3, 0}}, {}), c10::ValueError);
  CHECK_THROWS_AS(make_layout({{1, 4, 0}}, {0, 1, 1}), c10::ValueError);
  CHECK_THROWS_AS(make_layout({{1, 4, 0}}, {1, 0, 1}), c10::ValueError);
  CHECK_THROWS_AS(make_layout({{1, 4, 0}}, {1, 1, 0}), c10::ValueError);
  CHECK_THROWS_AS(make_layout({{1, 4, 0}, {1, 2, 0}}, {}), c10::ValueError);
}
