// The device kernels' bodies compiled for the host: for tests, which see with them that
// works cover their buffers and give the CPU kernels' bits. Not part of the library.

#define ZERO_KERNELS_NAMESPACE host_twin

#include "csrc/kernels/device_kernels_impl.h"

namespace zero::kernels {
namespace ZERO_KERNELS_NAMESPACE {

class HostLauncher {
 public:
  template <int kPack, typename Work>
  void span(StreamHandle, const char*, const Work& work, const Span& span) const {
    const auto constants = work.constants();
    if (!constants.runs) {
      return;
    }
    for (int64_t thread = 0; thread < kTeam; ++thread) {
      run_span<kPack>(work, constants, span, thread, kTeam);
    }
  }

  template <typename Body>
  void blocks(StreamHandle, const char*, const Body& body, int64_t count) const {
    double lanes[kThreads];
    for (int64_t index = 0; index < count; ++index) {
      body(Block{lanes}, index);
    }
  }

 private:
  static constexpr int64_t kTeam = 3; // threads, one after the other

  struct Block {
    double* lanes;

    template <typename Function>
    void each(const Function& function) const {
      for (int thread = 0; thread < kThreads; ++thread) {
        function(thread);
      }
    }
  };
};

} // namespace ZERO_KERNELS_NAMESPACE

const DeviceKernels& host_device_kernels() {
  static const ZERO_KERNELS_NAMESPACE::KernelsOver<ZERO_KERNELS_NAMESPACE::HostLauncher> kernels;
  return kernels;
}

} // namespace zero::kernels
