#include <zero/checkpoint/data_files.h>

#include <algorithm>
#include <utility>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

// A reader of a plan, which is sorted by file, needs few at a time.
constexpr size_t kMostOpen = 32;

void compare(const std::string& path, const std::string& key, uint64_t found, uint64_t expected) {
  TORCH_CHECK_VALUE(
      found == expected,
      "[zero.checkpoint] '",
      path,
      "': '",
      key,
      "' is damaged: its checksum is ",
      checksum_text(found),
      ", expected ",
      checksum_text(expected));
}

} // namespace

DataFiles::DataFiles(const std::string& directory, const Manifest& manifest, Check check)
    : directory_(open_directory(directory)), manifest_(manifest), check_(check) {}

const SafetensorsReader& DataFiles::open(int64_t file) {
  if (const auto found = open_.find(file); found != open_.end()) {
    return found->second;
  }
  const ManifestFile& expected = manifest_.files.at(file);
  File data = open_file(directory_, expected.name);
  const int64_t bytes = data.bytes();
  TORCH_CHECK_VALUE(
      bytes == expected.bytes,
      "[zero.checkpoint] '",
      data.path(),
      "' was cut off or replaced: expected ",
      expected.bytes,
      " bytes, got ",
      bytes);
  if (open_.size() >= kMostOpen) {
    open_.clear();
  }
  return open_.emplace(file, SafetensorsReader(std::move(data))).first->second;
}

// The reader of the piece's file, when what it has under `key` is that piece.
const SafetensorsReader&
DataFiles::holding(const ManifestTensor& tensor, const Piece& piece, const std::string& key) {
  const SafetensorsReader& reader = open(piece.file);
  const StoredTensor& stored = reader.at(key);
  TORCH_CHECK_VALUE(
      stored.dtype == tensor.dtype && stored.shape == std::vector<int64_t>{piece.count},
      "[zero.checkpoint] '",
      reader.path(),
      "': expected '",
      key,
      "' to be ",
      piece.count,
      " elements of ",
      tensor.dtype,
      ", got shape ",
      c10::IntArrayRef(stored.shape),
      " of ",
      stored.dtype);
  return reader;
}

void DataFiles::read_checked(
    const ManifestTensor& tensor,
    const Piece& piece,
    const PieceRead& read,
    void* destination) {
  const SafetensorsReader& reader = holding(tensor, piece, read.key);
  const uint64_t found = reader.read_and_sum(read.key, read.offset, read.count, destination);
  compare(reader.path(), read.key, found, piece.checksum);
  checked_.emplace(piece.file, read.key);
}

void DataFiles::read(const ManifestTensor& tensor, const PieceRead& read, void* begin) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const Piece& piece = tensor.pieces.at(read.piece);
  char* destination = static_cast<char*>(begin) + read.destination * itemsize;
  if (check_ == Check::pieces && !checked_.contains({piece.file, read.key})) {
    read_checked(tensor, piece, read, destination);
  } else {
    holding(tensor, piece, read.key).read(read.key, read.offset, read.count, destination);
  }
}

void DataFiles::read(
    const ManifestTensor& tensor,
    layout::Range wanted,
    const std::vector<int64_t>& order,
    void* destination) {
  const ReadPlan plan = plan_reads(tensor, wanted, order);
  std::vector<char> buffer;
  if (plan.whole) {
    buffer.resize(tensor.numel() * c10::elementSize(tensor.dtype));
  }
  for (const PieceRead& part : plan.reads) {
    read(tensor, part, plan.whole ? buffer.data() : destination);
  }
  if (plan.whole) {
    permute_elements(plan.reordering, buffer.data(), wanted, destination);
  }
}

void DataFiles::stream(
    const ManifestTensor& tensor,
    int64_t block,
    const std::function<void(const void* data, int64_t count)>& take) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  std::vector<char> buffer(std::min(block, tensor.numel()) * itemsize);
  for (const Piece& piece : tensor.pieces) {
    const std::string key = piece_key(tensor.name, piece.begin, piece.count);
    const SafetensorsReader& reader = holding(tensor, piece, key);
    Checksum sum;
    for (int64_t done = 0; done < piece.count;) {
      const int64_t count = std::min(block, piece.count - done);
      reader.read(key, done, count, buffer.data());
      if (check_ == Check::pieces) {
        sum.update(buffer.data(), count * itemsize);
      }
      take(buffer.data(), count);
      done += count;
    }
    if (check_ == Check::pieces) {
      compare(reader.path(), key, sum.value(), piece.checksum);
    }
  }
}

void DataFiles::verify(const ManifestTensor& tensor, const Piece& piece) {
  const PieceRead nothing{.key = piece_key(tensor.name, piece.begin, piece.count)};
  read_checked(tensor, piece, nothing, nullptr);
}

std::vector<Problem> verify(const std::string& directory, const Manifest& manifest) {
  std::vector<std::vector<std::pair<const ManifestTensor*, const Piece*>>> by_file(
      manifest.files.size());
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const Piece& piece : tensor.pieces) {
      by_file[piece.file].emplace_back(&tensor, &piece);
    }
  }
  std::vector<Problem> problems;
  DataFiles files(directory, manifest);
  const auto note = [&](size_t file, const auto& check) {
    try {
      check();
      return true;
    } catch (const c10::Error& error) {
      problems.push_back({manifest.files[file].name, error.what_without_backtrace()});
      return false;
    }
  };
  for (size_t i = 0; i < by_file.size(); ++i) {
    if (!note(i, [&] { files.open(static_cast<int64_t>(i)); })) {
      continue;
    }
    for (const auto& [tensor, piece] : by_file[i]) {
      note(i, [&, tensor = tensor, piece = piece] { files.verify(*tensor, *piece); });
    }
  }
  return problems;
}

} // namespace zero::checkpoint
