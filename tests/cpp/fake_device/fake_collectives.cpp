#include "fake_collectives.h"

#include <cstring>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace zero::fake {
namespace {

using Op = c10d::ReduceOp;

const char* name_of(Op::RedOpType op) {
  switch (op) {
  case Op::SUM:
    return "sum";
  case Op::AVG:
    return "average";
  case Op::MIN:
    return "minimum";
  case Op::MAX:
    return "maximum";
  default:
    return "other";
  }
}

template <typename T>
T combine(T a, T b, Op::RedOpType op) {
  switch (op) {
  case Op::MIN:
    return b < a || b != b ? b : a;
  case Op::MAX:
    return b > a || b != b ? b : a;
  default:
    return static_cast<T>(a + b);
  }
}

// In rank order, 16-bit types in fp32; rounded once.
template <typename T>
void reduce(
    const std::vector<const Part*>& ranks,
    int64_t offset,
    int64_t count,
    const std::vector<char*>& outputs) {
  using Sum = at::opmath_type<T>;
  const auto op = ranks[0]->reduction;
  std::vector<T> results(count);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = [&](const Part* part) {
      return static_cast<Sum>(reinterpret_cast<const T*>(part->input)[offset + i]);
    };
    Sum sum = at(ranks[0]);
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      sum = combine(sum, at(ranks[rank]), op);
    }
    if (op == Op::AVG) {
      sum = static_cast<Sum>(sum / static_cast<Sum>(ranks.size()));
    }
    results[i] = static_cast<T>(sum);
  }
  for (char* output : outputs) {
    std::memcpy(output, results.data(), count * sizeof(T));
  }
}

void reduce_typed(
    const std::vector<const Part*>& ranks,
    int64_t offset,
    const std::vector<char*>& outputs) {
  const int64_t count = ranks[0]->count;
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, ranks[0]->dtype, "fake collective", [&] {
    reduce<scalar_t>(ranks, offset, count, outputs);
  });
}

void all_gather(const std::vector<const Part*>& ranks) {
  const size_t bytes = ranks[0]->count * c10::elementSize(ranks[0]->dtype);
  for (const Part* to : ranks) {
    for (size_t from = 0; from < ranks.size(); ++from) {
      std::memmove(to->output + from * bytes, ranks[from]->input, bytes);
    }
  }
}

void reduce_scatter(const std::vector<const Part*>& ranks) {
  // An output may lie in its own input, and only there.
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    reduce_typed(ranks, static_cast<int64_t>(rank) * ranks[0]->count, {ranks[rank]->output});
  }
}

void all_reduce(const std::vector<const Part*>& ranks) {
  std::vector<char*> outputs;
  for (const Part* part : ranks) {
    outputs.push_back(part->output);
  }
  reduce_typed(ranks, 0, outputs);
}

void broadcast(const std::vector<const Part*>& ranks) {
  const Part& root = *ranks.at(ranks[0]->root);
  for (const Part* part : ranks) {
    std::memmove(part->output, root.input, root.count * c10::elementSize(root.dtype));
  }
}

void all_to_all(const std::vector<const Part*>& ranks) {
  const size_t item = c10::elementSize(ranks[0]->dtype);
  for (size_t to = 0; to < ranks.size(); ++to) {
    int64_t received = 0;
    for (size_t from = 0; from < ranks.size(); ++from) {
      const Part& sender = *ranks[from];
      const int64_t count = sender.sends[to];
      TORCH_CHECK(
          count == ranks[to]->receives[from],
          "[fake device] alltoall_base: rank ",
          from,
          " sends ",
          count,
          " elements to rank ",
          to,
          ", which expects ",
          ranks[to]->receives[from]);
      int64_t sent = 0;
      for (size_t before = 0; before < to; ++before) {
        sent += sender.sends[before];
      }
      std::memcpy(ranks[to]->output + received * item, sender.input + sent * item, count * item);
      received += count;
    }
  }
}

// Collectives that all ranks have queued, but that wait for others.
std::vector<std::shared_ptr<Collective>>& waiting() {
  static auto* list = new std::vector<std::shared_ptr<Collective>>;
  return *list;
}

} // namespace

