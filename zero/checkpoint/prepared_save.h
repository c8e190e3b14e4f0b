#pragma once

// A save between its parts: what is written is known, and where. Internal.

#include <memory>
#include <string>

#include <zero/checkpoint/collect.h>
#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/save.h>
#include <zero/checkpoint/together.h>

namespace zero::checkpoint {

class PreparedSave {
 public:
  // [collective] Makes the directory; finds what each rank writes. The object has views of
  // it: finish() comes before it changes, or copy().
  PreparedSave(std::string path, const Contents& contents, SaveOptions options);

  // From here on it holds copies, in memory of their own.
  void copy();
  // [collective] Writes, and commits. On any thread; `ranks` are those of before.
  void finish(const Together& ranks);

 private:
  Manifest manifest(const std::vector<std::string>& written);

  const std::string path_;
  const SaveOptions options_;
  const std::vector<std::pair<std::string, std::string>> tied_;
  const int64_t stage_;
  std::string generation_;
  Collected collected_;
  std::unique_ptr<SaveDirectory> directory_; // before finish() on rank 0 only
};

} // namespace zero::checkpoint
