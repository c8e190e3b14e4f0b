#pragma once

// Which ranks train together: one group, or a grid of them that shards in one
// direction and replicates in the other.

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/api.h>
#include <zero/options.h>

namespace zero {

// Hybrid sharding. Every rank gives the two groups that it is in: `shard`, whose ranks
// hold a model's shards among them (those of one host), and `replicate`, whose ranks
// hold the same shard (one of each host). Together they form a grid: rank j of the
// shard group and i of the replicate group is shard j of replica i, and rank
// i * shards + j of all.
struct Groups {
  c10::intrusive_ptr<c10d::ProcessGroup> shard;
  c10::intrusive_ptr<c10d::ProcessGroup> replicate;
};

// A group (null: that of the launcher), or a grid.
using Ranks = std::variant<c10::intrusive_ptr<c10d::ProcessGroup>, Groups>;

// [collective] zero::init()'s group where `ranks` is a null group. Throws c10::ValueError
// where the options name groups and there are none.
ZERO_API Ranks or_launched(const Ranks& ranks, const Options& options);

namespace comm {
class Communicator;

// Collective. As make_communicators(), over a group or a grid, whose groups each get
// the transport that fits. Throws c10::ValueError on all ranks, before any other
// communication, where the groups form no grid.
ZERO_API std::vector<std::shared_ptr<Communicator>> communicators_of(
    const Ranks& ranks,
    double timeout_seconds,
    int64_t count,
    const std::string& transport = "auto",
    bool registered_buffers = false);

// Collective over `group`, through its store: every rank's text, in rank order.
ZERO_API std::vector<std::string> exchange_texts(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& text,
    double timeout_seconds);
} // namespace comm

} // namespace zero
