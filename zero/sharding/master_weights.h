#pragma once

// MasterWeights: what is stepped instead of the parameters themselves, for the elements
// that this rank updates (its shard; everything at stage 0). The fp32 values of parameters
// that compute in 16 bits, see [Note: master weights] in docs/design.md; with
// Options::offload="optimizer" the values of all parameters, in the host's memory, see
// [Note: offload].

#include <cstdint>
#include <memory>
#include <vector>

#include <zero/sharding/host_weights.h>

namespace zero::sharding {

// What a step of a bucket writes.
struct Stepped {
  at::Tensor values; // masters, or parameters
  int64_t begin = 0; // the bucket's element that `values` begin with
  at::Tensor rounded; // gets them rounded; may be undefined
  int64_t rounded_begin = 0;
};

class MasterWeights {
 public:
  MasterWeights(
      const Options& options,
      ParameterTable& table,
      std::shared_ptr<memory::Account> account);

  // Whether the bucket's parameters are stepped by way of masters.
  bool wants(int64_t bucket) const;
  // Keeps this rank's elements of a bucket's values, which are fp32 where the parameters
  // compute in 16 bits.
  void keep(int64_t bucket, const at::Tensor& values);
  // The same of the values that its parameters have.
  void widen(int64_t bucket);
  bool has(int64_t bucket) const;
  layout::Range range(int64_t bucket) const;
  // Elements of the bucket, inside range(bucket).
  at::Tensor view(int64_t bucket, layout::Range elements) const;

  // Before the bucket is stepped: what is to be written, of its parameters where it has no
  // masters.
  Stepped begin_step(int64_t bucket);
  // Elements of it were written; the parameters have them in the order of the current
  // stream.
  void stepped(int64_t bucket, const Stepped& step, layout::Range elements);

  // Rounds masters into the parameters' own memory, inside range(bucket).
  void publish(int64_t bucket, layout::Range elements);
  // Values that somebody wrote into the parameters, inside `elements` as far as this
  // rank holds them: masters that don't round to them become them.
  void refresh(int64_t bucket, layout::Range elements);
  // The same wherever somebody may have written.
  void follow(int64_t bucket);
  // Before ParameterTable::reattach().
  void note_moved();
  // After parameters of the bucket got new versions for what publish() or a step wrote.
  void saw(int64_t bucket);

 private:
  at::Tensor make(int64_t bucket);

  ParameterTable& table_;
  const std::shared_ptr<memory::Account> account_;
  const bool whole_; // this rank updates everything
  const bool on_host_;
  const std::unique_ptr<HostWeights> host_; // parameters are on a device, masters are not
  std::vector<memory::FlatBuffer> masters_; // by bucket
};

} // namespace zero::sharding
