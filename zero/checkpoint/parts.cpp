#include <zero/checkpoint/parts.h>

#include <algorithm>
#include <unordered_map>

#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

int64_t itemsize_of(const OwnPiece& piece) {
  return static_cast<int64_t>(c10::elementSize(piece.dtype));
}

} // namespace

std::vector<std::vector<OwnPiece>> cut_into_parts(
    const std::vector<OwnPiece>& pieces,
    int64_t part_bytes) {
  std::vector<std::vector<OwnPiece>> parts;
  int64_t left = 0; // bytes of the last part
  for (OwnPiece piece : pieces) {
    TORCH_CHECK_VALUE(
        piece.begin >= 0 && piece.count >= 0,
        "[zero.checkpoint] expected a range of '",
        piece.tensor,
        "', got ",
        piece.count,
        " elements from ",
        piece.begin);
    const int64_t itemsize = itemsize_of(piece);
    while (piece.count > 0) {
      if (left < itemsize) {
        parts.emplace_back();
        left = std::max(part_bytes, itemsize);
      }
      OwnPiece fitting = piece;
      fitting.count = std::min(piece.count, left / itemsize);
      piece.begin += fitting.count;
      piece.count -= fitting.count;
      left -= fitting.count * itemsize;
      parts.back().push_back(std::move(fitting));
    }
  }
  return parts;
}

PartWriter::PartWriter(
    const SaveDirectory& directory,
    const PartTarget& target,
    const std::vector<OwnPiece>& pieces)
    : directory_(directory), target_(target), parts_(cut_into_parts(pieces, target.part_bytes)) {}

void PartWriter::open_next() {
  const auto part = static_cast<int64_t>(writers_.size());
  std::vector<TensorEntry> entries;
  missing_ = 0;
  for (const OwnPiece& piece : parts_[part]) {
    entries.push_back(
        {piece_key(piece.tensor, piece.begin, piece.count), piece.dtype, {piece.count}});
    missing_ += piece.count * itemsize_of(piece);
  }
  const std::string path = directory_.file_path(target_.kind, target_.rank, part);
  writers_.push_back(std::make_unique<SafetensorsWriter>(path, std::move(entries)));
}

void PartWriter::write(const void* data, int64_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    if (missing_ == 0) {
      TORCH_CHECK_VALUE(
          writers_.size() < parts_.size(),
          "[zero.checkpoint] rank ",
          target_.rank,
          ": ",
          bytes,
          " bytes more than its pieces have");
      open_next();
    }
    // A writer takes one tensor's bytes at a time.
    const int64_t part = std::min(bytes, writers_.back()->missing());
    writers_.back()->write(next, part);
    next += part;
    bytes -= part;
    missing_ -= part;
  }
}

std::vector<WrittenFile> PartWriter::finish() {
  TORCH_CHECK_VALUE(
      missing_ == 0 && writers_.size() == parts_.size(),
      "[zero.checkpoint] rank ",
      target_.rank,
      ": bytes of its pieces are missing, of '",
      missing_ == 0 ? parts_[writers_.size()][0].tensor : parts_[writers_.size() - 1].back().tensor,
      "' at the least");
  std::vector<WrittenFile> files;
  for (size_t i = 0; i < writers_.size(); ++i) {
    SafetensorsWriter& writer = *writers_[i];
    writer.finish();
    const std::string& path = writer.path();
    WrittenFile file{.name = path.substr(path.find_last_of('/') + 1), .bytes = writer.bytes()};
    for (size_t p = 0; p < parts_[i].size(); ++p) {
      const OwnPiece& piece = parts_[i][p];
      file.pieces.push_back({piece.tensor, piece.begin, piece.count, writer.checksums()[p]});
    }
    files.push_back(std::move(file));
  }
  return files;
}

bool written_before(const OwnPiece& a, const OwnPiece& b) {
  return itemsize_of(a) > itemsize_of(b);
}

void add_files(Manifest& manifest, const std::vector<WrittenFile>& files) {
  std::unordered_map<std::string_view, ManifestTensor*> tensors;
  for (ManifestTensor& tensor : manifest.tensors) {
    tensors.emplace(tensor.name, &tensor);
  }
  for (const WrittenFile& file : files) {
    const auto index = static_cast<int64_t>(manifest.files.size());
    manifest.files.push_back({file.name, file.bytes});
    for (const WrittenPiece& piece : file.pieces) {
      const auto found = tensors.find(piece.tensor);
      TORCH_CHECK_VALUE(
          found != tensors.end(),
          "[zero.checkpoint] '",
          file.name,
          "' holds a piece of '",
          piece.tensor,
          "', which the manifest does not have");
      found->second->pieces.push_back({index, piece.begin, piece.count, piece.checksum});
    }
  }
}

} // namespace zero::checkpoint
