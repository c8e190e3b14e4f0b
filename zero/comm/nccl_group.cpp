// NCCL from C++ alone. The only translation unit that includes ProcessGroupNCCL.hpp.

#include <zero/comm/nccl_group.h>

#include <c10/util/Exception.h>

#ifdef ZERO_CUDA

#include <iomanip>
#include <limits>
#include <sstream>

#include <ATen/cuda/CUDAContext.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/meeting.h>
#include <zero/comm/milliseconds.h>

namespace zero::comm {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

std::string id_of(c10::DeviceIndex index) {
  std::ostringstream text;
  text << "GPU-" << std::hex << std::setfill('0');
  for (const char byte : at::cuda::getDeviceProperties(index)->uuid.bytes) {
    text << std::setw(2) << static_cast<int>(static_cast<unsigned char>(byte));
  }
  return text.str();
}

} // namespace

bool has_nccl() {
  return true;
}

std::optional<Gpu> gpu_of(int64_t local_rank) {
  const int64_t count = at::cuda::getNumGPUs();
  if (count == 0) {
    return std::nullopt;
  }
  const auto index = static_cast<c10::DeviceIndex>(local_rank % count);
  return Gpu{.device = {c10::DeviceType::CUDA, index}, .id = id_of(index)};
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    double timeout_seconds,
    c10::Device device,
    bool high_priority) {
  TORCH_CHECK_VALUE(store, "[zero.comm] expected a c10d::Store to meet at, got null");
  TORCH_CHECK_VALUE(
      0 <= rank && rank < size && size <= std::numeric_limits<int>::max(),
      "[zero.comm] expected 0 <= rank < size, got rank ",
      rank,
      " of ",
      size);
  const int64_t count = at::cuda::getNumGPUs();
  TORCH_CHECK_VALUE(
      device.is_cuda() && (count == 0 || (device.has_index() && device.index() < count)),
      "[zero.comm] expected a CUDA device with an index below ",
      count,
      ", the number of devices that this process sees, got ",
      device,
      " (rank ",
      rank,
      " of ",
      size,
      ")");
  const BlockingScope scope;
  // NCCL's own complaints name neither the ranks that are missing nor those that share.
  const auto gpus =
      tell_all(*store, "gpu", rank, size, count == 0 ? "" : id_of(device.index()), timeout_seconds);
  const auto obstacle = nccl_obstacle(gpus);
  TORCH_CHECK_WITH(
      DistBackendError,
      obstacle.empty(),
      "[zero.comm] expected a GPU of its own for each rank, got ",
      obstacle,
      " (rank ",
      rank,
      " of ",
      size,
      "); ",
      kGpuRemedy);
  auto options = Nccl::Options::create(high_priority);
  options->timeout = to_milliseconds(timeout_seconds);
  auto backend = c10::make_intrusive<Nccl>(
      store, static_cast<int>(rank), static_cast<int>(size), std::move(options));
  backend->setBoundDeviceId(device);
  return backend;
}

} // namespace zero::comm

#else

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zero::comm {

bool has_nccl() {
  return false;
}

std::optional<Gpu> gpu_of(int64_t /*local_rank*/) {
  return std::nullopt;
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& /*store*/,
    int64_t rank,
    int64_t size,
    double /*timeout_seconds*/,
    c10::Device device,
    bool /*high_priority*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "[zero.comm] expected a build of Zero with NCCL for a group on ",
      device,
      ", and this one has no CUDA (rank ",
      rank,
      " of ",
      size,
      "); build it with ZERO_WITH_CUDA=ON where torch has CUDA (zero-torch: "
      "CMAKE_ARGS=-DZERO_WITH_CUDA=ON pip install --no-build-isolation .), or keep the model on "
      "the CPU");
}

} // namespace zero::comm

#endif
