#include "fake_kernels.h"

#include "machine.h"

namespace zero::fake {
namespace {

using kernels::StreamHandle;
using kernels::Type;

size_t size_of(Type type) {
  switch (type) {
  case Type::f32:
    return 4;
  case Type::f64:
    return 8;
  case Type::bf16:
  case Type::f16:
    return 2;
  }
  return 0;
}

// What one call touches, as it is put together.
class Touched {
 public:
  Touched& reads(const void* begin, int64_t count, size_t item) {
    return add(ranges_.reads, begin, count, item);
  }
  Touched& writes(const void* begin, int64_t count, size_t item) {
    return add(ranges_.writes, begin, count, item);
  }
  Touched& changes(const void* begin, int64_t count, size_t item) {
    return reads(begin, count, item).writes(begin, count, item);
  }
  Touched& step(const kernels::StepState& state) {
    return reads(state.step, 1, sizeof(int64_t)).reads(state.found_nonfinite, 1, sizeof(float));
  }
  Touched& copy(const kernels::Copy& copy, int64_t count) {
    return writes(copy.data, count, size_of(copy.type));
  }

  void launch(StreamHandle stream, const char* name) const {
    auto& machine = Machine::get();
    auto lock = machine.lock();
    machine.launch_locked(lock, *static_cast<StreamState*>(stream), name, ranges_);
  }

 private:
  Touched& add(std::vector<Range>& list, const void* begin, int64_t count, size_t item) {
    if (begin != nullptr && count > 0) {
      list.push_back({static_cast<const char*>(begin), static_cast<size_t>(count) * item});
    }
    return *this;
  }

