// The communicator over a grid of ranks, against arithmetic done here in the stated
// order: over the ranks of a replica, then over the replicas.

#include "catch.h"
#include "grids.h"

#include <cstring>
#include <random>

#include <ATen/ATen.h>

#include <zero/comm/communicator.h>
#include <zero/comm/hybrid_transport.h>
#include <zero/comm/make_communicator.h>
#include <zero/comm/queued_communicator.h>

using namespace zero::comm;
using zero::Groups;
using zero::test::check_contains;
using zero::test::error_of;
using zero::test::Group;
using zero::test::prefixed;
using zero::test::run_grid;
using zero::test::run_threads;
using zero::test::Shape;

namespace {

// "mixed" as on several hosts: memory within a row, Gloo between them.
std::shared_ptr<Communicator> make(const Groups& groups, const std::string& transport) {
  if (transport == "mixed") {
    auto shard = make_transports(membership_of(groups.shard), 60.0, 1, "host");
    auto replicate = make_transports(membership_of(groups.replicate), 60.0, 1, "group");
    return std::make_shared<QueuedCommunicator>(
        std::make_unique<HybridTransport>(std::move(shard[0]), std::move(replicate[0])));
  }
  return communicators_of(groups, 60.0, 1, transport).front();
}

// The same values on every rank that asks for the same seed.
at::Tensor random(int64_t count, at::ScalarType type, int64_t seed) {
  std::mt19937 engine(static_cast<unsigned>(seed));
  std::uniform_real_distribution<double> distribution(-200.0, 200.0);
  auto values = at::empty({count}, at::kDouble);
  for (int64_t i = 0; i < count; ++i) {
    values.data_ptr<double>()[i] = distribution(engine);
  }
  return values.to(type);
}

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.numel() == right.numel() &&
      (left.numel() == 0 ||
       std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

template <typename Compute>
at::Tensor sums_of(
    const std::vector<at::Tensor>& inputs,
    const Shape& shape,
    double divisor,
    const at::Tensor& addend,
    at::ScalarType compute) {
  std::vector<at::Tensor> wide;
  for (const auto& input : inputs) {
    wide.push_back(input.to(compute).contiguous());
  }
  const auto wide_addend = addend.defined() ? addend.to(compute) : addend;
  auto out = at::empty({inputs[0].numel()}, compute);
  for (int64_t i = 0; i < out.numel(); ++i) {
    volatile Compute total = 0;
    for (int64_t replica = 0; replica < shape.replicas; ++replica) {
      volatile Compute sum = wide[replica * shape.shards].data_ptr<Compute>()[i];
      for (int64_t shard = 1; shard < shape.shards; ++shard) {
        sum = sum + wide[replica * shape.shards + shard].data_ptr<Compute>()[i];
      }
      total = replica == 0 ? sum : total + sum;
    }
    total = total / static_cast<Compute>(divisor);
    if (addend.defined()) {
      total = wide_addend.data_ptr<Compute>()[i] + total;
    }
    out.data_ptr<Compute>()[i] = total;
  }
  return out;
}

struct Case {
  Shape shape;
  int64_t count; // of a shard
  at::ScalarType type;
  at::ScalarType out_type;
  bool divide;
  bool with_addend;
  bool in_place;
};

std::string text_of(const Case& c) {
  return c10::str(
      c.shape.replicas,
      " x ",
      c.shape.shards,
      ", shard ",
      c.count,
      ", ",
      c.type,
      " to ",
      c.out_type,
      ", divide ",
      c.divide,
      ", addend ",
      c.with_addend,
      ", in place ",
      c.in_place);
}

void check_collectives(Communicator& comm, const Case& c) {
  const Shape& shape = c.shape;
  const int64_t shard = comm.rank() % shape.shards;
  const int64_t elements = shape.shards * c.count;
  const double divisor = c.divide ? static_cast<double>(shape.size()) : 1.0;
  const auto slice = [&](const at::Tensor& x) { return x.narrow(0, shard * c.count, c.count); };
  std::vector<at::Tensor> whole; // every rank's input
  std::vector<at::Tensor> slices; // of it, what this rank's shard is made of
  for (int64_t rank = 0; rank < shape.size(); ++rank) {
    whole.push_back(random(elements, c.type, 100 + rank));
    slices.push_back(slice(whole[rank]).contiguous());
  }
  // Of a shard, and so the same on all replicas.
  const auto addend = c.with_addend ? random(c.count, c.out_type, 200 + shard) : at::Tensor();
  const auto compute = c.type == at::kDouble || c.type == at::kLong ? at::kDouble : at::kFloat;
  const auto expected =
      (compute == at::kDouble ? sums_of<double>(slices, shape, divisor, addend, compute)
                              : sums_of<float>(slices, shape, divisor, addend, compute))
          .to(c.out_type);

  auto input = whole[comm.rank()].clone();
  auto output = c.in_place ? slice(input) : at::empty({c.count}, c.out_type);
  auto added = c.with_addend && !c.in_place ? output.copy_(addend) : addend; // may be the output
  comm.reduce_scatter(output, input, {divisor, added}, {.what = "a"})->wait();
  TORCH_CHECK(same_bits(output, expected), "reduce_scatter, ", text_of(c));
  if (c.type != c.out_type) {
    return;
  }
  auto all = at::empty({elements}, c.type);
  auto own = c.in_place ? slice(all) : at::empty({c.count}, c.type);
  own.copy_(expected);
  comm.all_gather(all, own, {.what = "b"})->wait();
  TORCH_CHECK(same_bits(slice(all).contiguous(), expected), "all_gather, ", text_of(c));

  auto tensor = whole[comm.rank()].clone();
  comm.all_reduce(tensor, {divisor, addend}, {.what = "c"})->wait();
  TORCH_CHECK(same_bits(tensor, all), "all_reduce or all_gather, ", text_of(c));
  for (int64_t root = 0; root < shape.size(); ++root) {
    auto copy = whole[comm.rank()].clone();
    comm.broadcast(copy, root, {.what = "d"})->wait();
    TORCH_CHECK(same_bits(copy, whole[root]), "broadcast from ", root, ", ", text_of(c));
  }
}

void check_all(Communicator& comm, const Shape& shape) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
    for (const int64_t count : {0, 1, 37, 1024}) {
      for (int flags = 0; flags < 8; ++flags) {
        const bool divide = (flags & 1) != 0 && type != at::kLong;
        check_collectives(
            comm, {shape, count, type, type, divide, (flags & 2) != 0, (flags & 4) != 0});
        if (type == at::kBFloat16 || type == at::kHalf) {
          check_collectives(
              comm, {shape, count, type, at::kFloat, divide, (flags & 2) != 0, false});
        }
      }
    }
  }
}

