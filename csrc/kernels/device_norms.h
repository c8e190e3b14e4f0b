#pragma once

// Norms, and what follows from them, as bodies of blocks of threads. A block has
//   lanes: a double for each of its kThreads threads;
//   each(function): calls function(thread) for each of them, and waits for all.
// Sums are taken in an order that neither the device nor its load changes.

#include <cmath>

#include "csrc/kernels/device_elements.h"
#include "csrc/kernels/device_steps.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

constexpr int64_t kTile = 4096; // elements that a block takes at a time
constexpr int64_t kMostParts = 2048;

inline int64_t parts_of(int64_t count) {
  return std::clamp<int64_t>((count + kTile - 1) / kTile, 1, kMostParts);
}

// ---- what a norm adds up ----

// The maximum, or a NaN of either.
ZERO_HOST_DEVICE double larger(double a, double b) {
  return a >= b || a != a ? a : b;
}

struct Squares {
  ZERO_HOST_DEVICE double power(double value) const {
    return value * value;
  }
  ZERO_HOST_DEVICE static double join(double a, double b) {
    return a + b;
  }
};

struct Magnitudes {
  ZERO_HOST_DEVICE double power(double value) const {
    return std::abs(value);
  }
  ZERO_HOST_DEVICE static double join(double a, double b) {
    return a + b;
  }
};

struct Powers {
  double p;

  ZERO_HOST_DEVICE double power(double value) const {
    return std::pow(std::abs(value), p);
  }
  ZERO_HOST_DEVICE static double join(double a, double b) {
    return a + b;
  }
};

struct Maxima {
  ZERO_HOST_DEVICE double power(double value) const {
    return std::abs(value);
  }
  ZERO_HOST_DEVICE static double join(double a, double b) {
    return larger(a, b);
  }
};

// Joins the lanes into the first.
template <typename Terms, typename Block>
ZERO_HOST_DEVICE void join_lanes(const Block& block) {
  for (int half = kThreads / 2; half > 0; half /= 2) {
    block.each([&block, half](int thread) {
      if (thread < half) {
        block.lanes[thread] = Terms::join(block.lanes[thread], block.lanes[thread + half]);
      }
    });
  }
}

// ---- parts of norms: block b takes the tiles b, b + parts, ... ----

// kAligned: packs of x are aligned.
template <typename E, typename Terms, bool kAligned>
struct NormBody {
  using Compute = typename E::Compute;
  static constexpr int kPack = pack_of<E>();
  static constexpr int kStep = kThreads * kPack; // elements
  static constexpr int kSteps = kTile / kStep;

  void* x;
  int64_t count;
  Terms terms;
  bool scales;
  double factor;
  const double* device_factor;
  double* parts;
  int64_t part_count;

  template <typename Block>
  ZERO_HOST_DEVICE void operator()(const Block& block, int64_t part) const {
    const Compute by = scales ? rounded_factor<Compute>(factor, device_factor) : Compute(1);
    block.each([this, &block, part, by](int thread) {
      double sum = 0.0;
      for (int64_t tile = part; tile * kTile < count; tile += part_count) {
        const int64_t first = tile * kTile + thread * kPack;
        sum = Terms::join(
            sum, (tile + 1) * kTile <= count ? whole_tile(first, by) : last_tile(first, by));
      }
      block.lanes[thread] = sum;
    });
    join_lanes<Terms>(block);
    block.each([this, &block, part](int thread) {
      if (thread == 0) {
        parts[part] = block.lanes[0];
      }
    });
  }

