// Which communicator a process group gets. Runs on the caller's thread.

#include <zero/comm/init.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/failure_board.h>
#include <zero/comm/gloo_group.h>
#include <zero/comm/group_communicator.h>
#include <zero/comm/local_communicator.h>
#include <zero/comm/milliseconds.h>
#include <zero/comm/sigpipe.h>

namespace zero::comm {

std::vector<std::shared_ptr<Communicator>> make_communicators(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    int64_t count) {
  to_milliseconds(timeout_seconds); // refuses what is no timeout, at one rank too
  std::vector<std::shared_ptr<Communicator>> communicators;
  if (!group || group->getSize() == 1) {
    for (int64_t i = 0; i < count; ++i) {
      communicators.push_back(std::make_shared<LocalCommunicator>());
    }
    return communicators;
  }
  const int64_t rank = group->getRank();
  const int64_t size = group->getSize();
  const auto store = group->getStore();
  TORCH_CHECK_VALUE(
      store,
      "[zero.comm] expected a process group with a c10d::Store, got one without (rank ",
      rank,
      " of ",
      size,
      "); make it with zero::init(), zero::make_gloo_group() or "
      "torch.distributed.init_process_group(), or give c10d::ProcessGroup's constructor its store");
  const BlockingScope scope;
  const SigpipeBlock no_sigpipe;
  std::shared_ptr<FailureBoard> board;
  for (int64_t i = 0; i < count; ++i) {
    auto own_store =
        c10::make_intrusive<c10d::PrefixStore>(next_prefix(*store, "comm", rank), store);
    if (count > 1 && !board) {
      board = std::make_shared<FailureBoard>(own_store, rank, size);
    }
    auto backend = make_gloo_backend(own_store, rank, size, timeout_seconds);
    communicators.push_back(
        std::make_shared<GroupCommunicator>(
            std::make_unique<PeerExchange>(std::move(backend), timeout_seconds), board));
  }
  return communicators;
}

std::shared_ptr<Communicator> make_communicator(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds) {
  return make_communicators(group, timeout_seconds, 1).front();
}

} // namespace zero::comm
