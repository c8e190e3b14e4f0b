#include <zero/checkpoint/manifest.h>

#include <set>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <zero/checkpoint/checksum.h>
#include <zero/checkpoint/dtypes.h>
#include <zero/checkpoint/json_text.h>

namespace zero::checkpoint {

namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "zero-checkpoint";
// The last line but one, and what comes after its 16 digits.
constexpr std::string_view kSeal = ",\n\"checksum\": \"";
constexpr std::string_view kEnd = "\"\n}\n";
constexpr size_t kDigits = 16;

// A JSON object that is read field by field: no field may be missing, of another type,
// or left over. Errors name the file and the field.
class Fields {
 public:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    expect(json.is_object(), "an object", json);
  }

  bool has(const char* name) const {
    return json_.contains(name);
  }
  const Json& field(const char* name) {
    const auto found = json_.find(name);
    TORCH_CHECK_VALUE(
        found != json_.end(), "[zero.checkpoint] ", where_, ": field '", name, "' is missing");
    used_.insert(name);
    return *found;
  }
  int64_t integer(const char* name) {
    return integer(field(name), name);
  }
  std::string text(const char* name) {
    return text(field(name), name);
  }
  const Json& list(const char* name) {
    const Json& value = field(name);
    expect(value.is_array(), "a list", value, name);
    return value;
  }
  std::vector<int64_t> integers(const char* name) {
    std::vector<int64_t> numbers;
    for (const Json& number : list(name)) {
      numbers.push_back(integer(number, name));
    }
    return numbers;
  }
  // Nothing that was not asked for.
  void done() const {
    for (const auto& [name, value] : json_.items()) {
      TORCH_CHECK_VALUE(
          used_.contains(name), "[zero.checkpoint] ", where_, ": field '", name, "' is not known");
    }
  }

  int64_t integer(const Json& value, const char* name) const {
    expect(
        value.is_number_integer() &&
            (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX),
        "an integer",
        value,
        name);
    return value.get<int64_t>();
  }
  std::string text(const Json& value, const char* name) const {
    expect(value.is_string(), "a string", value, name);
    return value.get<std::string>();
  }
  void expect(bool right, const char* what, const Json& got, const char* name = nullptr) const {
    if (!right) {
      TORCH_CHECK_VALUE(
          false,
          "[zero.checkpoint] ",
          where_,
          name ? std::string(": field '") + name + "'" : "",
          ": expected ",
          what,
          ", got ",
          got.dump().substr(0, 80));
    }
  }
  const std::string& where() const {
    return where_;
  }

 private:
  const Json& json_;
  std::string where_;
  std::set<std::string> used_;
};

TensorKind kind_named(const std::string& name, const std::string& where) {
  for (const auto kind : {TensorKind::parameter, TensorKind::buffer, TensorKind::state}) {
    if (kind_name(kind) == name) {
      return kind;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "[zero.checkpoint] ",
      where,
      ": field 'kind': expected parameter, buffer or state, got '",
      name,
      "'");
}

Piece piece_from(const Fields& tensor, const Json& json) {
  tensor.expect(
      json.is_array() && json.size() == 4, "[file, begin, count, checksum]", json, "pieces");
  Piece piece;
  piece.file = tensor.integer(json[0], "pieces");
  piece.begin = tensor.integer(json[1], "pieces");
  piece.count = tensor.integer(json[2], "pieces");
  tensor.expect(
      parse_checksum(tensor.text(json[3], "pieces"), &piece.checksum),
      "a checksum of 16 lower-case hex digits",
      json[3],
      "pieces");
  return piece;
}

ManifestTensor tensor_from(const Json& json, const std::string& where) {
  ManifestTensor tensor;
  tensor.name = Fields(json, where + ": tensors").text("name");
  Fields fields(json, where + ": tensor '" + tensor.name + "'");
  fields.field("name");
  const auto dtype = dtype_named(fields.text("dtype"));
  fields.expect(dtype.has_value(), "a dtype", json["dtype"], "dtype");
  tensor.dtype = *dtype;
  tensor.shape = fields.integers("shape");
  if (fields.has("order")) {
    tensor.order = fields.integers("order");
  }
  tensor.kind = kind_named(fields.text("kind"), fields.where());
  for (const Json& piece : fields.list("pieces")) {
    tensor.pieces.push_back(piece_from(fields, piece));
  }
  fields.done();
  return tensor;
}

std::string list_text(const std::vector<int64_t>& numbers) {
  return Json(numbers).dump();
}

std::string tensor_text(const ManifestTensor& tensor) {
  std::string text = "{\"name\": " + json_string(tensor.name) + ", \"kind\": \"";
  text += kind_name(tensor.kind);
  text += "\", \"dtype\": \"";
  text += dtype_name(tensor.dtype, tensor.name);
  text += "\", \"shape\": " + list_text(tensor.shape);
  if (!tensor.order.empty()) {
    text += ", \"order\": " + list_text(tensor.order);
  }
  text += ", \"pieces\": [";
  for (const Piece& piece : tensor.pieces) {
    text += text.back() == '[' ? "[" : ", [";
    text += std::to_string(piece.file) + "," + std::to_string(piece.begin) + "," +
        std::to_string(piece.count) + ",\"" + checksum_text(piece.checksum) + "\"]";
  }
  return text + "]}";
}

// One line for each element.
template <typename List, typename Text>
std::string lines(const List& list, Text text) {
  std::string joined = "[";
  for (const auto& element : list) {
    joined += joined.size() > 1 ? ",\n  " : "\n  ";
    joined += text(element);
  }
  return joined + "]";
}

void check_seal(std::string_view text, const std::string& where) {
  const size_t tail = kSeal.size() + kDigits + kEnd.size();
  uint64_t stated = 0;
  const bool sealed = text.size() > tail &&
      text.substr(text.size() - tail, kSeal.size()) == kSeal &&
      text.substr(text.size() - kEnd.size()) == kEnd &&
      parse_checksum(text.substr(text.size() - kEnd.size() - kDigits, kDigits), &stated);
  TORCH_CHECK_VALUE(
      sealed,
      "[zero.checkpoint] ",
      where,
      ": expected a manifest that ends with its checksum; it was cut off, or changed by hand");
  const uint64_t found =
      checksum(text.data(), static_cast<int64_t>(text.size() - kEnd.size() - kDigits));
  TORCH_CHECK_VALUE(
      found == stated,
      "[zero.checkpoint] ",
      where,
      ": its checksum is ",
      checksum_text(found),
      ", expected ",
      checksum_text(stated),
      "; it is damaged, or was changed by hand");
}

void read_fields(const Json& json, std::string_view text, Manifest& manifest, std::string where) {
  Fields fields(json, where);
  fields.field("format");
  manifest.version = fields.integer("version");
  manifest.library = fields.text("library");
  manifest.torch = fields.text("torch");
  manifest.world_size = fields.integer("world_size");
  manifest.stage = fields.integer("stage");
  manifest.generation = fields.text("generation");
  for (const Json& element : fields.list("files")) {
    Fields file(element, where + ": files");
    manifest.files.push_back({file.text("name"), file.integer("bytes")});
    file.done();
  }
  for (const Json& element : fields.list("tensors")) {
    manifest.tensors.push_back(tensor_from(element, where));
  }
  for (const Json& element : fields.list("tied")) {
    fields.expect(element.is_array() && element.size() == 2, "[name, tied to]", element, "tied");
    manifest.tied.emplace_back(fields.text(element[0], "tied"), fields.text(element[1], "tied"));
  }
  for (auto [name, value] :
       {std::pair("optimizer", &manifest.optimizer),
        {"scalars", &manifest.scalars},
        {"extra", &manifest.extra}}) {
    fields.field(name);
    *value = member_text(text, name);
    fields.expect(!value->empty(), "its name unescaped", Json(name), name);
  }
  fields.field("checksum");
  fields.done();
}

} // namespace

