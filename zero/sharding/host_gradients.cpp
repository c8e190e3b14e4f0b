#include <zero/sharding/host_gradients.h>

#include <utility>

#include <zero/comm/blocking.h>
#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

HostGradients::HostGradients(
    const GradientContext& context,
    std::unique_ptr<GradientStorage> on_device,
    bool shown)
    : context_(context), on_device_(std::move(on_device)), shown_(shown) {}

HostGradients::~HostGradients() {
  try {
    for (const Copy& copy : copies_) {
      copy.done.finish(); // into memory that is let go
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the device is gone
  }
}

void HostGradients::settle(int64_t bucket) {
  Copy& copy = at_bucket(copies_, bucket);
  if (copy.started) {
    copy.done.wait();
    copy.started = false;
  }
}

void HostGradients::change(int64_t bucket) {
  settle(bucket);
  copies_[bucket].valid = false;
}

void HostGradients::make_room(Copy& copy, const at::Tensor& reduced) {
  const auto bytes = static_cast<int64_t>(reduced.nbytes());
  if (!copy.bytes || copy.bytes.tensor().numel() < bytes) {
    copy.done.finish();
    copy.bytes = {};
    copy.bytes = memory::FlatBuffer(
        bytes, memory::pinned(at::kByte), memory::Purpose::gradients, context_.account);
    copy.values.reset();
  }
  if (!copy.values.defined() || copy.values.scalar_type() != reduced.scalar_type()) {
    copy.values = memory::tensor_over(
        copy.bytes.tensor().storage(), {reduced.numel()}, {1}, reduced.options().device(at::kCPU));
  }
}

void HostGradients::start(int64_t bucket, const at::Tensor& reduced, comm::Work* work) {
  Copy& copy = at_bucket(copies_, bucket);
  make_room(copy, reduced);
  {
    const auto guard = stream_.enter(reduced.device());
    if (work != nullptr) {
      work->wait();
      copy.landed.record(reduced.device());
    }
    memory::queue_copy(copy.values, 0, reduced, 0, reduced.numel());
    copy.done.record(reduced.device());
  }
  copy.started = true;
  copy.valid = true;
}

const at::Tensor& HostGradients::open(int64_t bucket) {
  settle(bucket);
  return on_device_->open(bucket);
}

at::Tensor HostGradients::reduced(int64_t bucket) {
  settle(bucket);
  return on_device_->reduced(bucket);
}

at::Tensor HostGradients::stepped_by(int64_t bucket) {
  Copy& copy = at_bucket(copies_, bucket);
  if (!copy.valid) {
    start(bucket, on_device_->reduced(bucket), nullptr);
  }
  const comm::BlockingScope blocking;
  copy.done.finish();
  return copy.values;
}

void HostGradients::prepare(const std::vector<int64_t>& buckets) {
  for (const int64_t bucket : buckets) {
    const Copy& copy = at_bucket(copies_, bucket);
    if (shown_ || copy.lent || !copy.valid) {
      start(bucket, on_device_->reduced(bucket), nullptr);
    }
  }
}

void HostGradients::lent(int64_t bucket) {
  at_bucket(copies_, bucket).lent = true;
}

void HostGradients::show(int64_t bucket) {
  change(bucket);
  on_device_->show(bucket);
}

void HostGradients::take_shown(int64_t bucket) {
  on_device_->take_shown(bucket);
}

void HostGradients::assign(int64_t bucket, layout::Range slot, const at::Tensor& values) {
  change(bucket);
  on_device_->assign(bucket, slot, values);
}

void HostGradients::zero(int64_t bucket, layout::Range slot) {
  change(bucket);
  on_device_->zero(bucket, slot);
}

void HostGradients::keep(int64_t bucket, layout::Range slot) {
  change(bucket);
  on_device_->keep(bucket, slot);
}

void HostGradients::drop(int64_t bucket, layout::Range slot) {
  change(bucket);
  on_device_->drop(bucket, slot);
}

// Where nothing else is done to a reduction's output, its copy starts at once: a hook that
// works elsewhere than on the communicator would make the host wait.
comm::WorkPtr
HostGradients::reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag) {
  change(bucket);
  copies_[bucket].lent = false;
  comm::WorkPtr work = on_device_->reduce(bucket, add, sums, tag);
  const BucketReducer& reducer = *context_.reducer;
  if (!shown_ && (!reducer.hook() || reducer.hook()->in_order())) {
    copies_[bucket].sent = sums;
    start(bucket, reducer.output(bucket), work.get());
  }
  return work;
}

void HostGradients::finish(int64_t bucket) {
  Copy& copy = at_bucket(copies_, bucket);
  copy.landed.wait();
  copy.sent.reset();
  on_device_->finish(bucket);
  if (!shown_ && !copy.valid) {
    start(bucket, on_device_->reduced(bucket), nullptr);
  }
}

void HostGradients::forget(int64_t bucket) {
  change(bucket);
  on_device_->forget(bucket);
}

void HostGradients::end_backward() {
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) {
    settle(static_cast<int64_t>(bucket));
  }
  on_device_->end_backward();
}

void HostGradients::close_all() {
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) {
    change(static_cast<int64_t>(bucket));
  }
  on_device_->close_all();
}

void HostGradients::clear() {
  close_all();
  for (const Copy& copy : copies_) {
    copy.done.finish();
  }
  copies_.clear();
  on_device_->clear();
}

} // namespace zero::sharding
