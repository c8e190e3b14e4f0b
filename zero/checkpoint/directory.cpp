#include <zero/checkpoint/directory.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>

#include <c10/util/Exception.h>

#include <zero/checkpoint/checksum.h>

namespace zero::checkpoint {

namespace {

constexpr const char* kTemporaryName = "manifest.json.tmp";
// How every manifest of ours begins, of any version.
constexpr std::string_view kMark = "{\"format\": \"zero-checkpoint\"";
constexpr int64_t kLargestManifest = int64_t{256} << 20;

// Makes `path` and what is missing above it; each is on the disk when this returns.
// True where `path` itself was made.
bool make_directories(const std::filesystem::path& path) {
  if (path.empty()) {
    return false;
  }
  for (int tries = 0;; ++tries) {
    if (::mkdir(path.c_str(), 0777) == 0) {
      const auto parent = path.parent_path();
      open_directory(parent.empty() ? "." : parent.string()).sync();
      return true;
    }
    if (errno == EEXIST) {
      return false; // of whatever kind: opening it tells
    }
    if (errno != ENOENT || tries > 0) {
      TORCH_CHECK(false, write_error(errno, "making the directory", path.string(), -1));
    }
    make_directories(path.parent_path());
  }
}

File prepared(const std::string& path, bool* made) {
  std::filesystem::path folder(path);
  if (!folder.has_filename()) {
    folder = folder.parent_path(); // "run/step-1/"
  }
  TORCH_CHECK_VALUE(!path.empty(), "[zero.checkpoint] expected a directory to save to, got ''");
  *made = make_directories(folder);
  return open_directory(folder.string());
}

bool exists(const File& directory, const char* name) {
  struct stat status{};
  return fstatat(directory.number(), name, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

} // namespace

std::string new_generation() {
  std::random_device random;
  return checksum_text(random()).substr(8);
}

SaveDirectory::SaveDirectory(const std::string& path, std::string generation)
    : directory_(prepared(path, &made_)), generation_(std::move(generation)) {
  TORCH_CHECK_VALUE(
      is_generation(generation_),
      "[zero.checkpoint] expected a generation of 8 lower-case hex digits, got '",
      generation_,
      "'");
  check_contents();
}

void SaveDirectory::check_contents() const {
  if (exists(directory_, kManifestName)) {
    const File manifest = open_file(directory_, kManifestName);
    std::string begin(std::min<int64_t>(manifest.bytes(), kMark.size()), '\0');
    manifest.read(0, begin.data(), static_cast<int64_t>(begin.size()));
    TORCH_CHECK_VALUE(
        begin == kMark,
        "[zero.checkpoint] '",
        manifest.path(),
        "' is not zero's, or is damaged: it is not replaced; remove it or save elsewhere");
    return;
  }
  std::vector<std::string> foreign = names_in(directory_);
  std::erase_if(foreign, [](const std::string& name) {
    return name == kTemporaryName || parse_data_file_name(name).has_value();
  });
  std::string names;
  for (size_t i = 0; i < foreign.size() && i < 5; ++i) {
    names += (i > 0 ? ", '" : "'") + foreign[i] + "'";
  }
  // Another rank may have committed meanwhile.
  TORCH_CHECK_VALUE(
      foreign.empty() || exists(directory_, kManifestName),
      "[zero.checkpoint] expected a new or empty directory, or a checkpoint, to save to; '",
      path(),
      "' holds ",
      names,
      foreign.size() > 5 ? " and " + std::to_string(foreign.size() - 5) + " more" : "",
      "; save to a subdirectory of it");
}

std::string SaveDirectory::file_path(FileKind kind, int64_t rank, int64_t part) const {
  return path() + "/" + to_string({kind, generation_, rank, part});
}

// The data files of this generation, or those of all others and a manifest that was
// never renamed. What can't be deleted stays for the next save.
void SaveDirectory::delete_generations(bool own) const noexcept {
  try {
    for (const std::string& name : names_in(directory_)) {
      const auto parsed = parse_data_file_name(name);
      if (parsed ? (parsed->generation == generation_) == own : !own && name == kTemporaryName) {
        remove_file(directory_, name);
      }
    }
  } catch (const std::exception&) {
  }
}

SaveDirectory::~SaveDirectory() {
  if (settled_) {
    return;
  }
  try {
    if (exists(directory_, kManifestName) && read_manifest(path()).generation == generation_) {
      return;
    }
  } catch (const std::exception&) {
    return; // it can't be read now, and may name this generation
  }
  delete_generations(true);
  if (made_) {
    ::rmdir(path().c_str()); // where it is empty
  }
}

void SaveDirectory::commit(const std::string& manifest) {
  const std::string where = path() + "/" + kManifestName;
  const Manifest parsed = manifest_from_json(manifest, where);
  TORCH_CHECK_VALUE(
      parsed.generation == generation_,
      "[zero.checkpoint] ",
      where,
      ": expected generation ",
      generation_,
      ", got ",
      parsed.generation);
  for (const ManifestFile& file : parsed.files) {
    TORCH_CHECK_VALUE(
        exists(directory_, file.name.c_str()),
        "[zero.checkpoint] '",
        path(),
        "/",
        file.name,
        "' is not there before the commit; all ranks save to one directory, on a file system that "
        "they share");
    const int64_t bytes = open_file(directory_, file.name).bytes();
    TORCH_CHECK_VALUE(
        bytes == file.bytes,
        "[zero.checkpoint] '",
        path(),
        "/",
        file.name,
        "': expected ",
        file.bytes,
        " bytes before the commit, got ",
        bytes);
  }
  const auto size = static_cast<int64_t>(manifest.size());
  TORCH_CHECK_VALUE(
      size <= kLargestManifest,
      "[zero.checkpoint] ",
      where,
      ": expected at most ",
      kLargestManifest,
      " bytes, got ",
      size);
  directory_.sync();
  remove_file(directory_, kTemporaryName);
  try {
    File temporary = create_file(path() + "/" + kTemporaryName);
    write_all(temporary, manifest.data(), size, size);
    temporary.sync(size);
    temporary.close(size);
    const int number = directory_.number();
    if (renameat(number, kTemporaryName, number, kManifestName) != 0) {
      TORCH_CHECK(false, write_error(errno, "replacing", where, -1));
    }
  } catch (...) {
    remove_file(directory_, kTemporaryName);
    throw;
  }
  settled_ = true;
  directory_.sync();
  delete_generations(false);
}

Manifest read_manifest(const std::string& directory) {
  const File folder = open_directory(directory);
  TORCH_CHECK_VALUE(
      exists(folder, kManifestName),
      "[zero.checkpoint] '",
      directory,
      "' holds no checkpoint: it has no ",
      kManifestName,
      " (a first save that was interrupted leaves none)");
  const File file = open_file(folder, kManifestName);
  const int64_t bytes = file.bytes();
  TORCH_CHECK_VALUE(
      bytes <= kLargestManifest,
      "[zero.checkpoint] '",
      file.path(),
      "' has ",
      bytes,
      " bytes, expected at most ",
      kLargestManifest);
  std::string text(bytes, '\0');
  file.read(0, text.data(), bytes);
  return manifest_from_json(text, "'" + file.path() + "'");
}

} // namespace zero::checkpoint
