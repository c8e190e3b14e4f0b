#pragma once

// A c10d backend for tensors on fake devices that queues and orders as ProcessGroupNCCL
// does. Ranks are threads of one process, each on a device of its own.
//
// With asyncOp a collective runs on the backend's own stream, which first waits for the
// caller's current stream, and Work::wait() makes the then current stream wait; the work
// keeps its tensors until then. Without it runs on the current stream itself and the
// call returns null. No call waits for peers: data moves when the last rank has queued the
// collective, and what depends on it (a later operation on a stream that comes after it,
// a synchronization) waits on the host until then. A program whose hosts have to go on past
// such an operation before a peer can queue its part runs into the timeout here, and would
// not on hardware.
//
// Sums run over ranks in rank order in fp32 (fp64 for fp64) and are rounded once; the
// average is divided, last. Collectives that differ between ranks in kind, element count,
// dtype, reduction or root are an error on all of them that names two.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zero::fake {

class Meeting;
struct Part;
struct Batch;

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(std::shared_ptr<Meeting> meeting, int rank, int size, bool high_priority);
  ~FakeBackend() override;

  const std::string getBackendName() const override {
    return "fake";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  // Null where nothing was called since, or without asyncOp.
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  // The host waits: in wait(), or at once without asyncOp.
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work>
  add(Part part, std::vector<at::Tensor> reads, std::vector<at::Tensor> writes, bool async);
  c10::intrusive_ptr<c10d::Work> queue(Batch batch);

  const std::shared_ptr<Meeting> meeting_;
  const bool high_priority_;
  int64_t sequence_ = 0;
  std::vector<c10::StreamId> streams_; // its own, by device; -1: none yet
  std::unique_ptr<Batch> coalesced_; // since startCoalescing()
};

// [collective over the store] A backend; each call makes another one.
c10::intrusive_ptr<FakeBackend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    bool high_priority = false);
// [collective over the store] A process group that has it for fake devices, and no other.
c10::intrusive_ptr<c10d::ProcessGroup>
make_group(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size);

} // namespace zero::fake
