#include <zero/sharding/master_weights.h>

#include <utility>

#include <zero/memory/elements.h>
#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

MasterWeights::MasterWeights(
    const Options& options,
    ParameterTable& table,
    std::shared_ptr<memory::Account> account)
    : table_(table),
      account_(std::move(account)),
      whole_(options.stage == 0),
      on_host_(options.offload.has_value()),
      host_(
          options.offload == "optimizer" ? std::make_unique<HostWeights>(table_, account_)
                                         : nullptr) {}

bool MasterWeights::wants(int64_t bucket) const {
  const BucketEntry& entry = table_.bucket(bucket);
  return entry.masters || (host_ && entry.trainable);
}

layout::Range MasterWeights::range(int64_t bucket) const {
  return whole_ ? layout::Range{0, table_.bucket(bucket).layout.numel} : table_.shard(bucket);
}

bool MasterWeights::has(int64_t bucket) const {
  return has_bucket(masters_, bucket);
}

// Of the parameters' dtype they are copied to the device themselves.
at::Tensor MasterWeights::make(int64_t bucket) {
  const BucketEntry& entry = table_.bucket(bucket);
  at::TensorOptions options = entry.masters ? entry.options.dtype(at::kFloat) : entry.options;
  if (on_host_) {
    options = entry.masters ? options.device(at::kCPU)
                            : memory::pinned(entry.options.dtype().toScalarType());
  }
  memory::FlatBuffer& made = at_bucket(masters_, bucket);
  made =
      memory::FlatBuffer(range(bucket).size(), options, memory::Purpose::optimizer_state, account_);
  return made.tensor();
}

void MasterWeights::keep(int64_t bucket, const at::Tensor& values) {
  const layout::Range own = range(bucket);
  memory::copy_elements(make(bucket), 0, values, own.begin, own.size());
  saw(bucket);
}

void MasterWeights::widen(int64_t bucket) {
  const BucketEntry& entry = table_.bucket(bucket);
  const layout::Range own = range(bucket);
  const auto take = entry.masters ? &memory::convert_elements : &memory::copy_elements;
  take(make(bucket), 0, entry.values.tensor(), own.begin - entry.held.begin, own.size());
  saw(bucket);
}

at::Tensor MasterWeights::view(int64_t bucket, layout::Range elements) const {
  if (host_) {
    host_->settle(bucket);
  }
  return masters_[bucket].view(elements.begin - range(bucket).begin, elements.size());
}

Stepped MasterWeights::begin_step(int64_t bucket) {
  const BucketEntry& entry = table_.bucket(bucket);
  if (!has(bucket)) {
    return {entry.values.tensor(), entry.held.begin, {}, 0};
  }
  const layout::Range own = range(bucket);
  const at::Tensor& master = masters_[bucket].tensor();
  if (!host_) {
    return {master, own.begin, entry.values.tensor(), entry.held.begin};
  }
  host_->settle(bucket);
  return {
      master,
      own.begin,
      entry.masters ? host_->staging(bucket, own.size()) : at::Tensor(),
      own.begin};
}

void MasterWeights::stepped(int64_t bucket, const Stepped& step, layout::Range elements) {
  if (!host_) {
    return;
  }
  if (step.rounded.defined()) {
    host_->send(bucket, elements, step.rounded, elements.begin - step.rounded_begin);
  } else {
    host_->send(bucket, elements, step.values, elements.begin - step.begin);
  }
}

void MasterWeights::publish(int64_t bucket, layout::Range elements) {
  const Stepped step = begin_step(bucket);
  if (step.rounded.defined()) {
    memory::convert_elements(
        step.rounded,
        elements.begin - step.rounded_begin,
        step.values,
        elements.begin - step.begin,
        elements.size());
  }
  stepped(bucket, step, elements);
}

void MasterWeights::refresh(int64_t bucket, layout::Range elements) {
  const BucketEntry& entry = table_.bucket(bucket);
  const layout::Range own = layout::intersect(elements, range(bucket));
  const auto take = entry.masters ? &memory::follow_elements : &memory::copy_elements;
  if (host_) {
    host_->settle(bucket);
  }
  take(
      masters_[bucket].tensor(),
      own.begin - range(bucket).begin,
      entry.values.tensor(),
      own.begin - entry.held.begin,
      own.size());
}

void MasterWeights::follow(int64_t bucket) {
  if (!host_) {
    refresh(bucket, range(bucket));
    return;
  }
  host_->settle(bucket); // what a foreign rule writes to without asking for it again
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    if (host_->written(index)) {
      refresh(bucket, table_.entry(index).slot.range());
      host_->saw(index);
    }
  }
}

void MasterWeights::note_moved() {
  if (host_) {
    host_->note_moved();
  }
}

void MasterWeights::saw(int64_t bucket) {
  if (host_) {
    for (const int64_t index : table_.bucket(bucket).layout.parameters) {
      host_->saw(index);
    }
  }
}

} // namespace zero::sharding
