#pragma once

// manifest.json: what a checkpoint holds and where. A checkpoint exists when its
// manifest does; the data files beside it hold the pieces that the manifest names:
//
//   DIR/manifest.json
//   DIR/parameters-<generation>-<rank>-<part>.safetensors   parameters and buffers
//   DIR/optimizer-<generation>-<rank>-<part>.safetensors    optimizer state
//
// A piece is a run of a tensor's elements in the tensor's memory order, stored as a
// one-dimensional tensor under the key "name[begin:end]".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include <zero/api.h>

namespace zero::checkpoint {

// What this library writes, and the newest that it reads.
inline constexpr int64_t kManifestVersion = 1;

enum class TensorKind { parameter, buffer, state };
// "parameter", "buffer", "state".
ZERO_API std::string_view kind_name(TensorKind kind);

// Elements [begin, begin + count) of a tensor.
struct Piece {
  int64_t file = 0; // index in Manifest::files
  int64_t begin = 0;
  int64_t count = 0;
  uint64_t checksum = 0; // XXH64 of its bytes
  int64_t end() const {
    return begin + count;
  }
  bool operator==(const Piece&) const = default;
};

struct ManifestTensor {
  std::string name; // of any kind, unique in the manifest
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};
  // Dimensions from the slowest to the fastest in memory; empty: row-major.
  std::vector<int64_t> order = {};
  TensorKind kind = TensorKind::parameter;
  // By begin; they cover the elements without overlap. None where there are none.
  std::vector<Piece> pieces = {};
  int64_t numel() const; // of a checked shape
  bool operator==(const ManifestTensor&) const = default;
};

struct ManifestFile {
  std::string name;
  int64_t bytes = 0;
  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  int64_t version = kManifestVersion;
  std::string library = {}; // "zero 0.1.0"
  std::string torch = {}; // "2.13.0"
  int64_t world_size = 1; // of the run that saved
  int64_t stage = 0;
  std::string generation = {};
  std::vector<ManifestFile> files = {};
  std::vector<ManifestTensor> tensors = {};
  // {name, name of the tensor that it is tied to}
  std::vector<std::pair<std::string, std::string>> tied = {};
  // JSON texts that mean nothing here; kept as they are, digit for digit.
  std::string optimizer = "null";
  std::string scalars = "null";
  std::string extra = "null";

  // Null where there is none; looks at one after the other.
  const ManifestTensor* find(const std::string& name) const;
  bool operator==(const Manifest&) const = default;
};

enum class FileKind { parameters, optimizer };

// The name of a data file and its parts.
struct DataFileName {
  FileKind kind = FileKind::parameters;
  std::string generation; // 8 lower-case hex digits
  int64_t rank = 0;
  int64_t part = 0;
};
ZERO_API std::string to_string(const DataFileName& name);
// Nothing where `name` is no such name, to the letter.
ZERO_API std::optional<DataFileName> parse_data_file_name(std::string_view name);
ZERO_API bool is_generation(std::string_view text);

// "name[begin:end]"
ZERO_API std::string piece_key(const std::string& name, int64_t begin, int64_t count);

// Everything that a reader may rely on: ranges, names, coverage. Throws c10::ValueError
// that starts with `where` (a path) and names the field or the tensor. Sorts pieces.
ZERO_API void validate(Manifest& manifest, const std::string& where);

// The text ends with a checksum of itself. Throws c10::ValueError where the manifest is
// not valid, which includes opaque texts that are not JSON.
ZERO_API std::string to_json(Manifest manifest);
// Throws c10::ValueError on anything that to_json could not have written.
ZERO_API Manifest manifest_from_json(std::string_view text, const std::string& where);

// Adds the checksum to a JSON object without one, which ends in "}". Internal.
ZERO_API std::string seal(std::string text);

} // namespace zero::checkpoint
