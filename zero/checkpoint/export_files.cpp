#include <zero/checkpoint/export_files.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include <c10/util/Exception.h>

#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/json_text.h>

namespace zero::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".safetensors";

// Whether `path`, which need not exist, is `directory` or below it, links followed.
bool lies_in(const fs::path& path, const fs::path& directory) {
  std::error_code ignored;
  const fs::path inner = fs::weakly_canonical(path, ignored);
  const fs::path outer = fs::canonical(directory, ignored);
  const auto [end, _] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return !outer.empty() && end == outer.end();
}

std::string padded(int64_t number) {
  const std::string digits = std::to_string(number);
  return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() != fs::file_type::not_found;
}

} // namespace

ExportFiles::ExportFiles(const std::string& file, const std::string& source) {
  const fs::path target(file);
  TORCH_CHECK_VALUE(
      target.extension() == kSuffix,
      "[zero.checkpoint] expected the name of a file to end in .safetensors, got '",
      file,
      "'");
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      !fs::is_directory(target, ignored),
      "[zero.checkpoint] expected a file to write to, got a directory: '",
      file,
      "'");
  TORCH_CHECK_VALUE(
      !lies_in(target, source) && !lies_in(target.parent_path() / ".", source),
      "[zero.checkpoint] expected a file outside of the checkpoint, got '",
      file,
      "' in '",
      source,
      "', whose files would be mixed with it; write it beside the directory");
  folder_path_ = target.parent_path().string();
  stem_ = target.stem().string();
  folder_ = open_directory(folder_path_.empty() ? "." : folder_path_);
  mark_ = ".partial-" + new_generation();
}

ExportFiles::~ExportFiles() {
  for (const std::string& name : names_) {
    remove_file(folder_, name + mark_);
  }
}

std::string ExportFiles::path(const std::string& name) const {
  return (fs::path(folder_path_) / name).string();
}

std::string ExportFiles::index_name() const {
  return stem_ + std::string(kSuffix) + ".index.json";
}

std::string ExportFiles::name(int64_t part, int64_t parts) const {
  std::string text = stem_;
  if (parts > 1) {
    text.append("-").append(padded(part + 1)).append("-of-").append(padded(parts));
  }
  return text.append(kSuffix);
}

// "NAME-00002-of-00003.safetensors"
bool ExportFiles::is_part(const std::string& name) const {
  constexpr std::string_view kPattern = "-00000-of-00000";
  if (name.size() != stem_.size() + kPattern.size() + kSuffix.size() || !name.starts_with(stem_) ||
      !name.ends_with(kSuffix)) {
    return false;
  }
  for (size_t i = 0; i < kPattern.size(); ++i) {
    const char found = name[stem_.size() + i];
    const bool digit = found >= '0' && found <= '9';
    if (kPattern[i] == '0' ? !digit : found != kPattern[i]) {
      return false;
    }
  }
  return true;
}

std::string ExportFiles::add(const std::string& name) {
  names_.push_back(name);
  return path(name + mark_);
}

void ExportFiles::add_index(
    const std::vector<std::pair<std::string, std::string>>& places,
    int64_t total_bytes) {
  std::string text = "{\n  \"metadata\": {\"total_size\": " + std::to_string(total_bytes) +
      "},\n  \"weight_map\": {";
  std::string_view separator = "\n";
  for (const auto& [tensor, file] : places) {
    text.append(separator).append("    ");
    text += json_string(tensor) + ": " + json_string(file);
    separator = ",\n";
  }
  text += "\n  }\n}\n";
  const auto bytes = static_cast<int64_t>(text.size());
  File index = create_file(add(index_name()));
  write_all(index, text.data(), bytes, bytes);
  index.sync(bytes);
  index.close(bytes);
}

void ExportFiles::rename(const std::string& from, const std::string& to) {
  if (std::rename(path(from).c_str(), path(to).c_str()) != 0) {
    fail(errno, "renaming to", path(to));
  }
}

std::vector<std::string> ExportFiles::commit() {
  const std::string whole = name(0, 1);
  const bool in_parts = !names_.empty() && names_.back() == index_name();
  if (in_parts && std::any_of(names_.begin(), names_.end() - 1, [&](const std::string& name) {
        return exists(path(name));
      })) {
    remove_file(folder_, index_name());
    folder_.sync();
  }
  std::vector<std::string> paths;
  for (const std::string& name : names_) {
    if (name == index_name()) {
      folder_.sync(); // parts first
    }
    rename(name + mark_, name);
    paths.push_back(path(name));
  }
  folder_.sync();
  for (const std::string& name : names_in(folder_)) {
    const bool own = name == whole || name == index_name() || is_part(name);
    if (own && std::find(names_.begin(), names_.end(), name) == names_.end()) {
      remove_file(folder_, name);
    }
  }
  return paths;
}

} // namespace zero::checkpoint
