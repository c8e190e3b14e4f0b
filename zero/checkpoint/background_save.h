#pragma once

// The handle of a save that goes on in the background.

#include <atomic>
#include <exception>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include <zero/api.h>

namespace zero {

// Made by async_save(). The save goes on without it: dropping it loses nothing.
class ZERO_API BackgroundSave {
 public:
  // Internal: runs `work` on a thread of its own.
  BackgroundSave(std::string directory, std::function<void()> work);
  ~BackgroundSave(); // waits
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  const std::string& directory() const {
    return directory_;
  }
  // Whether it has ended, well or not; doesn't wait.
  bool done() const;
  // Blocks until the checkpoint is on the disk. Throws what the save threw, on every
  // rank, at each call. May be called by some ranks alone.
  void wait();

  // Internal; these block. The error, where neither wait() nor this has given it yet.
  std::exception_ptr unseen_error();
  bool has_unseen_error() const;
  bool failed() const;

 private:
  const std::string directory_;
  std::shared_future<void> result_;
  std::atomic<bool> seen_ = false;
  std::thread thread_;
};

} // namespace zero
