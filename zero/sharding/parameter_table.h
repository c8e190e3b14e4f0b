#pragma once

// The managed parameters and where they live: names, groups, slots, and the flat
// buffers that hold their values. Built at wrap, the same on every rank, and
// asked by every manager.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/comm/communicator.h>
#include <zero/layout/flat_layout.h>
#include <zero/memory/flat_buffer.h>
#include <zero/memory/slab_view.h>
#include <zero/options.h>

namespace zero {

struct NamedParameter {
  std::string name;
  at::Tensor tensor; // of Options::param_dtype once it is managed
  int64_t group = 0; // index of the parameter group
  int64_t unit = 0; // index of the unit (stage 3)
  bool keeps_dtype = false; // whatever Options::param_dtype says
};

namespace sharding {

struct ParameterEntry {
  NamedParameter parameter;
  bool trainable = true; // requires_grad at wrap, or unfreeze()
  bool flat = false; // lies in a bucket; frozen ones below stage 3 are only broadcast
  c10::ScalarType dtype = c10::ScalarType::Float; // that it computes in
  layout::Slot slot; // flat ones only
  memory::SlabView view;
};

struct BucketEntry {
  layout::Bucket layout; // parameters by their index in the table
  bool trainable = true;
  int64_t unit = 0;
  memory::FlatBuffer values; // of the elements in `held`
  layout::Range held; // everything, or this rank's shard once sharded
  std::string what; // for errors: "bucket 2 (blocks.3.up.weight ...)"
  at::TensorOptions options;
  // What parameters had when they came is taken in as fp32 and rounded by narrow().
  bool narrowed = false;
  bool masters = false; // the fp32 values are kept
};

class ParameterTable {
 public:
  ParameterTable(
      const Options& options,
      const comm::Communicator& communicator,
      std::shared_ptr<memory::Account> account);

  // Throws on what cannot be managed, by name; no communication.
  void check_new(const std::vector<NamedParameter>& parameters) const;
  // Takes new parameters in, without laying them out.
  void append(std::vector<NamedParameter> parameters);
  // A parameter without values gets a tensor that has them, of the same shape.
  void replace(int64_t index, at::Tensor tensor);
  // Lays parameters out in buckets of their own; adopt() moves a bucket's
  // parameters into a flat buffer.
  void lay_out(const std::vector<int64_t>& indices);
  void adopt(int64_t bucket);
  // Of a bucket that is `narrowed`: rounds it to the dtype that its parameters compute
  // in, which they have from then on. Gives the values as they were.
  memory::FlatBuffer narrow(int64_t bucket);
  // Stage 3: keeps this rank's shard of an adopted bucket only. Its parameters
  // have no data from then on.
  void shard_values(int64_t bucket);
  // Parameters that were frozen when they came are trainable from now on: below stage 3
  // in new buckets, at stage 3 with those that share their bucket. Gives the buckets
  // that became trainable; the same on all ranks. No communication. Throws, by name and
  // before any change, for one that was converted meanwhile.
  std::vector<int64_t> unfreeze(const std::vector<int64_t>& indices);

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

  // The group that all parameters of a bucket are in.
  int64_t group_of(int64_t bucket) const {
    return entries_[buckets_[bucket].layout.parameters.front()].parameter.group;
  }
  layout::Range shard(int64_t bucket) const {
    return buckets_[bucket].layout.shard(shard_rank_);
  }
  // Elements [begin, begin + numel) of a bucket, which must be held.
  at::Tensor values(int64_t bucket, int64_t begin, int64_t numel) const;
  int64_t padding_bytes() const;

  // Parameters that the user moved to other storage (`p.data = x`) come back
  // with their values; another shape, dtype or device is an error by name.
  void reattach();
  // Takes this rank's part of a whole tensor of the parameter's shape.
  void load(int64_t index, const at::Tensor& whole);
  // "parameter 'name' is sharded (rank 1 of 4)"
  std::string sharded(int64_t index) const;

 private:
  void check_moved(const ParameterEntry& entry) const;
  void check_converted(const ParameterEntry& entry) const;
  c10::ScalarType dtype_of(const NamedParameter& parameter) const;
  bool keeps_masters(const ParameterEntry& entry) const;
  bool owns_its_storage(const at::Tensor& tensor) const;

  const bool sharded_; // stage 3
  const int64_t bucket_bytes_;
  const int64_t first_bucket_bytes_;
  const std::optional<c10::ScalarType> param_dtype_;
  const bool masters_; // 16-bit parameters have fp32 masters
  const int64_t rank_; // for errors
  const int64_t world_size_;
  const int64_t shard_rank_;
  const int64_t shard_size_;
  std::shared_ptr<memory::Account> account_;
  std::shared_ptr<memory::BufferSource> shard_source_;
  std::vector<ParameterEntry> entries_;
  std::vector<BucketEntry> buckets_;
  std::unordered_map<const c10::TensorImpl*, int64_t> index_;
  // Parameters by the storage that they had when they came.
  std::unordered_map<const c10::StorageImpl*, int64_t> sharers_;
};

} // namespace sharding
} // namespace zero
