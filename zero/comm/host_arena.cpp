#include <zero/comm/host_arena.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

#include <c10/core/StorageImpl.h>

namespace zero::comm {
namespace {

constexpr int64_t kPage = int64_t{1} << 21;
constexpr int64_t kAlignment = 4096; // of a block
// What a peer's memory may count as this process's.
constexpr int64_t kPeerResident = int64_t{1} << 20;

#ifdef MADV_COLLAPSE
constexpr int kCollapse = MADV_COLLAPSE;
#else
constexpr int kCollapse = 25; // of Linux 6.1
#endif

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t machine_memory() {
  return round_up(static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE), kPage);
}

} // namespace

// ---- a mapping ----

ArenaMapping::ArenaMapping(int file, int64_t bytes, bool writable) : bytes_(bytes) {
  const auto length = static_cast<size_t>(bytes);
  void* reserved =
      mmap(nullptr, length + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr)
    throw_errno("mmap of addresses for shared buffers");
  }
  auto* const begin = static_cast<char*>(reserved);
  const auto before = static_cast<size_t>(
      (kPage - static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) % kPage)) % kPage);
  void* mapped = mmap(
      begin + before,
      length,
      writable ? PROT_READ | PROT_WRITE : PROT_READ,
      MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
      file,
      0);
  if (mapped == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr)
    const int error = errno;
    munmap(reserved, length + kPage);
    errno = error;
    throw_errno("mmap of shared buffers");
  }
  if (before > 0) {
    munmap(begin, before);
  }
  munmap(begin + before + length, kPage - before);
  data_ = static_cast<char*>(mapped);
}

ArenaMapping::~ArenaMapping() {
  munmap(data_, static_cast<size_t>(bytes_));
}

// ---- this process's arena ----

HostArena::HostArena(MemoryFile file, int64_t bytes)
    : process_(getpid()),
      file_(std::move(file)),
      mapping_(file_.number(), bytes, true),
      free_{{0, bytes}} {}

std::shared_ptr<HostArena> HostArena::create() {
  const int64_t bytes = machine_memory();
  std::shared_ptr<HostArena> arena;
  try {
    arena.reset(new HostArena(MemoryFile::create("zero buffers", bytes), bytes));
  } catch (const std::system_error&) { // a limit on addresses
    return nullptr;
  }
  *arena->mapping_.data() = 0;
  const bool huge = madvise(arena->mapping_.data(), kPage, kCollapse) == 0;
  madvise(arena->mapping_.data(), kPage, MADV_REMOVE);
  return huge ? arena : nullptr;
}

std::string HostArena::address() const {
  std::ostringstream text;
  text << reinterpret_cast<uint64_t>(mapping_.data()) << " " << mapping_.bytes() << " "
       << file_.number();
  return text.str();
}

int64_t HostArena::held() const {
  const std::lock_guard lock(mutex_);
  return kPage * std::count_if(users_.begin(), users_.end(), [](int32_t n) { return n > 0; });
}

// The lowest range that fits, taken: blocks stay together in few pages. -1 without one.
int64_t HostArena::find_room(int64_t bytes) {
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, length] = *range;
    if (length < bytes) {
      continue;
    }
    free_.erase(range);
    if (length > bytes) {
      free_.emplace(begin + bytes, length - bytes);
    }
    return begin;
  }
  return -1;
}

// Makes pages that nobody used huge ones, of zeros. Where memory is too fragmented for
// that, they stay small and come one by one.
void HostArena::populate(int64_t first_page, int64_t end_page) {
  for (int64_t page = first_page; page < end_page; ++page) {
    mapping_.data()[page * kPage] = 0; // a page without any memory is not made huge
  }
  madvise(
      mapping_.data() + first_page * kPage,
      static_cast<size_t>((end_page - first_page) * kPage),
      kCollapse);
}

c10::Storage HostArena::allocate(int64_t bytes) {
  if (bytes <= 0 || getpid() != process_) {
    return {};
  }
  const int64_t taken = round_up(bytes, kAlignment);
  const std::lock_guard lock(mutex_);
  const int64_t begin = find_room(taken);
  if (begin < 0) {
    return {};
  }
  const int64_t end = begin + taken;
  const int64_t end_page = round_up(end, kPage) / kPage;
  users_.resize(std::max<size_t>(users_.size(), end_page));
  for (int64_t page = begin / kPage; page < end_page;) {
    int64_t next = page;
    const bool fresh = users_[page] == 0;
    for (; next < end_page && (users_[next] == 0) == fresh; ++next) {
      ++users_[next];
    }
    if (fresh) {
      populate(page, next);
    } else {
      const int64_t from = std::max(begin, page * kPage);
      std::memset(mapping_.data() + from, 0, std::min(end, next * kPage) - from);
    }
    page = next;
  }
  auto* block = new Block{shared_from_this(), begin, taken};
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<size_t>(bytes),
      c10::DataPtr(mapping_.data() + begin, block, &free_block, c10::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

void HostArena::free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->arena->free(block->begin, block->bytes);
}

void HostArena::free(int64_t begin, int64_t bytes) noexcept {
  if (getpid() != process_) {
    return; // the parent's
  }
  const std::lock_guard lock(mutex_);
  const int64_t end_page = round_up(begin + bytes, kPage) / kPage;
  for (int64_t page = begin / kPage; page < end_page;) {
    int64_t next = page;
    while (next < end_page && --users_[next] == 0) {
      ++next;
    }
    if (next > page) {
      madvise(
          mapping_.data() + page * kPage, static_cast<size_t>((next - page) * kPage), MADV_REMOVE);
    }
    page = next + (next < end_page ? 1 : 0); // the one at `next` has other blocks
  }
  const auto after = free_.lower_bound(begin);
  int64_t end = begin + bytes;
  if (after != free_.end() && after->first == end) {
    end += after->second;
  }
  auto before = after;
  if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == begin) {
    before = std::prev(after);
    begin = before->first;
  }
  free_.erase(before, after != free_.end() && after->first < end ? std::next(after) : after);
  free_.emplace(begin, end - begin);
}

// ---- a peer's ----

PeerArena::PeerArena(int64_t process, const std::string& address) {
  std::istringstream parts(address);
  int64_t bytes = 0;
  int number = -1;
  parts >> base_ >> bytes >> number;
  const MemoryFile file = MemoryFile::open(process, number, bytes, /*writable=*/false);
  mapping_ = std::make_unique<ArenaMapping>(file.number(), bytes, false);
  madvise(mapping_->data(), static_cast<size_t>(bytes), MADV_DONTFORK);
}

void PeerArena::reading(int64_t bytes) {
  if (read_.fetch_add(bytes, std::memory_order_relaxed) + bytes > kPeerResident) {
    unmap_read();
  }
}

// After small operations it would cost more than they do.
void PeerArena::rest() {
  if (read_.load(std::memory_order_relaxed) >= kPeerResident / 16) {
    unmap_read();
  }
}

void PeerArena::unmap_read() {
  read_.store(0, std::memory_order_relaxed);
  madvise(mapping_->data(), static_cast<size_t>(size()), MADV_DONTNEED);
}

} // namespace zero::comm
