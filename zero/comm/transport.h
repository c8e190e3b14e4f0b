#pragma once

// What a QueuedCommunicator drives: one collective after the other, each from its
// opening, where ranks compare what they are about to do, to its end. Used by one
// thread at a time; only interrupt(), describe(), give_up()
// where it recovers(), broken() and behind() may be called from others.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/comm/arguments.h>
#include <zero/comm/operation_header.h>
#include <zero/memory/buffer_source.h>

namespace zero::comm {

// What an operation says of itself before it starts.
struct Opening {
  OperationHeader header;
  std::string description; // for errors
  bool training = false; // counted in group_traffic()
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual Place place() const = 0;
  // Among the ranks of a replica.
  virtual Place shard_place() const {
    return place();
  }
  // "group (gloo)", "host (threads)": for reports.
  virtual std::string describe() const = 0;
  // See Communicator.
  virtual std::shared_ptr<memory::BufferSource> buffers() const {
    return nullptr;
  }

  // All throw c10::DistBackendError that names this rank, the operation and the
  // rank that did not do as this one. They return the bytes that this rank sent.
  virtual int64_t reduce_scatter(const Opening& opening, const ReduceArguments& arguments) = 0;
  virtual int64_t all_gather(const Opening& opening, const GatherArguments& arguments) = 0;
  virtual int64_t all_reduce(const Opening& opening, const ReduceArguments& arguments) = 0;
  virtual int64_t broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) = 0;
  virtual std::vector<at::Tensor> exchange(const Opening& opening, const at::Tensor& bytes) = 0;
  virtual std::vector<at::Tensor> exchange_shards(const Opening& opening, const at::Tensor& bytes) {
    return exchange(opening, bytes);
  }
  virtual void barrier(const Opening& opening) = 0;

  // Where a transport of several groups counts for itself. From any thread.
  virtual std::optional<GroupTraffic> group_traffic() const {
    return std::nullopt;
  }

  // After an error: tells the peers, and lets nobody touch this rank's buffers any
  // more. What other ranks had to say about it, as a text to append, or nothing.
  virtual std::string give_up(const std::string& why) noexcept = 0;
  // Makes the wait in progress and all later ones throw.
  virtual void interrupt() = 0;

  // Whether give_up() may be called at any time and undone by recover().
  virtual bool recovers() const {
    return false;
  }
  // [collective] After give_up(): starts anew once all ranks have come here.
  virtual void recover() {}
  // Whether a peer has opened more operations, since the last recovery, than
  // `submitted`.
  virtual bool behind(int64_t /*submitted*/) const {
    return false;
  }
  // Whether another rank gave up, or this one did: the next operation will fail.
  virtual bool broken() const {
    return false;
  }
};

} // namespace zero::comm
