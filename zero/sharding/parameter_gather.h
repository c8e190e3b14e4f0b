#pragma once

// ParameterGather: after a sharded step, each bucket's updated shards travel to
// all ranks while the program goes on. Until its gather was waited for, a
// parameter has no data: an operation that reads it waits first (through the
// on-use guard), anything else gets a named error, so nothing reads half of it.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class ParameterGather {
 public:
  // `on_flight(true)` is called when the first gather starts, `on_flight(false)`
  // when the last was waited for: the guard is only on in between. `before_wait()`
  // is called when an operation is about to wait.
  ParameterGather(
      ParameterTable& table,
      std::shared_ptr<comm::Communicator> communicator,
      std::function<void(bool)> on_flight,
      std::function<void()> before_wait);
  ~ParameterGather();
  ParameterGather(const ParameterGather&) = delete;
  ParameterGather& operator=(const ParameterGather&) = delete;

  // [collective] Starts the gather of a bucket from the ranks' shards. A failure
  // shows when it is waited for.
  void start(int64_t bucket, int64_t step, bool training = true);
  // Waits for one bucket, or for all; throws what the gather threw.
  void wait(int64_t bucket);
  void wait_all();
  // After a failure of communication: waits for what is on its way. Buckets whose
  // gather failed must be started again, on all ranks.
  std::vector<bool> failed();
  void restart(int64_t bucket, int64_t step);

 private:
  class Flight final : public memory::OnUse {
   public:
    Flight(ParameterGather& gather, int64_t bucket) : gather_(gather), bucket_(bucket) {}
    bool before_use(const char* operation) noexcept override;

   private:
    ParameterGather& gather_;
    int64_t bucket_;
  };
  struct Entry {
    comm::WorkPtr work;
    std::unique_ptr<Flight> flight;
  };

  void land(int64_t bucket);
  void fail(int64_t bucket, const char* operation, const std::string& cause);
  std::string message(int64_t parameter) const;

  ParameterTable& table_;
  std::shared_ptr<comm::Communicator> communicator_;
  std::function<void(bool)> on_flight_;
  std::function<void()> before_wait_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  int64_t in_flight_ = 0;
  const int64_t process_; // a forked child must not wait for its parent's thread
};

} // namespace zero::sharding
