#pragma once

// The communicator of one rank: every operation is done when its call returns, on
// the caller's thread, with the bits that the others give at size 1. Also of a rank whose
// peers are not there, as in torch's "fake" group: it does its own part, what the others
// would send counts as nothing, and their messages are its own.

#include <zero/comm/arguments.h>
#include <zero/comm/communicator.h>

namespace zero::comm {

// What was done when its call returned.
ZERO_API WorkPtr done_work();

class LocalCommunicator final : public Communicator {
 public:
  explicit LocalCommunicator(const Place& place = {}) : place_(place) {}

  int64_t rank() const override {
    return place_.rank;
  }
  int64_t size() const override {
    return place_.size;
  }
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, Reduction reduction, Tag tag)
      override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input, Tag tag) override;
  WorkPtr all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) override;
  WorkPtr broadcast(at::Tensor tensor, int64_t root, Tag tag) override;
  std::vector<at::Tensor> exchange(at::Tensor bytes, Tag tag) override;
  void barrier(Tag tag) override;
  Traffic traffic() const override;
  std::string transport() const override;
  std::shared_ptr<Communicator> duplicate() const override {
    return std::make_shared<LocalCommunicator>(place_);
  }

 private:
  void count(Kind kind, const Tag& tag, int64_t bytes);

  const Place place_;
  Traffic traffic_;
};

} // namespace zero::comm
