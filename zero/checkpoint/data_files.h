#pragma once

// The data files of one checkpoint, opened as they are needed: carries out plans, and
// verifies checksums. No file outside the directory is opened, also not through a link.

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <zero/api.h>
#include <zero/checkpoint/manifest.h>
#include <zero/checkpoint/plan.h>
#include <zero/checkpoint/safetensors.h>

namespace zero::checkpoint {

// Whether a read compares checksums. With `pieces`, the first read from a piece reads all
// of it, which is more than was asked for where a piece is only needed in part; later ones
// read what they need. With `none`, damage of the data goes unnoticed.
enum class Check { pieces, none };

// Not thread-safe; it is kept by one reader, which refers to the manifest.
class ZERO_API DataFiles {
 public:
  DataFiles(const std::string& directory, const Manifest& manifest, Check check = Check::pieces);

  // Elements `wanted` of a tensor to `destination`, which has dimensions in `order`
  // (empty: row-major): as plan_reads() says. Takes memory of the whole tensor only
  // where the orders differ. Missing, cut off and damaged files are errors that name
  // the file and the piece.
  void read(
      const ManifestTensor& tensor,
      layout::Range wanted,
      const std::vector<int64_t>& order,
      void* destination);
  // One read of a plan; `begin` is where the plan's elements begin.
  void read(const ManifestTensor& tensor, const PieceRead& read, void* begin);

  // All elements in the tensor's own memory order, at most `block` at once, each read
  // once. Of a piece that is damaged, `take` has had the elements when this throws.
  void stream(
      const ManifestTensor& tensor,
      int64_t block,
      const std::function<void(const void* data, int64_t count)>& take);

  // Reads a piece and compares.
  void verify(const ManifestTensor& tensor, const Piece& piece);

  // Opens a file and checks its header and its size; good until the next call.
  const SafetensorsReader& open(int64_t file);

 private:
  const SafetensorsReader&
  holding(const ManifestTensor& tensor, const Piece& piece, const std::string& key);
  void read_checked(
      const ManifestTensor& tensor,
      const Piece& piece,
      const PieceRead& read,
      void* destination);

  File directory_;
  const Manifest& manifest_;
  Check check_;
  std::map<int64_t, SafetensorsReader> open_;
  std::set<std::pair<int64_t, std::string>> checked_; // by file and key
};

struct Problem {
  std::string file; // its name in the directory
  std::string text;
};

// Reads everything: the size of each file, the checksum of each piece. Problems in the
// order of the files, one for each piece that is damaged; none when all is well. A file
// that is missing is one problem.
ZERO_API std::vector<Problem> verify(const std::string& directory, const Manifest& manifest);

} // namespace zero::checkpoint
