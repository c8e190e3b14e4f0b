#pragma once

// The safetensors format: eight bytes with the length of a JSON header, the header
// (dtype, shape and place of each tensor), the tensors' bytes without gaps. Written and
// read here without copies; https://github.com/huggingface/safetensors describes it.
//
// Damaged or hostile files are c10::ValueError, failing system calls c10::Error; every
// error names the file.

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/ScalarType.h>

#include <zero/api.h>
#include <zero/checkpoint/checksum.h>
#include <zero/checkpoint/files.h>

namespace zero::checkpoint {

// A tensor of a file: row-major.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};
};

// Where it lies, in bytes from the file's begin.
struct StoredTensor : TensorEntry {
  int64_t numel = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

using Metadata = std::map<std::string, std::string>;

// Writes one file, tensor after tensor. Not thread-safe.
//
//   SafetensorsWriter writer(path, entries);
//   for (...) writer.write(data, bytes);   // in the order of the entries
//   writer.finish();                       // flushed to the disk
//
// Where finish() was not reached, by an error or otherwise, the file is removed.
class ZERO_API SafetensorsWriter {
 public:
  // `path` must not exist. Entries in falling order of itemsize, which keeps every
  // tensor aligned as other readers need it; other orders, and names that come twice
  // or are "__metadata__", are c10::ValueError.
  SafetensorsWriter(
      std::string path,
      std::vector<TensorEntry> entries,
      const Metadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of the current tensor, not more than it still needs; a tensor may
  // come in any number of parts. Written straight from `data`.
  void write(const void* data, int64_t bytes);
  // Flushes and closes; all tensors must be complete.
  void finish();

  // Bytes that the current tensor still needs; 0 when all are complete.
  int64_t missing() const {
    return missing_;
  }
  // XXH64 of each tensor's bytes, by entry; those of complete tensors so far.
  const std::vector<uint64_t>& checksums() const {
    return checksums_;
  }
  // The size of the whole file, known from the start.
  int64_t bytes() const {
    return bytes_;
  }
  const std::string& path() const {
    return path_;
  }

 private:
  void complete_tensors();
  std::string next_name() const;

  std::string path_;
  std::vector<TensorEntry> entries_;
  std::vector<uint64_t> checksums_;
  Checksum sum_;
  int64_t missing_ = 0;
  int64_t held_back_ = 0; // bytes that the disk was not asked to write yet
  int64_t bytes_ = 0;
  bool finished_ = false;
  File file_;
};

// Reads parts of tensors. The header is checked as a whole when the file is opened:
// nothing in it can make a read leave the file, or allocate more than a few times the
// header's size, which is at most 100 MB. Reads are thread-safe.
class ZERO_API SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path, Links links = Links::follow);
  explicit SafetensorsReader(File file);

  // In the order of their bytes.
  const std::vector<StoredTensor>& tensors() const {
    return tensors_;
  }
  const Metadata& metadata() const {
    return metadata_;
  }
  const std::string& path() const {
    return file_.path();
  }
  int64_t bytes() const {
    return bytes_;
  }

  // Null where there is none.
  const StoredTensor* find(const std::string& name) const;
  // The same, but its absence is a c10::ValueError.
  const StoredTensor& at(const std::string& name) const;
  // Elements [first, first + count) to `destination`.
  void read(const std::string& name, int64_t first, int64_t count, void* destination) const;
  // The same, but reads all of the tensor once and returns the XXH64 of its bytes;
  // memory for what is not asked for is a small buffer.
  uint64_t read_and_sum(const std::string& name, int64_t first, int64_t count, void* destination)
      const;
  uint64_t checksum(const std::string& name) const {
    return read_and_sum(name, 0, 0, nullptr);
  }

 private:
  void check_range(const StoredTensor& tensor, int64_t first, int64_t count) const;

  File file_;
  int64_t bytes_ = 0;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
  Metadata metadata_;
};

// ---- the header, internal ----

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors; // offsets from the begin of the data
  Metadata metadata;
};

// Entries one behind the other; padded so that the data starts at a multiple of eight.
// The length included.
std::string format_safetensors_header(
    const std::vector<TensorEntry>& entries,
    const Metadata& metadata);
// Checks JSON, names and dtypes; not yet whether the offsets make sense. The length not
// included.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& path);

} // namespace zero::checkpoint