std::string seal(std::string text) {
  text.erase(text.find_last_of('}'));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  text += kSeal;
  text += checksum_text(checksum(text.data(), static_cast<int64_t>(text.size())));
  text += kEnd;
  return text;
}

std::string to_json(Manifest manifest) {
  validate(manifest, "the manifest");
  for (const auto& [name, text] :
       {std::pair("optimizer", &manifest.optimizer),
        {"scalars", &manifest.scalars},
        {"extra", &manifest.extra}}) {
    check_json(*text, std::string("'") + name + "' of the manifest");
  }
  std::string text = "{\"format\": " + json_string(std::string(kFormat));
  text += ",\n\"version\": " + std::to_string(manifest.version);
  text += ",\n\"library\": " + json_string(manifest.library);
  text += ",\n\"torch\": " + json_string(manifest.torch);
  text += ",\n\"world_size\": " + std::to_string(manifest.world_size);
  text += ",\n\"stage\": " + std::to_string(manifest.stage);
  text += ",\n\"generation\": " + json_string(manifest.generation);
  text += ",\n\"files\": " + lines(manifest.files, [](const ManifestFile& file) {
            return "{\"name\": " + json_string(file.name) +
                ", \"bytes\": " + std::to_string(file.bytes) + "}";
          });
  text += ",\n\"tensors\": " + lines(manifest.tensors, tensor_text);
  text += ",\n\"tied\": " + lines(manifest.tied, [](const auto& pair) {
            return "[" + json_string(pair.first) + ", " + json_string(pair.second) + "]";
          });
  text += ",\n\"optimizer\": " + manifest.optimizer;
  text += ",\n\"scalars\": " + manifest.scalars;
  text += ",\n\"extra\": " + manifest.extra;
  return seal(text + "}");
}

Manifest manifest_from_json(std::string_view text, const std::string& where) {
  check_json(text, where);
  Manifest manifest;
  try {
    const Json json = Json::parse(text.begin(), text.end());
    const auto format = json.is_object() ? json.find("format") : json.end();
    TORCH_CHECK_VALUE(
        format != json.end() && *format == kFormat,
        "[zero.checkpoint] ",
        where,
        ": expected a manifest with \"format\": \"",
        kFormat,
        "\", got other JSON; it is no checkpoint of zero");
    // A newer version may be sealed in another way.
    const auto version = json.find("version");
    if (version != json.end() && version->is_number_integer() && *version > kManifestVersion) {
      manifest.version = version->get<int64_t>();
      validate(manifest, where);
    }
    check_seal(text, where);
    read_fields(json, text, manifest, where);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, "[zero.checkpoint] ", where, ": ", error.what());
  }
  validate(manifest, where);
  return manifest;
}

} // namespace zero::checkpoint
