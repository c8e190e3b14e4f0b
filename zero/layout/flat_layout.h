#pragma once

// The flat layout: which bucket holds which parameter, and at what offset.
// Integers only; every question about shards, padding and ranges is answered
// here by arithmetic. The layout depends on nothing but its arguments, so equal
// arguments give equal layouts on every rank.

#include <cstdint>
#include <vector>

#include <zero/api.h>

namespace zero::layout {

// Parameters start, and shards end, at multiples of this many bytes: whole
// cache lines, and whole vectors of every instruction set in use.
inline constexpr int64_t kAlignmentBytes = 64;

// Half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const {
    return end > begin ? end - begin : 0;
  }
  bool operator==(const Range&) const = default;
};

ZERO_API Range intersect(Range a, Range b);

struct ParameterSpec {
  int64_t numel = 0;
  int64_t itemsize = 4; // bytes an element: 1, 2, 4, 8 or 16
  int64_t family = 0; // only parameters of one family share a bucket
};

struct BucketOptions {
  int64_t world_size = 1;
  int64_t bucket_bytes = 25 * 1024 * 1024;
  int64_t first_bucket_bytes = 1024 * 1024;
};

// Where a parameter lies.
struct Slot {
  int64_t bucket = 0;
  int64_t offset = 0; // in elements from the bucket's begin
  int64_t numel = 0;
  Range range() const {
    return {offset, offset + numel};
  }
};

struct Bucket {
  int64_t family = 0;
  int64_t itemsize = 4;
  std::vector<int64_t> parameters = {}; // in order of their offsets
  int64_t numel = 0; // padding included: world_size * shard_numel
  int64_t shard_numel = 0;
  Range shard(int64_t rank) const {
    return {rank * shard_numel, (rank + 1) * shard_numel};
  }
};

struct FlatLayout {
  std::vector<Slot> slots = {}; // by parameter
  std::vector<Bucket> buckets = {};
};

// The part of a parameter that lies in a range of its bucket, as elements of the
// parameter; and the part that a rank owns.
ZERO_API Range within(const Slot& slot, Range held);
ZERO_API Range owned(const Slot& slot, const Bucket& bucket, int64_t rank);

// Fills buckets in reverse order of registration (backward produces gradients
// roughly in that order). A bucket closes when its next parameter would take it
// over its bytes; a larger parameter gets a bucket of its own. Families are laid
// out one after another in order of their last registered parameter; only the
// first bucket of all is `first_bucket_bytes`. Parameters of no elements take no
// space. Throws c10::ValueError on a non-positive size or count.
ZERO_API FlatLayout
make_layout(const std::vector<ParameterSpec>& parameters, const BucketOptions& options);

} // namespace zero::layout
