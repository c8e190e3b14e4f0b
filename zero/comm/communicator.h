#pragma once

// Who talks. A Communicator carries asynchronous collectives between the ranks
// of one private group, of tensors on the CPU or on a device, whose operations begin
// once what the calling thread queued on the device's current stream is done. Calls are collective
// unless they say otherwise or only ask something of this rank: all ranks make the same calls in
// the same order with equal arguments. Ranks that don't get an error that names both operations.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/memory/buffer_source.h>

namespace zero::comm {

enum class Kind { reduce_scatter, all_gather, all_reduce, broadcast, barrier, exchange };

ZERO_API const char* name_of(Kind kind);

// Identity of an operation, compared between ranks: payloads of different ones never mix.
struct Tag {
  std::string what; // for errors: "bucket 2 (blocks.3.up.weight ...)"
  int64_t id = 0; // e.g. the bucket's index
  int64_t step = 0; // optimizer steps so far
  bool training = true; // counted in traffic(); false for set-up and control
};

// How contributions are combined: addend + (sum over ranks in rank order) /
// divisor, in fp32 (fp64 for fp64), rounded once.
struct Reduction {
  double divisor = 1.0;
  at::Tensor addend; // undefined, or as many elements as the output
};

// Handle of an operation in flight. Buffers belong to the operation until wait()
// has returned.
class ZERO_API Work {
 public:
  virtual ~Work() = default;
  // Blocks until done; throws what the operation threw (again at each call). Of tensors
  // on a device it blocks nobody: what the calling thread queues on the device's current
  // stream from then on comes after the operation.
  virtual void wait() = 0;
  virtual bool done() const = 0;
  // Blocks until done, whatever came of it: whether it succeeded.
  virtual bool settle() noexcept = 0;
};
using WorkPtr = std::shared_ptr<Work>;

// Bytes that this rank sent in operations tagged `training`, and their number.
struct Traffic {
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;
  };
  Count reduce_scatter;
  Count all_gather;
  Count all_reduce;
  Count broadcast;

  Count* of(Kind kind); // null for what is not counted
  int64_t bytes() const;
  Traffic operator+(const Traffic& other) const;
};

// The same, by the group that it was sent in (see Groups).
struct GroupTraffic {
  Traffic shard;
  Traffic replicate;

  GroupTraffic operator+(const GroupTraffic& other) const {
    return {shard + other.shard, replicate + other.replicate};
  }
};

// One of several all-gathers that start together.
struct Gather {
  at::Tensor output;
  at::Tensor input;
  Tag tag;
};

class ZERO_API Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  // The ranks that shard among themselves: all, or where ranks are a grid (Groups) those
  // of a replica. Rank r is number r % shard_size() of replica r / shard_size().
  virtual int64_t shard_rank() const {
    return rank();
  }
  virtual int64_t shard_size() const {
    return size();
  }

  // input: shard_size() * S elements, contiguous. output: S elements, and may be this
  // rank's own slice of the input. Of one dtype, or the output (and the addend) of
  // fp32 for an input of 16 bits. Sends (shard_size() - 1) * S elements of the input;
  // over replicas see HybridTransport.
  virtual WorkPtr
  reduce_scatter(at::Tensor output, at::Tensor input, Reduction reduction, Tag tag) = 0;
  // Among the ranks of a replica. output: shard_size() * S elements. input: S elements,
  // and may be this rank's own slice of the output. Sends (shard_size() - 1) * S elements.
  virtual WorkPtr all_gather(at::Tensor output, at::Tensor input, Tag tag) = 0;
  // One after the other; where a transport gains by it, as one operation.
  virtual std::vector<WorkPtr> all_gather_together(std::vector<Gather> gathers);
  // Reduces shard_size() * S elements in place: a reduce-scatter and an all-gather,
  // with the bits and the traffic of the two. The addend has S elements.
  virtual WorkPtr all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) = 0;
  virtual WorkPtr broadcast(at::Tensor tensor, int64_t root, Tag tag) = 0;

  // Blocking. Each rank's bytes (any length, one-dimensional uint8) to every
  // rank, in rank order; this rank's own may be the tensor that was given.
  virtual std::vector<at::Tensor> exchange(at::Tensor bytes, Tag tag) = 0;
  // The same among the ranks of this rank's replica.
  virtual std::vector<at::Tensor> exchange_shards(at::Tensor bytes, Tag tag) {
    return exchange(std::move(bytes), std::move(tag));
  }
  virtual void barrier(Tag tag) = 0;

  virtual Traffic traffic() const = 0;
  virtual GroupTraffic group_traffic() const {
    return {traffic(), {}};
  }
  // How bytes travel, for reports: "group (gloo)", "host (threads)".
  virtual std::string transport() const = 0;
  // Where to take buffers from that the other ranks read fastest (in place, on one
  // host); null where it makes no difference. Give it to memory::FlatBuffer.
  virtual std::shared_ptr<memory::BufferSource> buffers() const {
    return nullptr;
  }

  // [collective] Another communicator over the same ranks and transport, ordered and broken
  // by itself: for what goes on beside the traffic of this one.
  virtual std::shared_ptr<Communicator> duplicate() const = 0;

  // Whether ranks can start anew after a failure, which else breaks every later
  // operation.
  virtual bool recovers() const {
    return false;
  }
  // Whether a peer waits for an operation that this rank has not called.
  virtual bool behind() const {
    return false;
  }
  // Whether it recovers(), and a caller has been told of a failure by an exception.
  virtual bool recoverable() const {
    return false;
  }
  // Gives up what is in flight, on every rank: operations throw there and name this
  // rank and `why`. Not collective. Where ranks can't start anew, does nothing.
  virtual void abort(const std::string& /*why*/) noexcept {}
  // [collective, where recoverable()] Starts anew once all ranks have come here.
  // Throws c10::DistBackendError when one is gone or doesn't come.
  virtual void recover() {}
};

} // namespace zero::comm
