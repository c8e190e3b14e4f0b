#pragma once

// The managed parameters and where they live: names, groups, slots, and the flat
// buffers that hold their values. Built at wrap, the same on every rank, and
// asked by every manager.

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/layout/flat_layout.h>
#include <zero/memory/flat_buffer.h>
#include <zero/memory/slab_view.h>
#include <zero/options.h>

namespace zero {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  int64_t group = 0; // index of the parameter group
};

namespace sharding {

struct ParameterEntry {
  NamedParameter parameter;
  bool trainable = true; // requires_grad at wrap; others are only broadcast
  layout::Slot slot; // trainable ones only
  memory::SlabView view;
};

struct BucketEntry {
  layout::Bucket layout; // parameters by their index in the table
  memory::FlatBuffer values;
  std::string what; // for errors: "bucket 2 (blocks.3.up.weight ...)"
  at::TensorOptions options;
};

class ParameterTable {
 public:
  ParameterTable(
      const Options& options,
      int64_t rank,
      int64_t world_size,
      std::shared_ptr<memory::Account> account);

  // Throws on what cannot be managed, by name; no communication.
  void check_new(const std::vector<NamedParameter>& parameters) const;
  // Lays new parameters out in buckets of their own and moves their values there.
  void append(std::vector<NamedParameter> parameters);

  int64_t size() const {
    return static_cast<int64_t>(entries_.size());
  }
  int64_t bucket_count() const {
    return static_cast<int64_t>(buckets_.size());
  }
  ParameterEntry& entry(int64_t index) {
    return entries_[index];
  }
  const ParameterEntry& entry(int64_t index) const {
    return entries_[index];
  }
  BucketEntry& bucket(int64_t index) {
    return buckets_[index];
  }
  const BucketEntry& bucket(int64_t index) const {
    return buckets_[index];
  }
  int64_t rank() const {
    return rank_;
  }
  int64_t world_size() const {
    return world_size_;
  }
  // -1 when the tensor is not managed.
  int64_t index_of(const at::Tensor& tensor) const;

  layout::Range shard(int64_t bucket) const {
    return buckets_[bucket].layout.shard(rank_);
  }
  int64_t padding_bytes() const;

  // Parameters that the user moved to other storage (`p.data = x`) come back
  // with their values; another shape, dtype or device is an error by name.
  void reattach();

 private:
  void add_buckets(const std::vector<int64_t>& trainable);
  bool owns_its_storage(const at::Tensor& tensor) const;

  const int64_t bucket_bytes_;
  const int64_t first_bucket_bytes_;
  const int64_t rank_;
  const int64_t world_size_;
  std::shared_ptr<memory::Account> account_;
  std::vector<ParameterEntry> entries_;
  std::vector<BucketEntry> buckets_;
  std::unordered_map<const c10::TensorImpl*, int64_t> index_;
  // Parameters by the storage that they had when they came.
  std::unordered_map<const c10::StorageImpl*, int64_t> sharers_;
};

} // namespace sharding
} // namespace zero
