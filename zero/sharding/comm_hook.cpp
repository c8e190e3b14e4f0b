#include <zero/sharding/comm_hook.h>

#include <utility>

#include <ATen/core/grad_mode.h>

#include <zero/comm/local_communicator.h>
#include <zero/memory/flat_buffer.h>

namespace zero {
namespace {

class Compress final : public CommHook {
 public:
  // `divides_first`: the dtype lacks the range for what is to be divided.
  Compress(std::string name, c10::ScalarType dtype, bool divides_first)
      : name_(std::move(name)), dtype_(dtype), divides_first_(divides_first) {}

  std::string name() const override {
    return name_;
  }

  comm::WorkPtr reduce(
      const GradientBucket& bucket,
      comm::Communicator& communicator,
      at::Tensor output,
      comm::Reduction reduction,
      comm::Tag tag) override {
    const at::Tensor& whole = bucket.gradients;
    if (whole.scalar_type() != at::kFloat) {
      return communicator.reduce_scatter(
          std::move(output), whole, std::move(reduction), std::move(tag));
    }
    if (divides_first_ && reduction.divisor != 1.0) {
      whole.div_(std::exchange(reduction.divisor, 1.0));
    }
    const at::Tensor rounded = bucket.scratch(dtype_);
    memory::convert_elements(rounded, 0, whole, 0, whole.numel());
    return communicator.reduce_scatter(
        std::move(output), rounded, std::move(reduction), std::move(tag));
  }

  bool in_order() const override {
    return true;
  }

  c10::ScalarType wire_dtype(c10::ScalarType dtype) const override {
    return dtype == at::kFloat ? dtype_ : dtype;
  }

 private:
  const std::string name_;
  const c10::ScalarType dtype_;
  const bool divides_first_;
};

class FunctionHook final : public CommHook {
 public:
  FunctionHook(std::string name, CommHookFunction function)
      : name_(std::move(name)), function_(std::move(function)) {}

  std::string name() const override {
    return name_;
  }

  comm::WorkPtr reduce(
      const GradientBucket& bucket,
      comm::Communicator& /*communicator*/,
      at::Tensor output,
      comm::Reduction reduction,
      comm::Tag /*tag*/) override {
    take_finished(bucket, function_(bucket), output, reduction.addend);
    return comm::done_work();
  }

 private:
  const std::string name_;
  const CommHookFunction function_;
};

} // namespace

at::Tensor GradientBucket::shard() const {
  return memory::flat_view(gradients, shard_range.begin, shard_range.size());
}

void take_finished(
    const GradientBucket& bucket,
    const at::Tensor& finished,
    const at::Tensor& output,
    const at::Tensor& addend) {
  const int64_t whole = bucket.gradients.numel();
  const int64_t part = output.numel();
  const auto where = [&] {
    return c10::str(" for ", bucket.what, " (rank ", bucket.rank, " of ", bucket.world_size, ")");
  };
  TORCH_CHECK_TYPE(
      finished.defined(),
      "[zero.sharding] expected a comm hook to return a gradient, got none",
      where());
  TORCH_CHECK_VALUE(
      finished.dim() == 1 && (finished.numel() == whole || finished.numel() == part),
      "[zero.sharding] expected a comm hook to return a gradient of shape [",
      whole,
      "], the whole bucket, or [",
      part,
      "], this rank's shard, got ",
      finished.sizes(),
      where());
  TORCH_CHECK_TYPE(
      finished.scalar_type() == bucket.gradients.scalar_type() ||
          finished.scalar_type() == output.scalar_type(),
      "[zero.sharding] expected a comm hook to return a gradient of dtype ",
      bucket.gradients.scalar_type(),
      output.scalar_type() == bucket.gradients.scalar_type()
          ? ""
          : c10::str(" or ", output.scalar_type()),
      ", got ",
      finished.scalar_type(),
      where());
  TORCH_CHECK_VALUE(
      finished.device() == output.device(),
      "[zero.sharding] expected a comm hook to return a gradient on ",
      output.device(),
      ", got ",
      finished.device(),
      where());
  const at::NoGradGuard no_grad;
  const at::Tensor flat = finished.detach();
  const at::Tensor own =
      flat.numel() == part ? flat : flat.narrow(0, bucket.shard_range.begin, part);
  if (addend.defined()) {
    output.copy_(own.to(addend.scalar_type()).add(addend));
  } else {
    output.copy_(own);
  }
}

std::shared_ptr<CommHook> compress_bf16() {
  return std::make_shared<Compress>("bf16", at::kBFloat16, false);
}

std::shared_ptr<CommHook> compress_fp16() {
  return std::make_shared<Compress>("fp16", at::kHalf, true);
}

std::shared_ptr<CommHook> make_comm_hook(std::string name, CommHookFunction function) {
  return std::make_shared<FunctionHook>(std::move(name), std::move(function));
}

} // namespace zero
