// After an error on some rank: on a transport that can start anew, the ranks give
// up what they were in, agree on what is left, and go on.

#include <zero/optim/engine_join.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <zero/autograd/backward_end.h>
#include <zero/comm/blocking.h>

namespace zero {
namespace {

constexpr std::chrono::milliseconds kLookInterval{2};

// How a rank's gradients are; the worst counts.
enum class Condition : uint8_t { intact, lost, torn };

// What each rank says: its number of steps, the condition of its gradients, and the
// buckets of parameters (as bytes) whose gather it lost.
at::Tensor write_state(int64_t steps, Condition condition, const std::vector<bool>& lost) {
  at::Tensor message =
      at::empty({static_cast<int64_t>(sizeof(steps) + 1 + lost.size())}, at::kByte);
  auto* bytes = message.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &steps, sizeof(steps));
  bytes[sizeof(steps)] = static_cast<uint8_t>(condition);
  std::copy(lost.begin(), lost.end(), bytes + sizeof(steps) + 1);
  return message;
}

// One rank may have learned of an unfrozen parameter just before another failed.
std::vector<bool> trainable_anywhere(
    const sharding::ParameterTable& table,
    comm::Communicator& communicator) {
  at::Tensor own = at::empty({table.size()}, at::kByte);
  auto* flags = own.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < table.size(); ++i) {
    flags[i] = table.entry(i).trainable ? 1 : 0;
  }
  std::vector<bool> trainable(table.size());
  for (const at::Tensor& theirs : communicator.exchange(
           own, {"the trainable parameters after an error", 0, /*step=*/0, false})) {
    for (int64_t i = 0; i < table.size(); ++i) {
      trainable[i] = trainable[i] || theirs.const_data_ptr<uint8_t>()[i] != 0;
    }
  }
  return trainable;
}

} // namespace

void Engine::Impl::recover_if_failed() {
  if (autograd::inside_backward() || join) {
    return; // a join that failed does not go on
  }
  if (communicator->recoverable() || gathers->recoverable()) {
    forward_abandoned = false;
    recover();
  } else if (forward_abandoned.exchange(false)) {
    meet_after_abandoned_forward();
  }
}

// If the others left theirs, too, nothing is lost. Else they wait for gathers or
// reductions that this rank is not going to join: it gives up, for all.
void Engine::Impl::meet_after_abandoned_forward() {
  const comm::BlockingScope blocking;
  try {
    const comm::WorkPtr work = communicator->all_reduce( // over all, as no gather is
        at::zeros({communicator->size()}, at::kFloat),
        {},
        {"a new forward after one that an exception left", 0, gradients.steps(), false});
    while (!work->done()) {
      if (gathers->behind()) {
        communicator->abort("its forward was left by an exception: see its own error");
      }
      std::this_thread::sleep_for(kLookInterval);
    }
    work->wait();
  } catch (const c10::DistBackendError&) {
    if (!communicator->recoverable()) {
      throw;
    }
    recover();
  }
}

void Engine::Impl::recover() {
  const std::lock_guard lock(recovery);
  if (!communicator->recoverable() && !gathers->recoverable()) {
    return; // another thread did it
  }
  if (parameters) {
    parameters->discard();
  }
  std::vector<bool> lost = gather ? gather->failed() : std::vector<bool>();
  communicator->recover();
  if (gathers != communicator) {
    gathers->recover();
  }
  const int64_t steps = gradients.steps();
  Condition condition = gradients.interrupted() ? Condition::torn
      : gradients.intact()                      ? Condition::intact
                                                : Condition::lost;
  gradients.catch_up(trainable_anywhere(table, *communicator));
  if (gather) {
    lost.resize(table.bucket_count());
  }
  const std::vector<at::Tensor> states = communicator->exchange(
      write_state(steps, condition, lost), {"the recovery from an error", 0, /*step=*/0, false});
  for (size_t rank = 0; rank < states.size(); ++rank) {
    const auto* bytes = states[rank].const_data_ptr<uint8_t>();
    int64_t theirs = 0;
    std::memcpy(&theirs, bytes, sizeof(theirs));
    if (theirs != steps) {
      communicator->abort("ranks have taken different numbers of steps"); // again next time
    }
    TORCH_CHECK(
        theirs == steps,
        "[zero.optim] after an error ranks have taken different numbers of steps, ",
        theirs,
        " on rank ",
        rank,
        " and ",
        steps,
        " on rank ",
        communicator->rank(),
        ", so their parameters differ; load a checkpoint on all ranks");
    condition = std::max(condition, static_cast<Condition>(bytes[sizeof(theirs)]));
    for (size_t b = 0; b < lost.size(); ++b) {
      lost[b] = lost[b] || bytes[sizeof(theirs) + 1 + b] != 0;
    }
  }
  if (condition != Condition::intact) {
    gradients.discard();
  }
  if (condition == Condition::torn) {
    gradients.tear();
  }
  for (size_t b = 0; b < lost.size(); ++b) {
    if (lost[b]) {
      gather->restart(static_cast<int64_t>(b), steps);
    }
  }
}

} // namespace zero