at::Tensor message_of(int64_t rank, int64_t length) {
  return at::full({length}, rank, at::kByte);
}

// What a rank was told by making communicators over groups of these members, by rank.
struct Rows {
  std::vector<std::vector<int64_t>> shard; // disjoint
  std::vector<std::vector<int64_t>> replicate;
};

Group group_of(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& name,
    const std::vector<std::vector<int64_t>>& groups,
    int64_t rank) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto found = std::find(groups[g].begin(), groups[g].end(), rank);
    if (found != groups[g].end()) {
      return prefixed(
          store,
          name + std::to_string(g),
          found - groups[g].begin(),
          static_cast<int64_t>(groups[g].size()));
    }
  }
  return {};
}

std::vector<std::string> errors_of_groups(const Rows& rows, int64_t ranks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(ranks);
  run_threads(ranks, [&](int64_t rank) {
    const Groups groups{
        .shard = group_of(store, "shard", rows.shard, rank),
        .replicate = group_of(store, "replicate", rows.replicate, rank)};
    try {
      communicators_of(groups, 20.0, 1);
    } catch (const c10::ValueError& error) {
      errors[rank] = error.what_without_backtrace();
    }
  });
  return errors;
}

} // namespace

TEST_CASE("a grid's collectives are right to the bit") {
  const auto transport = GENERATE(as<std::string>{}, "host", "group");
  const auto shape = GENERATE(values<Shape>({{1, 1}, {1, 3}, {3, 1}, {2, 2}, {3, 2}, {2, 3}}));
  run_grid(shape, [&](int64_t rank, const Groups& groups) {
    auto comm = make(groups, transport);
    TORCH_CHECK(comm->rank() == rank && comm->size() == shape.size());
    TORCH_CHECK(comm->shard_rank() == rank % shape.shards && comm->shard_size() == shape.shards);
    check_all(*comm, shape);
  });
}

