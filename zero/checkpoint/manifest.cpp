#include <zero/checkpoint/manifest.h>

#include <algorithm>
#include <unordered_set>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <zero/checkpoint/dtypes.h>

namespace zero::checkpoint {

namespace {

constexpr std::string_view kParameters = "parameters-";
constexpr std::string_view kOptimizer = "optimizer-";
constexpr std::string_view kDataSuffix = ".safetensors";
constexpr size_t kMostDigits = 18; // an int64_t holds them

// Takes decimal digits without leading zeros off the front.
bool take_number(std::string_view* text, int64_t* number) {
  const size_t digits = std::min(text->find_first_not_of("0123456789"), text->size());
  if (digits == 0 || digits > kMostDigits || (digits > 1 && text->front() == '0')) {
    return false;
  }
  *number = 0;
  for (const char digit : text->substr(0, digits)) {
    *number = *number * 10 + (digit - '0');
  }
  text->remove_prefix(digits);
  return true;
}

bool take(std::string_view* text, std::string_view prefix) {
  const bool found = text->substr(0, prefix.size()) == prefix;
  text->remove_prefix(found ? prefix.size() : 0);
  return found;
}

template <typename... Parts>
void check(bool right, const std::string& where, const Parts&... parts) {
  TORCH_CHECK_VALUE(right, "[zero.checkpoint] ", where, ": ", parts...);
}

void check_files(const Manifest& manifest, const std::string& where) {
  std::unordered_set<std::string_view> names;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    const auto parsed = parse_data_file_name(file.name);
    check(
        parsed && parsed->generation == manifest.generation,
        where,
        "files[",
        i,
        "].name: expected parameters-",
        manifest.generation,
        "-<rank>-<part>.safetensors or the same with optimizer-, got '",
        file.name,
        "'");
    check(file.bytes >= 0, where, "files[", i, "].bytes is ", file.bytes);
    check(
        names.insert(file.name).second,
        where,
        "files[",
        i,
        "].name '",
        file.name,
        "' stands twice");
  }
}

void check_order(const ManifestTensor& tensor, const std::string& at) {
  if (tensor.order.empty()) {
    return;
  }
  const auto dims = static_cast<int64_t>(tensor.shape.size());
  std::vector<int64_t> sorted = tensor.order;
  std::sort(sorted.begin(), sorted.end());
  bool right = sorted.size() == tensor.shape.size();
  for (int64_t i = 0; right && i < dims; ++i) {
    right = sorted[i] == i;
  }
  check(
      right,
      at,
      "order ",
      c10::IntArrayRef(tensor.order),
      " is no permutation of its ",
      dims,
      " dimensions");
}

void check_pieces(const Manifest& manifest, ManifestTensor& tensor, const std::string& at) {
  const int64_t numel = tensor.numel();
  const auto files = static_cast<int64_t>(manifest.files.size());
  std::sort(tensor.pieces.begin(), tensor.pieces.end(), [](const Piece& a, const Piece& b) {
    return a.begin < b.begin;
  });
  int64_t end = 0;
  for (const Piece& piece : tensor.pieces) {
    check(
        piece.file >= 0 && piece.file < files,
        at,
        "a piece is in file ",
        piece.file,
        ", there are ",
        files);
    check(
        piece.begin >= 0 && piece.count > 0 && piece.begin <= numel &&
            piece.count <= numel - piece.begin,
        at,
        "a piece of ",
        piece.count,
        " elements from ",
        piece.begin,
        " is not within its ",
        numel,
        " elements");
    check(piece.begin >= end, at, "pieces overlap at element ", piece.begin);
    check(piece.begin == end, at, "no piece has elements ", end, " to ", piece.begin);
    const std::string& file = manifest.files[piece.file].name;
    check(
        (tensor.kind == TensorKind::state) ==
            (parse_data_file_name(file)->kind == FileKind::optimizer),
        at,
        "a ",
        kind_name(tensor.kind),
        " can't be in '",
        file,
        "'");
    end = piece.end();
  }
  check(end == numel, at, "no piece has elements ", end, " to ", numel);
}

void check_tied(
    const Manifest& manifest,
    const std::unordered_set<std::string_view>& names,
    const std::string& where) {
  std::unordered_set<std::string_view> tied;
  for (const auto& [name, same_as] : manifest.tied) {
    check(
        !names.contains(name) && tied.insert(name).second,
        where,
        "tied: the name '",
        name,
        "' stands twice");
    check(
        names.contains(same_as),
        where,
        "tied: '",
        name,
        "' is tied to '",
        same_as,
        "', which is not there");
  }
}

} // namespace

