#pragma once

// Messages between this rank and each other one, over the point-to-point half of
// a private c10d backend. Owns that backend and the buffers of messages in
// flight, and words what goes wrong: every error names the operation, this rank
// and the peer. Used by one thread, the communicator's; only interrupt() may be
// called from another.

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <zero/comm/operation_header.h>

namespace c10d {
class Backend;
} // namespace c10d

namespace zero::comm {

// Bytes within a tensor that stays alive while they travel.
struct Span {
  at::Tensor owner;
  char* data = nullptr;
  int64_t size = 0;
};

class PeerExchange {
 public:
  struct Transfer;
  using TransferPtr = std::shared_ptr<Transfer>;

  PeerExchange(c10::intrusive_ptr<c10d::Backend> backend, double timeout_seconds);
  ~PeerExchange();
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  int64_t rank() const {
    return rank_;
  }
  int64_t size() const {
    return size_;
  }
  // The peers at distance i, 0 < i < size: all ranks talk to different ones.
  int64_t after(int64_t i) const {
    return (rank_ + i) % size_;
  }
  int64_t before(int64_t i) const {
    return (rank_ + size_ - i) % size_;
  }

  // Opens an operation: tells every rank this one's header. Payloads may be posted
  // at once, which saves them a round trip: they meet only those of the same
  // operation.
  void open(OperationHeader own, std::string description);
  // Every rank's header, in rank order. Throws on every rank if they are not of the
  // same operation. Whatever waits for a payload, and close(), meets first.
  const std::vector<OperationHeader>& meet();

  // Payload of the open operation; messages between two ranks keep their order.
  // Spans of no bytes don't travel.
  TransferPtr send(Span span, int64_t peer);
  TransferPtr receive(Span span, int64_t peer);
  void wait(const TransferPtr& transfer);
  void wait(const std::vector<TransferPtr>& transfers);

  // Closes the operation: all that this rank sent has left it.
  void close();

  // After an error: tells the peers, as far as they listen, and disconnects.
  void give_up(std::string_view why) noexcept;

  // Makes the wait in progress and all later ones throw. From any thread.
  void interrupt();

 private:
  TransferPtr post(Span span, int64_t peer, int32_t channel, bool is_send);
  void finish(const TransferPtr& transfer);
  void finish(const std::vector<TransferPtr>& transfers);
  void post_header_receive(int64_t peer, char* row);
  OperationHeader receive_header(int64_t peer);
  void compare(const std::vector<OperationHeader>& headers, std::vector<int64_t> ranks) const;
  std::string last_words(int64_t peer);
  void say_farewell(std::string_view why);
  [[noreturn]] void fail(const Transfer& transfer, const std::string& cause, bool timed_out);
  [[noreturn]] void fail_interrupted() const;
  std::string where() const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  const int64_t rank_;
  const int64_t size_;
  const double timeout_seconds_;

  std::string description_; // of the open operation
  bool opening_ = false; // not all headers have come yet
  std::vector<OperationHeader> met_; // by rank
  int32_t payload_channel_ = 0;
  int64_t sequence_ = 0;
  at::Tensor headers_; // a header a row; the first is sent, the others are received
  std::vector<std::deque<TransferPtr>> header_receives_; // by peer
  std::vector<TransferPtr> header_sends_;

  std::mutex mutex_; // guards the two below
  Transfer* waiting_ = nullptr;
  bool interrupted_ = false;
};

} // namespace zero::comm