std::string text_of(const Part& part) {
  std::string text = part.name;
  if (part.name != "barrier") {
    text += c10::str(" of ", part.count, " ", c10::toString(part.dtype));
  }
  if (part.name == "broadcast") {
    text += c10::str(" from rank ", part.root);
  }
  if (part.name == "allreduce" || part.name == "_reduce_scatter_base") {
    text += c10::str(" (", name_of(part.reduction), ")");
  }
  return text;
}

void move_data(const std::vector<const Part*>& ranks) {
  const auto& name = ranks[0]->name;
  if (name == "_allgather_base") {
    all_gather(ranks);
  } else if (name == "_reduce_scatter_base") {
    reduce_scatter(ranks);
  } else if (name == "allreduce") {
    all_reduce(ranks);
  } else if (name == "broadcast") {
    broadcast(ranks);
  } else if (name == "alltoall_base") {
    all_to_all(ranks);
  }
}

void Collective::queue_locked(int64_t rank, Queued call) {
  const auto text = [](const Queued& queued) {
    std::vector<std::string> parts;
    for (const auto& part : queued.parts) {
      parts.push_back(text_of(part));
    }
    return c10::Join(", ", parts);
  };
  for (size_t other = 0; other < ranks_.size() && error.empty(); ++other) {
    if (ranks_[other] && text(*ranks_[other]) != text(call)) {
      error = c10::str(
          "[fake device] collective ",
          sequence_,
          ": rank ",
          other,
          " queued ",
          text(*ranks_[other]),
          ", rank ",
          rank,
          " queued ",
          text(call));
    }
  }
  Machine::get().begin_use_locked(call.ranges.reads);
  Machine::get().begin_use_locked(call.ranges.writes);
  ranks_.at(rank) = std::make_unique<Queued>(std::move(call));
  TORCH_CHECK(error.empty(), error);
}

void Collective::fail_locked(const std::string& why) {
  error = error.empty() ? why : error;
  finish_locked();
}

bool Collective::try_to_run_locked() {
  if (done) {
    return true;
  }
  for (const auto& call : ranks_) {
    if (call == nullptr || !Machine::is_done(call->after)) {
      return false;
    }
  }
  try {
    for (const auto& call : ranks_) {
      for (const auto& before : call->after) {
        TORCH_CHECK(before->error.empty(), before->error);
      }
    }
    for (size_t part = 0; part < ranks_[0]->parts.size(); ++part) {
      std::vector<const Part*> parts;
      for (const auto& call : ranks_) {
        parts.push_back(&call->parts[part]);
      }
      move_data(parts);
    }
  } catch (const c10::Error& failure) {
    error = failure.what_without_backtrace();
  }
  finish_locked();
  return true;
}

void Collective::finish_locked() {
  done = true;
  auto& machine = Machine::get();
  for (const auto& call : ranks_) {
    if (call) {
      machine.end_use_locked(std::exchange(call->ranges.reads, {}), call->stream, !error.empty());
      machine.end_use_locked(std::exchange(call->ranges.writes, {}), call->stream, !error.empty());
      call->after.clear();
    }
  }
  machine.notify_locked();
}

std::string Collective::missing() const {
  std::vector<std::string> here;
  std::vector<std::string> absent;
  std::string what;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    (ranks_[rank] ? here : absent).push_back(std::to_string(rank));
    if (ranks_[rank] && what.empty()) {
      what = text_of(ranks_[rank]->parts[0]);
    }
  }
  const auto begin = c10::str("collective ", sequence_, " (", what, "), which ");
  return absent.empty() ? begin + "waits for another collective"
                        : c10::str(
                              begin,
                              "rank ",
                              c10::Join(", ", here),
                              " has queued and rank ",
                              c10::Join(", ", absent),
                              " has not");
}

std::shared_ptr<Collective> Meeting::collective_locked(int64_t sequence) {
  Open& open = open_[sequence];
  if (open.collective == nullptr) {
    open.collective = std::make_shared<Collective>(sequence, size_);
    waiting().push_back(open.collective);
  }
  auto found = open.collective;
  if (++open.arrivals == size_) {
    open_.erase(sequence);
  }
  return found;
}

void Meeting::progress_locked() {
  auto& list = waiting();
  for (bool moved = true; moved;) {
    const auto gone =
        std::erase_if(list, [](const auto& collective) { return collective->try_to_run_locked(); });
    moved = gone > 0;
  }
}

} // namespace zero::fake
