// Which communicator a process group gets. Runs on the caller's thread.

#include <zero/comm/make_communicator.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/device_backend.h>
#include <zero/comm/failure_board.h>
#include <zero/comm/gloo_group.h>
#include <zero/comm/group_transport.h>
#include <zero/comm/host_transport.h>
#include <zero/comm/init.h>
#include <zero/comm/local_communicator.h>
#include <zero/comm/meeting.h>
#include <zero/comm/milliseconds.h>
#include <zero/comm/queued_communicator.h>
#include <zero/comm/sigpipe.h>

namespace zero::comm {

namespace {

using Communicators = std::vector<std::shared_ptr<Communicator>>;
using Store = c10::intrusive_ptr<c10d::Store>;

// Ranks that were told different things would wait for each other elsewhere.
void compare_choices(
    c10d::Store& store,
    const Place& place,
    const std::string& transport,
    double timeout_seconds) {
  const auto choices =
      tell_all(store, "transport", place.rank, place.size, transport, timeout_seconds);
  for (int64_t rank = 0; rank < place.size; ++rank) {
    TORCH_CHECK_VALUE(
        choices[rank] == choices[0],
        "[zero.comm] expected one transport on all ranks, got ",
        choices[0],
        " on rank 0 and ",
        choices[rank],
        " on rank ",
        rank,
        " (this is rank ",
        place.rank,
        " of ",
        place.size,
        ")");
  }
}

Transports over_host(const std::shared_ptr<HostGroup>& host, double timeout_seconds) {
  Transports transports;
  for (int64_t channel = 0; channel < host->channels(); ++channel) {
    transports.push_back(std::make_unique<HostTransport>(host, channel, timeout_seconds));
  }
  return transports;
}

Transports over_group(const Membership& membership, double timeout_seconds, int64_t count) {
  const Place& place = membership.place;
  const SigpipeBlock no_sigpipe;
  Transports transports;
  std::shared_ptr<FailureBoard> board;
  for (int64_t i = 0; i < count; ++i) {
    const auto own_store = new_store(membership);
    if (count > 1 && !board) {
      board = std::make_shared<FailureBoard>(own_store, place.rank, place.size);
    }
    auto backend = make_gloo_backend(own_store, place.rank, place.size, timeout_seconds);
    transports.push_back(
        std::make_unique<GroupTransport>(
            std::make_unique<PeerExchange>(std::move(backend), timeout_seconds), board));
  }
  return transports;
}

Communicators over(
    const Membership& membership,
    double timeout_seconds,
    int64_t count,
    const std::string& transport,
    bool registered_buffers) {
  const auto another = [=] {
    return over(membership, timeout_seconds, 1, transport, registered_buffers).front();
  };
  Communicators communicators;
  for (auto& made : make_transports(membership, timeout_seconds, count, transport)) {
    communicators.push_back(with_devices(
        std::make_shared<QueuedCommunicator>(std::move(made), another),
        membership,
        std::nullopt,
        timeout_seconds,
        transport,
        registered_buffers));
  }
  return communicators;
}

// torch's group whose other ranks don't exist.
bool is_fake(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->hasBackends() && group->getDefaultBackend()->getBackendName() == "fake";
}

} // namespace

Membership membership_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto store = group->getStore();
  TORCH_CHECK_VALUE(
      store,
      "[zero.comm] expected a process group with a c10d::Store, got one without (rank ",
      group->getRank(),
      " of ",
      group->getSize(),
      "); make it with zero::init(), zero::make_gloo_group() or "
      "torch.distributed.init_process_group(), or give c10d::ProcessGroup's constructor its store");
  return {store, {group->getRank(), group->getSize()}};
}

Store new_store(const Membership& membership) {
  const auto& [store, place] = membership;
  return c10::make_intrusive<c10d::PrefixStore>(next_prefix(*store, "comm", place.rank), store);
}

void check_choice(double timeout_seconds, const std::string& transport) {
  to_milliseconds(timeout_seconds); // refuses what is no timeout, at one rank too
  TORCH_CHECK_VALUE(
      transport == "auto" || transport == "host" || transport == "group" || transport == "nccl",
      "[zero.comm] expected transport auto, host, group or nccl, got ",
      transport);
}

Transports make_transports(
    const Membership& membership,
    double timeout_seconds,
    int64_t count,
    const std::string& transport) {
  const Place& place = membership.place;
  const BlockingScope scope;
  const auto meeting = new_store(membership);
  compare_choices(*meeting, place, transport, timeout_seconds);
  if (transport != "group") {
    std::string why_not;
    const auto host =
        HostGroup::connect(*meeting, place.rank, place.size, count, timeout_seconds, &why_not);
    if (host) {
      return over_host(host, timeout_seconds);
    }
    TORCH_CHECK_WITH(
        DistBackendError,
        transport != "host",
        "[zero.comm] expected all ranks on one host for transport=\"host\": ",
        why_not,
        " (rank ",
        place.rank,
        " of ",
        place.size,
        "); use transport=\"group\" or \"auto\"");
  }
  return over_group(membership, timeout_seconds, count);
}

Communicators make_communicators(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    int64_t count,
    const std::string& transport,
    bool registered_buffers) {
  check_choice(timeout_seconds, transport);
  Communicators communicators;
  if (!group || group->getSize() == 1 || is_fake(group)) {
    const Place place = group ? Place{group->getRank(), group->getSize()} : Place{};
    for (int64_t i = 0; i < count; ++i) {
      communicators.push_back(with_devices(
          std::make_shared<LocalCommunicator>(place),
          std::nullopt,
          std::nullopt,
          timeout_seconds,
          transport,
          registered_buffers));
    }
    return communicators;
  }
  return over(membership_of(group), timeout_seconds, count, transport, registered_buffers);
}

std::shared_ptr<Communicator> make_communicator(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    double timeout_seconds,
    const std::string& transport) {
  return make_communicators(group, timeout_seconds, 1, transport).front();
}

} // namespace zero::comm
