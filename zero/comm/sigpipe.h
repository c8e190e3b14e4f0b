#pragma once

// Gloo writes to sockets whose other end may be gone, which by default ends the
// process with SIGPIPE. Python ignores that signal; a C++ program need not, and
// its handlers are not ours to change. So the threads that write keep the signal
// blocked: our worker, and Gloo's, which inherit the mask of their creator.

#include <csignal>
#include <ctime>

namespace zero::comm {

// Blocks SIGPIPE in this thread for a scope, and drops the one that came in it.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &previous_);
  }
  ~SigpipeBlock() {
    const timespec no_time{};
    if (!was_pending_) {
      while (sigtimedwait(&pipe_, nullptr, &no_time) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t pipe_;
  sigset_t previous_;
  bool was_pending_ = false;
};

} // namespace zero::comm
