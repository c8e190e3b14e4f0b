#pragma once

// CPU kernels over flat buffers. Each is elementwise in IEEE arithmetic without
// contraction, so its result does not depend on the vector width chosen at run
// time, on how a buffer is cut, nor on the number of threads.
//
// Pointers are 64-byte aligned unless said otherwise and counts are elements.
// Types of 16 bits are computed in fp32 and rounded once to nearest even; fp64
// is computed in fp64.

#include <cstdint>

#include "csrc/kernels/exact_sum.h"

namespace zero::kernels {

enum class Type { f32, f64, bf16, f16 };

// ---- sums over ranks ----

// Equal types, or inputs of 16 bits and `out` and `addend` of fp32. Inputs need only
// element alignment.
struct Reduction {
  Type type; // of the inputs
  const void* const* inputs;
  int64_t input_count;
  Type out_type;
  void* out; // may be the addend, and of equal types one of the inputs
  const void* addend = nullptr; // null: no addition
  double divisor = 1.0;
};

// out[i] = addend[i] + (inputs[0][i] + inputs[1][i] + ...) / divisor: summed in
// the order of `inputs`, divided (not multiplied by an inverse), rounded to the
// compute type, then added.
void reduce_ranks(const Reduction& reduction, int64_t count);

// ---- optimizers ----

// A second buffer that takes the new parameters, rounded: the weights that models
// compute with beside fp32 master weights.
struct Copy {
  Type type = Type::f32;
  void* data = nullptr; // null: none
};

// Parameters and state have one type. Gradients have it too, and there is no copy,
// unless the type is fp32: then gradient and copy may be fp32, bf16 or fp16.
struct AdamBuffers {
  void* param;
  Type grad_type;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq = nullptr; // given: the amsgrad variant
  Copy copy = {};
};

struct AdamArguments {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true; // AdamW: p *= 1 - lr * weight_decay; else g += weight_decay * p
  int64_t step = 1; // this step's number, from 1
  bool maximize = false; // the gradient negated
};

// One pass of Adam or AdamW (torch.optim's formulas, bias corrections computed in
// fp64).
void adam(Type type, const AdamBuffers& buffers, int64_t count, const AdamArguments& arguments);

// As for Adam.
struct SgdBuffers {
  void* param;
  Type grad_type;
  const void* grad;
  void* momentum_buffer = nullptr; // may be null when momentum is 0
  Copy copy = {};
};

struct SgdArguments {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool first_step = true; // the momentum buffer becomes the gradient itself
  bool maximize = false;
};

void sgd(Type type, const SgdBuffers& buffers, int64_t count, const SgdArguments& arguments);

// As for Adam.
struct LionBuffers {
  void* param;
  Type grad_type;
  const void* grad;
  void* exp_avg;
  Copy copy = {};
};

struct LionArguments {
  double lr = 1e-4;
  double beta1 = 0.9; // of the update
  double beta2 = 0.99; // of the moment
  double weight_decay = 0.0; // decoupled: p *= 1 - lr * weight_decay
  bool maximize = false;
};

// p -= lr * sign(beta1 * m + (1 - beta1) * g), where sign(0) is 0 and NaN stays NaN;
// m = beta2 * m + (1 - beta2) * g.
void lion(Type type, const LionBuffers& buffers, int64_t count, const LionArguments& arguments);

// ---- one buffer, or two of different types ----

// x[i] *= factor (factor rounded to the compute type first).
void scale(Type type, void* x, double factor, int64_t count);

// x[i] = min(max(x[i], low), high) with the bounds rounded to the type, as by
// torch.clamp: NaN stays. The bounds themselves are no NaN.
void clamp(Type type, void* x, double low, double high, int64_t count);

// to[i] = from[i], rounded once. The buffers don't overlap, unless they are the same
// and of one type.
void convert(Type from_type, const void* from, Type to_type, void* to, int64_t count);

// to[i] += from[i] in fp32 (fp64 is rounded to it first).
void accumulate(Type from_type, const void* from, float* to, int64_t count);

// Where to[i], rounded to the type, is not from[i] bit for bit, it becomes from[i].
void follow(Type from_type, const void* from, float* to, int64_t count);

// The index of the first infinity or NaN, or -1.
int64_t first_nonfinite(Type type, const void* x, int64_t count);

// ---- norms ----

// Adds the p-th powers of |x[i]| to `sum` (p = infinity: the maximum). `count`
// need not be whole blocks, but `x` starts a block of 64 bytes of the parameter's
// flat layout, so that blocks are the same however a buffer is sharded: the block
// sums are taken in fp64 in a fixed order, and added to each other exactly.
void accumulate_norm(Type type, const void* x, int64_t count, double p, ExactSum& sum);

// scale, then accumulate_norm of what that gives, in one pass.
void scale_and_accumulate_norm(
    Type type,
    void* x,
    double factor,
    int64_t count,
    double p,
    ExactSum& sum);

} // namespace zero::kernels
