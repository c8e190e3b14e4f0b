#include <zero/checkpoint/json_text.h>

#include <set>
#include <vector>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

namespace zero::checkpoint {

namespace {

constexpr size_t kDeepest = 128;

// Looks at names and depth only; keeps no values.
class Checker : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Checker(const std::string& where) : where_(where) {}

  bool null() override {
    return true;
  }
  bool boolean(bool) override {
    return true;
  }
  bool number_integer(number_integer_t) override {
    return true;
  }
  bool number_unsigned(number_unsigned_t) override {
    return true;
  }
  bool number_float(number_float_t, const string_t&) override {
    return true;
  }
  bool string(string_t&) override {
    return true;
  }
  bool binary(binary_t&) override {
    return true;
  }
  bool start_object(size_t) override {
    return open();
  }
  bool start_array(size_t) override {
    return open();
  }
  bool end_object() override {
    names_.pop_back();
    return true;
  }
  bool end_array() override {
    names_.pop_back();
    return true;
  }
  bool key(string_t& name) override {
    TORCH_CHECK_VALUE(
        names_.back().insert(name).second,
        "[zero.checkpoint] ",
        where_,
        ": the name '",
        name,
        "' stands twice in one JSON object");
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    TORCH_CHECK_VALUE(
        false, "[zero.checkpoint] ", where_, ": not well-formed JSON: ", error.what());
  }

 private:
  bool open() {
    TORCH_CHECK_VALUE(
        names_.size() < kDeepest,
        "[zero.checkpoint] ",
        where_,
        ": JSON nested more than ",
        kDeepest,
        " deep");
    names_.emplace_back();
    return true;
  }

  const std::string& where_;
  std::vector<std::set<std::string>> names_;
};

size_t skip_string(std::string_view text, size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    at += text[at] == '\\';
  }
  return at + 1;
}

size_t skip_space(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

// Past the value that starts at `at`.
size_t skip_value(std::string_view text, size_t at) {
  int64_t depth = 0;
  while (at < text.size()) {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, at);
    } else if (c == '{' || c == '[') {
      ++depth;
      ++at;
    } else if (depth > 0) {
      depth -= c == '}' || c == ']';
      ++at;
    } else {
      return std::min(text.find_first_of(",}] \t\r\n", at), text.size());
    }
    if (depth == 0 && (c == '"' || c == '}' || c == ']')) {
      return at;
    }
  }
  return text.size();
}

} // namespace

void check_json(std::string_view text, const std::string& where) {
  Checker checker(where);
  nlohmann::json::sax_parse(text.begin(), text.end(), &checker);
}

std::string_view member_text(std::string_view object, std::string_view name) {
  size_t at = skip_space(object, object.find('{') + 1);
  while (at < object.size() && object[at] == '"') {
    const size_t after = skip_string(object, at);
    const bool found = object.substr(at + 1, after - at - 2) == name;
    at = skip_space(object, object.find(':', after) + 1);
    const size_t end = skip_value(object, at);
    if (found) {
      return object.substr(at, end - at);
    }
    at = skip_space(object, end);
    at = skip_space(object, at + (at < object.size() && object[at] == ','));
  }
  return {};
}

std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK_VALUE(false, "[zero.checkpoint] expected UTF-8, got the name or text '", text, "'");
  }
}

} // namespace zero::checkpoint
