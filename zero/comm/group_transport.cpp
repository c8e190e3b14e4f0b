#include <zero/comm/group_transport.h>

#include <cstring>
#include <utility>

#include <zero/comm/sigpipe.h>

namespace zero::comm {

GroupTransport::GroupTransport(
    std::unique_ptr<PeerExchange> peers,
    std::shared_ptr<FailureBoard> board)
    : peers_(std::move(peers)), board_(std::move(board)) {}

Place GroupTransport::place() const {
  return {peers_->rank(), peers_->size()};
}

int64_t GroupTransport::reduce_scatter(const Opening& opening, const ReduceArguments& arguments) {
  const SigpipeBlock no_sigpipe;
  peers_->open(opening.header, opening.description);
  const auto sent = comm::reduce_scatter(*peers_, arguments, scratch_);
  peers_->close();
  return sent;
}

int64_t GroupTransport::all_gather(const Opening& opening, const GatherArguments& arguments) {
  const SigpipeBlock no_sigpipe;
  peers_->open(opening.header, opening.description);
  const auto sent = comm::all_gather(*peers_, arguments);
  peers_->close();
  return sent;
}

int64_t GroupTransport::all_reduce(const Opening& opening, const ReduceArguments& arguments) {
  const SigpipeBlock no_sigpipe;
  peers_->open(opening.header, opening.description);
  const auto reduced = comm::reduce_scatter(*peers_, arguments, scratch_);
  const auto gathered = comm::all_gather(*peers_, gather_of(arguments));
  peers_->close();
  return reduced + gathered;
}

int64_t GroupTransport::broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) {
  const SigpipeBlock no_sigpipe;
  peers_->open(opening.header, opening.description);
  const auto sent = comm::broadcast(*peers_, tensor, root);
  peers_->close();
  return sent;
}

std::vector<at::Tensor> GroupTransport::exchange(const Opening& opening, const at::Tensor& bytes) {
  const SigpipeBlock no_sigpipe;
  auto header = opening.header;
  if (bytes.numel() > 0 && bytes.numel() <= static_cast<int64_t>(OperationHeader::kInlineSize)) {
    std::memcpy(header.inline_payload(), bytes.const_data_ptr(), bytes.numel());
  }
  peers_->open(header, opening.description);
  auto messages = comm::exchange(*peers_, bytes, peers_->meet());
  peers_->close();
  return messages;
}

void GroupTransport::barrier(const Opening& opening) {
  const SigpipeBlock no_sigpipe;
  peers_->open(opening.header, opening.description);
  peers_->close();
}

std::string GroupTransport::give_up(const std::string& why) noexcept {
  const SigpipeBlock no_sigpipe;
  peers_->give_up(why);
  return board_ ? board_->post(why) : std::string();
}

void GroupTransport::interrupt() {
  peers_->interrupt();
}

} // namespace zero::comm
