#include <zero/checkpoint/safetensors.h>

#include <unordered_set>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <zero/checkpoint/dtypes.h>
#include <zero/checkpoint/json_text.h>

namespace zero::checkpoint {

namespace {

constexpr std::string_view kMetadata = "__metadata__";

// Fills entries as the parser meets them, without a tree of values in between: memory
// stays within a few times the text, whatever it says.
class HeaderParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderParser(const std::string& path) : path_(path) {}

  SafetensorsHeader header;

  bool null() override {
    return refuse("null");
  }
  bool boolean(bool) override {
    return refuse("a boolean");
  }
  bool number_integer(number_integer_t) override {
    return refuse("a negative number");
  }
  bool number_unsigned(number_unsigned_t number) override {
    if (numbers_ == nullptr) {
      return refuse("a number");
    }
    check(number <= INT64_MAX, "a number is too large");
    numbers_->push_back(static_cast<int64_t>(number));
    check(numbers_->size() <= 64, "a list has more than 64 numbers");
    return true;
  }
  bool number_float(number_float_t, const string_t&) override {
    return refuse("a number that is no integer");
  }
  bool binary(binary_t&) override {
    return refuse("binary data");
  }

  bool string(string_t& text) override {
    if (level_ != 2 || numbers_ != nullptr) {
      return refuse("a string");
    }
    if (in_metadata_) {
      header.metadata[field_] = text;
      return true;
    }
    if (field_ != "dtype") {
      return refuse("a string");
    }
    const auto dtype = dtype_named(text);
    check(dtype.has_value(), "dtype '" + text + "' is not known");
    header.tensors.back().dtype = *dtype;
    return true;
  }

  bool start_object(size_t) override {
    if (level_ == 2 || numbers_ != nullptr) {
      return refuse("an object");
    }
    ++level_;
    seen_.clear();
    return true;
  }

  bool end_object() override {
    if (level_ == 2 && !in_metadata_) {
      check(seen_.size() == 3, "expected dtype, shape and data_offsets");
      check(offsets_.size() == 2, "expected two data_offsets");
      StoredTensor& tensor = header.tensors.back();
      tensor.begin = offsets_[0];
      tensor.end = offsets_[1];
    }
    --level_;
    name_.clear();
    return true;
  }

  bool start_array(size_t) override {
    const bool shape = field_ == "shape";
    if (level_ != 2 || in_metadata_ || numbers_ != nullptr ||
        !(shape || field_ == "data_offsets")) {
      return refuse("a list");
    }
    numbers_ = shape ? &header.tensors.back().shape : &offsets_;
    numbers_->clear();
    return true;
  }
  bool end_array() override {
    numbers_ = nullptr;
    return true;
  }

  bool key(string_t& key) override {
    if (level_ == 1) {
      name_ = key;
      check(names_.insert(key).second, "the name stands twice");
      in_metadata_ = key == kMetadata;
      offsets_.clear();
      if (!in_metadata_) {
        header.tensors.emplace_back();
        header.tensors.back().name = key;
      }
      return true;
    }
    field_ = key;
    check(
        in_metadata_ || key == "dtype" || key == "shape" || key == "data_offsets",
        "field '" + key + "' is not known");
    check(seen_.insert(key).second, "field '" + key + "' stands twice");
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    check(false, std::string("not well-formed JSON: ") + error.what());
    return false;
  }

 private:
  void check(bool right, const std::string& what) const {
    TORCH_CHECK_VALUE(
        right,
        "[zero.checkpoint] the header of '",
        path_,
        "' is damaged",
        name_.empty() ? "" : ", at '" + name_ + "'",
        ": ",
        what);
  }
  bool refuse(const std::string& what) const {
    check(false, "unexpected " + what);
    return false;
  }

  const std::string& path_;
  int level_ = 0; // objects that are open
  std::string name_; // in the outer one
  std::string field_; // in the inner one
  bool in_metadata_ = false;
  std::vector<int64_t>* numbers_ = nullptr; // the open list
  std::vector<int64_t> offsets_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> seen_;
};

std::string join(const std::vector<int64_t>& numbers) {
  std::string text;
  for (const int64_t number : numbers) {
    text += text.empty() ? "" : ",";
    text += std::to_string(number);
  }
  return text;
}

} // namespace

std::string format_safetensors_header(
    const std::vector<TensorEntry>& entries,
    const Metadata& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += json_string(std::string(kMetadata)) + ":{";
    for (const auto& [key, value] : metadata) {
      json += json_string(key) + ":" + json_string(value) + ",";
    }
    json.back() = '}';
    json += ',';
  }
  int64_t offset = 0;
  for (const TensorEntry& entry : entries) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
    const auto numel = checked_numel(entry.shape, itemsize);
    TORCH_CHECK_VALUE(
        numel && *numel <= (INT64_MAX / 2 - offset) / itemsize,
        "[zero.checkpoint] tensor '",
        entry.name,
        "' has no possible size: [",
        join(entry.shape),
        "]");
    const int64_t end = offset + *numel * itemsize;
    json += json_string(entry.name) + ":{\"dtype\":\"";
    json += dtype_name(entry.dtype, entry.name);
    json +=
        "\",\"shape\":[" + join(entry.shape) + "],\"data_offsets\":[" + join({offset, end}) + "]},";
    offset = end;
  }
  if (json.back() == ',') {
    json.pop_back();
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(json.size() >> (8 * i) & 0xFF);
  }
  return length + json;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& path) {
  TORCH_CHECK_VALUE(
      !text.empty() && text[0] == '{',
      "[zero.checkpoint] '",
      path,
      "' is no safetensors file: its header does not start with '{'");
  HeaderParser parser(path);
  nlohmann::json::sax_parse(text.begin(), text.end(), &parser);
  return std::move(parser.header);
}

} // namespace zero::checkpoint
