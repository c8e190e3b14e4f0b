#include <zero/comm/host_transport.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>

#include <zero/comm/error_text.h>
#include <zero/comm/reduce_elements.h>

namespace zero::comm {
namespace {

// What a rank reads and sums at a time: stays in the core's cache.
constexpr int64_t kPieceBytes = int64_t{1} << 18;

// Multiples of 64 bytes keep the kernels' alignment.
int64_t window_piece(int64_t parts) {
  return kHostWindowBytes / parts / 64 * 64;
}

bool is_small(int64_t bytes) {
  return bytes <= kHostInlineBytes;
}

} // namespace

HostTransport::HostTransport(
    std::shared_ptr<HostGroup> group,
    int64_t channel,
    double timeout_seconds)
    : channel_(std::move(group), channel, timeout_seconds) {}

Place HostTransport::place() const {
  return {channel_.rank(), channel_.size()};
}

std::string HostTransport::describe() const {
  if (channel_.group().staged()) {
    return "host (shared windows)";
  }
  const HostMemory& memory = channel_.group().memory();
  const char* how = "host (threads)";
  for (int64_t rank = 0; rank < channel_.size(); ++rank) {
    if (!memory.same_process(rank)) {
      if (!memory.has_arena(rank)) {
        return "host (process_vm_readv)";
      }
      how = "host (shared buffers, process_vm_readv)";
    }
  }
  return how;
}

std::shared_ptr<memory::BufferSource> HostTransport::buffers() const {
  const HostGroup& group = channel_.group();
  return group.staged() ? nullptr : group.arena();
}

template <typename Body>
void HostTransport::run(
    const Opening& opening,
    const HostChannel::Content& content,
    const Body& body) {
  try {
    channel_.open(opening, content);
    body();
    channel_.finish();
  } catch (...) {
    channel_.fail(text_of(std::current_exception()));
    throw;
  }
}

const char* HostTransport::window(int64_t rank) const {
  return channel_.group().window(rank, channel_.index(), channel_.count(&HostSlot::taken) % 2);
}

char* HostTransport::scratch(int64_t index) {
  if (!scratch_.defined()) {
    scratch_ = at::empty({(channel_.size() - 1) * kPieceBytes}, at::kByte);
  }
  return static_cast<char*>(scratch_.mutable_data_ptr()) + index * kPieceBytes;
}

// Each window is filled when all have taken what it held two pieces ago.
void HostTransport::move(
    int64_t bytes,
    int64_t piece,
    const std::function<void(const Piece&, char* window)>& stage,
    const std::function<void(const Piece&)>& take) {
  const HostGroup& group = channel_.group();
  for (int64_t begin = 0; begin < bytes; begin += piece) {
    const Piece current{begin, std::min(piece, bytes - begin)};
    if (group.staged()) {
      const int64_t filled = channel_.count(&HostSlot::staged);
      channel_.await(&HostSlot::taken, filled - 1);
      stage(current, group.window(channel_.rank(), channel_.index(), filled % 2));
      channel_.advance(&HostSlot::staged);
      channel_.await(&HostSlot::staged, filled + 1);
      take(current);
      channel_.advance(&HostSlot::taken);
    } else {
      const HostChannel::Reading reading(channel_);
      channel_.check_given_up();
      take(current);
    }
  }
  if (!group.staged()) {
    channel_.advance(&HostSlot::taken);
    group.memory().rest();
  }
}

// Until then they read this rank's memory.
void HostTransport::await_readers() {
  if (!channel_.group().staged()) {
    channel_.await(&HostSlot::taken, channel_.count(&HostSlot::taken));
  }
}

void HostTransport::read(int64_t peer, uint64_t address, const Piece& piece, char* to) {
  if (channel_.group().staged()) {
    std::memcpy(to, window(peer), piece.bytes);
  } else {
    channel_.copy(peer, address + piece.begin, piece.bytes, to);
  }
}

// ---- reductions ----

void HostTransport::sum_piece(
    const ReduceArguments& arguments,
    const Piece& piece,
    int64_t window_stride) {
  const int64_t rank = channel_.rank();
  const int64_t offset = rank * arguments.shard_bytes() + piece.begin;
  std::vector<const void*> inputs;
  int64_t used = 0;
  for (int64_t peer = 0; peer < channel_.size(); ++peer) {
    if (peer == rank) {
      inputs.push_back(arguments.whole + offset);
    } else if (channel_.group().staged()) {
      inputs.push_back(window(peer) + rank * window_stride);
    } else {
      inputs.push_back(channel_.view(
          peer, channel_.post_of(peer).address + offset, piece.bytes, scratch(used++)));
    }
  }
  reduce_elements(
      arguments,
      arguments.shard + arguments.out_bytes(piece.begin),
      inputs,
      arguments.addend_at(piece.begin),
      piece.bytes / arguments.item_size);
}

void HostTransport::scatter_sums(const ReduceArguments& arguments) {
  const int64_t shard = arguments.shard_bytes();
  const int64_t size = channel_.size();
  const int64_t piece = channel_.group().staged() ? window_piece(size) : kPieceBytes;
  move(
      shard,
      piece,
      [&](const Piece& current, char* window) {
        for (int64_t peer = 0; peer < size; ++peer) {
          if (peer != channel_.rank()) {
            std::memcpy(
                window + peer * piece,
                arguments.whole + peer * shard + current.begin,
                current.bytes);
          }
        }
      },
      [&](const Piece& current) { sum_piece(arguments, current, piece); });
  await_readers();
}

// From posts that carry all of every rank's input.
void HostTransport::sum_inline(
    const ReduceArguments& arguments,
    int64_t shard,
    char* out,
    const char* addend) {
  std::vector<const void*> inputs;
  for (int64_t peer = 0; peer < channel_.size(); ++peer) {
    inputs.push_back(channel_.post_of(peer).inline_bytes.data() + shard * arguments.shard_bytes());
  }
  reduce_elements(arguments, out, inputs, addend, arguments.count);
}

int64_t HostTransport::reduce_scatter(const Opening& opening, const ReduceArguments& arguments) {
  const int64_t whole = channel_.size() * arguments.shard_bytes();
  const bool small = is_small(whole);
  run(opening, {arguments.whole, small ? whole : 0}, [&] {
    if (small) {
      sum_inline(arguments, channel_.rank(), arguments.shard, arguments.addend_data);
    } else {
      scatter_sums(arguments);
    }
  });
  return (channel_.size() - 1) * arguments.shard_bytes();
}

int64_t HostTransport::all_reduce(const Opening& opening, const ReduceArguments& arguments) {
  const int64_t shard = arguments.shard_bytes();
  const int64_t whole = channel_.size() * shard;
  const bool small = is_small(whole + shard); // room for the addend, on every rank alike
  HostChannel::Content content{arguments.whole, small ? whole : 0};
  if (small && arguments.addend_data != nullptr) {
    content.more = arguments.addend_data;
    content.more_bytes = shard;
  }
  run(opening, content, [&] {
    if (small) {
      auto* out = const_cast<char*>(arguments.whole); // the output too
      for (int64_t rank = 0; rank < channel_.size(); ++rank) {
        const HostPost& post = channel_.post_of(rank);
        const char* addend = post.more_bytes > 0 ? post.inline_bytes.data() + whole : nullptr;
        sum_inline(arguments, rank, out + rank * shard, addend);
      }
    } else {
      scatter_sums(arguments);
      gather_shards(gather_of(arguments), shard);
    }
  });
  return 2 * (channel_.size() - 1) * shard;
}

// ---- what moves unchanged ----

// A peer's shard is `address_step` times its rank behind the address that it posted.
void HostTransport::gather_shards(const GatherArguments& arguments, uint64_t address_step) {
  const int64_t rank = channel_.rank();
  const int64_t bytes = arguments.shard_bytes;
  const int64_t piece = channel_.group().staged() ? window_piece(1) : std::max<int64_t>(bytes, 1);
  move(
      bytes,
      piece,
      [&](const Piece& current, char* window) {
        std::memcpy(window, arguments.shard + current.begin, current.bytes);
      },
      [&](const Piece& current) {
        for (int64_t i = 1; i < channel_.size(); ++i) {
          const int64_t peer = (rank + i) % channel_.size();
          read(
              peer,
              channel_.post_of(peer).address + peer * address_step,
              current,
              arguments.whole + peer * bytes + current.begin);
        }
      });
  auto* own = arguments.whole + rank * bytes;
  if (bytes > 0 && own != arguments.shard) {
    std::memcpy(own, arguments.shard, bytes);
  }
  await_readers();
}

int64_t HostTransport::all_gather(const Opening& opening, const GatherArguments& arguments) {
  const int64_t bytes = arguments.shard_bytes;
  const bool small = is_small(bytes);
  run(opening, {arguments.shard, small ? bytes : 0}, [&] {
    if (!small) {
      gather_shards(arguments, 0);
      return;
    }
    for (int64_t rank = 0; rank < channel_.size() && bytes > 0; ++rank) {
      std::memcpy(
          arguments.whole + rank * bytes, channel_.post_of(rank).inline_bytes.data(), bytes);
    }
  });
  return (channel_.size() - 1) * bytes;
}

int64_t HostTransport::broadcast(const Opening& opening, const at::Tensor& tensor, int64_t root) {
  const bool is_root = channel_.rank() == root;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const bool small = is_small(bytes);
  run(opening, {data, small && is_root ? bytes : 0}, [&] {
    const HostPost& post = channel_.post_of(root);
    if (small) {
      if (!is_root && bytes > 0) {
        std::memcpy(data, post.inline_bytes.data(), bytes);
      }
      return;
    }
    move(
        bytes,
        channel_.group().staged() ? window_piece(1) : bytes,
        [&](const Piece& current, char* window) {
          if (is_root) {
            std::memcpy(window, data + current.begin, current.bytes);
          }
        },
        [&](const Piece& current) {
          if (!is_root) {
            read(root, post.address, current, data + current.begin);
          }
        });
    await_readers();
  });
  return is_root ? (channel_.size() - 1) * bytes : 0;
}

std::vector<at::Tensor> HostTransport::receive_messages(const at::Tensor& bytes) {
  const int64_t size = channel_.size();
  std::vector<at::Tensor> messages(size);
  int64_t longest = 0;
  for (int64_t rank = 0; rank < size; ++rank) {
    const HostPost& post = channel_.post_of(rank);
    const int64_t length = load_header(post.header).bytes;
    if (rank == channel_.rank()) {
      messages[rank] = bytes;
    } else {
      messages[rank] = at::empty({length}, at::kByte);
      if (length > 0 && is_small(length)) {
        std::memcpy(messages[rank].mutable_data_ptr(), post.inline_bytes.data(), length);
      }
    }
    longest = std::max(longest, length);
  }
  if (is_small(longest)) {
    return messages;
  }
  const auto part = [](const Piece& piece, int64_t length) {
    return Piece{piece.begin, is_small(length) ? 0 : std::min(piece.bytes, length - piece.begin)};
  };
  move(
      longest,
      channel_.group().staged() ? window_piece(1) : longest,
      [&](const Piece& current, char* window) {
        if (const auto own = part(current, bytes.numel()); own.bytes > 0) {
          std::memcpy(
              window, static_cast<const char*>(bytes.const_data_ptr()) + own.begin, own.bytes);
        }
      },
      [&](const Piece& current) {
        for (int64_t peer = 0; peer < size; ++peer) {
          const auto theirs = part(current, messages[peer].numel());
          if (peer != channel_.rank() && theirs.bytes > 0) {
            auto* to = static_cast<char*>(messages[peer].mutable_data_ptr()) + theirs.begin;
            read(peer, channel_.post_of(peer).address, theirs, to);
          }
        }
      });
  await_readers();
  return messages;
}

std::vector<at::Tensor> HostTransport::exchange(const Opening& opening, const at::Tensor& bytes) {
  std::vector<at::Tensor> messages;
  const bool small = is_small(bytes.numel());
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  run(opening, {data, small ? bytes.numel() : 0}, [&] { messages = receive_messages(bytes); });
  return messages;
}

void HostTransport::barrier(const Opening& opening) {
  run(opening, {}, [] {});
}

std::string HostTransport::give_up(const std::string& why) noexcept {
  channel_.give_up(why);
  return {};
}

} // namespace zero::comm
