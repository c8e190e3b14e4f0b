#pragma once

// How a process finds its peers.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/api.h>

namespace zero {

// What a launcher told this process: torchrun's variables (RANK, WORLD_SIZE,
// LOCAL_RANK, MASTER_ADDR, MASTER_PORT), else Open MPI's, MPICH's (PMI) or
// Slurm's. nullopt when none is set. Throws c10::ValueError on a variable that
// is missing or malformed, naming it.
struct LaunchEnvironment {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;
  std::string master_addr;
  int64_t master_port = 0;
  std::string launcher; // "torchrun", "openmpi", "pmi", "slurm"
};
ZERO_API std::optional<LaunchEnvironment> launch_environment();

// Collective. The process group of all ranks that the launcher started; null without a
// launcher (one rank). Waits `timeout_seconds` for the other ranks. Needs no Python in the
// process. CPU tensors go over Gloo.
//
// In a build with CUDA, a process that sees GPUs works on the device LOCAL_RANK modulo
// their number, which becomes its current device. CUDA tensors go over NCCL where every
// rank has a GPU of its own, else over Gloo, with a warning that names the ranks.
ZERO_API c10::intrusive_ptr<c10d::ProcessGroup> init(double timeout_seconds = 600.0);

// A Gloo group of `world_size` ranks that meet at `store`; also for ranks that
// are threads of one process over a c10d::HashStore.
ZERO_API c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t world_size,
    double timeout_seconds = 600.0);

namespace comm {
class Communicator;

// Collective over `group` (null: one rank). A communicator over the same ranks that
// shares nothing with the user's traffic. `transport`: "host", through memory of the
// one host that all ranks run on; "group", point to point over a private Gloo group
// with the same members; "auto", the first where it is possible, else the second.
ZERO_API std::shared_ptr<Communicator> make_communicator(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    const std::string& transport = "auto");
// Several, each ordered for itself; a failure in one says what other ranks were in,
// whichever that was. `registered_buffers`: see Options.
ZERO_API std::vector<std::shared_ptr<Communicator>> make_communicators(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    int64_t count,
    const std::string& transport = "auto",
    bool registered_buffers = false);
} // namespace comm

} // namespace zero
