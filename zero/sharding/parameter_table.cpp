#include <zero/sharding/parameter_table.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>

#include <zero/sharding/dtype_names.h>

namespace zero::sharding {
namespace {

// Families: what may share a flat buffer.
using FamilyKey =
    std::tuple<int64_t, int64_t, bool, bool, c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;

// At stage 3 buckets are parts of a unit, and come and go with backward: small
// ones are let go sooner.
constexpr int64_t kMostOfUnit = int64_t{4} << 20;

FamilyKey family_of(const ParameterEntry& entry, bool by_unit) {
  const at::Tensor& tensor = entry.parameter.tensor;
  return {
      by_unit ? entry.parameter.unit : 0,
      entry.parameter.group,
      entry.trainable,
      // Those that are converted and those that are not are not mixed.
      entry.dtype == tensor.scalar_type(),
      entry.dtype,
      tensor.device().type(),
      tensor.device().has_index() ? tensor.device().index() : c10::DeviceIndex(0)};
}

std::string describe(int64_t index, const std::vector<std::string>& names) {
  std::string what = "bucket " + std::to_string(index) + " (" + names.front();
  if (names.size() > 1) {
    what += " and " + std::to_string(names.size() - 1) + " more";
  }
  return what + ")";
}

} // namespace

ParameterTable::ParameterTable(
    const Options& options,
    const comm::Communicator& communicator,
    std::shared_ptr<memory::Account> account)
    : sharded_(options.stage == 3),
      bucket_bytes_(sharded_ ? std::min(options.bucket_bytes, kMostOfUnit) : options.bucket_bytes),
      first_bucket_bytes_(sharded_ ? bucket_bytes_ : options.first_bucket_bytes),
      param_dtype_(
          options.param_dtype ? std::optional(dtype_named(*options.param_dtype)) : std::nullopt),
      masters_(options.param_dtype || options.master_dtype),
      rank_(communicator.rank()),
      world_size_(communicator.size()),
      shard_rank_(communicator.shard_rank()),
      shard_size_(communicator.shard_size()),
      account_(std::move(account)),
      shard_source_(communicator.buffers()) {}

void ParameterTable::check_new(const std::vector<NamedParameter>& parameters) const {
  std::unordered_map<const c10::TensorImpl*, int64_t> seen;
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    TORCH_CHECK_TYPE(
        tensor.defined() && tensor.layout() == c10::kStrided && tensor.has_storage(),
        "[zero.sharding] expected a dense tensor for parameter '",
        parameter.name,
        "'; materialize it before wrapping");
    TORCH_CHECK_VALUE(
        tensor.is_leaf(),
        "[zero.sharding] expected a leaf tensor for parameter '",
        parameter.name,
        "', got the result of an operation");
    TORCH_CHECK_TYPE(
        !tensor.is_complex() || !tensor.requires_grad(),
        "[zero.sharding] parameter '",
        parameter.name,
        "' is complex, which is not supported; store its real and imaginary parts");
    TORCH_CHECK_VALUE(
        index_of(tensor) < 0 && seen.emplace(tensor.unsafeGetTensorImpl(), 0).second,
        "[zero.sharding] parameter '",
        parameter.name,
        "' is managed already or given twice; give each parameter once");
  }
}

c10::ScalarType ParameterTable::dtype_of(const NamedParameter& parameter) const {
  const auto own = parameter.tensor.scalar_type();
  return param_dtype_ && c10::isFloatingType(own) && !parameter.keeps_dtype ? *param_dtype_ : own;
}

bool ParameterTable::keeps_masters(const ParameterEntry& entry) const {
  return masters_ && entry.trainable && memory::has_16_bits(c10::scalarTypeToTypeMeta(entry.dtype));
}

bool ParameterTable::owns_its_storage(const at::Tensor& tensor) const {
  const auto sharers = sharers_.find(tensor.storage().unsafeGetStorageImpl());
  return tensor.storage_offset() == 0 && sharers != sharers_.end() && sharers->second == 1 &&
      tensor.storage().nbytes() == static_cast<size_t>(tensor.numel()) * tensor.itemsize();
}

