#pragma once

// How many steps each parameter has taken. Stepped on a device, the count stays there, since a
// step that meets an infinity may be left out without the host's knowing: parameters of
// a bucket that took part in the same steps share one, and a step adds to it in a kernel.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class StepCounts {
 public:
  // `on_host`: the CPU steps, wherever the parameters are (Options::offload).
  StepCounts(const ParameterTable& table, bool on_host) : table_(table), on_host_(on_host) {}

  // On a device: waits for it.
  int64_t get(int64_t parameter) const;
  void set(int64_t parameter, int64_t steps);
  // Whether it took a step, or was about to.
  bool any(int64_t parameter) const;

  // Of the CPU: one more.
  void count(int64_t parameter);

  // Of a device: the parameters of the bucket that `has` names are about to be stepped.
  // By parameter: which count of counts() is theirs; -1 for the others.
  template <typename Has>
  std::vector<int64_t> begin(int64_t bucket, const Has& has) {
    std::vector<bool> stepping;
    for (const int64_t parameter : table_.bucket(bucket).layout.parameters) {
      stepping.push_back(has(parameter));
    }
    return begin_device(bucket, stepping);
  }
  // int64 on the device; not all are in use.
  const at::Tensor& counts(int64_t bucket) const;

 private:
  struct Shared { // of a bucket on a device
    std::vector<int64_t> of; // by position in the bucket: its count
    std::vector<int64_t> known; // by count: what it is, -1 after a step
    at::Tensor counts;
  };
  std::vector<int64_t> begin_device(int64_t bucket, const std::vector<bool>& stepping);
  Shared& shared(int64_t bucket) const;
  bool on_device(int64_t parameter) const;
  // The count of a parameter that is on a device.
  int64_t& count_of(Shared& shared, int64_t parameter) const;
  static int64_t unused(const Shared& shared);

  const ParameterTable& table_;
  const bool on_host_;
  mutable std::vector<int64_t> host_; // by parameter
  mutable std::vector<Shared> shared_; // by bucket
  mutable std::vector<int64_t> position_; // by parameter: in its bucket
};

} // namespace zero::sharding
