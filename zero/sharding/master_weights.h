#pragma once

// MasterWeights: the fp32 values of parameters that compute in 16 bits, for the
// elements that this rank updates (its shard; everything at stage 0). Optimizers step
// them, and parameters are their rounded copies. See [Note: master weights] in
// docs/design.md.

#include <cstdint>
#include <memory>
#include <vector>

#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class MasterWeights {
 public:
  // `whole`: this rank updates everything (stage 0).
  MasterWeights(ParameterTable& table, std::shared_ptr<memory::Account> account, bool whole);

  // Keeps this rank's elements of a bucket's fp32 values.
  void keep(int64_t bucket, const at::Tensor& values);
  // The same of the values that its parameters have.
  void widen(int64_t bucket);
  bool has(int64_t bucket) const;
  // Over range(bucket); undefined without.
  at::Tensor tensor(int64_t bucket) const;
  layout::Range range(int64_t bucket) const;
  // Elements of the bucket, inside range(bucket).
  at::Tensor view(int64_t bucket, layout::Range elements) const;

  // Rounds masters into the parameters' own memory, inside range(bucket).
  void publish(int64_t bucket, layout::Range elements);
  // Values that somebody wrote into the parameters, inside `elements` as far as this
  // rank holds them: masters that don't round to them become them.
  void refresh(int64_t bucket, layout::Range elements);

 private:
  at::Tensor make(int64_t bucket);

  ParameterTable& table_;
  const std::shared_ptr<memory::Account> account_;
  const bool whole_;
  std::vector<memory::FlatBuffer> masters_; // by bucket
};

} // namespace zero::sharding
