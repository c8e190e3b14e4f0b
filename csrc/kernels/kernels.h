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

// out[i] = addend[i] + (inputs[0][i] + inputs[1][i] + ...) / divisor: summed in
// the order of `inputs`, divided (not multiplied by an inverse), rounded to the
// compute type, then added. `addend` may be null (no addition). `out` may be one
// of the inputs or the addend. Inputs need only element alignment.
void reduce_ranks(
    Type type,
    void* out,
    const void* const* inputs,
    int64_t input_count,
    const void* addend,
    double divisor,
    int64_t count);

struct AdamArguments {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true; // AdamW: p *= 1 - lr * weight_decay; else g += weight_decay * p
  int64_t step = 1; // this step's number, from 1
};

// One pass of Adam or AdamW over parameters, gradients and both moments, all of
// one type (torch.optim's formulas, bias corrections computed in fp64).
void adam(
    Type type,
    void* param,
    const void* grad,
    void* exp_avg,
    void* exp_avg_sq,
    int64_t count,
    const AdamArguments& arguments);

struct SgdArguments {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool first_step = true; // the momentum buffer becomes the gradient itself
};

// `momentum_buffer` may be null when momentum is 0.
void sgd(
    Type type,
    void* param,
    const void* grad,
    void* momentum_buffer,
    int64_t count,
    const SgdArguments& arguments);

// x[i] *= factor (factor rounded to the compute type first).
void scale(Type type, void* x, double factor, int64_t count);

// Adds the p-th powers of |x[i]| to `sum` (p = infinity: the maximum). `count`
// need not be whole blocks, but `x` starts a block of 64 bytes of the parameter's
// flat layout, so that blocks are the same however a buffer is sharded: the block
// sums are taken in fp64 in a fixed order, and added to each other exactly.
void accumulate_norm(Type type, const void* x, int64_t count, double p, ExactSum& sum);

} // namespace zero::kernels
