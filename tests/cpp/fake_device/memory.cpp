// Blocks of memory: allocation, reuse as by a caching allocator, poison.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "machine.h"

namespace zero::fake {
namespace {

constexpr size_t granularity = 512;
// NaN in every floating-point type, -1 in signed integers.
constexpr int poison = 0xFF;

bool is_poisoned(const Block& block) {
  return std::all_of(block.data, block.data + block.size, [](char byte) {
    return static_cast<unsigned char>(byte) == poison;
  });
}

void free_memory(void* data) {
  Machine::get().free(static_cast<char*>(data));
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    const c10::Device here = device(index);
    if (bytes == 0) {
      return {nullptr, here};
    }
    auto& machine = Machine::get();
    StreamState* stream = nullptr;
    {
      const auto lock = machine.lock();
      stream = &machine.stream_locked(current_stream(index));
    }
    char* data = machine.allocate(bytes, index, stream);
    return {data, data, &free_memory, here};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    char* data = Machine::get().allocate(bytes, current_device(), nullptr);
    return {data, data, &free_memory, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

} // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

Block* Machine::find_locked(const char* address) {
  auto after = blocks_.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == blocks_.begin()) {
    return nullptr;
  }
  Block* block = std::prev(after)->second.get();
  return address < block->data + block->size ? block : nullptr;
}

bool Machine::is_pinned(const void* address) {
  const auto guard = lock();
  const Block* block = find_locked(static_cast<const char*>(address));
  return block != nullptr && block->live && block->stream == nullptr;
}

Block* Machine::reuse_locked(size_t size, StreamState* stream) {
  auto& list = free_[{stream, size}];
  if (list.empty()) {
    return nullptr;
  }
  Block* block = list.back();
  list.pop_back();
  if (!is_poisoned(*block)) {
    error_locked(
        c10::str(
            "[fake device] block ",
            block->id,
            " (",
            block->requested,
            " bytes) ",
            block->name,
            " was written after it was freed"));
    std::memset(block->data, poison, block->size);
  }
  return block;
}

char* Machine::allocate(size_t bytes, c10::DeviceIndex device, StreamState* stream) {
  const auto guard = lock();
  const size_t size = (bytes + granularity - 1) / granularity * granularity;
  Block* block = reuse_locked(size, stream);
  if (block == nullptr) {
    auto made = std::make_unique<Block>();
    made->size = size;
    made->data = static_cast<char*>(std::aligned_alloc(granularity, size));
    if (made->data == nullptr) {
      throw std::bad_alloc();
    }
    std::memset(made->data, poison, size);
    block = made.get();
    blocks_[reinterpret_cast<uintptr_t>(made->data)] = std::move(made);
  }
  block->device = device;
  block->stream = stream;
  mark_allocated_locked(*block, bytes);
  return block->data;
}

// Whether a block is new or was in use a moment ago is chance: to users on other streams
// it is always as if the allocation's stream had just used it.
void Machine::mark_allocated_locked(Block& block, size_t bytes) {
  StreamState* stream = block.stream;
  Entry& entry = entry_locked(Kind::allocate, block.device, stream ? stream->id : -1, "allocate");
  block.id = entry.number;
  block.requested = bytes;
  block.live = true;
  block.name = current_label();
  block.recorded.clear();
  block.accesses.clear();
  entry.block = block.id;
  entry.bytes = bytes;
  if (stream == nullptr) {
    return;
  }
  stream->clock.join(devices_.at(block.device).host);
  block.accesses.push_back(
      {block.data,
       block.data + block.size,
       true,
       stream->agent,
       stream->clock.of(stream->agent),
       entry.number,
       intern_locked("the allocation"),
       stream->device,
       stream->id});
  auto& memory = memory_locked(block.device);
  memory.bytes += static_cast<int64_t>(bytes);
  memory.peak = std::max(memory.peak, memory.bytes);
  ++memory.allocations;
}

// The allocation's stream may get the block again at once.
void Machine::check_free_locked(Block& block) {
  Clock now = block.stream->clock;
  now.join(devices_.at(block.device).host);
  const auto recorded = [&](const Access& access) {
    return std::any_of(block.recorded.begin(), block.recorded.end(), [&](const auto* stream) {
      return stream->agent == access.agent;
    });
  };
  for (const auto& access : block.accesses) {
    if (access.agent != block.stream->agent && !now.knows(access.agent, access.time) &&
        !recorded(access)) {
      error_locked(
          c10::str(
              "[fake device] ",
              describe_locked({block.data, block.requested}),
              ", allocated on stream ",
              block.stream->id,
              " of device ",
              int(block.device),
              ", was freed while ",
              *access.name,
              " (number ",
              access.number,
              ") on stream ",
              access.stream,
              " may still be using it: let stream ",
              block.stream->id,
              " wait for an event after number ",
              access.number,
              " first, or record the block on stream ",
              access.stream));
      return;
    }
  }
}

void Machine::free(char* data) noexcept {
  try {
    const auto guard = lock();
    Block* block = find_locked(data);
    if (block == nullptr || !block->live || block->data != data) {
      error_locked("[fake device] what was freed is no block");
      return;
    }
    Entry& entry =
        entry_locked(Kind::free, block->device, block->stream ? block->stream->id : -1, "free");
    entry.block = block->id;
    entry.bytes = block->requested;
    if (block->stream != nullptr) {
      memory_locked(block->device).bytes -= static_cast<int64_t>(block->requested);
      check_free_locked(*block);
    }
    block->live = false;
    if (block->pending_uses == 0) {
      retire_locked(*block);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake device: %s\n", error.what());
    std::abort();
  }
}

void Machine::retire_locked(Block& block) noexcept {
  std::memset(block.data, poison, block.size);
  free_[{block.stream, block.size}].push_back(&block);
}

// As CUDA's allocator: only for a pointer that is a whole block of its own.
void Machine::record_stream(const char* data, const c10::Stream& stream, bool ours) {
  const auto guard = lock();
  Block* block = ours ? find_locked(data) : nullptr;
  Entry& entry = entry_locked(
      Kind::record_stream,
      stream.device_index(),
      stream.id(),
      block ? "record_stream" : "record_stream (ignored: not the allocator's pointer)");
  if (block != nullptr) {
    entry.block = block->id;
    entry.bytes = block->requested;
    block->recorded.insert(&stream_locked(stream));
  }
}

} // namespace zero::fake
