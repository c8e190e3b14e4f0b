// What each launcher's variables are taken to mean, and init() across processes.

#include "catch.h"
#include "ranks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <map>

#include <ATen/ATen.h>

#include <zero/comm/communicator.h>

using zero::launch_environment;
using zero::LaunchEnvironment;
using zero::test::error_of;

namespace {

using Variables = std::map<std::string, std::string>;

const std::vector<std::string> kNames{
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NUM_NODES",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT"};

// Exactly these of the launchers' variables; restored at the end of the scope.
class Environment {
 public:
  explicit Environment(const Variables& variables) {
    for (const auto& name : kNames) {
      const char* value = std::getenv(name.c_str());
      if (value != nullptr) {
        saved_[name] = value;
      }
      unsetenv(name.c_str());
    }
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  ~Environment() {
    for (const auto& name : kNames) {
      unsetenv(name.c_str());
    }
    for (const auto& [name, value] : saved_) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }

 private:
  Variables saved_;
};

LaunchEnvironment read(const Variables& variables) {
  const Environment scope(variables);
  const auto environment = launch_environment();
  REQUIRE(environment.has_value());
  return *environment;
}

std::string refusal(const Variables& variables) {
  const Environment scope(variables);
  try {
    launch_environment();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string slurm_host(const std::string& list) {
  return read({{"SLURM_PROCID", "1"},
               {"SLURM_NTASKS", "4"},
               {"SLURM_LOCALID", "1"},
               {"SLURM_NNODES", "2"},
               {"SLURM_JOB_NODELIST", list}})
      .master_addr;
}

} // namespace

TEST_CASE("no launcher") {
  const Environment scope({});
  REQUIRE_FALSE(launch_environment().has_value());
  REQUIRE_FALSE(zero::init());
}

TEST_CASE("torchrun") {
  const auto environment = read(
      {{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "4"},
       {"MASTER_ADDR", "10.0.0.1"},
       {"MASTER_PORT", "1234"},
       {"SLURM_PROCID", "0"},
       {"OMPI_COMM_WORLD_RANK", "0"}});
  REQUIRE(environment.launcher == "torchrun");
  REQUIRE(environment.rank == 5);
  REQUIRE(environment.world_size == 8);
  REQUIRE(environment.local_rank == 1);
  REQUIRE(environment.master_addr == "10.0.0.1");
  REQUIRE(environment.master_port == 1234);
}

TEST_CASE("defaults of ranks on one host") {
  auto environment = read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}});
  REQUIRE(environment.master_addr == "127.0.0.1");
  REQUIRE(environment.master_port == 29500);
  REQUIRE(environment.local_rank == 1);
  environment = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  REQUIRE(environment.master_addr == "127.0.0.1");
  REQUIRE(environment.local_rank == 0);
}

