#include <zero/checkpoint/safetensors.h>

#include <unistd.h>

#include <algorithm>
#include <unordered_set>

#include <c10/util/Exception.h>

#include <zero/checkpoint/dtypes.h>

namespace zero::checkpoint {

namespace {

// Hashed, then written while it is in the cache.
constexpr int64_t kChunk = int64_t{4} << 20;

int64_t bytes_of(const TensorEntry& entry) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
  return *checked_numel(entry.shape, itemsize) * itemsize;
}

void check_entries(const std::vector<TensorEntry>& entries, const std::string& path) {
  std::unordered_set<std::string_view> names = {"__metadata__"};
  size_t itemsize = SIZE_MAX;
  for (const TensorEntry& entry : entries) {
    TORCH_CHECK_VALUE(
        names.insert(entry.name).second,
        "[zero.checkpoint] '",
        path,
        "': the name '",
        entry.name,
        "' is taken");
    TORCH_CHECK_VALUE(
        c10::elementSize(entry.dtype) <= itemsize,
        "[zero.checkpoint] '",
        path,
        "': '",
        entry.name,
        "' of ",
        entry.dtype,
        " comes after a tensor of smaller elements; sort tensors by falling itemsize");
    itemsize = c10::elementSize(entry.dtype);
  }
}

} // namespace

SafetensorsWriter::SafetensorsWriter(
    std::string path,
    std::vector<TensorEntry> entries,
    const Metadata& metadata)
    : path_(std::move(path)), entries_(std::move(entries)) {
  check_entries(entries_, path_);
  const std::string header = format_safetensors_header(entries_, metadata);
  bytes_ = static_cast<int64_t>(header.size());
  for (const TensorEntry& entry : entries_) {
    bytes_ += bytes_of(entry);
  }
  checksums_.reserve(entries_.size());
  file_ = create_file(path_);
  try {
    write_all(file_, header.data(), static_cast<int64_t>(header.size()), bytes_);
  } catch (...) {
    ::unlink(path_.c_str());
    throw;
  }
  missing_ = entries_.empty() ? 0 : bytes_of(entries_[0]);
  complete_tensors();
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!finished_) {
    ::unlink(path_.c_str());
  }
}

// Those that have no bytes are complete at once.
void SafetensorsWriter::complete_tensors() {
  while (missing_ == 0 && checksums_.size() < entries_.size()) {
    checksums_.push_back(sum_.value());
    sum_ = {};
    missing_ = checksums_.size() < entries_.size() ? bytes_of(entries_[checksums_.size()]) : 0;
  }
}

std::string SafetensorsWriter::next_name() const {
  return checksums_.size() < entries_.size() ? entries_[checksums_.size()].name : "the end";
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
  TORCH_CHECK_VALUE(
      bytes >= 0 && bytes <= missing_ && file_.number() >= 0,
      "[zero.checkpoint] '",
      path_,
      "': expected at most ",
      missing_,
      " bytes for '",
      next_name(),
      "', got ",
      bytes);
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kChunk);
    sum_.update(next, part);
    write_all(file_, next, part, bytes_);
    held_back_ += part;
    if (held_back_ >= kChunk) {
      file_.start_sync();
      held_back_ = 0;
    }
    next += part;
    bytes -= part;
    missing_ -= part;
  }
  complete_tensors();
}

void SafetensorsWriter::finish() {
  TORCH_CHECK_VALUE(
      checksums_.size() == entries_.size() && file_.number() >= 0,
      "[zero.checkpoint] '",
      path_,
      "' is not complete: ",
      missing_,
      " bytes are missing for '",
      next_name(),
      "'");
  file_.sync(bytes_);
  file_.close(bytes_);
  finished_ = true;
}

} // namespace zero::checkpoint
