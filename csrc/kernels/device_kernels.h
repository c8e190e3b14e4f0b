#pragma once

// Kernels of a device with streams, each the twin of one in kernels.h: the same
// formulas, types and order of operations on elements. Calls queue work on a stream and
// return; none blocks, allocates, or reads what lies on the device from the host, so
// that a step can be captured into a graph. Unless said otherwise pointers are device
// memory, aligned to 64 bytes, and counts are elements. Buffers that start elsewhere
// are right too, and as fast where all lie alike in blocks of 16 bytes. The stream is
// one of the current device. A launch that fails throws std::runtime_error, types that
// don't go together throw std::logic_error.
//
// Bits are the CPU kernels', but for a NaN's payload and, where a device's pow() differs
// from the host's in the last bit of fp64, Adam's bias corrections in fp64 and norms of
// other p than 1, 2 and infinity.

#include <cstdint>

#include "csrc/kernels/kernels.h"

namespace zero::kernels {

// cudaStream_t.
using StreamHandle = void*;

// Inputs that lie one after the other, `stride` elements apart.
struct StridedReduction {
  Type type; // of the inputs
  const void* inputs;
  int64_t stride;
  int64_t input_count;
  Type out_type; // as in Reduction
  void* out;
  const void* addend = nullptr;
  double divisor = 1.0;
};

// Numbers of a step that stay on the device.
struct StepState {
  // This step's number, from 1: AdamArguments::step and SgdArguments::first_step are
  // taken from it instead.
  const int64_t* step;
  // Not null and not zero: the step is left out, nothing is written.
  const float* found_nonfinite = nullptr;
};

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  virtual void reduce_ranks(StreamHandle stream, const StridedReduction& reduction, int64_t count)
      const = 0;

  virtual void adam(
      StreamHandle stream,
      Type type,
      const AdamBuffers& buffers,
      int64_t count,
      const AdamArguments& arguments,
      const StepState& state) const = 0;
  virtual void sgd(
      StreamHandle stream,
      Type type,
      const SgdBuffers& buffers,
      int64_t count,
      const SgdArguments& arguments,
      const StepState& state) const = 0;
  virtual void lion(
      StreamHandle stream,
      Type type,
      const LionBuffers& buffers,
      int64_t count,
      const LionArguments& arguments,
      const StepState& state) const = 0;

  // steps[i] += 1 for i < count, unless the step is left out, which `skipped` (may be
  // null) then counts.
  virtual void begin_step(
      StreamHandle stream,
      int64_t* steps,
      int64_t count,
      const float* found_nonfinite,
      int64_t* skipped) const = 0;

  // x[i] *= factor * *device_factor (null: 1; the product is rounded to the compute type
  // first). By exactly 1: nothing is read or written.
  virtual void scale(
      StreamHandle stream,
      Type type,
      void* x,
      double factor,
      const double* device_factor,
      int64_t count) const = 0;
  virtual void
  clamp(StreamHandle stream, Type type, void* x, double low, double high, int64_t count) const = 0;
  // Element alignment is enough for these three.
  virtual void convert(
      StreamHandle stream,
      Type from_type,
      const void* from,
      Type to_type,
      void* to,
      int64_t count) const = 0;
  virtual void accumulate(
      StreamHandle stream,
      Type from_type,
      const void* from,
      float* to,
      int64_t count) const = 0;
  virtual void
  follow(StreamHandle stream, Type from_type, const void* from, float* to, int64_t count) const = 0;

  // ---- norms ----

  // How many doubles norm_parts() writes for `count` elements: at least 1.
  virtual int64_t norm_part_count(int64_t count) const = 0;
  // Sums of the p-th powers of |x[i]| (p = infinity: maxima), taken in fp64 in an order
  // that depends on the type and `count` alone. Where `scales`, x is multiplied first as
  // by scale(), in the same pass. NaN and infinities show in the parts.
  virtual void norm_parts(
      StreamHandle stream,
      Type type,
      void* x,
      int64_t count,
      double p,
      bool scales,
      double factor,
      const double* device_factor,
      double* parts) const = 0;
  // *sum = the sum (p = infinity: the maximum, NaN if one is) of `count` parts, in an
  // order that depends on `count` alone.
  virtual void sum_parts(
      StreamHandle stream,
      const double* parts,
      int64_t count,
      double p,
      double* sum) const = 0;
  // norms[g] = (sum over r of sums[r * norm_count + g]) ^ (1 / p), in rank order, rounded
  // to fp32 where `rounds`; the maximum for p = infinity. *found_nonfinite (may be null)
  // becomes 1 or 0: whether any of them is not finite.
  virtual void finish_norms(
      StreamHandle stream,
      const double* sums,
      int64_t rank_count,
      int64_t norm_count,
      double p,
      bool rounds,
      double* norms,
      float* found_nonfinite) const = 0;
  // What gradients of this norm are to be multiplied by, as torch.nn.utils.clip_grad_norm_
  // has it in fp32: min(1, max_norm / (norm + 1e-6)), NaN for a NaN.
  virtual void clip_factor(StreamHandle stream, const double* norm, double max_norm, double* factor)
      const = 0;
};

// The kernels' bodies compiled for the host, where they run at once, in the calling
// thread: what tests compare with the CPU kernels.
const DeviceKernels& host_device_kernels();
// For CUDA devices; in builds that have them.
const DeviceKernels& cuda_kernels();

} // namespace zero::kernels
