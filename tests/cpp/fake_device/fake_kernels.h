#pragma once

// Kernels for fake devices: each call is an operation of the trace, named as the
// function, on the stream whose native handle (c10::Stream::native_handle()) is given, with
// the memory that the interface says it reads and writes; then `kernels` does the work.
// As with CUDA, pointers have to be device memory.

#include "csrc/kernels/device_kernels.h"

namespace zero::fake {

class FakeKernels final : public kernels::DeviceKernels {
 public:
  // `kernels` run at once in the calling thread (host_device_kernels()) and outlive this.
  explicit FakeKernels(const kernels::DeviceKernels& kernels) : kernels_(kernels) {}

  void reduce_ranks(
      kernels::StreamHandle stream,
      const kernels::StridedReduction& reduction,
      int64_t count) const override;
  void adam(
      kernels::StreamHandle stream,
      kernels::Type type,
      const kernels::AdamBuffers& buffers,
      int64_t count,
      const kernels::AdamArguments& arguments,
      const kernels::StepState& state) const override;
  void sgd(
      kernels::StreamHandle stream,
      kernels::Type type,
      const kernels::SgdBuffers& buffers,
      int64_t count,
      const kernels::SgdArguments& arguments,
      const kernels::StepState& state) const override;
  void lion(
      kernels::StreamHandle stream,
      kernels::Type type,
      const kernels::LionBuffers& buffers,
      int64_t count,
      const kernels::LionArguments& arguments,
      const kernels::StepState& state) const override;
  void begin_step(
      kernels::StreamHandle stream,
      int64_t* steps,
      int64_t count,
      const float* found_nonfinite,
      int64_t* skipped) const override;
  void scale(
      kernels::StreamHandle stream,
      kernels::Type type,
      void* x,
      double factor,
      const double* device_factor,
      int64_t count) const override;
  void clamp(
      kernels::StreamHandle stream,
      kernels::Type type,
      void* x,
      double low,
      double high,
      int64_t count) const override;
  void convert(
      kernels::StreamHandle stream,
      kernels::Type from_type,
      const void* from,
      kernels::Type to_type,
      void* to,
      int64_t count) const override;
  void accumulate(
      kernels::StreamHandle stream,
      kernels::Type from_type,
      const void* from,
      float* to,
      int64_t count) const override;
  void follow(
      kernels::StreamHandle stream,
      kernels::Type from_type,
      const void* from,
      float* to,
      int64_t count) const override;
  int64_t norm_part_count(int64_t count) const override {
    return kernels_.norm_part_count(count);
  }
  void norm_parts(
      kernels::StreamHandle stream,
      kernels::Type type,
      void* x,
      int64_t count,
      double p,
      bool scales,
      double factor,
      const double* device_factor,
      double* parts) const override;
  void sum_parts(
      kernels::StreamHandle stream,
      const double* parts,
      int64_t count,
      double p,
      double* sum) const override;
  void finish_norms(
      kernels::StreamHandle stream,
      const double* sums,
      int64_t rank_count,
      int64_t norm_count,
      double p,
      bool rounds,
      double* norms,
      float* found_nonfinite) const override;
  void clip_factor(
      kernels::StreamHandle stream,
      const double* norm,
      double max_norm,
      double* factor) const override;

 private:
  const kernels::DeviceKernels& kernels_;
};

} // namespace zero::fake
