#pragma once

// Tensors for the tests of kernels, and what it means that two are the same.

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "csrc/kernels/kernels_impl.h"

namespace kernel_values {

using namespace zero::kernels;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline const std::vector<Type> kTypes = {Type::f32, Type::f64, Type::bf16, Type::f16};

// Of a step: the types of parameter and state, of the gradient, and of the copy.
struct Types {
  Type type;
  Type grad_type;
  bool copies = false;
  Type copy_type = Type::f32;
};

inline std::vector<Types> all_types() {
  std::vector<Types> all;
  for (const Type type : kTypes) {
    all.push_back({type, type});
  }
  for (const Type grad_type : {Type::f32, Type::bf16, Type::f16}) {
    all.push_back({Type::f32, grad_type});
    for (const Type copy_type : {Type::f32, Type::bf16, Type::f16}) {
      all.push_back({Type::f32, grad_type, true, copy_type});
    }
  }
  return all;
}

inline at::ScalarType scalar_type(Type type) {
  constexpr at::ScalarType kScalarTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  return kScalarTypes[static_cast<int>(type)];
}

inline at::ScalarType compute_type(Type type) {
  return type == Type::f64 ? at::kDouble : at::kFloat;
}

inline at::Tensor random(int64_t count, Type type, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({count}, generator, at::kFloat).to(scalar_type(type));
}

inline at::Tensor with_special_values(int64_t count, Type type, uint64_t seed) {
  at::Tensor x = random(count, type, seed);
  auto at = static_cast<int64_t>(seed);
  for (const float value : {kNan, kInfinity, -kInfinity, -0.0F, 0x1p-149F, 0x1p-24F, 3e38F}) {
    at = at * 7 + 3;
    if (at < count) {
      x[at] = value;
    }
  }
  return x;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.nbytes() == b.nbytes() &&
      (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// The same bits but for NaN, whose payloads depend on the order of operands.
inline bool same_values(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor nan = a.isnan();
  return at::equal(nan, b.isnan()) && same_bits(a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0));
}

inline void* element(const at::Tensor& tensor, int64_t index = 0) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + index * tensor.itemsize();
}

// Where a buffer may be cut: whole blocks of 64 bytes; two cuts may be the same.
inline std::vector<int64_t> random_cuts(int64_t count, std::mt19937& generator) {
  std::vector<int64_t> cuts = {0, count};
  for (int i = 0; i < 9; ++i) {
    cuts.push_back(static_cast<int64_t>(generator() % (count / 32 + 1)) * 32);
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

} // namespace kernel_values
