#pragma once

// HostGradients (Options::offload): what other storages reduce on a device is also copied
// to pinned memory of the host, where the CPU steps by it. A copy starts when its bucket's
// reduction does, behind it on a stream of copies, and nobody waits for it but the step.
// What is changed on the device afterwards is copied once more. See [Note: offload] in
// docs/design.md.

#include <memory>
#include <vector>

#include <zero/memory/copy_stream.h>
#include <zero/sharding/gradient_storage.h>

namespace zero::sharding {

class HostGradients final : public GradientStorage {
 public:
  // `shown`: `.grad` is memory that users write to without a notice (stage 0), so copies
  // are made for each step only.
  HostGradients(
      const GradientContext& context,
      std::unique_ptr<GradientStorage> on_device,
      bool shown);
  ~HostGradients() override;

  const at::Tensor& open(int64_t bucket) override;
  bool is_open(int64_t bucket) const override {
    return on_device_->is_open(bucket);
  }
  at::Tensor reduced(int64_t bucket) override;
  layout::Range reduced_range(int64_t bucket) const override {
    return on_device_->reduced_range(bucket);
  }
  at::Tensor stepped_by(int64_t bucket) override;
  void prepare(const std::vector<int64_t>& buckets) override;
  void lent(int64_t bucket) override;
  void show(int64_t bucket) override;
  void take_shown(int64_t bucket) override;
  void assign(int64_t bucket, layout::Range slot, const at::Tensor& values) override;
  void zero(int64_t bucket, layout::Range slot) override;
  void keep(int64_t bucket, layout::Range slot) override;
  void drop(int64_t bucket, layout::Range slot) override;
  comm::WorkPtr reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag)
      override;
  void finish(int64_t bucket) override;
  void forget(int64_t bucket) override;
  int64_t max_in_flight() const override {
    return on_device_->max_in_flight();
  }
  void end_backward() override;
  void close_all() override;
  void clear() override;

 private:
  struct Copy {
    memory::FlatBuffer bytes;
    at::Tensor values; // over `bytes`, of the dtype that was copied
    at::Tensor sent; // the reduction's input, until finish(): its work lets go of it
    memory::Moment landed; // on the stream of copies: the reduction is done
    memory::Moment done;
    bool started = false; // the current stream has not waited for `done`
    bool valid = false; // what it has, or is going to have, is the gradient
    bool lent = false;
  };
  // Copies `reduced`, once `work` is done where there is one.
  void start(int64_t bucket, const at::Tensor& reduced, comm::Work* work);
  void make_room(Copy& copy, const at::Tensor& reduced);
  // What is queued from now on comes after the copy.
  void settle(int64_t bucket);
  void change(int64_t bucket);

  const GradientContext context_;
  const std::unique_ptr<GradientStorage> on_device_;
  const bool shown_;
  memory::CopyStream stream_;
  std::vector<Copy> copies_; // by bucket
};

} // namespace zero::sharding