void ParameterTable::append(std::vector<NamedParameter> parameters) {
  for (NamedParameter& parameter : parameters) {
    index_.emplace(parameter.tensor.unsafeGetTensorImpl(), size());
    ++sharers_[parameter.tensor.storage().unsafeGetStorageImpl()];
    ParameterEntry entry;
    entry.trainable = parameter.tensor.requires_grad();
    entry.flat = entry.trainable || sharded_;
    entry.dtype = dtype_of(parameter);
    if (!entry.flat && entry.dtype != parameter.tensor.scalar_type()) {
      const at::NoGradGuard no_grad;
      parameter.tensor.set_data(parameter.tensor.detach().to(entry.dtype));
    }
    entry.parameter = std::move(parameter);
    if (!entry.flat) {
      account_->add(
          memory::Purpose::parameters, static_cast<int64_t>(entry.parameter.tensor.nbytes()));
    }
    entries_.push_back(std::move(entry));
  }
}

void ParameterTable::replace(int64_t index, at::Tensor tensor) {
  NamedParameter& parameter = entries_[index].parameter;
  TORCH_CHECK_VALUE(
      tensor.sizes() == parameter.tensor.sizes() && tensor.dtype() == parameter.tensor.dtype() &&
          tensor.requires_grad() == parameter.tensor.requires_grad(),
      "[zero.sharding] expected parameter '",
      parameter.name,
      "' to be materialized as it was declared, ",
      parameter.tensor.dtype(),
      " of shape ",
      parameter.tensor.sizes(),
      ", got ",
      tensor.dtype(),
      " of shape ",
      tensor.sizes());
  index_.erase(parameter.tensor.unsafeGetTensorImpl());
  sharers_.erase(parameter.tensor.storage().unsafeGetStorageImpl());
  index_.emplace(tensor.unsafeGetTensorImpl(), index);
  ++sharers_[tensor.storage().unsafeGetStorageImpl()];
  parameter.tensor = std::move(tensor);
}

void ParameterTable::lay_out(const std::vector<int64_t>& indices) {
  std::map<FamilyKey, int64_t> families;
  std::vector<layout::ParameterSpec> specs;
  for (const int64_t index : indices) {
    at::Tensor& tensor = entries_[index].parameter.tensor;
    if (!tensor.is_non_overlapping_and_dense()) {
      const at::NoGradGuard no_grad;
      tensor.set_data(tensor.detach().contiguous());
      ++sharers_[tensor.storage().unsafeGetStorageImpl()];
    }
    const auto key = family_of(entries_[index], sharded_);
    const auto family =
        families.try_emplace(key, static_cast<int64_t>(families.size())).first->second;
    specs.push_back(
        {tensor.numel(), static_cast<int64_t>(c10::elementSize(entries_[index].dtype)), family});
  }
  layout::FlatLayout flat = layout::make_layout(
      specs, {shard_size_, bucket_bytes_, buckets_.empty() ? first_bucket_bytes_ : bucket_bytes_});
  const int64_t first = bucket_count();
  for (layout::Bucket& bucket : flat.buckets) {
    BucketEntry entry;
    std::vector<std::string> names;
    for (int64_t& parameter : bucket.parameters) {
      const layout::Slot slot = flat.slots[parameter];
      parameter = indices[parameter];
      entries_[parameter].slot = {first + slot.bucket, slot.offset, slot.numel};
      names.push_back(entries_[parameter].parameter.name);
    }
    const ParameterEntry& sample = entries_[bucket.parameters.front()];
    entry.options =
        at::TensorOptions().dtype(sample.dtype).device(sample.parameter.tensor.device());
    entry.masters = keeps_masters(sample);
    entry.narrowed = entry.masters || sample.dtype != sample.parameter.tensor.scalar_type();
    entry.trainable = sample.trainable;
    entry.unit = sample.parameter.unit;
    entry.what = describe(bucket_count(), names);
    entry.layout = std::move(bucket);
    buckets_.push_back(std::move(entry));
  }
}

// One bucket after another, so that at most one is held twice.
void ParameterTable::adopt(int64_t bucket) {
  BucketEntry& entry = buckets_[bucket];
  entry.values = memory::FlatBuffer(
      entry.layout.numel,
      entry.narrowed ? entry.options.dtype(at::kFloat) : entry.options,
      memory::Purpose::parameters,
      account_);
  entry.held = {0, entry.layout.numel};
  for (const int64_t index : entry.layout.parameters) {
    ParameterEntry& managed = entries_[index];
    at::Tensor& tensor = managed.parameter.tensor;
    if (entry.narrowed) {
      const at::NoGradGuard no_grad;
      at::as_strided(entry.values.tensor(), tensor.sizes(), tensor.strides(), managed.slot.offset)
          .copy_(tensor.detach());
      continue;
    }
    managed.view = memory::SlabView::adopt(
        tensor, entry.values.tensor(), managed.slot.offset, owns_its_storage(tensor));
  }
}

