#include <zero/sharding/parameter_table.h>

#include <map>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>

namespace zero::sharding {
namespace {

// Families: what may share a flat buffer.
using FamilyKey = std::tuple<int64_t, c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;

FamilyKey family_of(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  return {
      parameter.group,
      tensor.scalar_type(),
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
    int64_t rank,
    int64_t world_size,
    std::shared_ptr<memory::Account> account)
    : bucket_bytes_(options.bucket_bytes),
      first_bucket_bytes_(options.first_bucket_bytes),
      rank_(rank),
      world_size_(world_size),
      account_(std::move(account)) {}

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

bool ParameterTable::owns_its_storage(const at::Tensor& tensor) const {
  const auto sharers = sharers_.find(tensor.storage().unsafeGetStorageImpl());
  return tensor.storage_offset() == 0 && sharers != sharers_.end() && sharers->second == 1 &&
      tensor.storage().nbytes() == static_cast<size_t>(tensor.numel()) * tensor.itemsize();
}

void ParameterTable::append(std::vector<NamedParameter> parameters) {
  std::vector<int64_t> trainable;
  for (NamedParameter& parameter : parameters) {
    const int64_t index = size();
    index_.emplace(parameter.tensor.unsafeGetTensorImpl(), index);
    ++sharers_[parameter.tensor.storage().unsafeGetStorageImpl()];
    ParameterEntry entry;
    entry.trainable = parameter.tensor.requires_grad();
    entry.parameter = std::move(parameter);
    entries_.push_back(std::move(entry));
    if (entries_.back().trainable) {
      trainable.push_back(index);
    } else {
      account_->add(
          memory::Purpose::parameters,
          static_cast<int64_t>(entries_.back().parameter.tensor.nbytes()));
    }
  }
  if (!trainable.empty()) {
    add_buckets(trainable);
  }
}

void ParameterTable::add_buckets(const std::vector<int64_t>& trainable) {
  std::map<FamilyKey, int64_t> families;
  std::vector<layout::ParameterSpec> specs;
  for (const int64_t index : trainable) {
    at::Tensor& tensor = entries_[index].parameter.tensor;
    if (!tensor.is_non_overlapping_and_dense()) {
      const at::NoGradGuard no_grad;
      tensor.set_data(tensor.detach().contiguous());
      ++sharers_[tensor.storage().unsafeGetStorageImpl()];
    }
    const auto key = family_of(entries_[index].parameter);
    const auto family =
        families.try_emplace(key, static_cast<int64_t>(families.size())).first->second;
    specs.push_back({tensor.numel(), static_cast<int64_t>(tensor.itemsize()), family});
  }
  layout::FlatLayout flat = layout::make_layout(
      specs, {world_size_, bucket_bytes_, buckets_.empty() ? first_bucket_bytes_ : bucket_bytes_});
  const int64_t first = bucket_count();
  for (layout::Bucket& bucket : flat.buckets) {
    BucketEntry entry;
    std::vector<std::string> names;
    for (int64_t& parameter : bucket.parameters) {
      const layout::Slot slot = flat.slots[parameter];
      parameter = trainable[parameter];
      entries_[parameter].slot = {first + slot.bucket, slot.offset, slot.numel};
      names.push_back(entries_[parameter].parameter.name);
    }
    const at::Tensor& sample = entries_[bucket.parameters.front()].parameter.tensor;
    entry.options = at::TensorOptions().dtype(sample.dtype()).device(sample.device());
    entry.what = describe(bucket_count(), names);
    entry.values =
        memory::FlatBuffer(bucket.numel, entry.options, memory::Purpose::parameters, account_);
    entry.layout = std::move(bucket);
    // One bucket after another, so that at most one is held twice.
    for (const int64_t index : entry.layout.parameters) {
      ParameterEntry& managed = entries_[index];
      at::Tensor& tensor = managed.parameter.tensor;
      managed.view = memory::SlabView::adopt(
          tensor, entry.values.tensor(), managed.slot.offset, owns_its_storage(tensor));
    }
    buckets_.push_back(std::move(entry));
  }
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

void ParameterTable::reattach() {
  for (ParameterEntry& entry : entries_) {
    at::Tensor& tensor = entry.parameter.tensor;
    if (!entry.trainable || entry.view.holds(tensor)) {
      continue;
    }
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
    if (!tensor.is_non_overlapping_and_dense()) {
      const at::NoGradGuard no_grad;
      tensor.set_data(tensor.detach().contiguous());
    }
    entry.view.take_back(tensor, bucket.values.tensor(), entry.slot.offset);
  }
}

} // namespace zero::sharding
