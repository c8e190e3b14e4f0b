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

// What transports are made over. It outlives the group.
struct Membership {
  c10::intrusive_ptr<c10d::Store> store;
  Place place;
};
// Throws where the group has no store.
Membership membership_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. `count` transports between several ranks.
Transports make_transports(
    const Membership& membership,
    double timeout_seconds,
    int64_t count,
    const std::string& transport);
// A prefix of the store that is new on all ranks.
c10::intrusive_ptr<c10d::Store> new_store(const Membership& membership);
// Throws c10::ValueError on what is no timeout or no transport's name.
void check_choice(double timeout_seconds, const std::string& transport);

} // namespace zero::comm