memory::FlatBuffer ParameterTable::narrow(int64_t bucket) {
  BucketEntry& entry = buckets_[bucket];
  memory::FlatBuffer before = std::move(entry.values);
  entry.values =
      memory::FlatBuffer(entry.layout.numel, entry.options, memory::Purpose::parameters, account_);
  memory::convert_elements(entry.values.tensor(), 0, before.tensor(), 0, entry.layout.numel);
  for (const int64_t index : entry.layout.parameters) {
    ParameterEntry& managed = entries_[index];
    managed.view = memory::SlabView::replace(
        managed.parameter.tensor, entry.values.tensor(), managed.slot.offset);
  }
  return before;
}

void ParameterTable::shard_values(int64_t bucket) {
  BucketEntry& entry = buckets_[bucket];
  const layout::Range own = shard(bucket);
  memory::FlatBuffer kept(
      own.size(), entry.options, memory::Purpose::parameters, account_, shard_source_.get());
  memory::copy_elements(kept.tensor(), 0, entry.values.tensor(), own.begin, own.size());
  for (const int64_t index : entry.layout.parameters) {
    entries_[index].view.release(sharded(index));
  }
  entry.values = std::move(kept);
  entry.held = own;
}

at::Tensor ParameterTable::values(int64_t bucket, int64_t begin, int64_t numel) const {
  return buckets_[bucket].values.view(begin - buckets_[bucket].held.begin, numel);
}

std::string ParameterTable::sharded(int64_t index) const {
  return "[zero.sharding] parameter '" + entries_[index].parameter.name + "' is sharded (rank " +
      std::to_string(rank_) + " of " + std::to_string(world_size_) + ")";
}

int64_t ParameterTable::index_of(const at::Tensor& tensor) const {
  const auto found = index_.find(tensor.unsafeGetTensorImpl());
  return found == index_.end() ? -1 : found->second;
}

int64_t ParameterTable::padding_bytes() const {
  int64_t bytes = 0;
  for (const BucketEntry& bucket : buckets_) {
    bytes += bucket.layout.numel * bucket.layout.itemsize;
    for (const int64_t index : bucket.layout.parameters) {
      bytes -= entries_[index].slot.numel * bucket.layout.itemsize;
    }
  }
  return bytes;
}

void ParameterTable::check_moved(const ParameterEntry& entry) const {
  const at::Tensor& tensor = entry.parameter.tensor;
  const BucketEntry& bucket = buckets_[entry.slot.bucket];
  TORCH_CHECK_TYPE(
      tensor.dtype() == bucket.options.dtype() && tensor.device() == bucket.options.device() &&
          tensor.numel() == entry.slot.numel,
      "[zero.sharding] parameter '",
      entry.parameter.name,
      "' was moved: expected ",
      entry.slot.numel,
      " elements of ",
      bucket.options.dtype(),
      " on ",
      bucket.options.device(),
      ", found ",
      tensor.numel(),
      " of ",
      tensor.dtype(),
      " on ",
      tensor.device(),
      " (rank ",
      rank_,
      " of ",
      world_size_,
      "); convert or move the model before wrapping it");
}

void ParameterTable::reattach() {
  for (int64_t index = 0; index < size(); ++index) {
    ParameterEntry& entry = entries_[index];
    at::Tensor& tensor = entry.parameter.tensor;
    if (!entry.flat || entry.view.holds(tensor)) {
      continue;
    }
    check_moved(entry);
    if (!tensor.is_non_overlapping_and_dense()) {
      const at::NoGradGuard no_grad;
      tensor.set_data(tensor.detach().contiguous());
    }
    if (sharded_) {
      load(index, tensor);
      entry.view.take_back(tensor);
    } else {
      entry.view.take_back(tensor, buckets_[entry.slot.bucket].values.tensor(), entry.slot.offset);
    }
  }
}

void ParameterTable::load(int64_t index, const at::Tensor& whole) {
  const ParameterEntry& entry = entries_[index];
  const layout::Range held = buckets_[entry.slot.bucket].held;
  const layout::Range part = layout::within(entry.slot, held);
  memory::copy_elements(
      buckets_[entry.slot.bucket].values.tensor(),
      entry.slot.offset + part.begin - held.begin,
      whole,
      part.begin,
      part.size());
}

} // namespace zero::sharding
