// Direct algorithms: every byte that has to cross between two ranks crosses once,
// and sums run over ranks in rank order, whatever order messages arrive in.

#include <zero/comm/collectives.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <zero/comm/reduce_elements.h>

namespace zero::comm {
namespace {

constexpr int64_t kWindow = 2; // chunks in flight

// One reduce-scatter: chunk c of every shard, with c's transfers posted kWindow
// chunks ahead of its reduction.
class ReduceScatter {
 public:
  ReduceScatter(PeerExchange& peers, const ReduceArguments& arguments, ReduceScratch& scratch)
      : peers_(peers),
        arguments_(arguments),
        scratch_(scratch),
        chunk_count_(ReduceScratch::kChunkBytes / arguments.item_size),
        chunks_((arguments.count + chunk_count_ - 1) / chunk_count_) {}

  void run() {
    for (int64_t chunk = 0; chunk < std::min(kWindow, chunks_); ++chunk) {
      post(chunk);
    }
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      finish(chunk);
      if (chunk + kWindow < chunks_) {
        post(chunk + kWindow);
      }
    }
  }

 private:
  struct Flight {
    std::vector<PeerExchange::TransferPtr> sends;
    std::vector<PeerExchange::TransferPtr> receives;
  };

  int64_t offset(int64_t chunk) const {
    return chunk * chunk_count_ * arguments_.item_size;
  }
  int64_t bytes(int64_t chunk) const {
    return std::min(chunk_count_, arguments_.count - chunk * chunk_count_) * arguments_.item_size;
  }
  const char* slice(int64_t rank, int64_t chunk) const {
    return arguments_.whole + rank * arguments_.shard_bytes() + offset(chunk);
  }
  Span received(int64_t chunk, int64_t distance) {
    const auto others = peers_.size() - 1;
    return scratch_.span(chunk % kWindow * others + distance - 1, kWindow * others);
  }

  void post(int64_t chunk) {
    auto& flight = flights_[chunk % kWindow];
    for (int64_t i = 1; i < peers_.size(); ++i) {
      const auto from = peers_.before(i);
      auto span = received(chunk, i);
      span.size = bytes(chunk);
      flight.receives.push_back(peers_.receive(std::move(span), from));
      const auto to = peers_.after(i);
      auto* data = const_cast<char*>(slice(to, chunk)); // only read by a send
      flight.sends.push_back(peers_.send({arguments_.input, data, bytes(chunk)}, to));
    }
  }

  void finish(int64_t chunk) {
    auto& flight = flights_[chunk % kWindow];
    peers_.wait(flight.receives);
    std::vector<const void*> inputs(peers_.size());
    inputs[peers_.rank()] = slice(peers_.rank(), chunk);
    for (int64_t i = 1; i < peers_.size(); ++i) {
      inputs[peers_.before(i)] = received(chunk, i).data;
    }
    reduce_elements(
        arguments_,
        arguments_.shard + arguments_.out_bytes(offset(chunk)),
        inputs,
        arguments_.addend_at(offset(chunk)),
        bytes(chunk) / arguments_.item_size);
    peers_.wait(flight.sends);
    flight = {};
  }

  PeerExchange& peers_;
  const ReduceArguments& arguments_;
  ReduceScratch& scratch_;
  const int64_t chunk_count_; // elements
  const int64_t chunks_;
  Flight flights_[kWindow];
};

} // namespace

Span ReduceScratch::span(int64_t index, int64_t count) {
  if (!buffer_.defined() || buffer_.numel() < count * kChunkBytes) {
    buffer_ = at::empty({count * kChunkBytes}, at::kByte);
  }
  auto* data = static_cast<char*>(buffer_.mutable_data_ptr()) + index * kChunkBytes;
  return {buffer_, data, kChunkBytes};
}

int64_t
reduce_scatter(PeerExchange& peers, const ReduceArguments& arguments, ReduceScratch& scratch) {
  ReduceScatter(peers, arguments, scratch).run();
  return (peers.size() - 1) * arguments.shard_bytes();
}

int64_t all_gather(PeerExchange& peers, const GatherArguments& arguments) {
  const auto bytes = arguments.shard_bytes;
  auto* own = arguments.whole + peers.rank() * bytes;
  std::vector<PeerExchange::TransferPtr> transfers;
  for (int64_t i = 1; i < peers.size(); ++i) {
    const auto from = peers.before(i);
    transfers.push_back(
        peers.receive({arguments.output, arguments.whole + from * bytes, bytes}, from));
    auto* data = const_cast<char*>(arguments.shard); // only read by a send
    transfers.push_back(peers.send({arguments.input, data, bytes}, peers.after(i)));
  }
  if (bytes > 0 && own != arguments.shard) {
    std::memcpy(own, arguments.shard, bytes);
  }
  peers.wait(transfers);
  return (peers.size() - 1) * bytes;
}

int64_t broadcast(PeerExchange& peers, const at::Tensor& tensor, int64_t root) {
  const auto size = peers.size();
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const Span span{tensor, static_cast<char*>(tensor.mutable_data_ptr()), bytes};
  // In ranks relative to the root, a rank's parent lacks its lowest set bit.
  const auto relative = (peers.rank() + size - root) % size;
  int64_t bit = 1;
  while (bit < size && (relative & bit) == 0) {
    bit <<= 1;
  }
  if (relative != 0) {
    peers.wait(peers.receive(span, (relative - bit + root) % size));
  }
  int64_t sent = 0;
  std::vector<PeerExchange::TransferPtr> sends;
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (relative + bit < size) {
      sends.push_back(peers.send(span, (relative + bit + root) % size));
      sent += bytes;
    }
  }
  peers.wait(sends);
  return sent;
}

std::vector<at::Tensor> exchange(
    PeerExchange& peers,
    const at::Tensor& bytes,
    const std::vector<OperationHeader>& headers) {
  constexpr auto inline_size = static_cast<int64_t>(OperationHeader::kInlineSize);
  std::vector<at::Tensor> messages(peers.size());
  for (int64_t rank = 0; rank < peers.size(); ++rank) {
    if (rank == peers.rank() && bytes.numel() > inline_size) {
      messages[rank] = bytes;
      continue;
    }
    messages[rank] = at::empty({headers[rank].bytes}, at::kByte);
    if (headers[rank].bytes > 0 && headers[rank].bytes <= inline_size) {
      std::memcpy(
          messages[rank].mutable_data_ptr(), headers[rank].inline_payload(), headers[rank].bytes);
    }
  }
  std::vector<PeerExchange::TransferPtr> transfers;
  for (int64_t i = 1; i < peers.size(); ++i) {
    const auto from = peers.before(i);
    if (const auto length = headers[from].bytes; length > inline_size) {
      auto* data = static_cast<char*>(messages[from].mutable_data_ptr());
      transfers.push_back(peers.receive({messages[from], data, length}, from));
    }
    if (bytes.numel() > inline_size) {
      auto* data = static_cast<char*>(bytes.mutable_data_ptr());
      transfers.push_back(peers.send({bytes, data, bytes.numel()}, peers.after(i)));
    }
  }
  peers.wait(transfers);
  return messages;
}

} // namespace zero::comm
