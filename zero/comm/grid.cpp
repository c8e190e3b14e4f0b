// Groups that shard and replicate: whether they form a grid, and the communicators
// over them. Runs on the caller's thread.

#include <zero/comm/groups.h>

#include <atomic>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/device_backend.h>
#include <zero/comm/host_process.h>
#include <zero/comm/hybrid_transport.h>
#include <zero/comm/init.h>
#include <zero/comm/local_communicator.h>
#include <zero/comm/make_communicator.h>
#include <zero/comm/meeting.h>
#include <zero/comm/queued_communicator.h>

namespace zero {
namespace comm {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Unlike every other rank's.
std::string own_name() {
  static std::atomic<int64_t> count = 0; // ranks may be threads
  const HostProcess process = this_process();
  return c10::str(process.host, " ", process.pid, " ", process.start_time, " ", count.fetch_add(1));
}

// Ranks tell each other of both groups what they see, in three rounds: a row is seen by
// the shard group, the rows of all replicas by each replicate group, and whether all of
// a row see the same rows by the shard group again. Where they do, nobody is in the
// rows' groups but who is in the rows.
class GridCheck {
 public:
  GridCheck(const Groups& groups, double timeout_seconds)
      : shard_(groups.shard), replicate_(groups.replicate), timeout_(timeout_seconds) {}

  void run() {
    const std::string coordinates =
        c10::str(replicate_->getRank(), " of ", replicate_->getSize(), "\n");
    std::string row;
    for (const std::string& text : tell(shard_, coordinates + own_name())) {
      expect(text.rfind(coordinates, 0) == 0, "ranks of one shard group are in different rows");
      row += text.substr(text.find('\n') + 1) + "\n";
    }
    const std::string column = c10::str(shard_->getRank(), " of ", shard_->getSize(), "\n");
    std::string rows;
    for (const std::string& text : tell(replicate_, column + row)) {
      expect(
          text.rfind(column, 0) == 0,
          "ranks of one replicate group hold different shards, or of different numbers of them");
      rows += text.substr(text.find('\n') + 1) + "\n";
    }
    const std::string own = (complaint_.empty() ? "+" : "-") + rows;
    for (const std::string& text : tell(shard_, own)) {
      expect(text == own, "the replicate groups of one shard group's ranks end in different rows");
    }
    TORCH_CHECK_VALUE(
        complaint_.empty(),
        "[zero.comm] expected shard_group and replicate_group to form a grid, in which rank i of "
        "rank j's replicate group is rank j of the i-th shard group, for every rank; got groups "
        "in which ",
        complaint_,
        " (this is rank ",
        shard_->getRank(),
        " of ",
        shard_->getSize(),
        " in its shard group and rank ",
        replicate_->getRank(),
        " of ",
        replicate_->getSize(),
        " in its replicate group); make the groups of the rows and columns of one 2-D table of "
        "ranks, each in ascending order");
  }

 private:
  std::vector<std::string> tell(const Group& group, const std::string& text) const {
    return exchange_texts(group, text, timeout_);
  }
  void expect(bool condition, const char* otherwise) {
    if (!condition && complaint_.empty()) {
      complaint_ = otherwise;
    }
  }

  const Group shard_;
  const Group replicate_;
  const double timeout_;
  std::string complaint_; // the first; all rounds are gone through all the same
};

std::vector<std::shared_ptr<Communicator>> over(
    const std::optional<Membership>& shard,
    const std::optional<Membership>& replicate,
    double timeout_seconds,
    int64_t count,
    const std::string& transport,
    bool registered_buffers) {
  const auto another = [=] {
    return over(shard, replicate, timeout_seconds, 1, transport, registered_buffers).front();
  };
  const auto made_over = [&](const std::optional<Membership>& membership) {
    return membership ? make_transports(*membership, timeout_seconds, count, transport)
                      : Transports(count);
  };
  Transports shards = made_over(shard);
  Transports replicas = made_over(replicate);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (int64_t i = 0; i < count; ++i) {
    std::shared_ptr<Communicator> host;
    if (shards[i] || replicas[i]) {
      host = std::make_shared<QueuedCommunicator>(
          std::make_unique<HybridTransport>(std::move(shards[i]), std::move(replicas[i])), another);
    } else {
      host = std::make_shared<LocalCommunicator>();
    }
    communicators.push_back(with_devices(
        std::move(host), shard, replicate, timeout_seconds, transport, registered_buffers));
  }
  return communicators;
}

// None where a rank is alone.
std::optional<Membership> membership_in(const Group& group) {
  return group->getSize() > 1 ? std::optional(membership_of(group)) : std::nullopt;
}

} // namespace

std::vector<std::string>
exchange_texts(const Group& group, const std::string& text, double timeout_seconds) {
  if (group->getSize() == 1) {
    return {text};
  }
  const BlockingScope scope;
  return tell_all(
      *new_store(membership_of(group)),
      "text",
      group->getRank(),
      group->getSize(),
      text,
      timeout_seconds);
}

std::vector<std::shared_ptr<Communicator>> communicators_of(
    const Ranks& ranks,
    double timeout_seconds,
    int64_t count,
    const std::string& transport,
    bool registered_buffers) {
  if (const auto* group = std::get_if<Group>(&ranks)) {
    return make_communicators(*group, timeout_seconds, count, transport, registered_buffers);
  }
  const auto& groups = std::get<Groups>(ranks);
  check_choice(timeout_seconds, transport);
  TORCH_CHECK_VALUE(
      groups.shard && groups.replicate,
      "[zero.comm] expected both a shard and a replicate group of which this rank is a member, got "
      "no ",
      groups.shard ? "replicate" : "shard",
      " group; give a group of one rank where there is nothing to ",
      groups.shard ? "replicate" : "shard");
  GridCheck(groups, timeout_seconds).run();
  return over(
      membership_in(groups.shard),
      membership_in(groups.replicate),
      timeout_seconds,
      count,
      transport,
      registered_buffers);
}

} // namespace comm

Ranks or_launched(const Ranks& ranks, const Options& options) {
  TORCH_CHECK_VALUE(
      !options.shard_group || std::holds_alternative<Groups>(ranks),
      "[zero.comm] expected zero::Groups beside shard_group=",
      options.shard_group.value_or(""),
      " and replicate_group, which are only their names; got a single process group");
  const auto* group = std::get_if<c10::intrusive_ptr<c10d::ProcessGroup>>(&ranks);
  return group != nullptr && !*group ? Ranks(init(options.timeout)) : ranks;
}

} // namespace zero