TEST_CASE("Open MPI") {
  Variables variables{
      {"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  const auto environment = read(variables);
  REQUIRE(environment.launcher == "openmpi");
  REQUIRE(environment.rank == 3);
  REQUIRE(environment.world_size == 4);
  REQUIRE(environment.local_rank == 1);
  REQUIRE(environment.master_addr == "127.0.0.1");
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  REQUIRE(contains(refusal(variables), "environment variable MASTER_ADDR"));
  variables["MASTER_ADDR"] = "first";
  REQUIRE(read(variables).master_addr == "first");
}

TEST_CASE("PMI") {
  const auto environment = read(
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  REQUIRE(environment.launcher == "pmi");
  REQUIRE(environment.rank == 1);
  REQUIRE(environment.local_rank == 1);
  REQUIRE(environment.master_port == 29500);
  REQUIRE(contains(refusal({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}), "MASTER_ADDR"));
}

TEST_CASE("Slurm") {
  Variables variables{{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}};
  REQUIRE(contains(refusal(variables), "environment variable MASTER_ADDR"));
  variables["SLURM_LAUNCH_NODE_IPADDR"] = "10.1.1.1";
  auto environment = read(variables);
  REQUIRE(environment.launcher == "slurm");
  REQUIRE(environment.rank == 2);
  REQUIRE(environment.world_size == 4);
  REQUIRE(environment.local_rank == 0);
  REQUIRE(environment.master_addr == "10.1.1.1");
  variables["SLURM_NNODES"] = "1";
  REQUIRE(read(variables).master_addr == "127.0.0.1");
}

TEST_CASE("Slurm's host lists") {
  REQUIRE(slurm_host("node[01-04,7],x") == "node01");
  REQUIRE(slurm_host("node[7,01-04]") == "node7");
  REQUIRE(slurm_host("x,node[01-04]") == "x");
  REQUIRE(slurm_host("alone") == "alone");
  REQUIRE(slurm_host("rack[2-3]n[08-09]-ib,y") == "rack2n08-ib");
  for (const auto* bad : {"node[01-04", "node[]", ",x"}) {
    REQUIRE(contains(
        refusal(
            {{"SLURM_PROCID", "0"},
             {"SLURM_NTASKS", "2"},
             {"SLURM_LOCALID", "0"},
             {"SLURM_JOB_NODELIST", bad}}),
        "list of hosts in SLURM_JOB_NODELIST"));
  }
}

TEST_CASE("missing and malformed variables are named") {
  REQUIRE(contains(refusal({{"RANK", "0"}}), "environment variable WORLD_SIZE"));
  REQUIRE(contains(refusal({{"WORLD_SIZE", "2"}}), "environment variable RANK"));
  REQUIRE(contains(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK to be an integer from 0"));
  REQUIRE(contains(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "got '-1'"));
  REQUIRE(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "two"}}), "WORLD_SIZE to be an integer"));
  REQUIRE(contains(refusal({{"RANK", "0x1"}, {"WORLD_SIZE", "2"}}), "got '0x1'"));
  REQUIRE(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), "WORLD_SIZE"));
  REQUIRE(
      contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}), "LOCAL_RANK"));
  REQUIRE(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR"));
  REQUIRE(contains(
      refusal({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "65536"}}), "MASTER_PORT"));
}

// ---- processes ----
// A rank is this program again, told by a variable to run one rank and exit.

namespace {

constexpr const char* kChild = "ZERO_TEST_CHILD";

int run_child() {
  const auto error = error_of([] {
    const auto group = zero::init(30.0);
    TORCH_CHECK(group && group.get() == zero::init(30.0).get(), "init() twice");
    const int64_t rank = group->getRank();
    const int64_t size = group->getSize();
    const auto comm = zero::comm::make_communicator(group, 30.0);
    auto values = at::full({3 * size}, static_cast<double>(rank + 1));
    comm->all_reduce(values, {}, {})->wait();
    const auto expected = static_cast<double>(size * (size + 1) / 2);
    TORCH_CHECK(at::equal(values, at::full({3 * size}, expected)));
    std::vector<at::Tensor> users{at::ones({2})};
    group->allreduce(users)->wait();
    TORCH_CHECK(at::equal(users[0], at::full({2}, static_cast<double>(size))));
  });
  if (!error.empty()) {
    std::cerr << error << std::endl;
  }
  return error.empty() ? 0 : 1;
}

int64_t free_port() {
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  REQUIRE(bind(descriptor, reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  close(descriptor);
  return ntohs(address.sin_port);
}

pid_t start_rank(const Variables& variables) {
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), 1);
    }
    setenv(kChild, "1", 1);
    execl("/proc/self/exe", "rank", "a rank that runs as a child", static_cast<char*>(nullptr));
    _exit(127);
  }
  return child;
}

} // namespace

TEST_CASE("a rank that runs as a child", "[.]") {
  if (std::getenv(kChild) != nullptr) {
    std::exit(run_child()); // the ordinary way out, destructors of statics included
  }
}

TEST_CASE("init() joins processes, and they exit cleanly") {
  const Environment scope({});
  const int64_t size = GENERATE(1, 3);
  const auto port = std::to_string(free_port());
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto number = std::to_string(rank);
    children.push_back(start_rank(
        {{"PMI_RANK", number},
         {"PMI_SIZE", std::to_string(size)},
         {"MPI_LOCALRANKID", number},
         {"MPI_LOCALNRANKS", std::to_string(size)},
         {"MASTER_PORT", port}}));
  }
  for (const auto child : children) {
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(status == 0);
  }
}
