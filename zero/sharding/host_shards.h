#pragma once

// HostShards (stage 3 with Options::offload="parameters"): this rank's shards of
// parameters lie in pinned memory of the host. A gather first copies the own shard to its
// place in the slab, on a stream of copies, and then goes on in place behind that. See
// [Note: offload] in docs/design.md.

#include <vector>

#include <zero/memory/copy_stream.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class HostShards {
 public:
  HostShards(ParameterTable& table, std::shared_ptr<memory::Account> account);
  ~HostShards();
  HostShards(const HostShards&) = delete;
  HostShards& operator=(const HostShards&) = delete;

  // Moves a bucket's shard, which the table holds, to the host.
  void take(int64_t bucket);
  // [collective] Starts gathers, by the bucket in their tags, whose inputs are the table's
  // shards.
  std::vector<comm::WorkPtr> gather(
      comm::Communicator& communicator,
      std::vector<comm::Gather> gathers);
  // Before shards are written to or let go: the host waits until none is read.
  void settle();

 private:
  ParameterTable& table_;
  const std::shared_ptr<memory::Account> account_;
  memory::CopyStream stream_;
  memory::Moment read_; // the last copy
};

} // namespace zero::sharding
