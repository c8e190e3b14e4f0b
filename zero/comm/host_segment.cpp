#include <zero/comm/host_segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>

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

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
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

HostSegment::HostSegment(int file, std::string address, int64_t ranks, int64_t channels)
    : file_(file), address_(std::move(address)), ranks_(ranks), channels_(channels) {
  void* data = mmap(
      nullptr,
      static_cast<size_t>(total_bytes(ranks, channels)),
      PROT_READ | PROT_WRITE,
      MAP_SHARED,
      file,
      0);
  if (data == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr)
    fail("mmap of the shared segment");
  }
  data_ = static_cast<char*>(data);
}

HostSegment::~HostSegment() {
  if (data_ != nullptr) {
    munmap(data_, static_cast<size_t>(total_bytes(ranks_, channels_)));
  }
  close_file();
}

void HostSegment::close_file() {
  if (const int file = file_.exchange(-1); file >= 0) { // ranks that are threads share it
    close(file);
  }
}

std::shared_ptr<HostSegment> HostSegment::create(int64_t ranks, int64_t channels) {
  const int file = memfd_create("zero", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) {
    fail("memfd_create");
  }
  std::shared_ptr<HostSegment> segment;
  try {
    // The control part exists from now on: a lack of memory shows here, not as SIGBUS.
    if (ftruncate(file, total_bytes(ranks, channels)) != 0 ||
        fallocate(file, 0, 0, windows_begin(ranks, channels)) != 0) {
      fail("making room for the shared segment");
    }
    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    std::ostringstream address;
    address << getpid() << " " << file << " " << random_text();
    segment = std::shared_ptr<HostSegment>(new HostSegment(file, address.str(), ranks, channels));
  } catch (...) {
    close(file);
    throw;
  }
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
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    throw std::runtime_error("can't open " + path + ": " + std::strerror(errno));
  }
  struct stat status{};
  if (fstat(file, &status) != 0 || status.st_size != total_bytes(ranks, channels)) {
    close(file);
    throw std::runtime_error(path + " is not the segment that was announced");
  }
  std::shared_ptr<HostSegment> segment;
  try {
    segment = std::shared_ptr<HostSegment>(new HostSegment(file, address, ranks, channels));
  } catch (...) {
    close(file);
    throw;
  }
  const auto* preamble = reinterpret_cast<const Preamble*>(segment->data_);
  if (preamble->magic != kMagic || address != preamble->address.data()) {
    throw std::runtime_error(path + " is not the segment that was announced");
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