TEST_CASE("shards of several pieces are summed over a grid") {
  const auto transport = GENERATE(as<std::string>{}, "host", "group", "mixed");
  const Shape shape{2, 2};
  run_grid(shape, [&](int64_t, const Groups& groups) {
    auto comm = make(groups, transport);
    const int64_t count = 3 * (1 << 17) + 21;
    check_collectives(*comm, {shape, count, at::kFloat, at::kFloat, true, true, false});
    check_collectives(*comm, {shape, count, at::kFloat, at::kFloat, true, false, true});
    check_collectives(*comm, {shape, count, at::kBFloat16, at::kFloat, true, false, false});
  });
}

TEST_CASE("messages reach all ranks of a grid, or those of a replica, in rank order") {
  const auto transport = GENERATE(as<std::string>{}, "host", "group", "mixed");
  const Shape shape{2, 2};
  run_grid(shape, [&](int64_t rank, const Groups& groups) {
    auto comm = make(groups, transport);
    for (const int64_t length : {0, 1, 96, 500}) {
      const auto length_of = [&](int64_t of) { return length * (of + 1); };
      const auto all = comm->exchange(message_of(rank, length_of(rank)), {.what = "all"});
      TORCH_CHECK(all.size() == 4);
      for (int64_t other = 0; other < 4; ++other) {
        TORCH_CHECK(at::equal(all[other], message_of(other, length_of(other))));
      }
      const auto row = comm->exchange_shards(message_of(rank, length_of(rank)), {.what = "row"});
      TORCH_CHECK(row.size() == 2);
      for (int64_t shard = 0; shard < 2; ++shard) {
        const int64_t other = rank / 2 * 2 + shard;
        TORCH_CHECK(at::equal(row[shard], message_of(other, length_of(other))));
      }
    }
    comm->barrier({});
  });
}

TEST_CASE("traffic is counted by group") {
  const Shape shape{3, 2};
  run_grid(shape, [&](int64_t rank, const Groups& groups) {
    auto comm = make(groups, "auto");
    const auto whole = at::ones({60}, at::kBFloat16);
    const auto wide = at::ones({60});
    comm->reduce_scatter(at::empty({30}, at::kBFloat16), whole, {6.0, {}}, {.what = "a"})->wait();
    comm->reduce_scatter(at::empty({30}), wide, {6.0, {}}, {.what = "b"})->wait();
    comm->all_gather(at::empty({60}), at::ones({30}), {.what = "c"})->wait();
    comm->broadcast(wide.clone(), 0, {.what = "d", .training = false})->wait();
    const auto by_group = comm->group_traffic();
    // To the other shard: 30 elements of 2 bytes, and of 4, and gathered.
    TORCH_CHECK(by_group.shard.reduce_scatter.bytes == 30 * 2 + 30 * 4);
    TORCH_CHECK(by_group.shard.all_gather.bytes == 30 * 4);
    TORCH_CHECK(by_group.shard.all_reduce.bytes == 0);
    // A third of the sums to two others, twice, in fp32.
    TORCH_CHECK(by_group.replicate.bytes() == 2 * (2 * 2 * 10 * 4));
    TORCH_CHECK(by_group.replicate.all_reduce.bytes == by_group.replicate.bytes());
    const auto traffic = comm->traffic();
    TORCH_CHECK(traffic.reduce_scatter.bytes == by_group.shard.reduce_scatter.bytes);
    TORCH_CHECK(traffic.all_reduce.bytes == by_group.replicate.all_reduce.bytes);
    TORCH_CHECK(traffic.bytes() == by_group.shard.bytes() + by_group.replicate.bytes());
    comm->all_reduce(wide.clone(), {6.0, {}}, {.what = "e"})->wait();
    TORCH_CHECK(comm->group_traffic().shard.all_reduce.bytes == 2 * 30 * 4);
    TORCH_CHECK(comm->group_traffic().replicate.bytes() == 3 * (2 * 2 * 10 * 4));
    check_contains(comm->transport(), {"shards: host (threads)", "replicas: host (threads)"});
    TORCH_CHECK(comm->rank() == rank);
  });
}

