#pragma once

// The collectives of a grid of ranks (Groups), made of those of its two groups. Sums
// run over the ranks of a replica first, in their order, then over the replicas, in
// theirs, in fp32 (fp64 for fp64); they are divided, added to the addend and rounded
// once, at the end: equal bits on every replica, and in the last place not those of one
// group of all ranks. Gathers stay within a replica; everything else is over all ranks.
// Between replicas travel the sums of a shard, and no weights.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/comm/transport.h>

namespace zero::comm {

class HybridTransport final : public Transport {
 public:
  // Either may be null: a group of one rank.
  HybridTransport(std::unique_ptr<Transport> shard, std::unique_ptr<Transport> replicate);

  Place place() const override;
  Place shard_place() const override {
    return shards_;
  }
  std::string describe() const override;
  // Gathers read it, and the first half of reductions.
  std::shared_ptr<memory::BufferSource> buffers() const override;

  int64_t reduce_scatter(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t all_gather(const Opening& opening, const GatherArguments& arguments) override;
  int64_t all_reduce(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) override;
  std::vector<at::Tensor> exchange(const Opening& opening, const at::Tensor& bytes) override;
  std::vector<at::Tensor> exchange_shards(const Opening& opening, const at::Tensor& bytes) override;
  void barrier(const Opening& opening) override;
  std::optional<GroupTraffic> group_traffic() const override;

  // What fails in one group is given up in both, so that all ranks learn of it.
  std::string give_up(const std::string& why) noexcept override;
  void interrupt() override;
  bool recovers() const override;
  void recover() override;
  // Of a peer in the shard group, exact where all operations were gathers.
  bool behind(int64_t submitted) const override;
  bool broken() const override;

 private:
  enum class Axis : uint8_t { shard, replicate };

  // Runs a step in one group; its errors say whose numbers they use.
  template <typename Step>
  auto within(Axis axis, const Step& step) -> decltype(step());
  int64_t count(const Opening& opening, Axis axis, Kind kind, int64_t bytes);
  std::string where(Axis axis) const;
  // Sums `arguments` over all ranks into its shard; the bytes that were sent.
  int64_t reduce(const Opening& opening, const ReduceArguments& arguments, Kind kind);
  int64_t sum_shards(const Opening& opening, const ReduceArguments& arguments, Kind kind);
  int64_t add_replicas(const Opening& opening, const at::Tensor& sums, double divisor);

  const std::unique_ptr<Transport> shard_;
  const std::unique_ptr<Transport> replicate_;
  const Place shards_;
  const Place replicas_;

  mutable std::mutex mutex_; // guards the rest
  GroupTraffic traffic_;
};

} // namespace zero::comm
