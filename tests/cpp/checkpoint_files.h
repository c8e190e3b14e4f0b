#pragma once

// Files for the tests of zero/checkpoint, made without the code under test.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "catch.h"

#include <c10/util/Exception.h>

namespace zero::test {

// Removed with all that is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "zero-test-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  const std::string& path() const {
    return path_;
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  REQUIRE(file);
}

// A safetensors file of any header, right or wrong.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  }
  return bytes + header + data;
}

inline std::string random_bytes(std::mt19937& random, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(random());
  }
  return bytes;
}

inline size_t below(std::mt19937& random, size_t limit) {
  return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
}

// One random change: a bit, the end, a byte, a run, a digit; within the first `head`
// bytes, or (0) anywhere.
inline std::string corrupted(std::mt19937& random, std::string bytes, size_t head = 0) {
  const std::string original = bytes;
  while (bytes == original) {
    const size_t at = below(random, head > 0 ? head : bytes.size());
    const std::string digits = "0123456789\"{}[],:-e";
    switch (below(random, 7)) {
    case 0:
      bytes.resize(below(random, bytes.size()));
      break;
    case 1:
      bytes += random_bytes(random, 1 + below(random, 9));
      break;
    case 2:
      bytes.erase(at, 1 + below(random, 8));
      break;
    case 3:
      bytes[at] = digits[below(random, digits.size())];
      break;
    case 4:
      bytes = bytes.substr(0, at) + digits[below(random, digits.size())] + bytes.substr(at);
      break;
    case 5:
      bytes = bytes.substr(0, at) + random_bytes(random, 8) + bytes.substr(at);
      break;
    default:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8)));
    }
  }
  return bytes;
}

// What an error says that must be a `Error` of this folder.
template <typename Error = c10::ValueError>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string text = error.what_without_backtrace();
    REQUIRE(text.rfind("[zero.checkpoint] ", 0) == 0);
    return text;
  }
  FAIL("expected an error");
  return {};
}

template <typename Error = c10::ValueError>
void require_error(const std::string& part, const std::function<void()>& action) {
  const std::string text = error_of<Error>(action);
  INFO(text << " has no " << part);
  REQUIRE(text.find(part) != std::string::npos);
}

} // namespace zero::test
