#pragma once

// Ranks as processes of their own: host_worker, started and ended by a test.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

extern char** environ;

namespace zero::test {

// Killed when it goes, if it still runs.
class Worker {
 public:
  explicit Worker(const std::vector<std::string>& arguments) {
    std::array<int, 2> input{};
    std::array<int, 2> output{};
    TORCH_CHECK(pipe2(input.data(), O_CLOEXEC) == 0 && pipe2(output.data(), O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
    std::vector<char*> pointers;
    for (const auto& argument : arguments) {
      pointers.push_back(const_cast<char*>(argument.c_str()));
    }
    pointers.push_back(nullptr);
    const int failed = posix_spawn(&pid_, pointers[0], &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(input[0]);
    close(output[1]);
    input_ = input[1];
    output_ = output[0];
    TORCH_CHECK(failed == 0, "posix_spawn of ", arguments[0], ": ", failed);
  }
  ~Worker() {
    end_input();
    close(output_);
    if (!ended_) {
      send(SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  pid_t pid() const {
    return pid_;
  }
  void send(int signal) const {
    kill(pid_, signal);
  }
  void say(const std::string& line) const {
    const auto text = line + "\n";
    TORCH_CHECK(write(input_, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  void end_input() {
    if (input_ >= 0) {
      close(input_);
      input_ = -1;
    }
  }

  // The next line it says; empty once it has ended. Throws after `seconds`.
  std::string line(double seconds) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (true) {
      if (const auto end = text_.find('\n'); end != std::string::npos) {
        const auto line = text_.substr(0, end);
        text_.erase(0, end + 1);
        return line;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd output{output_, POLLIN, 0};
      TORCH_CHECK(
          left.count() > 0 && poll(&output, 1, static_cast<int>(left.count())) > 0,
          "process ",
          pid_,
          " said nothing within ",
          seconds,
          " s");
      std::array<char, 4096> bytes{};
      const auto count = read(output_, bytes.data(), bytes.size());
      if (count <= 0) {
        return {};
      }
      text_.append(bytes.data(), static_cast<std::size_t>(count));
    }
  }

  // Its exit status, as waitpid() gives it.
  int join() {
    int status = 0;
    waitpid(pid_, &status, 0);
    ended_ = true;
    return status;
  }

 private:
  pid_t pid_ = 0;
  int input_ = -1;
  int output_ = -1;
  bool ended_ = false;
  std::string text_;
};

using Workers = std::vector<std::unique_ptr<Worker>>;

// A folder for a store's file, which goes with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    auto name = (std::filesystem::temp_directory_path() / "zero_test_XXXXXX").string();
    TORCH_CHECK(mkdtemp(name.data()) != nullptr, "mkdtemp of ", name);
    path = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  std::filesystem::path path;
};

} // namespace zero::test
