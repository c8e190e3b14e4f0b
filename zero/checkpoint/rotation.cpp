#include <zero/checkpoint/directory.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

namespace fs = std::filesystem;

// More digits than an int64_t holds make no number.
constexpr size_t kMostDigits = 18;

void split_name(const std::string& name, CheckpointInfo* info) {
  const size_t begin = name.find_last_not_of("0123456789") + 1; // npos + 1 is 0
  const std::string digits = name.substr(begin);
  info->prefix = name.substr(0, begin);
  if (!digits.empty() && digits.size() <= kMostDigits) {
    info->number = std::stoll(digits);
  }
}

// Nothing where there is no whole checkpoint of a model.
std::optional<CheckpointInfo> look_at(const fs::path& path) {
  CheckpointInfo info;
  info.path = path.string();
  split_name(path.filename().string(), &info);
  try {
    const Manifest manifest = read_manifest(info.path);
    const File directory = open_directory(info.path);
    for (const ManifestFile& file : manifest.files) {
      if (parse_data_file_name(file.name)->kind == FileKind::parameters &&
          open_file(directory, file.name).bytes() != file.bytes) {
        return std::nullopt;
      }
    }
    info.modified = open_file(directory, kManifestName).modified();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return info;
}

bool is_real_directory(const fs::path& path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

void delete_checkpoint(const std::string& path) {
  const File directory = open_directory(path);
  if (!remove_file(directory, kManifestName)) {
    TORCH_CHECK(false, write_error(errno, "deleting", path + "/" + kManifestName, -1));
  }
  directory.sync();
  for (const std::string& name : names_in(directory)) {
    if (parse_data_file_name(name) || name == std::string(kManifestName) + ".tmp") {
      remove_file(directory, name);
    }
  }
  ::rmdir(path.c_str()); // where nothing else is in it
}

} // namespace

std::vector<CheckpointInfo> list_checkpoints(const std::string& parent) {
  const std::vector<std::string> names = names_in(open_directory(parent));
  std::vector<CheckpointInfo> found;
  for (const std::string& name : names) {
    const fs::path path = fs::path(parent) / name;
    if (is_real_directory(path)) {
      if (auto info = look_at(path)) {
        found.push_back(std::move(*info));
      }
    }
  }
  const bool numbered = std::all_of(found.begin(), found.end(), [&](const CheckpointInfo& info) {
    return info.number && info.prefix == found.front().prefix;
  });
  std::stable_sort(
      found.begin(), found.end(), [&](const CheckpointInfo& a, const CheckpointInfo& b) {
        return numbered ? *a.number < *b.number : a.modified < b.modified;
      });
  return found;
}

std::optional<std::string> latest(const std::string& parent) {
  const std::vector<CheckpointInfo> found = list_checkpoints(parent);
  return found.empty() ? std::nullopt : std::optional(found.back().path);
}

std::vector<std::string> rotate(const std::string& saved, int64_t keep_last) {
  TORCH_CHECK_VALUE(
      keep_last >= 1, "[zero.checkpoint] keep_last: expected 1 or more, got ", keep_last);
  fs::path path(saved);
  if (!path.has_filename()) {
    path = path.parent_path();
  }
  CheckpointInfo own;
  split_name(path.filename().string(), &own);
  if (!own.number) {
    return {};
  }
  const std::string parent = path.parent_path().string();
  std::vector<CheckpointInfo> others = list_checkpoints(parent.empty() ? "." : parent);
  std::erase_if(others, [&](const CheckpointInfo& info) {
    return !info.number || info.prefix != own.prefix ||
        fs::path(info.path).filename() == path.filename();
  });
  std::stable_sort(others.begin(), others.end(), [](const auto& a, const auto& b) {
    return *a.number < *b.number;
  });
  std::vector<std::string> deleted;
  for (size_t i = 0; i + (keep_last - 1) < others.size(); ++i) {
    delete_checkpoint(others[i].path);
    deleted.push_back(others[i].path);
  }
  return deleted;
}

} // namespace zero::checkpoint
