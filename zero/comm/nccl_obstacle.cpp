#include <zero/comm/nccl_group.h>

#include <map>

namespace zero::comm {

const char* const kGpuRemedy =
    "start at most one rank for each GPU of a host (a rank takes the device LOCAL_RANK modulo the "
    "number of devices that it sees; CUDA_VISIBLE_DEVICES says which it sees)";

std::string nccl_obstacle(const std::vector<std::string>& gpus) {
  std::map<std::string, size_t> owners;
  std::string without;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].empty()) {
      without += (without.empty() ? "" : ", ") + std::to_string(rank);
      continue;
    }
    const auto [owner, first] = owners.try_emplace(gpus[rank], rank);
    if (!first) {
      return "ranks " + std::to_string(owner->second) + " and " + std::to_string(rank) +
          " are on the same GPU (" + gpus[rank] + ")";
    }
  }
  if (owners.empty()) {
    return "no rank has a GPU";
  }
  return without.empty() ? "" : "no GPU is there for rank " + without;
}

} // namespace zero::comm
