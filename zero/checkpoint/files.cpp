#include <zero/checkpoint/files.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

// Linux transfers less than 2 GiB at once.
constexpr int64_t kLargestTransfer = int64_t{1} << 30;

template <typename Call>
auto retry(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

File checked_regular(int number, const std::string& path) {
  if (number < 0) {
    TORCH_CHECK_VALUE(
        errno != ELOOP,
        "[zero.checkpoint] '",
        path,
        "' is a symbolic link; the files of a checkpoint must lie in its own directory");
    fail(errno, "opening", path);
  }
  File file(number, path);
  struct stat status{};
  if (fstat(number, &status) != 0) {
    fail(errno, "looking at", path);
  }
  TORCH_CHECK_VALUE(
      S_ISREG(status.st_mode),
      "[zero.checkpoint] expected a regular file, got something else: '",
      path,
      "'");
  return file;
}

} // namespace

void fail(int error, const std::string& operation, const std::string& path) {
  TORCH_CHECK(
      false, "[zero.checkpoint] ", operation, " '", path, "' failed: ", std::strerror(error));
}

File& File::operator=(File&& other) noexcept {
  std::swap(number_, other.number_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (number_ >= 0) {
    ::close(number_);
  }
}

int64_t File::bytes() const {
  struct stat status{};
  if (fstat(number_, &status) != 0) {
    fail(errno, "looking at", path_);
  }
  return status.st_size;
}

int64_t File::modified() const {
  struct stat status{};
  if (fstat(number_, &status) != 0) {
    fail(errno, "looking at", path_);
  }
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

void File::read(int64_t offset, void* destination, int64_t bytes) const {
  auto* next = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t got =
        retry([&] { return pread(number_, next, std::min(bytes, kLargestTransfer), offset); });
    if (got < 0) {
      fail(errno, "reading", path_);
    }
    TORCH_CHECK_VALUE(
        got > 0,
        "[zero.checkpoint] '",
        path_,
        "' ends at byte ",
        offset,
        ", expected ",
        bytes,
        " more; it was cut off while it was being read");
    next += got;
    offset += got;
    bytes -= got;
  }
}

void File::start_sync() const noexcept {
  sync_file_range(number_, 0, 0, SYNC_FILE_RANGE_WRITE); // a file system may not know it
}

void File::sync(int64_t needed) const {
  if (retry([&] { return fsync(number_); }) != 0) {
    TORCH_CHECK(false, write_error(errno, "flushing", path_, needed));
  }
}

void File::close(int64_t needed) {
  // Not again after EINTR: Linux has closed it then.
  if (::close(std::exchange(number_, -1)) != 0 && errno != EINTR) {
    TORCH_CHECK(false, write_error(errno, "closing", path_, needed));
  }
}

File open_file(const std::string& path, Links links) {
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links == Links::refuse ? O_NOFOLLOW : 0);
  return checked_regular(retry([&] { return ::open(path.c_str(), flags); }), path);
}

File open_file(const File& directory, const std::string& name) {
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW;
  return checked_regular(
      retry([&] { return openat(directory.number(), name.c_str(), flags); }),
      directory.path() + "/" + name);
}

File open_directory(const std::string& path) {
  const int number =
      retry([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY); });
  if (number < 0) {
    TORCH_CHECK_VALUE(
        errno != ENOTDIR, "[zero.checkpoint] expected a directory, got a file: '", path, "'");
    TORCH_CHECK_VALUE(errno != ENOENT, "[zero.checkpoint] there is no directory '", path, "'");
    fail(errno, "opening", path);
  }
  return {number, path};
}

File create_file(const std::string& path) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int number = retry([&] { return ::open(path.c_str(), flags, 0666); });
  if (number < 0) {
    TORCH_CHECK(false, write_error(errno, "creating", path, -1));
  }
  return {number, path};
}

void write_all(const File& file, const void* data, int64_t bytes, int64_t needed) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done =
        retry([&] { return ::write(file.number(), next, std::min(bytes, kLargestTransfer)); });
    if (done < 0) {
      TORCH_CHECK(false, write_error(errno, "writing", file.path(), needed));
    }
    next += done;
    bytes -= done;
  }
}

std::string
write_error(int error, const std::string& operation, const std::string& path, int64_t needed) {
  std::string text = "[zero.checkpoint] " + operation + " '" + path + "' failed: ";
  text += std::strerror(error);
  if (error == ENOSPC || error == EDQUOT) {
    text += error == ENOSPC ? ": the disk is full" : ": the disk quota is used up";
    if (needed >= 0) {
      text += "; the file needs " + std::to_string(needed) + " bytes";
    }
    struct statvfs disk{};
    const std::string folder = path.substr(0, path.find_last_of('/') + 1);
    if (statvfs(folder.empty() ? "." : folder.c_str(), &disk) == 0) {
      const auto left = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
      text += ", " + std::to_string(left) + " bytes are left on the disk";
    }
    text += "; make space or save elsewhere";
  }
  return text;
}

std::vector<std::string> names_in(const File& directory) {
  const int number =
      openat(directory.number(), ".", O_RDONLY | O_CLOEXEC | O_DIRECTORY); // its own position
  struct Close {
    void operator()(DIR* entries) const {
      closedir(entries);
    }
  };
  const std::unique_ptr<DIR, Close> entries(number < 0 ? nullptr : fdopendir(number));
  if (!entries) {
    fail(errno, "listing", directory.path());
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") {
      names.emplace_back(name);
    }
  }
  if (errno != 0) {
    fail(errno, "listing", directory.path());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool remove_file(const File& directory, const std::string& name) noexcept {
  return unlinkat(directory.number(), name.c_str(), 0) == 0;
}

} // namespace zero::checkpoint
