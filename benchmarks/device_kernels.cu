// The kernels of CUDA devices beside a copy of the device's memory: how much of the
// bandwidth that cudaMemcpyAsync reaches each kernel reaches. Prints a line a kernel;
// without a device, a line that says so.
//
//   nvcc -std=c++20 -O3 -fmad=false -arch=native -I. -o build/bench_device_kernels
//     benchmarks/device_kernels.cu csrc/kernels/cuda_kernels.cu
//   build/bench_device_kernels [ELEMENTS] [ROUNDS]

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/kernels/device_kernels.h"

namespace {

namespace kernels = zero::kernels;
using kernels::Type;

constexpr int kBuffers = 6; // of 8 bytes an element
constexpr int kRanks = 8;
constexpr int kCalls = 5; // a round

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(error));
  }
}

struct Case {
  std::string name;
  double bytes; // read and written for an element
  std::function<void()> call;
};

class Bench {
 public:
  Bench(int64_t count, int rounds) : count_(count), rounds_(rounds) {
    check(cudaStreamCreate(&stream_));
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
    for (void*& buffer : buffers_) {
      check(cudaMalloc(&buffer, count * 8));
      check(cudaMemset(buffer, 0, count * 8));
    }
    check(cudaMalloc(&numbers_, sizeof(double) * (device().norm_part_count(count) + 8)));
    const int64_t step = 10;
    check(cudaMalloc(&step_, sizeof(step)));
    check(cudaMemcpy(step_, &step, sizeof(step), cudaMemcpyHostToDevice));
  }

  void run() {
    const double copy =
        bandwidth({"copy", 16.0, [this] {
                     check(cudaMemcpyAsync(
                         buffers_[0], buffers_[1], count_ * 8, cudaMemcpyDeviceToDevice, stream_));
                   }});
    std::printf("%-28s %8.1f GB/s\n", "cudaMemcpyAsync", copy / 1e9);
    for (const Case& one : cases()) {
      const double reached = bandwidth(one);
      std::printf(
          "%-28s %8.1f GB/s  %5.1f%% of a copy\n",
          one.name.c_str(),
          reached / 1e9,
          100.0 * reached / copy);
    }
  }

 private:
  static const kernels::DeviceKernels& device() {
    return kernels::cuda_kernels();
  }

  // Of the fastest round.
  double bandwidth(const Case& one) {
    one.call();
    float fastest = 1e30F;
    for (int round = 0; round < rounds_; ++round) {
      check(cudaEventRecord(begin_, stream_));
      for (int call = 0; call < kCalls; ++call) {
        one.call();
      }
      check(cudaEventRecord(end_, stream_));
      check(cudaEventSynchronize(end_));
      float milliseconds = 0.0F;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_));
      fastest = std::min(fastest, milliseconds);
    }
    return one.bytes * static_cast<double>(count_) * kCalls / (fastest * 1e-3);
  }

  std::vector<Case> cases() {
    std::vector<Case> all;
    add_steps(all);
    add_sums(all);
    add_elementwise(all);
    return all;
  }

  void add_steps(std::vector<Case>& all) {
    const kernels::StepState state{step_};
    const auto adam = [=, this](Type type, Type grad_type, kernels::Copy copy) {
      const kernels::AdamBuffers x{
          buffers_[0], grad_type, buffers_[1], buffers_[2], buffers_[3], nullptr, copy};
      device().adam(stream_, type, x, count_, {.weight_decay = 0.1}, state);
    };
    const kernels::Copy copy{Type::bf16, buffers_[4]};
    all.push_back({"adamw fp32", 28.0, [=] { adam(Type::f32, Type::f32, {}); }});
    all.push_back({"adamw fp32, bf16 outside", 28.0, [=] { adam(Type::f32, Type::bf16, copy); }});
    all.push_back({"adamw bf16", 14.0, [=] { adam(Type::bf16, Type::bf16, {}); }});
    all.push_back({"sgd fp32, momentum", 20.0, [=, this] {
                     const kernels::SgdBuffers x{buffers_[0], Type::f32, buffers_[1], buffers_[2]};
                     device().sgd(stream_, Type::f32, x, count_, {.momentum = 0.9}, state);
                   }});
    all.push_back({"lion fp32, bf16 outside", 20.0, [=, this] {
                     const kernels::LionBuffers x{
                         buffers_[0], Type::bf16, buffers_[1], buffers_[2], copy};
                     device().lion(stream_, Type::f32, x, count_, {}, state);
                   }});
  }

  // Over parts of the elements, so that the inputs have room.
  void add_sums(std::vector<Case>& all) {
    const int64_t part = count_ / kRanks / 64 * 64;
    const auto reduce = [=, this](Type type, Type out_type) {
      const kernels::StridedReduction x{
          type, buffers_[0], part, kRanks, out_type, buffers_[1], nullptr, double(kRanks)};
      device().reduce_ranks(stream_, x, part);
    };
    const double whole = static_cast<double>(part * kRanks) / static_cast<double>(count_);
    all.push_back({"sum of 8, fp32", whole * 4.0 * 9 / 8, [=] { reduce(Type::f32, Type::f32); }});
    all.push_back({"sum of 8, bf16", whole * 2.0 * 9 / 8, [=] { reduce(Type::bf16, Type::bf16); }});
    all.push_back({"sum of 8, bf16 to fp32", whole * (2.0 + 4.0 / 8), [=] {
                     reduce(Type::bf16, Type::f32);
                   }});
  }

  void add_elementwise(std::vector<Case>& all) {
    const auto norm = [this](Type type, bool scales) {
      device().norm_parts(stream_, type, buffers_[0], count_, 2.0, scales, 0.99, nullptr, numbers_);
    };
    all.push_back({"norm fp32", 4.0, [=] { norm(Type::f32, false); }});
    all.push_back({"norm bf16", 2.0, [=] { norm(Type::bf16, false); }});
    all.push_back({"scale + norm bf16", 4.0, [=] { norm(Type::bf16, true); }});
    for (const auto& [name, type, size] :
         {std::tuple{"fp32", Type::f32, 4.0}, std::tuple{"bf16", Type::bf16, 2.0}}) {
      all.push_back({std::string("scale ") + name, 2 * size, [this, type = type] {
                       device().scale(stream_, type, buffers_[0], 0.99, nullptr, count_);
                     }});
      all.push_back({std::string("accumulate ") + name, 8.0 + size, [this, type = type] {
                       auto* const sum = static_cast<float*>(buffers_[1]);
                       device().accumulate(stream_, type, buffers_[0], sum, count_);
                     }});
    }
    all.push_back({"convert fp32 to bf16", 6.0, [this] {
                     device().convert(
                         stream_, Type::f32, buffers_[0], Type::bf16, buffers_[1], count_);
                   }});
  }

  int64_t count_;
  int rounds_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  void* buffers_[kBuffers] = {};
  double* numbers_ = nullptr;
  int64_t* step_ = nullptr;
};

} // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device here\n");
    return 0;
  }
  try {
    const int64_t count = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 27;
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
    if (count < kRanks * 64 || rounds < 1) {
      std::fprintf(
          stderr, "bench_device_kernels: usage: bench_device_kernels [ELEMENTS] [ROUNDS]\n");
      return 2;
    }
    Bench(count, rounds).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_device_kernels: %s\n", error.what());
    return 1;
  }
}
