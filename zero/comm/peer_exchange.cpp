// Gloo's own timeouts and closed connections, in words; see peer_exchange.h.

#include <zero/comm/peer_exchange.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <zero/comm/error_text.h>
#include <zero/comm/milliseconds.h>

namespace zero::comm {

struct PeerExchange::Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  int64_t peer = 0;
  char* data = nullptr;
  bool finished = false;
  std::string refused; // why it could not even be posted
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kHeaderChannel = 1;
constexpr int32_t kFirstPayloadChannel = 2;
constexpr int64_t kHeaderBytes = sizeof(OperationHeader);
// Receives of headers posted ahead, from each peer: one for the next operation,
// which saves its sender a round trip, and one for the peer's last words.
constexpr int64_t kHeadersAhead = 2;
constexpr std::chrono::milliseconds kFarewellTime{500};
constexpr std::chrono::milliseconds kLastWordsTime{100};
constexpr std::string_view kPrefix = "[zero.comm] ";

// Another one for each operation, as far as 31 bits can tell them apart: payloads of
// ranks in different operations never meet, not even before their headers have.
int32_t payload_channel(const OperationHeader& header) {
  constexpr uint64_t channels = (uint64_t{1} << 31) - kFirstPayloadChannel;
  return kFirstPayloadChannel + static_cast<int32_t>(identity_hash(header) % channels);
}

OperationHeader header_at(const char* data) {
  OperationHeader header;
  std::memcpy(static_cast<void*>(&header), data, sizeof(header));
  return header;
}

} // namespace

PeerExchange::PeerExchange(c10::intrusive_ptr<c10d::Backend> backend, double timeout_seconds)
    : backend_(std::move(backend)),
      rank_(backend_->getRank()),
      size_(backend_->getSize()),
      timeout_seconds_(timeout_seconds),
      description_("the set-up"),
      headers_(at::empty({size_ * kHeadersAhead, kHeaderBytes}, at::kByte)),
      header_receives_(size_) {
  auto* row = static_cast<char*>(headers_.mutable_data_ptr());
  for (int64_t i = 1; i < size_; ++i) {
    for (int64_t ahead = 0; ahead < kHeadersAhead; ++ahead) {
      row += kHeaderBytes; // the first rows are left for what this rank sends
      post_header_receive(before(i), row);
    }
  }
}

PeerExchange::~PeerExchange() = default;

PeerExchange::TransferPtr
PeerExchange::post(Span span, int64_t peer, int32_t channel, bool is_send) {
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->data = span.data;
  if (span.size == 0) {
    transfer->finished = true;
    return transfer;
  }
  // The tensor that Gloo holds while the message is in flight holds the owner.
  std::vector<at::Tensor> message{
      at::from_blob(span.data, {span.size}, [owner = std::move(span.owner)](void*) {}, at::kByte)};
  try {
    const auto number = static_cast<int>(peer);
    transfer->work = is_send ? backend_->send(message, number, channel)
                             : backend_->recv(message, number, channel);
  } catch (const std::exception& error) {
    // Reported by wait(): a peer may leave after an operation whose rest doesn't
    // need it.
    transfer->refused = error.what();
  }
  return transfer;
}

PeerExchange::TransferPtr PeerExchange::send(Span span, int64_t peer) {
  return post(std::move(span), peer, payload_channel_, true);
}

PeerExchange::TransferPtr PeerExchange::receive(Span span, int64_t peer) {
  return post(std::move(span), peer, payload_channel_, false);
}

void PeerExchange::post_header_receive(int64_t peer, char* row) {
  header_receives_[peer].push_back(
      post({headers_, row, kHeaderBytes}, peer, kHeaderChannel, false));
}

void PeerExchange::wait(const TransferPtr& transfer) {
  meet();
  finish(transfer);
}

void PeerExchange::wait(const std::vector<TransferPtr>& transfers) {
  meet();
  finish(transfers);
}

void PeerExchange::finish(const TransferPtr& transfer) {
  if (transfer->finished) {
    return;
  }
  if (!transfer->work) {
    fail(*transfer, transfer->refused, false);
  }
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_) {
      fail_interrupted();
    }
    waiting_ = transfer.get();
  }
  const auto start = Clock::now();
  const auto limit = to_milliseconds(timeout_seconds_);
  std::string cause;
  bool completed = false;
  try {
    completed = transfer->work->wait(limit);
  } catch (const std::exception& error) {
    cause = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    waiting_ = nullptr;
    if (!completed && interrupted_) {
      fail_interrupted();
    }
  }
  if (!completed) {
    // Gloo throws the same type for both.
    const bool timed_out =
        Clock::now() - start >= limit && cause.find("closed by peer") == std::string::npos;
    fail(*transfer, cause, timed_out);
  }
  transfer->finished = true;
}

void PeerExchange::finish(const std::vector<TransferPtr>& transfers) {
  for (const auto& transfer : transfers) {
    finish(transfer);
  }
}

OperationHeader PeerExchange::receive_header(int64_t peer) {
  auto& receives = header_receives_[peer];
  const auto transfer = receives.front();
  finish(transfer);
  const auto header = header_at(transfer->data);
  TORCH_CHECK_WITH(
      DistBackendError,
      header.kind != OperationHeader::kGaveUp,
      kPrefix,
      "rank ",
      peer,
      " gave up: ",
      why_gave_up(header),
      " (",
      where(),
      ")");
  receives.pop_front();
  post_header_receive(peer, transfer->data);
  return header;
}

