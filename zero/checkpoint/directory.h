#pragma once

// The directory of a checkpoint: saved whole or not at all. A save writes the data files
// of a new generation beside those of the one before, then replaces manifest.json by one
// rename after everything is on the disk, then deletes the files of other generations. A
// crash leaves the old or the new checkpoint, and files that the next save deletes.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <zero/api.h>
#include <zero/checkpoint/files.h>
#include <zero/checkpoint/manifest.h>

namespace zero::checkpoint {

inline constexpr const char* kManifestName = "manifest.json";

// 8 random hex digits: one for each save, the same on all its ranks.
ZERO_API std::string new_generation();

// One save, on one rank. All ranks make one with the same arguments. When each has its
// own files finished, the ranks other than the one that commits call release(), then
// tell it, and it calls commit().
class ZERO_API SaveDirectory {
 public:
  // Makes the directory, and those above it, if there are none. c10::ValueError where
  // the path is a file, where the directory holds other things than a checkpoint, or
  // where its manifest.json is somebody else's.
  SaveDirectory(const std::string& path, std::string generation);
  // Without commit() and release(): deletes the files of this generation, of all ranks,
  // unless the manifest names it already.
  ~SaveDirectory();
  SaveDirectory(const SaveDirectory&) = delete;
  SaveDirectory& operator=(const SaveDirectory&) = delete;

  const std::string& path() const {
    return directory_.path();
  }
  const std::string& generation() const {
    return generation_;
  }
  // Where a data file of this save goes.
  std::string file_path(FileKind kind, int64_t rank, int64_t part) const;

  // This rank's files stay, whatever happens to this object.
  void release() noexcept {
    settled_ = true;
  }
  // Makes the checkpoint the one of `manifest`, a text of to_json(). Refuses one of
  // another generation, or that names a file that is not there in its whole size. Where
  // this throws, the checkpoint before is still there.
  void commit(const std::string& manifest);

 private:
  void check_contents() const;
  void delete_generations(bool own) const noexcept;

  bool made_ = false; // before directory_, whose making sets it
  File directory_;
  std::string generation_;
  bool settled_ = false;
};

// c10::ValueError where there is no checkpoint, or its manifest is damaged; data files
// are not looked at.
ZERO_API Manifest read_manifest(const std::string& directory);

// ---- several checkpoints in one folder: rotation.cpp ----

struct CheckpointInfo {
  std::string path;
  std::string prefix; // of the name: "step-" of "step-1000"
  std::optional<int64_t> number; // 1000
  int64_t modified = 0; // of the manifest, nanoseconds
};

// Subdirectories with a valid manifest and all of its files of parameters, oldest first:
// by number where all names have the same prefix and a number, else by the time of the
// manifest. Links are left out. c10::ValueError where `parent` is no directory.
ZERO_API std::vector<CheckpointInfo> list_checkpoints(const std::string& parent);
// The path of the newest.
ZERO_API std::optional<std::string> latest(const std::string& parent);
// After `saved` was saved: deletes the lowest-numbered complete checkpoints beside it
// whose names differ from its own in the number only, until `keep_last` are left, `saved`
// among them. Nothing where its name ends in no number. Manifests go first, so that none
// is left half; files that are no part of a checkpoint stay. Returns the paths deleted.
ZERO_API std::vector<std::string> rotate(const std::string& saved, int64_t keep_last);

} // namespace zero::checkpoint
