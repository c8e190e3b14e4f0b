#pragma once

// The interface's kernels over any launcher, which has
//   span<kPack>(stream, name, work, span): runs a work over a span;
//   blocks(stream, name, body, count): runs a body of blocks (device_norms.h).

#include <limits>
#include <stdexcept>

#include "csrc/kernels/device_elements.h"
#include "csrc/kernels/device_norms.h"
#include "csrc/kernels/device_steps.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// Where an element type's buffer starts.
template <typename E>
Place place(const void* data) {
  return {data, sizeof(typename E::Storage)};
}

inline Place place_of_copy(const Copy& copy) {
  const bool wide = copy.type == Type::f32;
  return {copy.data, wide ? 4 : 2};
}

// Calls function(type of parameter and state, type of gradients).
template <typename Function>
void with_step_elements(Type type, Type grad_type, const Copy& copy, const Function& function) {
  const bool mixed = type == Type::f32 && grad_type != Type::f64 && copy.type != Type::f64;
  if (!mixed && (grad_type != type || copy.data != nullptr)) {
    throw std::logic_error("[zero.kernels] a step of types that don't go together");
  }
  if (type == Type::f32 && grad_type == Type::bf16) {
    function(Float32{}, BFloat16{});
  } else if (type == Type::f32 && grad_type == Type::f16) {
    function(Float32{}, Float16{});
  } else {
    with_elements(type, [&](auto element) { function(element, element); });
  }
}

// Calls function(what a norm adds up).
template <typename Function>
void with_terms(double p, const Function& function) {
  if (p == std::numeric_limits<double>::infinity()) {
    function(Maxima{});
  } else if (p == 2.0) {
    function(Squares{});
  } else if (p == 1.0) {
    function(Magnitudes{});
  } else {
    function(Powers{p});
  }
}

template <typename Launcher>
class KernelsOver final : public DeviceKernels {
 public:
  void reduce_ranks(StreamHandle stream, const StridedReduction& x, int64_t count) const override {
    if (x.out_type != x.type && (x.out_type != Type::f32 || x.type == Type::f64)) {
      throw std::logic_error("[zero.kernels] a sum of types that don't go together");
    }
    with_elements(x.type, [&](auto element) {
      using E = decltype(element);
      if (x.out_type == x.type) {
        reduce<E, E>(stream, x, count);
      } else if constexpr (sizeof(typename E::Storage) == 2) {
        reduce<E, Float32>(stream, x, count);
      }
    });
  }

  void adam(
      StreamHandle stream,
      Type type,
      const AdamBuffers& x,
      int64_t count,
      const AdamArguments& arguments,
      const StepState& state) const override {
    with_step_elements(type, x.grad_type, x.copy, [&](auto element, auto gradient) {
      using E = decltype(element);
      using G = decltype(gradient);
      constexpr int kPack = pack_of<E, G>();
      const Span span = make_span(
          {place<E>(x.param),
           place<G>(x.grad),
           place<E>(x.exp_avg),
           place<E>(x.exp_avg_sq),
           place<E>(x.max_exp_avg_sq),
           place_of_copy(x.copy)},
          kPack,
          count);
      launcher_.template span<kPack>(stream, "adam", AdamWork<E, G>{x, arguments, state}, span);
    });
  }

  void sgd(
      StreamHandle stream,
      Type type,
      const SgdBuffers& x,
      int64_t count,
      const SgdArguments& arguments,
      const StepState& state) const override {
    with_step_elements(type, x.grad_type, x.copy, [&](auto element, auto gradient) {
      momentum_step(
          stream,
          "sgd",
          SgdWork<decltype(element), decltype(gradient)>{
              x.param, x.grad, x.momentum_buffer, x.copy, arguments, state},
          element,
          gradient,
          count);
    });
  }

  void lion(
      StreamHandle stream,
      Type type,
      const LionBuffers& x,
      int64_t count,
      const LionArguments& arguments,
      const StepState& state) const override {
    with_step_elements(type, x.grad_type, x.copy, [&](auto element, auto gradient) {
      momentum_step(
          stream,
          "lion",
          LionWork<decltype(element), decltype(gradient)>{
              x.param, x.grad, x.exp_avg, x.copy, arguments, state},
          element,
          gradient,
          count);
    });
  }

  void begin_step(
      StreamHandle stream,
      int64_t* steps,
      int64_t count,
      const float* found_nonfinite,
      int64_t* skipped) const override {
    const BeginStepBody body{steps, count, found_nonfinite, skipped};
    launcher_.blocks(stream, "begin_step", body, 1);
  }

  void scale(
      StreamHandle stream,
      Type type,
      void* x,
      double factor,
      const double* device_factor,
      int64_t count) const override {
    with_elements(type, [&](auto element) {
      using E = decltype(element);
      elements<E, E>(stream, "scale", ScaleWork<E>{x, factor, device_factor}, x, x, count);
    });
  }

