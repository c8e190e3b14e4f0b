#pragma once

// Collectives that are queued on a stream of their own: each begins once what the
// caller's current stream holds is done, and what comes after its Work::wait() there
// comes after it. The host never waits. Between two events the memory belongs to the
// collective; whoever frees or writes it has waited before, so no record_stream is
// needed and the peak is the same in every step.

#include <mutex>
#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <zero/comm/device_collectives.h>

namespace c10d {
class Backend;
} // namespace c10d

namespace zero::comm {

// Events that are used again: making one takes the driver longer than recording it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}
  c10::Event take();
  void give(c10::Event event);

 private:
  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<c10::Event> free_;
};

class StreamCollectives : public DeviceCollectives {
 public:
  // `place`: among all ranks; `shards`: among those of a replica.
  StreamCollectives(c10::Device device, const Place& place, const Place& shards, bool own_stream);

  WorkPtr reduce_scatter(const ReduceArguments& arguments, const Tag& tag) final;
  std::vector<WorkPtr> all_gather(const std::vector<Gather>& gathers) final;
  WorkPtr all_reduce(const ReduceArguments& arguments, const Tag& tag) final;
  WorkPtr broadcast(const at::Tensor& tensor, int64_t root, const Tag& tag) final;
  GroupTraffic traffic() const final;

 protected:
  // Called with the collectives' stream as the current one, where they have one.
  virtual void do_reduce_scatter(const ReduceArguments& arguments) = 0;
  virtual void do_all_gather(const std::vector<Gather>& gathers) = 0;
  virtual void do_all_reduce(const ReduceArguments& arguments) = 0;
  virtual void do_broadcast(const at::Tensor& tensor, int64_t root) = 0;
  // Bytes that this rank sends to the ranks of other replicas in a reduction.
  virtual int64_t bytes_between_replicas(const ReduceArguments& /*arguments*/) const {
    return 0;
  }
  const c10::Device device_;
  const Place place_;
  const Place shards_;

 private:
  template <typename Body>
  WorkPtr run(std::vector<at::Tensor> tensors, const Body& body);
  void count(Kind kind, const Tag& tag, int64_t bytes, int64_t between_replicas);

  const std::optional<c10::Stream> stream_; // none: the caller's
  const std::shared_ptr<EventPool> events_;
  mutable std::mutex mutex_; // guards the rest, and the order in the stream
  c10::Event begin_;
  GroupTraffic traffic_;
};

// Over c10d backends of a device: NCCL. `replicate` may be null: one replica. Sums of
// fp32 and fp64 are the backend's own; those of 16 bits are taken in fp32, in rank
// order, and rounded once, after an all-to-all of the same bytes. With
// torch.use_deterministic_algorithms(True) all are, and have the bits of the CPU's.
std::unique_ptr<DeviceCollectives> make_backend_collectives(
    c10::Device device,
    const Place& place,
    const Place& shards,
    c10::intrusive_ptr<c10d::Backend> shard,
    c10::intrusive_ptr<c10d::Backend> replicate,
    bool registered_buffers);

// Of a rank whose peers are not there: alone, or in torch's "fake" group. It does its own
// part; what the others would send counts as nothing.
std::unique_ptr<DeviceCollectives> make_lone_collectives(c10::Device device, const Place& place);

} // namespace zero::comm
