#include <zero/layout/flat_layout.h>

#include <algorithm>
#include <map>

#include <c10/util/Exception.h>

namespace zero::layout {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check(const std::vector<ParameterSpec>& parameters, const BucketOptions& options) {
  TORCH_CHECK_VALUE(
      options.world_size >= 1, "[zero.layout] expected world_size >= 1, got ", options.world_size);
  TORCH_CHECK_VALUE(
      options.bucket_bytes >= 1,
      "[zero.layout] expected bucket_bytes >= 1, got ",
      options.bucket_bytes);
  TORCH_CHECK_VALUE(
      options.first_bucket_bytes >= 1,
      "[zero.layout] expected first_bucket_bytes >= 1, got ",
      options.first_bucket_bytes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i];
    TORCH_CHECK_VALUE(
        spec.numel >= 0,
        "[zero.layout] expected numel >= 0, got ",
        spec.numel,
        " for parameter ",
        i);
    TORCH_CHECK_VALUE(
        spec.itemsize >= 1 && kAlignmentBytes % spec.itemsize == 0,
        "[zero.layout] expected an itemsize that divides ",
        kAlignmentBytes,
        ", got ",
        spec.itemsize,
        " for parameter ",
        i);
  }
}

// Parameters of each family in reverse registration order; families in the
// order in which that walk meets them.
std::vector<std::vector<int64_t>> by_family(const std::vector<ParameterSpec>& parameters) {
  std::vector<std::vector<int64_t>> families;
  std::map<int64_t, size_t> index;
  for (int64_t i = static_cast<int64_t>(parameters.size()) - 1; i >= 0; --i) {
    auto [entry, added] = index.try_emplace(parameters[i].family, families.size());
    if (added) {
      families.emplace_back();
    }
    families[entry->second].push_back(i);
  }
  return families;
}

void close(Bucket& bucket, int64_t used, int64_t world_size) {
  bucket.numel = round_up(used, world_size * (kAlignmentBytes / bucket.itemsize));
  bucket.shard_numel = bucket.numel / world_size;
}

} // namespace

Range intersect(Range a, Range b) {
  Range common{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return common.size() > 0 ? common : Range{};
}

Range within(const Slot& slot, Range held) {
  const Range common = intersect(slot.range(), held);
  return common.size() > 0 ? Range{common.begin - slot.offset, common.end - slot.offset} : Range{};
}

Range owned(const Slot& slot, const Bucket& bucket, int64_t rank) {
  return within(slot, bucket.shard(rank));
}

FlatLayout make_layout(const std::vector<ParameterSpec>& parameters, const BucketOptions& options) {
  check(parameters, options);
  FlatLayout layout;
  layout.slots.resize(parameters.size());
  int64_t limit = options.first_bucket_bytes;
  for (const std::vector<int64_t>& family : by_family(parameters)) {
    const int64_t itemsize = parameters[family.front()].itemsize;
    const int64_t alignment = kAlignmentBytes / itemsize;
    int64_t used = 0;
    Bucket bucket{.family = parameters[family.front()].family, .itemsize = itemsize};
    for (int64_t i : family) {
      const int64_t numel = parameters[i].numel;
      TORCH_CHECK_VALUE(
          parameters[i].itemsize == itemsize,
          "[zero.layout] expected one itemsize in a family, got ",
          parameters[i].itemsize,
          " and ",
          itemsize);
      if (used > 0 && (used + numel) * itemsize > limit) {
        close(bucket, used, options.world_size);
        layout.buckets.push_back(std::move(bucket));
        bucket = Bucket{.family = parameters[i].family, .itemsize = itemsize};
        used = 0;
        limit = options.bucket_bytes;
      }
      layout.slots[i] = {static_cast<int64_t>(layout.buckets.size()), used, numel};
      bucket.parameters.push_back(i);
      used = round_up(used + numel, alignment);
    }
    close(bucket, used, options.world_size);
    layout.buckets.push_back(std::move(bucket));
    limit = options.bucket_bytes;
  }
  return layout;
}

} // namespace zero::layout
