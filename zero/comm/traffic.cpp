// Communicator's own: sums over what was sent, and operations made of others.

#include <zero/comm/communicator.h>

#include <utility>

namespace zero::comm {

Traffic::Count* Traffic::of(Kind kind) {
  switch (kind) {
  case Kind::reduce_scatter:
    return &reduce_scatter;
  case Kind::all_gather:
    return &all_gather;
  case Kind::all_reduce:
    return &all_reduce;
  case Kind::broadcast:
    return &broadcast;
  case Kind::barrier:
  case Kind::exchange:
    break; // control messages
  }
  return nullptr;
}

int64_t Traffic::bytes() const {
  return reduce_scatter.bytes + all_gather.bytes + all_reduce.bytes + broadcast.bytes;
}

Traffic Traffic::operator+(const Traffic& other) const {
  Traffic sum = other;
  const auto add = [](Count& to, const Count& more) {
    to.calls += more.calls;
    to.bytes += more.bytes;
  };
  add(sum.reduce_scatter, reduce_scatter);
  add(sum.all_gather, all_gather);
  add(sum.all_reduce, all_reduce);
  add(sum.broadcast, broadcast);
  return sum;
}

std::vector<WorkPtr> Communicator::all_gather_together(std::vector<Gather> gathers) {
  std::vector<WorkPtr> works;
  try {
    for (Gather& gather : gathers) {
      works.push_back(
          all_gather(std::move(gather.output), std::move(gather.input), std::move(gather.tag)));
    }
  } catch (...) {
    for (const WorkPtr& work : works) {
      work->settle(); // the caller has no handle of it
    }
    throw;
  }
  return works;
}

} // namespace zero::comm
