// Calls of Zero's kernels in the fake device's trace.

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "catch.h"
#include "fake_device/fake_device.h"
#include "fake_device/fake_kernels.h"
#include "ranks.h"

namespace {

using namespace zero;
using zero::test::check_contains;
using zero::test::error_of;

// Only what the test below calls.
class TwoKernels final : public kernels::DeviceKernels {
 public:
  void reduce_ranks(kernels::StreamHandle, const kernels::StridedReduction& r, int64_t count)
      const override {
    const auto* inputs = static_cast<const float*>(r.inputs);
    for (int64_t i = 0; i < count; ++i) {
      static_cast<float*>(r.out)[i] = inputs[i] + inputs[r.stride + i];
    }
  }
  void scale(kernels::StreamHandle, kernels::Type, void* x, double by, const double*, int64_t n)
      const override {
    kernels::scale(kernels::Type::f32, x, by, n);
  }
  void adam(
      kernels::StreamHandle,
      kernels::Type,
      const kernels::AdamBuffers&,
      int64_t,
      const kernels::AdamArguments&,
      const kernels::StepState&) const override {}
  void sgd(
      kernels::StreamHandle,
      kernels::Type,
      const kernels::SgdBuffers&,
      int64_t,
      const kernels::SgdArguments&,
      const kernels::StepState&) const override {}
  void lion(
      kernels::StreamHandle,
      kernels::Type,
      const kernels::LionBuffers&,
      int64_t,
      const kernels::LionArguments&,
      const kernels::StepState&) const override {}
  void begin_step(kernels::StreamHandle, int64_t*, int64_t, const float*, int64_t*) const override {
  }
  void clamp(kernels::StreamHandle, kernels::Type, void*, double, double, int64_t) const override {}
  void convert(kernels::StreamHandle, kernels::Type, const void*, kernels::Type, void*, int64_t)
      const override {}
  void accumulate(kernels::StreamHandle, kernels::Type, const void*, float*, int64_t)
      const override {}
  void follow(kernels::StreamHandle, kernels::Type, const void*, float*, int64_t) const override {}
  int64_t norm_part_count(int64_t) const override {
    return 1;
  }
  void norm_parts(
      kernels::StreamHandle,
      kernels::Type,
      void*,
      int64_t,
      double,
      bool,
      double,
      const double*,
      double*) const override {}
  void sum_parts(kernels::StreamHandle, const double*, int64_t, double, double*) const override {}
  void finish_norms(
      kernels::StreamHandle,
      const double*,
      int64_t,
      int64_t,
      double,
      bool,
      double*,
      float*) const override {}
  void clip_factor(kernels::StreamHandle, const double*, double, double*) const override {}
};

} // namespace

TEST_CASE("kernels are operations of the stream whose native handle they get") {
  fake::reset();
  const TwoKernels work;
  const fake::FakeKernels kernels(work);
  const auto inputs = at::arange(128, at::kFloat).to(fake::device());
  const auto out = at::zeros({64}, inputs.options());
  const auto here = fake::current_stream();
  kernels.reduce_ranks(
      here.native_handle(),
      {kernels::Type::f32,
       inputs.const_data_ptr(),
       64,
       2,
       kernels::Type::f32,
       out.mutable_data_ptr()},
      64);
  REQUIRE(out.cpu()[3].item<float>() == 3.f + 67.f);
  const auto reductions = fake::operations("reduce_ranks");
  REQUIRE(reductions.size() == 1);
  REQUIRE(reductions[0].reads.size() == 2);
  REQUIRE(fake::touches(reductions[0], out));
  out.add_(1);
  const auto side = fake::new_stream();
  const auto scale = [&] {
    kernels.scale(
        side.native_handle(), kernels::Type::f32, out.mutable_data_ptr(), 2.0, nullptr, 64);
  };
  check_contains(error_of(scale), {"scale", "add_", "nothing orders"});
  REQUIRE(fake::take_errors().size() == 1);
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(here);
  side.wait(event);
  scale();
  REQUIRE(
      error_of([&] {
        auto host = at::zeros({64});
        kernels.scale(
            here.native_handle(), kernels::Type::f32, host.mutable_data_ptr(), 2.0, nullptr, 64);
      }) != "");
  check_contains(fake::take_errors().at(0), {"memory that is no device's"});
  side.synchronize();
}
