#pragma once

// Communicators over each way that bytes can travel, by name: "host" (ranks that are
// threads read each other in place), "staged" (the host transport's windows, which
// make_communicator takes only where the kernel forbids more), "group" (Gloo).

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <zero/comm/communicator.h>
#include <zero/comm/gloo_group.h>
#include <zero/comm/host_transport.h>
#include <zero/comm/init.h>
#include <zero/comm/queued_communicator.h>

#include "ranks.h"

// In a test case, with Catch.
#define EACH_TRANSPORT GENERATE(as<std::string>{}, "host", "staged", "group")

namespace zero::test {

using Communicators = std::vector<std::shared_ptr<comm::Communicator>>;

inline Communicators make_staged(const Group& group, double timeout_seconds, int64_t count) {
  const int64_t rank = group->getRank();
  const auto shared = group->getStore();
  auto store =
      c10::make_intrusive<c10d::PrefixStore>(comm::next_prefix(*shared, "staged", rank), shared);
  std::string why_not;
  const auto host = comm::HostGroup::connect(
      *store, rank, group->getSize(), count, timeout_seconds, &why_not, /*direct=*/false);
  TORCH_CHECK(host, why_not);
  Communicators communicators;
  for (int64_t channel = 0; channel < count; ++channel) {
    communicators.push_back(
        std::make_shared<comm::QueuedCommunicator>(
            std::make_unique<comm::HostTransport>(host, channel, timeout_seconds)));
  }
  return communicators;
}

inline Communicators make_communicators_over(
    const std::string& name,
    const Group& group,
    double timeout_seconds,
    int64_t count) {
  if (name == "staged" && group->getSize() > 1) {
    return make_staged(group, timeout_seconds, count);
  }
  return comm::make_communicators(group, timeout_seconds, count, name == "staged" ? "host" : name);
}

inline std::shared_ptr<comm::Communicator>
make_communicator_over(const std::string& name, const Group& group, double timeout_seconds) {
  return make_communicators_over(name, group, timeout_seconds, 1).front();
}

} // namespace zero::test