void PeerExchange::open(OperationHeader own, std::string description) {
  description_ = std::move(description);
  opening_ = true;
  own.sequence = sequence_++;
  payload_channel_ = payload_channel(own);
  met_.assign(size_, own);
  auto* row = static_cast<char*>(headers_.mutable_data_ptr());
  std::memcpy(row, &own, sizeof(own));
  header_sends_.clear();
  for (int64_t i = 1; i < size_; ++i) {
    header_sends_.push_back(post({headers_, row, kHeaderBytes}, after(i), kHeaderChannel, true));
  }
}

const std::vector<OperationHeader>& PeerExchange::meet() {
  if (!opening_) {
    return met_;
  }
  std::vector<int64_t> known{rank_};
  try {
    for (int64_t i = 1; i < size_; ++i) {
      met_[before(i)] = receive_header(before(i));
      known.push_back(before(i));
    }
  } catch (...) {
    // A rank that went elsewhere explains a rank that did not come.
    compare(met_, std::move(known));
    throw;
  }
  finish(header_sends_); // before any complaint: the peers need it for theirs
  compare(met_, std::move(known));
  opening_ = false;
  return met_;
}

// In rank order, so that every rank finds the same two to name.
void PeerExchange::compare(const std::vector<OperationHeader>& headers, std::vector<int64_t> ranks)
    const {
  std::sort(ranks.begin(), ranks.end());
  const auto first = ranks.front();
  for (const auto rank : ranks) {
    TORCH_CHECK_WITH(
        DistBackendError,
        same_operation(headers[first], headers[rank]),
        kPrefix,
        describe_mismatch(first, headers[first], rank, headers[rank]));
  }
}

void PeerExchange::close() {
  meet();
  header_sends_.clear();
}

std::string PeerExchange::where() const {
  return c10::str("in ", description_, ", rank ", rank_, " of ", size_);
}

void PeerExchange::fail_interrupted() const {
  TORCH_CHECK_WITH(
      DistBackendError,
      false,
      kPrefix,
      "rank ",
      rank_,
      " of ",
      size_,
      " closed its communicator during ",
      description_,
      "; an optimizer or a module was destroyed before its operations were done");
}

// A peer that fails says why on the header channel before it disconnects.
std::string PeerExchange::last_words(int64_t peer) {
  for (const auto& transfer : header_receives_[peer]) {
    try {
      if (transfer->work && transfer->work->wait(kLastWordsTime)) {
        const auto header = header_at(transfer->data);
        if (header.kind == OperationHeader::kGaveUp) {
          return why_gave_up(header);
        }
      }
    } catch (const std::exception&) {
      break; // it left without
    }
  }
  return {};
}

void PeerExchange::fail(const Transfer& transfer, const std::string& cause, bool timed_out) {
  const auto peer = transfer.peer;
  if (timed_out) {
    TORCH_CHECK_WITH(
        DistBackendError,
        false,
        kPrefix,
        "rank ",
        peer,
        opening_ ? " did not take part in " : " stopped answering in ",
        description_,
        " within ",
        timeout_seconds_,
        " s (rank ",
        rank_,
        " of ",
        size_,
        " was waiting); see whether rank ",
        peer,
        " failed, is stuck or takes another path, or raise the timeout",
        kUnevenData);
  }
  if (const auto why = last_words(peer); !why.empty()) {
    TORCH_CHECK_WITH(
        DistBackendError, false, kPrefix, "rank ", peer, " gave up: ", why, " (", where(), ")");
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      false,
      kPrefix,
      "rank ",
      peer,
      " closed its connection during ",
      description_,
      " (rank ",
      rank_,
      " of ",
      size_,
      "); it ended or failed first: see its own error",
      kUnevenData,
      " [",
      first_line(cause),
      "]");
}

void PeerExchange::say_farewell(std::string_view why) {
  const auto header = make_gave_up(without_prefix(first_line(why)));
  auto copy = at::empty({kHeaderBytes}, at::kByte);
  std::memcpy(copy.mutable_data_ptr(), &header, sizeof(header));
  std::vector<TransferPtr> farewells;
  for (int64_t i = 1; i < size_; ++i) {
    farewells.push_back(post(
        {copy, static_cast<char*>(copy.mutable_data_ptr()), kHeaderBytes},
        after(i),
        kHeaderChannel,
        true));
  }
  const auto deadline = Clock::now() + kFarewellTime;
  for (const auto& farewell : farewells) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    try {
      if (farewell->work) {
        farewell->work->wait(std::max(left, std::chrono::milliseconds(1)));
      }
    } catch (const std::exception&) {
      continue; // that peer is gone; the others may listen
    }
  }
}

void PeerExchange::give_up(std::string_view why) noexcept {
  try {
    say_farewell(why);
  } catch (const std::exception&) {
    // The peers see the closed connection all the same.
  }
  header_receives_.clear();
  header_sends_.clear();
  backend_.reset();
}

void PeerExchange::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (waiting_ != nullptr) {
    waiting_->work->abort();
  }
}

} // namespace zero::comm
