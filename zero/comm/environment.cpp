// What launchers tell their processes: reading and checking of variables, no
// communication. Runs on the caller's thread, before any group exists.

#include <zero/comm/init.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include <c10/util/Exception.h>

#include <zero/comm/host_list.h>

namespace zero {
namespace {

constexpr int64_t kDefaultPort = 29500;
constexpr int64_t kLargestPort = 65535;

// The variables of one launcher; null where it has none.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_size;
};

// torchrun first: it may itself run under one of the others.
constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"openmpi",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
};

// Empty counts as unset, as in shells' ${VAR:-default}.
const char* variable(const char* name) {
  const char* value = name == nullptr ? nullptr : std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) {
  const char* text = variable(name);
  if (text == nullptr) {
    return std::nullopt;
  }
  const std::string_view view(text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == view.data() + view.size() && low <= value && value <= high,
      "[zero.comm] expected ",
      name,
      " to be an integer from ",
      low,
      " to ",
      high,
      ", got '",
      text,
      "'; correct or unset it");
  return value;
}

int64_t required_integer(const Launcher& launcher, const char* name, int64_t low, int64_t high) {
  const auto value = integer(name, low, high);
  TORCH_CHECK_VALUE(
      value.has_value(),
      "[zero.comm] expected the environment variable ",
      name,
      ", because ",
      launcher.rank,
      " is set, got none; start the program with torchrun, mpirun or srun, or set ",
      name);
  return *value;
}

bool on_one_host(const Launcher& launcher, int64_t world_size) {
  if (world_size == 1) {
    return true;
  }
  if (std::string_view(launcher.name) == "slurm") {
    for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}) {
      if (const auto nodes = integer(name, 1, INT32_MAX)) {
        return *nodes == 1;
      }
    }
    return false;
  }
  return integer(launcher.local_size, 1, INT32_MAX) == world_size;
}

// Slurm places rank 0 on the first host of the list. The node that srun was
// started on may be a login node, so it is the second choice.
std::string slurm_address() {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (const char* hosts = variable(name)) {
      auto host = comm::first_host(hosts);
      TORCH_CHECK_VALUE(
          !host.empty(),
          "[zero.comm] expected a list of hosts in ",
          name,
          ", got '",
          hosts,
          "'; set MASTER_ADDR to the address of rank 0's host");
      return host;
    }
  }
  const char* address = variable("SLURM_LAUNCH_NODE_IPADDR");
  return address == nullptr ? "" : address;
}

std::string master_address(const Launcher& launcher, int64_t world_size) {
  if (const char* address = variable("MASTER_ADDR")) {
    return address;
  }
  if (on_one_host(launcher, world_size)) {
    return "127.0.0.1";
  }
  auto address = std::string_view(launcher.name) == "slurm" ? slurm_address() : std::string();
  TORCH_CHECK_VALUE(
      !address.empty(),
      "[zero.comm] expected the environment variable MASTER_ADDR, because the ",
      world_size,
      " ranks of ",
      launcher.name,
      " are not known to be on one host, got none; set MASTER_ADDR "
      "to the address of rank 0's host on every rank (127.0.0.1 if all are on one)");
  return address;
}

int64_t local_rank_of(const Launcher& launcher, int64_t rank, int64_t world_size) {
  if (const auto local_rank = integer(launcher.local_rank, 0, world_size - 1)) {
    return *local_rank;
  }
  const auto local_size = integer(launcher.local_size, 1, world_size);
  return local_size ? rank % *local_size : rank;
}

LaunchEnvironment read(const Launcher& launcher) {
  LaunchEnvironment environment;
  environment.launcher = launcher.name;
  environment.world_size = required_integer(launcher, launcher.world_size, 1, INT32_MAX);
  environment.rank = required_integer(launcher, launcher.rank, 0, environment.world_size - 1);
  environment.local_rank = local_rank_of(launcher, environment.rank, environment.world_size);
  environment.master_addr = master_address(launcher, environment.world_size);
  environment.master_port = integer("MASTER_PORT", 1, kLargestPort).value_or(kDefaultPort);
  return environment;
}

} // namespace

std::optional<LaunchEnvironment> launch_environment() {
  for (const auto& launcher : kLaunchers) {
    if (variable(launcher.rank) != nullptr) {
      return read(launcher);
    }
  }
  // Training on one rank because a variable got lost would look like success.
  TORCH_CHECK_VALUE(
      integer("WORLD_SIZE", 1, INT32_MAX).value_or(1) == 1,
      "[zero.comm] expected the environment variable RANK, because WORLD_SIZE is set, got none; "
      "start the program with torchrun, or unset WORLD_SIZE to run on one rank");
  return std::nullopt;
}

} // namespace zero
