#pragma once

// What one rank writes of one kind: its pieces of many tensors, streamed into as many
// files as a part's size asks for, and what the manifest has to know of them.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include <zero/api.h>
#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/manifest.h>
#include <zero/checkpoint/safetensors.h>

namespace zero::checkpoint {

// Bytes of data in a file, its header apart.
inline constexpr int64_t kPartBytes = int64_t{4} << 30;

// Elements [begin, begin + count) of a tensor in its memory order.
struct OwnPiece {
  std::string tensor;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t begin = 0;
  int64_t count = 0;
};

struct WrittenPiece {
  std::string tensor;
  int64_t begin = 0;
  int64_t count = 0;
  uint64_t checksum = 0;
  bool operator==(const WrittenPiece&) const = default;
};

struct WrittenFile {
  std::string name; // in the directory
  int64_t bytes = 0;
  std::vector<WrittenPiece> pieces = {};
  bool operator==(const WrittenFile&) const = default;
};

// The pieces as they go into files of at most `part_bytes`, in their order: cut where a
// file is full. Those of no elements are left out. At least one element fits.
ZERO_API std::vector<std::vector<OwnPiece>> cut_into_parts(
    const std::vector<OwnPiece>& pieces,
    int64_t part_bytes);

struct PartTarget {
  FileKind kind = FileKind::parameters;
  int64_t rank = 0;
  int64_t part_bytes = kPartBytes;
};

// Not thread-safe, and within the life of `directory`. Files that finish() has not
// finished are removed with the object. Without pieces it writes no file.
class ZERO_API PartWriter {
 public:
  // Pieces in the order of written_before().
  PartWriter(
      const SaveDirectory& directory,
      const PartTarget& target,
      const std::vector<OwnPiece>& pieces);

  // The next bytes of the pieces, one behind the other, in any portions; written from
  // where they lie. A c10::ValueError where they are more than is left.
  void write(const void* data, int64_t bytes);
  // Flushes all files to the disk. A c10::ValueError where bytes are missing.
  std::vector<WrittenFile> finish();

 private:
  void open_next();

  const SaveDirectory& directory_;
  PartTarget target_;
  std::vector<std::vector<OwnPiece>> parts_;
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;
  int64_t missing_ = 0; // bytes of the last writer
};

// By falling itemsize: for a stable sort.
ZERO_API bool written_before(const OwnPiece& a, const OwnPiece& b);

// Adds files and their pieces to a manifest that has the tensors already. A
// c10::ValueError where one of them is not there.
ZERO_API void add_files(Manifest& manifest, const std::vector<WrittenFile>& files);

// For the rank that writes the manifest: as JSON, and back. Throws c10::ValueError on
// anything else.
ZERO_API std::string to_json(const std::vector<WrittenFile>& files);
ZERO_API std::vector<WrittenFile> written_files_from_json(std::string_view text);

} // namespace zero::checkpoint
