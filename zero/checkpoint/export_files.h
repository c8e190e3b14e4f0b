#pragma once

// The files of an export, which take their places together: one safetensors file, or
// parts with an index as Hugging Face names them. Internal.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <zero/checkpoint/files.h>

namespace zero::checkpoint {

class ExportFiles {
 public:
  // `file` is "FOLDER/NAME.safetensors". c10::ValueError for another suffix, where it is a
  // directory, or where it lies in the directory `source` or a folder of it.
  ExportFiles(const std::string& file, const std::string& source);
  // Removes what was not committed.
  ~ExportFiles();
  ExportFiles(const ExportFiles&) = delete;
  ExportFiles& operator=(const ExportFiles&) = delete;

  // "NAME.safetensors", or "NAME-00002-of-00003.safetensors"; `part` counts from 0.
  std::string name(int64_t part, int64_t parts) const;
  // Where the data of `name` is to be written meanwhile.
  std::string add(const std::string& name);
  // For parts: {tensor, name of its file} of all.
  void add_index(
      const std::vector<std::pair<std::string, std::string>>& places,
      int64_t total_bytes);
  // When all are on the disk: renames them, and removes what an earlier export of this
  // name left. A crash leaves the old export or the new one; or, where parts of the same
  // names are replaced, parts without an index, never an index of mixed parts. Returns the
  // paths, the index last.
  std::vector<std::string> commit();

 private:
  std::string path(const std::string& name) const;
  std::string index_name() const;
  bool is_part(const std::string& name) const;
  void rename(const std::string& from, const std::string& to);

  std::string folder_path_; // as given; empty: the working directory
  std::string stem_;
  File folder_;
  std::string mark_; // what temporary names end in
  std::vector<std::string> names_; // as they will be
};

} // namespace zero::checkpoint
