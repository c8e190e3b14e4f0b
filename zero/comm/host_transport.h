#pragma once

// The collectives between ranks of one host. A rank posts what it is about to do
// and where its bytes are; when all have posted and agree, each reads what it needs
// from the others, and none goes on before the others have read what is its. What
// is small travels in the post itself, and nobody waits for its readers. Where
// ranks may not read each other's memory, bytes go through windows of the segment.
// See [Note: host transport] in docs/design.md.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/comm/host_channel.h>
#include <zero/comm/transport.h>

namespace zero::comm {

class HostTransport final : public Transport {
 public:
  HostTransport(std::shared_ptr<HostGroup> group, int64_t channel, double timeout_seconds);

  Place place() const override;
  std::string describe() const override;
  std::shared_ptr<memory::BufferSource> buffers() const override;
  int64_t reduce_scatter(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t all_gather(const Opening& opening, const GatherArguments& arguments) override;
  int64_t all_reduce(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) override;
  std::vector<at::Tensor> exchange(const Opening& opening, const at::Tensor& bytes) override;
  void barrier(const Opening& opening) override;
  std::string give_up(const std::string& why) noexcept override;
  void interrupt() override {
    channel_.interrupt();
  }
  bool recovers() const override {
    return true;
  }
  void recover() override {
    channel_.recover();
  }
  bool behind(int64_t submitted) const override {
    return channel_.behind(submitted);
  }
  bool broken() const override {
    return channel_.broken();
  }

 private:
  // A piece of what moves: [begin, begin + bytes) of every shard.
  struct Piece {
    int64_t begin;
    int64_t bytes;
  };

  template <typename Body>
  void run(const Opening& opening, const HostChannel::Content& content, const Body& body);
  // Moves `bytes` bytes in pieces of at most `piece`. `stage` fills this rank's
  // window, where there are windows; `take` reads the others' memory or windows.
  void move(
      int64_t bytes,
      int64_t piece,
      const std::function<void(const Piece&, char* window)>& stage,
      const std::function<void(const Piece&)>& take);
  void await_readers();
  void scatter_sums(const ReduceArguments& arguments);
  void sum_piece(const ReduceArguments& arguments, const Piece& piece, int64_t window_stride);
  void sum_inline(const ReduceArguments& arguments, int64_t shard, char* out, const char* addend);
  void gather_shards(const GatherArguments& arguments, uint64_t address_step);
  std::vector<at::Tensor> receive_messages(const at::Tensor& bytes);

  // `bytes` of what `peer` has at `address`: in place, in its window, or copied.
  void read(int64_t peer, uint64_t address, const Piece& piece, char* to);
  const char* window(int64_t rank) const;
  char* scratch(int64_t index);

  HostChannel channel_;
  at::Tensor scratch_; // a piece of each other rank
};

} // namespace zero::comm