 private:
  ZERO_HOST_DEVICE double whole_tile(int64_t first, Compute by) const {
    Pack<E, kPack> packs[kSteps];
    ZERO_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      packs[step] = load(first + step * kStep);
    }
    double sum = 0.0;
    ZERO_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (by != 1) {
        multiply(packs[step], by);
        store(first + step * kStep, packs[step]);
      }
      sum = Terms::join(sum, sum_of(packs[step], kPack));
    }
    return sum;
  }

  ZERO_HOST_DEVICE double last_tile(int64_t first, Compute by) const {
    double sum = 0.0;
    for (int64_t index = first; index < count; index += kStep) {
      const auto present = static_cast<int>(count - index < kPack ? count - index : kPack);
      Pack<E, kPack> pack{};
      for (int j = 0; j < kPack; ++j) {
        pack.values[j] = j < present ? *at<E>(x, index + j) : typename E::Storage(0);
      }
      if (by != 1) {
        multiply(pack, by);
        for (int j = 0; j < kPack; ++j) {
          if (j < present) {
            *at<E>(x, index + j) = pack.values[j];
          }
        }
      }
      sum = Terms::join(sum, sum_of(pack, present));
    }
    return sum;
  }

  ZERO_HOST_DEVICE Pack<E, kPack> load(int64_t index) const {
    if constexpr (kAligned) {
      return load_pack<E, kPack>(x, index);
    } else {
      Pack<E, kPack> pack;
      ZERO_UNROLL
      for (int j = 0; j < kPack; ++j) {
        pack.values[j] = *at<E>(x, index + j);
      }
      return pack;
    }
  }

  ZERO_HOST_DEVICE void store(int64_t index, const Pack<E, kPack>& pack) const {
    if constexpr (kAligned) {
      store_pack<E, kPack>(x, index, pack);
    } else {
      ZERO_UNROLL
      for (int j = 0; j < kPack; ++j) {
        *at<E>(x, index + j) = pack.values[j];
      }
    }
  }

  ZERO_HOST_DEVICE static void multiply(Pack<E, kPack>& pack, Compute by) {
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = E::store(E::load(pack.values[j]) * by);
    }
  }

  // The first `present` elements, as a tree of neighbors.
  ZERO_HOST_DEVICE double sum_of(const Pack<E, kPack>& pack, int present) const {
    double sums[kPack];
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      sums[j] = j < present ? terms.power(static_cast<double>(E::load(pack.values[j]))) : 0.0;
    }
    ZERO_UNROLL
    for (int width = 1; width < kPack; width *= 2) {
      ZERO_UNROLL
      for (int j = 0; j < kPack; j += 2 * width) {
        sums[j] = Terms::join(sums[j], sums[j + width]);
      }
    }
    return sums[0];
  }
};

// ---- one block ----

template <typename Terms>
struct SumPartsBody {
  const double* parts;
  int64_t count;
  double* sum;

  template <typename Block>
  ZERO_HOST_DEVICE void operator()(const Block& block, int64_t) const {
    block.each([this, &block](int thread) {
      double total = 0.0;
      for (int64_t i = thread; i < count; i += kThreads) {
        total = Terms::join(total, parts[i]);
      }
      block.lanes[thread] = total;
    });
    join_lanes<Terms>(block);
    block.each([this, &block](int thread) {
      if (thread == 0) {
        *sum = block.lanes[0];
      }
    });
  }
};

struct FinishNormsBody {
  const double* sums;
  int64_t rank_count;
  int64_t norm_count;
  double p;
  bool rounds;
  double* norms;
  float* found_nonfinite;

  template <typename Block>
  ZERO_HOST_DEVICE void operator()(const Block& block, int64_t) const {
    block.each([this, &block](int thread) {
      double nonfinite = 0.0;
      for (int64_t g = thread; g < norm_count; g += kThreads) {
        norms[g] = norm_of(g);
        nonfinite = norms[g] - norms[g] == 0.0 ? nonfinite : 1.0;
      }
      block.lanes[thread] = nonfinite;
    });
    join_lanes<Maxima>(block);
    block.each([this, &block](int thread) {
      if (thread == 0 && found_nonfinite != nullptr) {
        *found_nonfinite = static_cast<float>(block.lanes[0]);
      }
    });
  }

 private:
  ZERO_HOST_DEVICE double norm_of(int64_t g) const {
    const bool infinite = std::isinf(p);
    double total = 0.0;
    for (int64_t rank = 0; rank < rank_count; ++rank) {
      const double next = sums[rank * norm_count + g];
      total = infinite ? larger(total, next) : total + next;
    }
    const double norm = infinite || p == 1.0 ? total
        : p == 2.0                           ? std::sqrt(total)
                                             : std::pow(total, 1.0 / p);
    return rounds ? static_cast<double>(static_cast<float>(norm)) : norm;
  }
};

struct ClipFactorBody {
  const double* norm;
  double max_norm;
  double* factor;

  template <typename Block>
  ZERO_HOST_DEVICE void operator()(const Block& block, int64_t) const {
    block.each([this](int thread) {
      if (thread == 0) {
        const float quotient = static_cast<float>(max_norm) / (static_cast<float>(*norm) + 1e-6F);
        *factor = quotient >= 1.0F ? 1.0 : static_cast<double>(quotient);
      }
    });
  }
};

struct BeginStepBody {
  int64_t* steps;
  int64_t count;
  const float* found_nonfinite;
  int64_t* skipped;

  template <typename Block>
  ZERO_HOST_DEVICE void operator()(const Block& block, int64_t) const {
    block.each([this](int thread) {
      if (left_out(found_nonfinite)) {
        if (thread == 0 && skipped != nullptr) {
          ++*skipped;
        }
        return;
      }
      for (int64_t i = thread; i < count; i += kThreads) {
        ++steps[i];
      }
    });
  }
};

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
