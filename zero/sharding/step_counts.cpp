#include <zero/sharding/step_counts.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <zero/memory/device_streams.h>

namespace zero::sharding {

bool StepCounts::on_device(int64_t parameter) const {
  const ParameterEntry& entry = table_.entry(parameter);
  return !on_host_ && entry.flat && !table_.bucket(entry.slot.bucket).options.device().is_cpu();
}

int64_t& StepCounts::count_of(Shared& shared, int64_t parameter) const {
  return shared.of[position_[parameter]];
}

StepCounts::Shared& StepCounts::shared(int64_t bucket) const {
  if (static_cast<int64_t>(shared_.size()) <= bucket) {
    shared_.resize(table_.bucket_count());
  }
  Shared& found = shared_[bucket];
  if (found.of.empty()) {
    const BucketEntry& entry = table_.bucket(bucket);
    const size_t count = entry.layout.parameters.size();
    position_.resize(table_.size());
    for (size_t i = 0; i < count; ++i) {
      position_[entry.layout.parameters[i]] = static_cast<int64_t>(i);
    }
    const memory::Quiet quiet;
    found.of.assign(count, 0);
    found.known.assign(count, 0);
    found.counts = at::zeros(
        {static_cast<int64_t>(count)}, at::TensorOptions(at::kLong).device(entry.options.device()));
  }
  return found;
}

// There are as many counts as parameters, so one is.
int64_t StepCounts::unused(const Shared& shared) {
  std::vector<bool> used(shared.known.size());
  for (const int64_t count : shared.of) {
    used[count] = true;
  }
  return std::find(used.begin(), used.end(), false) - used.begin();
}

int64_t StepCounts::get(int64_t parameter) const {
  if (on_device(parameter)) {
    Shared& found = shared(table_.entry(parameter).slot.bucket);
    const int64_t count = count_of(found, parameter);
    const memory::Quiet quiet;
    return found.known[count] >= 0 ? found.known[count]
                                   : found.counts.narrow(0, count, 1).item<int64_t>();
  }
  return static_cast<int64_t>(host_.size()) > parameter ? host_[parameter] : 0;
}

bool StepCounts::any(int64_t parameter) const {
  if (!on_device(parameter)) {
    return get(parameter) > 0;
  }
  const auto bucket = static_cast<size_t>(table_.entry(parameter).slot.bucket);
  if (shared_.size() <= bucket || shared_[bucket].of.empty()) {
    return false;
  }
  return shared_[bucket].known[count_of(shared_[bucket], parameter)] != 0;
}

void StepCounts::count(int64_t parameter) {
  set(parameter, get(parameter) + 1);
}

void StepCounts::set(int64_t parameter, int64_t steps) {
  if (!on_device(parameter)) {
    if (static_cast<int64_t>(host_.size()) < table_.size()) {
      host_.resize(table_.size(), 0);
    }
    host_[parameter] = steps;
    return;
  }
  Shared& found = shared(table_.entry(parameter).slot.bucket);
  int64_t& own = count_of(found, parameter);
  for (const int64_t other : found.of) {
    if (found.known[other] == steps) {
      own = other;
      return;
    }
  }
  if (std::count(found.of.begin(), found.of.end(), own) > 1) {
    own = unused(found);
  }
  found.known[own] = steps;
  const memory::Quiet quiet;
  found.counts.narrow(0, own, 1).fill_(steps);
}

// A count of which some parameters step and some don't is no longer one.
std::vector<int64_t> StepCounts::begin_device(int64_t bucket, const std::vector<bool>& stepping) {
  Shared& found = shared(bucket);
  const size_t size = stepping.size();
  std::vector<int64_t> moved(size, -1); // by count: where those that step go
  for (size_t i = 0; i < size; ++i) {
    if (!stepping[i]) {
      moved[found.of[i]] = found.of[i];
    }
  }
  for (size_t i = 0; i < size; ++i) {
    const int64_t count = found.of[i];
    if (!stepping[i] || moved[count] < 0) {
      continue;
    }
    if (moved[count] == count) {
      moved[count] = unused(found);
      found.known[moved[count]] = found.known[count];
      const memory::Quiet quiet;
      found.counts.narrow(0, moved[count], 1).copy_(found.counts.narrow(0, count, 1));
    }
    found.of[i] = moved[count];
  }
  std::vector<int64_t> counts(size, -1);
  for (size_t i = 0; i < size; ++i) {
    if (stepping[i]) {
      counts[i] = found.of[i];
      found.known[found.of[i]] = -1;
    }
  }
  return counts;
}

const at::Tensor& StepCounts::counts(int64_t bucket) const {
  return shared(bucket).counts;
}

} // namespace zero::sharding
