#pragma once

// LocalSums: what this rank has accumulated and not reduced of 16-bit gradients
// (no_sync), in fp32. The slot in the open bucket shows a sum rounded; before autograd
// adds to it, it is emptied, so that each backward's gradient is added in fp32.

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class LocalSums {
 public:
  LocalSums(ParameterTable& table, std::shared_ptr<memory::Account> account)
      : table_(table), account_(std::move(account)) {}

  // Whether gradients of this parameter have few bits.
  bool wants(int64_t index) const;
  bool has(int64_t index) const {
    return summed_.count(index) > 0;
  }
  // `whole` is the bucket's open gradient.
  void take_out(int64_t index, const at::Tensor& whole);
  void add(int64_t index, const at::Tensor& whole);
  void forget(int64_t index) {
    summed_.erase(index);
  }
  // The bucket in fp32, other slots as in `whole`; undefined where nothing of it was
  // summed. Forgets it.
  at::Tensor seal(int64_t bucket, const at::Tensor& whole);
  void clear() {
    summed_.clear();
    sums_.clear();
  }

 private:
  ParameterTable& table_;
  const std::shared_ptr<memory::Account> account_;
  std::unordered_set<int64_t> summed_; // parameters
  std::vector<memory::FlatBuffer> sums_; // by bucket
};

} // namespace zero::sharding
