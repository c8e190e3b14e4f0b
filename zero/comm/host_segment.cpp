#include <zero/comm/host_segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace zero::comm {
namespace {

// Lock-free, so that they work between processes, and zero when their bytes are.
static_assert(std::atomic<int64_t>::is_always_lock_free);
static_assert(std::atomic<char>::is_always_lock_free && sizeof(std::atomic<char>) == 1);

struct alignas(64) Preamble {
  uint64_t magic;
  std::array<char, 64> address;
};
constexpr uint64_t kMagic = 0x314f52455a2d686d;

int64_t control_bytes(int64_t ranks, int64_t channels) {
  return static_cast<int64_t>(sizeof(Preamble)) + ranks * static_cast<int64_t>(sizeof(HostMember)) +
      ranks * channels * static_cast<int64_t>(sizeof(HostSlot));
}

int64_t windows_begin(int64_t ranks, int64_t channels) {
  constexpr int64_t kPage = int64_t{1} << 16; // the largest page that is common
  return (control_bytes(ranks, channels) + kPage - 1) / kPage * kPage;
}

int64_t total_bytes(int64_t ranks, int64_t channels) {
  return windows_begin(ranks, channels) + ranks * channels * 2 * kHostWindowBytes;
}

// Ranks that are threads share one mapping.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<HostSegment>> segments;
};

Registry& registry() {
  static auto* instance = new Registry(); // no destructor: threads may outlive main
  return *instance;
}

std::string random_text() {
  std::random_device device;
  std::ostringstream text;
  text << std::hex << device() << device() << device() << device();
  return text.str();
}

} // namespace

HostSegment::HostSegment(MemoryFile file, std::string address, int64_t ranks, int64_t channels)
    : file_(std::move(file)), address_(std::move(address)), ranks_(ranks), channels_(channels) {
  void* data = mmap(
      nullptr,
      static_cast<size_t>(total_bytes(ranks, channels)),
      PROT_READ | PROT_WRITE,
      MAP_SHARED,
      file_.number(),
      0);
  if (data == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr)
    throw_errno("mmap of the shared segment");
  }
  data_ = static_cast<char*>(data);
}

HostSegment::~HostSegment() {
  if (data_ != nullptr) {
    munmap(data_, static_cast<size_t>(total_bytes(ranks_, channels_)));
  }
}

std::shared_ptr<HostSegment> HostSegment::create(int64_t ranks, int64_t channels) {
  MemoryFile file = MemoryFile::create("zero", total_bytes(ranks, channels));
  // The control part exists from now on: a lack of memory shows here, not as SIGBUS.
  if (fallocate(file.number(), 0, 0, windows_begin(ranks, channels)) != 0) {
    throw_errno("making room for the shared segment");
  }
  std::ostringstream address;
  address << getpid() << " " << file.number() << " " << random_text();
  const std::shared_ptr<HostSegment> segment(
      new HostSegment(std::move(file), address.str(), ranks, channels));
  auto* preamble = reinterpret_cast<Preamble*>(segment->data_);
  std::strncpy(preamble->address.data(), segment->address_.c_str(), preamble->address.size() - 1);
  preamble->magic = kMagic;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.segments, [](const auto& entry) { return entry.second.expired(); });
  all.segments[segment->address_] = segment;
  return segment;
}

std::shared_ptr<HostSegment>
HostSegment::open(const std::string& address, int64_t ranks, int64_t channels) {
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.segments.find(address);
    if (auto here = found == all.segments.end() ? nullptr : found->second.lock()) {
      return here;
    }
  }
  std::istringstream parts(address);
  int64_t pid = 0;
  int number = -1;
  parts >> pid >> number;
  const std::shared_ptr<HostSegment> segment(new HostSegment(
      MemoryFile::open(pid, number, total_bytes(ranks, channels), /*writable=*/true),
      address,
      ranks,
      channels));
  const auto* preamble = reinterpret_cast<const Preamble*>(segment->data_);
  if (preamble->magic != kMagic || address != preamble->address.data()) {
    throw std::runtime_error("the memory at " + address + " is not the segment that was announced");
  }
  return segment;
}

HostMember& HostSegment::member(int64_t rank) {
  return reinterpret_cast<HostMember*>(data_ + sizeof(Preamble))[rank];
}

HostSlot& HostSegment::slot(int64_t rank, int64_t channel) {
  auto* slots = reinterpret_cast<HostSlot*>(
      data_ + sizeof(Preamble) + ranks_ * static_cast<int64_t>(sizeof(HostMember)));
  return slots[rank * channels_ + channel];
}

char* HostSegment::window(int64_t rank, int64_t channel, int64_t which) {
  return data_ + windows_begin(ranks_, channels_) +
      ((rank * channels_ + channel) * 2 + which) * kHostWindowBytes;
}

} // namespace zero::comm