  void clamp(StreamHandle stream, Type type, void* x, double low, double high, int64_t count)
      const override {
    with_elements(type, [&](auto element) {
      using E = decltype(element);
      using Compute = typename E::Compute;
      const ClampWork<E> work{x, static_cast<Compute>(low), static_cast<Compute>(high)};
      elements<E, E>(stream, "clamp", work, x, x, count);
    });
  }

  void convert(
      StreamHandle stream,
      Type from_type,
      const void* from,
      Type to_type,
      void* to,
      int64_t count) const override {
    if (from == to && from_type == to_type) {
      return;
    }
    with_elements(from_type, [&](auto given) {
      with_elements(to_type, [&](auto made) {
        using From = decltype(given);
        using To = decltype(made);
        elements<From, To>(stream, "convert", ConvertWork<From, To>{from, to}, from, to, count);
      });
    });
  }

  void accumulate(StreamHandle stream, Type from_type, const void* from, float* to, int64_t count)
      const override {
    into_floats<Accumulated>(stream, "accumulate", from_type, from, to, count);
  }

  void follow(StreamHandle stream, Type from_type, const void* from, float* to, int64_t count)
      const override {
    into_floats<Followed>(stream, "follow", from_type, from, to, count);
  }

  int64_t norm_part_count(int64_t count) const override {
    return parts_of(count);
  }

  void norm_parts(
      StreamHandle stream,
      Type type,
      void* x,
      int64_t count,
      double p,
      bool scales,
      double factor,
      const double* device_factor,
      double* parts) const override {
    const int64_t part_count = parts_of(count);
    with_elements(type, [&](auto element) {
      with_terms(p, [&](auto terms) {
        using E = decltype(element);
        using Terms = decltype(terms);
        if (reinterpret_cast<uintptr_t>(x) % kPackBytes == 0) {
          const NormBody<E, Terms, true> body{
              x, count, terms, scales, factor, device_factor, parts, part_count};
          launcher_.blocks(stream, "norm_parts", body, part_count);
        } else {
          const NormBody<E, Terms, false> body{
              x, count, terms, scales, factor, device_factor, parts, part_count};
          launcher_.blocks(stream, "norm_parts", body, part_count);
        }
      });
    });
  }

  void sum_parts(StreamHandle stream, const double* parts, int64_t count, double p, double* sum)
      const override {
    if (p == std::numeric_limits<double>::infinity()) {
      launcher_.blocks(stream, "sum_parts", SumPartsBody<Maxima>{parts, count, sum}, 1);
    } else {
      launcher_.blocks(stream, "sum_parts", SumPartsBody<Squares>{parts, count, sum}, 1);
    }
  }

  void finish_norms(
      StreamHandle stream,
      const double* sums,
      int64_t rank_count,
      int64_t norm_count,
      double p,
      bool rounds,
      double* norms,
      float* found_nonfinite) const override {
    const FinishNormsBody body{sums, rank_count, norm_count, p, rounds, norms, found_nonfinite};
    launcher_.blocks(stream, "finish_norms", body, 1);
  }

  void clip_factor(StreamHandle stream, const double* norm, double max_norm, double* factor)
      const override {
    launcher_.blocks(stream, "clip_factor", ClipFactorBody{norm, max_norm, factor}, 1);
  }

 private:
  // From one buffer to another, or the same.
  template <typename From, typename To, typename Work>
  void elements(
      StreamHandle stream,
      const char* name,
      const Work& work,
      const void* from,
      const void* to,
      int64_t count) const {
    constexpr int kPack = pack_of<From, To>();
    const Span span = make_span({place<From>(from), place<To>(to)}, kPack, count);
    launcher_.template span<kPack>(stream, name, work, span);
  }

  template <typename Rule>
  void into_floats(
      StreamHandle stream,
      const char* name,
      Type from_type,
      const void* from,
      float* to,
      int64_t count) const {
    with_elements(from_type, [&](auto element) {
      using E = decltype(element);
      elements<E, Float32>(stream, name, IntoFloatsWork<E, Rule>{from, to}, from, to, count);
    });
  }

  template <typename E, typename G, typename Work>
  void momentum_step(StreamHandle stream, const char* name, const Work& work, E, G, int64_t count)
      const {
    constexpr int kPack = pack_of<E, G>();
    const Span span = make_span(
        {place<E>(work.param),
         place<G>(work.grad),
         place<E>(work.buffer),
         place_of_copy(work.copy)},
        kPack,
        count);
    launcher_.template span<kPack>(stream, name, work, span);
  }

  template <typename E, typename Out>
  void reduce(StreamHandle stream, const StridedReduction& x, int64_t count) const {
    constexpr int kPack = pack_of<E, Out>();
    // Packs that are aligned in the first two inputs are so in all.
    const Place second{
        x.input_count > 1 ? at<E>(x.inputs, x.stride) : nullptr, sizeof(typename E::Storage)};
    const Span span = make_span(
        {place<E>(x.inputs), second, place<Out>(x.out), place<Out>(x.addend)}, kPack, count);
    launcher_.template span<kPack>(stream, "reduce_ranks", ReduceWork<E, Out>{x}, span);
  }

  Launcher launcher_;
};

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