  Ranges ranges_;
};

} // namespace

void FakeKernels::reduce_ranks(
    StreamHandle stream,
    const kernels::StridedReduction& reduction,
    int64_t count) const {
  Touched touched;
  const size_t item = size_of(reduction.type);
  for (int64_t rank = 0; rank < reduction.input_count; ++rank) {
    const auto offset = static_cast<size_t>(rank * reduction.stride) * item;
    touched.reads(static_cast<const char*>(reduction.inputs) + offset, count, item);
  }
  touched.reads(reduction.addend, count, size_of(reduction.out_type))
      .writes(reduction.out, count, size_of(reduction.out_type))
      .launch(stream, "reduce_ranks");
  kernels_.reduce_ranks(stream, reduction, count);
}

void FakeKernels::adam(
    StreamHandle stream,
    Type type,
    const kernels::AdamBuffers& buffers,
    int64_t count,
    const kernels::AdamArguments& arguments,
    const kernels::StepState& state) const {
  const size_t item = size_of(type);
  Touched()
      .changes(buffers.param, count, item)
      .reads(buffers.grad, count, size_of(buffers.grad_type))
      .changes(buffers.exp_avg, count, item)
      .changes(buffers.exp_avg_sq, count, item)
      .changes(buffers.max_exp_avg_sq, count, item)
      .copy(buffers.copy, count)
      .step(state)
      .launch(stream, "adam");
  kernels_.adam(stream, type, buffers, count, arguments, state);
}

void FakeKernels::sgd(
    StreamHandle stream,
    Type type,
    const kernels::SgdBuffers& buffers,
    int64_t count,
    const kernels::SgdArguments& arguments,
    const kernels::StepState& state) const {
  const size_t item = size_of(type);
  Touched()
      .changes(buffers.param, count, item)
      .reads(buffers.grad, count, size_of(buffers.grad_type))
      .changes(buffers.momentum_buffer, count, item)
      .copy(buffers.copy, count)
      .step(state)
      .launch(stream, "sgd");
  kernels_.sgd(stream, type, buffers, count, arguments, state);
}

void FakeKernels::lion(
    StreamHandle stream,
    Type type,
    const kernels::LionBuffers& buffers,
    int64_t count,
    const kernels::LionArguments& arguments,
    const kernels::StepState& state) const {
  const size_t item = size_of(type);
  Touched()
      .changes(buffers.param, count, item)
      .reads(buffers.grad, count, size_of(buffers.grad_type))
      .changes(buffers.exp_avg, count, item)
      .copy(buffers.copy, count)
      .step(state)
      .launch(stream, "lion");
  kernels_.lion(stream, type, buffers, count, arguments, state);
}

void FakeKernels::begin_step(
    StreamHandle stream,
    int64_t* steps,
    int64_t count,
    const float* found_nonfinite,
    int64_t* skipped) const {
  Touched()
      .changes(steps, count, sizeof(int64_t))
      .reads(found_nonfinite, 1, sizeof(float))
      .changes(skipped, 1, sizeof(int64_t))
      .launch(stream, "begin_step");
  kernels_.begin_step(stream, steps, count, found_nonfinite, skipped);
}

void FakeKernels::scale(
    StreamHandle stream,
    Type type,
    void* x,
    double factor,
    const double* device_factor,
    int64_t count) const {
  const bool nothing = factor == 1.0 && device_factor == nullptr;
  Touched()
      .changes(nothing ? nullptr : x, count, size_of(type))
      .reads(device_factor, 1, sizeof(double))
      .launch(stream, "scale");
  kernels_.scale(stream, type, x, factor, device_factor, count);
}

void FakeKernels::clamp(
    StreamHandle stream,
    Type type,
    void* x,
    double low,
    double high,
    int64_t count) const {
  Touched().changes(x, count, size_of(type)).launch(stream, "clamp");
  kernels_.clamp(stream, type, x, low, high, count);
}

void FakeKernels::convert(
    StreamHandle stream,
    Type from_type,
    const void* from,
    Type to_type,
    void* to,
    int64_t count) const {
  Touched()
      .reads(from, count, size_of(from_type))
      .writes(to, count, size_of(to_type))
      .launch(stream, "convert");
  kernels_.convert(stream, from_type, from, to_type, to, count);
}

void FakeKernels::accumulate(
    StreamHandle stream,
    Type from_type,
    const void* from,
    float* to,
    int64_t count) const {
  Touched()
      .reads(from, count, size_of(from_type))
      .changes(to, count, sizeof(float))
      .launch(stream, "accumulate");
  kernels_.accumulate(stream, from_type, from, to, count);
}

void FakeKernels::follow(
    StreamHandle stream,
    Type from_type,
    const void* from,
    float* to,
    int64_t count) const {
  Touched()
      .reads(from, count, size_of(from_type))
      .changes(to, count, sizeof(float))
      .launch(stream, "follow");
  kernels_.follow(stream, from_type, from, to, count);
}

void FakeKernels::norm_parts(
    StreamHandle stream,
    Type type,
    void* x,
    int64_t count,
    double p,
    bool scales,
    double factor,
    const double* device_factor,
    double* parts) const {
  Touched()
      .reads(x, count, size_of(type))
      .writes(scales ? x : nullptr, count, size_of(type))
      .reads(device_factor, 1, sizeof(double))
      .writes(parts, norm_part_count(count), sizeof(double))
      .launch(stream, "norm_parts");
  kernels_.norm_parts(stream, type, x, count, p, scales, factor, device_factor, parts);
}

void FakeKernels::sum_parts(
    StreamHandle stream,
    const double* parts,
    int64_t count,
    double p,
    double* sum) const {
  Touched()
      .reads(parts, count, sizeof(double))
      .writes(sum, 1, sizeof(double))
      .launch(stream, "sum_parts");
  kernels_.sum_parts(stream, parts, count, p, sum);
}

void FakeKernels::finish_norms(
    StreamHandle stream,
    const double* sums,
    int64_t rank_count,
    int64_t norm_count,
    double p,
    bool rounds,
    double* norms,
    float* found_nonfinite) const {
  Touched()
      .reads(sums, rank_count * norm_count, sizeof(double))
      .writes(norms, norm_count, sizeof(double))
      .writes(found_nonfinite, 1, sizeof(float))
      .launch(stream, "finish_norms");
  kernels_.finish_norms(stream, sums, rank_count, norm_count, p, rounds, norms, found_nonfinite);
}

void FakeKernels::clip_factor(
    StreamHandle stream,
    const double* norm,
    double max_norm,
    double* factor) const {
  Touched()
      .reads(norm, 1, sizeof(double))
      .writes(factor, 1, sizeof(double))
      .launch(stream, "clip_factor");
  kernels_.clip_factor(stream, norm, max_norm, factor);
}

} // namespace zero::fake