std::string_view kind_name(TensorKind kind) {
  switch (kind) {
  case TensorKind::parameter:
    return "parameter";
  case TensorKind::buffer:
    return "buffer";
  case TensorKind::state:
    return "state";
  }
  return "";
}

int64_t ManifestTensor::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    numel *= size;
  }
  return numel;
}

const ManifestTensor* Manifest::find(const std::string& name) const {
  const auto found = std::find_if(
      tensors.begin(), tensors.end(), [&](const auto& tensor) { return tensor.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::string to_string(const DataFileName& name) {
  const bool optimizer = name.kind == FileKind::optimizer;
  return std::string(optimizer ? kOptimizer : kParameters) + name.generation + "-" +
      std::to_string(name.rank) + "-" + std::to_string(name.part) + std::string(kDataSuffix);
}

bool is_generation(std::string_view text) {
  return text.size() == 8 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<DataFileName> parse_data_file_name(std::string_view name) {
  DataFileName parsed;
  if (take(&name, kOptimizer)) {
    parsed.kind = FileKind::optimizer;
  } else if (!take(&name, kParameters)) {
    return std::nullopt;
  }
  parsed.generation = name.substr(0, 8);
  if (!is_generation(parsed.generation)) {
    return std::nullopt;
  }
  name.remove_prefix(8);
  if (!take(&name, "-") || !take_number(&name, &parsed.rank) || !take(&name, "-") ||
      !take_number(&name, &parsed.part) || name != kDataSuffix) {
    return std::nullopt;
  }
  return parsed;
}

std::string piece_key(const std::string& name, int64_t begin, int64_t count) {
  return name + "[" + std::to_string(begin) + ":" + std::to_string(begin + count) + "]";
}

void validate(Manifest& manifest, const std::string& where) {
  check(
      manifest.version == kManifestVersion,
      where,
      "version: expected ",
      kManifestVersion,
      ", got ",
      manifest.version,
      manifest.version > kManifestVersion ? "; a newer zero has saved it, which can read it" : "");
  check(
      manifest.world_size > 0, where, "world_size: expected 1 or more, got ", manifest.world_size);
  check(
      manifest.stage >= 0 && manifest.stage <= 3,
      where,
      "stage: expected 0, 1, 2 or 3, got ",
      manifest.stage);
  check(
      is_generation(manifest.generation),
      where,
      "generation: expected 8 lower-case hex digits, got '",
      manifest.generation,
      "'");
  check_files(manifest, where);

  std::unordered_set<std::string_view> names;
  for (ManifestTensor& tensor : manifest.tensors) {
    const std::string at = where + ": tensor '" + tensor.name + "'";
    check(!tensor.name.empty(), where, "a tensor has no name");
    check(names.insert(tensor.name).second, at, "the name stands twice");
    dtype_name(tensor.dtype, tensor.name);
    const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    check(
        checked_numel(tensor.shape, itemsize).has_value(),
        at,
        "shape ",
        c10::IntArrayRef(tensor.shape),
        " is negative or too large");
    check_order(tensor, at);
    check_pieces(manifest, tensor, at);
  }
  check_tied(manifest, names, where);
}

} // namespace zero::checkpoint
