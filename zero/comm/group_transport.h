#pragma once

// The collectives over a private c10d backend's point-to-point messages.

#include <memory>

#include <zero/comm/collectives.h>
#include <zero/comm/failure_board.h>
#include <zero/comm/transport.h>

namespace zero::comm {

class GroupTransport final : public Transport {
 public:
  // `board` may be null.
  GroupTransport(std::unique_ptr<PeerExchange> peers, std::shared_ptr<FailureBoard> board);

  Place place() const override;
  std::string describe() const override {
    return "group (gloo)";
  }
  int64_t reduce_scatter(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t all_gather(const Opening& opening, const GatherArguments& arguments) override;
  int64_t all_reduce(const Opening& opening, const ReduceArguments& arguments) override;
  int64_t broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) override;
  std::vector<at::Tensor> exchange(const Opening& opening, const at::Tensor& bytes) override;
  void barrier(const Opening& opening) override;
  std::string give_up(const std::string& why) noexcept override;
  void interrupt() override;

 private:
  std::unique_ptr<PeerExchange> peers_;
  ReduceScratch scratch_;
  std::shared_ptr<FailureBoard> board_;
};

} // namespace zero::comm
