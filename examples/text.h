#pragma once

// Bytes to train on, and which of them go into which batch. text.py is the same
// in Python: the same files in the same order, the same batches.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

constexpr uint64_t validation_seed = 0x7A65726F;

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path.string());
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// $ZERO_TEXT_DIR, else the newest Python standard library in the usual places.
inline std::string default_directory() {
  if (const char* given = std::getenv("ZERO_TEXT_DIR"); given != nullptr && *given != '\0') {
    return given;
  }
  namespace fs = std::filesystem;
  const std::string prefix = "python3.";
  std::pair<int, std::string> newest;
  for (const fs::path root : {"/usr/lib", "/usr/local/lib"}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(root, ignored)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with(prefix) && fs::exists(entry.path() / "os.py")) {
        const int minor = std::atoi(name.c_str() + prefix.size());
        newest = std::max(newest, {minor, entry.path().string()});
      }
    }
  }
  return newest.second;
}

// All *.py files outside test directories, by relative path, up to `max_bytes`.
inline std::string read_directory(const std::string& directory, int64_t max_bytes) {
  namespace fs = std::filesystem;
  static const std::set<std::string> skipped = {
      "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"};
  if (directory.empty()) {
    throw std::runtime_error("no Python standard library found; use --text or --text-dir");
  }
  std::vector<std::string> paths;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto entry = fs::recursive_directory_iterator(directory, options);
       entry != fs::recursive_directory_iterator();
       ++entry) {
    if (entry->is_symlink()) {
      continue;
    }
    if (entry->is_directory()) {
      if (skipped.contains(entry->path().filename().string())) {
        entry.disable_recursion_pending();
      }
    } else if (entry->path().string().ends_with(".py")) {
      paths.push_back(entry->path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::string text;
  for (const auto& path : paths) {
    if (static_cast<int64_t>(text.size()) >= max_bytes) {
      break;
    }
    text += read_file(path);
  }
  return text.substr(0, max_bytes);
}

// 64 well-mixed bits (splitmix64's finalizer) that depend on every number.
inline uint64_t hash_numbers(std::initializer_list<uint64_t> numbers) {
  uint64_t state = 0;
  for (const uint64_t number : numbers) {
    state += number + 0x9E3779B97F4A7C15;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    state ^= state >> 31;
  }
  return state;
}

struct Batch {
  torch::Tensor input, target;
};

// One rank's batches. The union over ranks and micro-batches depends only on
// seed, step and the effective batch, not on how many ranks share it.
class Batches {
 public:
  struct Share {
    int64_t batch = 1;
    int64_t context = 1;
    int64_t seed = 0;
    int64_t rank = 0;
    int64_t ranks = 1;
    torch::Device device = torch::kCPU;
  };

  Batches(std::string text, const Share& share) : share_(share) {
    const auto size = static_cast<int64_t>(text.size());
    const int64_t split = size - size / 20;
    if (size - split <= share.context + 1) {
      throw std::runtime_error(
          "a text of " + std::to_string(size) + " bytes is too short for a context of " +
          std::to_string(share.context));
    }
    auto data = torch::from_blob(text.data(), {size}, torch::kUInt8).clone();
    training_ = data.slice(0, 0, split);
    held_out_ = data.slice(0, split);
  }

  Batch train(int64_t step, int64_t micro) const {
    return cut(training_, share_.seed, step, micro);
  }

  Batch validation(int64_t number) const {
    return cut(held_out_, validation_seed, 0, number);
  }

 private:
  Batch cut(const torch::Tensor& data, uint64_t seed, uint64_t step, int64_t number) const {
    const uint64_t first = (number * share_.ranks + share_.rank) * share_.batch;
    const uint64_t room = data.size(0) - share_.context - 1;
    std::vector<int64_t> starts(share_.batch);
    for (int64_t i = 0; i < share_.batch; ++i) {
      starts[i] = static_cast<int64_t>(hash_numbers({seed, step, first + i}) % room);
    }
    auto index = torch::tensor(starts).unsqueeze(1) + torch::arange(share_.context + 1);
    auto rows = data.index({index}).to(torch::kLong);
    return {
        rows.slice(1, 0, share_.context).contiguous().to(share_.device),
        rows.slice(1, 1, share_.context + 1).contiguous().to(share_.device)};
  }

  Share share_;
  torch::Tensor training_, held_out_;
};