TEST_CASE("groups that are no grid are refused on all ranks") {
  const std::vector<Rows> wrong = {
      {{{0, 1}, {2, 3}}, {{0, 3}, {1, 2}}}, // columns cross
      {{{0, 1}, {2, 3}}, {{0, 1}, {2, 3}}}, // the same groups twice
      {{{0, 1, 2}, {3}}, {{0, 3}, {1}, {2}}}, // sizes differ
      // Rows and columns that only close after two rounds of the ring.
      {{{0, 1}, {2, 3}, {4, 5}, {6, 7}}, {{0, 2}, {5, 3}, {4, 6}, {1, 7}}},
  };
  for (const Rows& rows : wrong) {
    const int64_t ranks = rows.shard.size() == 4 ? 8 : 4;
    for (const std::string& error : errors_of_groups(rows, ranks)) {
      CHECK(zero::test::contains_all(error, {"shard_group and replicate_group", "a grid"}) == "");
    }
  }
  for (const std::string& error : errors_of_groups({{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}}, 4)) {
    CHECK(error.empty());
  }
  for (const std::string& error : errors_of_groups({{{0}, {1}}, {}}, 2)) {
    CHECK(zero::test::contains_all(error, {"got no replicate group"}) == "");
  }
}

TEST_CASE("ranks of a grid in different operations learn which") {
  const auto transport = GENERATE(as<std::string>{}, "host", "group", "mixed");
  std::vector<std::string> errors(4);
  run_grid({2, 2}, [&](int64_t rank, const Groups& groups) {
    auto comm = make(groups, transport);
    comm->barrier({.what = "the start"});
    errors[rank] = error_of([&] {
      if (rank == 3) {
        comm->barrier({.what = "another thing"});
      } else {
        comm->all_reduce(at::ones({4}), {}, {.what = "some sum"})->wait();
      }
    });
  });
  for (int64_t rank = 0; rank < 4; ++rank) {
    INFO(rank << ": " << errors[rank]);
    CHECK(
        zero::test::contains_all(
            errors[rank], {"group of ", " of all 4", rank < 2 ? "" : "another thing"}) == "");
  }
}

TEST_CASE("a grid recovers after one rank gave up") {
  zero::test::MeetingPoint point(4);
  run_grid({2, 2}, [&](int64_t rank, const Groups& groups) {
    auto channels = communicators_of(groups, 60.0, 2, "host");
    for (int round = 0; round < 20; ++round) {
      point.meet();
      if (rank == round % 4) {
        channels[round % 2]->abort("round " + std::to_string(round));
      } else {
        const auto error = error_of([&] {
          channels[1]->all_gather(at::empty({4}), at::ones({2}), {.what = "gather"})->wait();
          channels[0]->all_reduce(at::ones({4}), {}, {.what = "sum"})->wait();
        });
        check_contains(error, {"round " + std::to_string(round)});
      }
      TORCH_CHECK(channels[0]->recoverable() || channels[1]->recoverable());
      for (const auto& channel : channels) {
        channel->recover();
      }
      auto sum = at::ones({4});
      channels[0]->all_reduce(sum, {}, {.what = "afterwards"})->wait();
      TORCH_CHECK(at::equal(sum, at::full({4}, 4.0)));
      auto all = at::empty({4});
      channels[1]->all_gather(all, at::full({2}, rank, at::kFloat), {.what = "afterwards"})->wait();
      TORCH_CHECK(
          all[0].item<int64_t>() == rank / 2 * 2 && all[3].item<int64_t>() == rank / 2 * 2 + 1);
    }
  });
}
