#include <zero/checkpoint/safetensors.h>

#include <algorithm>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <zero/checkpoint/dtypes.h>

namespace zero::checkpoint {

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kLargestHeader = 100'000'000;
constexpr int64_t kBuffer = int64_t{1} << 20;

// The header's text, after what it costs was checked.
std::string read_header(const File& file, int64_t file_bytes) {
  TORCH_CHECK_VALUE(
      file_bytes >= kLengthBytes,
      "[zero.checkpoint] '",
      file.path(),
      "' is no safetensors file, or was cut off: it has ",
      file_bytes,
      " bytes");
  unsigned char bytes[kLengthBytes];
  file.read(0, bytes, kLengthBytes);
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | bytes[i];
  }
  TORCH_CHECK_VALUE(
      length <= static_cast<uint64_t>(std::min(kLargestHeader, file_bytes - kLengthBytes)),
      "[zero.checkpoint] '",
      file.path(),
      "' is no safetensors file, or was cut off: a header of ",
      length,
      " bytes does not fit into ",
      file_bytes,
      " bytes (and at most ",
      kLargestHeader,
      " are allowed)");
  std::string text(length, '\0');
  file.read(kLengthBytes, text.data(), static_cast<int64_t>(length));
  return text;
}

// Every tensor has the size that its shape says, and they lie one behind the other.
void check_places(std::vector<StoredTensor>& tensors, int64_t data_bytes, const std::string& path) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (StoredTensor& tensor : tensors) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const auto numel = checked_numel(tensor.shape, itemsize);
    TORCH_CHECK_VALUE(
        numel && tensor.end >= tensor.begin && tensor.end - tensor.begin == *numel * itemsize,
        "[zero.checkpoint] '",
        path,
        "' is damaged: bytes [",
        tensor.begin,
        ", ",
        tensor.end,
        ") of '",
        tensor.name,
        "' are not what its shape ",
        c10::IntArrayRef(tensor.shape),
        " of ",
        tensor.dtype,
        " takes");
    TORCH_CHECK_VALUE(
        tensor.begin == end,
        "[zero.checkpoint] '",
        path,
        "' is damaged: '",
        tensor.name,
        "' starts at byte ",
        tensor.begin,
        " of the data, expected ",
        end,
        ": tensors overlap, or there is a gap");
    tensor.numel = *numel;
    end = tensor.end;
  }
  TORCH_CHECK_VALUE(
      end == data_bytes,
      "[zero.checkpoint] '",
      path,
      "' is damaged or was cut off: its tensors take ",
      end,
      " bytes, it has ",
      data_bytes);
}

} // namespace

SafetensorsReader::SafetensorsReader(const std::string& path, Links links)
    : SafetensorsReader(open_file(path, links)) {}

SafetensorsReader::SafetensorsReader(File file) : file_(std::move(file)), bytes_(file_.bytes()) {
  const std::string text = read_header(file_, bytes_);
  SafetensorsHeader header = parse_safetensors_header(text, path());
  const int64_t data = kLengthBytes + static_cast<int64_t>(text.size());
  check_places(header.tensors, bytes_ - data, path());
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
  by_name_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].begin += data;
    tensors_[i].end += data;
    by_name_.emplace(tensors_[i].name, i);
  }
}

const StoredTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& SafetensorsReader::at(const std::string& name) const {
  const StoredTensor* tensor = find(name);
  TORCH_CHECK_VALUE(
      tensor != nullptr, "[zero.checkpoint] '", path(), "' has no tensor '", name, "'");
  return *tensor;
}

void SafetensorsReader::check_range(const StoredTensor& tensor, int64_t first, int64_t count)
    const {
  TORCH_CHECK_VALUE(
      first >= 0 && count >= 0 && first <= tensor.numel && count <= tensor.numel - first,
      "[zero.checkpoint] '",
      path(),
      "': expected a range of the ",
      tensor.numel,
      " elements of '",
      tensor.name,
      "', got ",
      count,
      " from ",
      first);
}

void SafetensorsReader::read(
    const std::string& name,
    int64_t first,
    int64_t count,
    void* destination) const {
  const StoredTensor& tensor = at(name);
  check_range(tensor, first, count);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  file_.read(tensor.begin + first * itemsize, destination, count * itemsize);
}

uint64_t SafetensorsReader::read_and_sum(
    const std::string& name,
    int64_t first,
    int64_t count,
    void* destination) const {
  const StoredTensor& tensor = at(name);
  check_range(tensor, first, count);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t begin = tensor.begin + first * itemsize;
  const int64_t end = begin + count * itemsize;
  auto* kept = static_cast<char*>(destination);
  std::vector<char> buffer(std::min(kBuffer, tensor.end - tensor.begin - (end - begin)));
  Checksum sum;
  for (int64_t at = tensor.begin; at < tensor.end;) {
    const bool wanted = at >= begin && at < end;
    const int64_t stop = wanted ? end : at < begin ? begin : tensor.end;
    const int64_t part = std::min(kBuffer, stop - at);
    char* bytes = wanted ? kept + (at - begin) : buffer.data();
    file_.read(at, bytes, part);
    sum.update(bytes, part);
    at += part;
  }
  return sum.value();
}

} // namespace zero::checkpoint
