#pragma once

// How a group's ranks get transports: what make_communicators() and
// communicators_of() share.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/transport.h>

namespace zero::comm {

using Transports = std::vector<std::unique_ptr<Transport>>;

// Collective. `count` transports over a group of several ranks.
Transports make_transports(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    int64_t count,
    const std::string& transport);
// A prefix of the group's store that is new on all ranks; throws where it has none.
c10::intrusive_ptr<c10d::Store> new_store(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
// Throws c10::ValueError on what is no timeout or no transport's name.
void check_choice(double timeout_seconds, const std::string& transport);

} // namespace zero::comm
