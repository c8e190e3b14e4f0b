// The communicator against arithmetic done here, for ranks as threads.

#include "catch.h"
#include "ranks.h"
#include "transports.h"

#include <atomic>
#include <cstring>
#include <random>

#include <ATen/ATen.h>

#include <zero/comm/blocking.h>
#include <zero/comm/communicator.h>

using namespace zero::comm;
using zero::test::check_contains;
using zero::test::contains_all;
using zero::test::error_of;
using zero::test::Group;
using zero::test::make_communicator_over;
using zero::test::run_ranks;

namespace {

// The same values on every rank that asks for the same seed.
at::Tensor random(int64_t count, at::ScalarType type, int64_t seed) {
  std::mt19937 engine(static_cast<unsigned>(seed));
  std::uniform_real_distribution<double> distribution(-2.0, 2.0);
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

// addend + (inputs[0] + inputs[1] + ...) / divisor, one scalar after the other.
template <typename Compute>
at::Tensor reference(
    const std::vector<at::Tensor>& inputs,
    double divisor,
    const at::Tensor& addend,
    at::ScalarType compute) {
  const auto type = inputs[0].scalar_type();
  auto out = at::empty({inputs[0].numel()}, compute);
  std::vector<at::Tensor> wide;
  for (const auto& input : inputs) {
    wide.push_back(input.to(compute).contiguous());
  }
  const auto wide_addend = addend.defined() ? addend.to(compute) : addend;
  for (int64_t i = 0; i < out.numel(); ++i) {
    volatile Compute sum = wide[0].data_ptr<Compute>()[i];
    for (std::size_t rank = 1; rank < wide.size(); ++rank) {
      sum = sum + wide[rank].data_ptr<Compute>()[i];
    }
    sum = sum / static_cast<Compute>(divisor);
    if (addend.defined()) {
      sum = wide_addend.data_ptr<Compute>()[i] + sum;
    }
    out.data_ptr<Compute>()[i] = sum;
  }
  return out.to(type);
}

at::Tensor
reduced(const std::vector<at::Tensor>& inputs, double divisor, const at::Tensor& addend) {
  return inputs[0].scalar_type() == at::kDouble
      ? reference<double>(inputs, divisor, addend, at::kDouble)
      : reference<float>(inputs, divisor, addend, at::kFloat);
}

struct Case {
  int64_t size;
  int64_t shard;
  at::ScalarType type;
  bool divide;
  bool with_addend;
  bool in_place;
};

std::string text_of(const Case& c) {
  return c10::str(
      "size ",
      c.size,
      ", shard ",
      c.shard,
      ", ",
      c.type,
      ", divide ",
      c.divide,
      ", addend ",
      c.with_addend,
      ", in place ",
      c.in_place);
}

// All of one communicator's collectives on one case.
void check_collectives(Communicator& comm, const Case& c) {
  const auto rank = comm.rank();
  const auto elements = c.size * c.shard;
  const double divisor = c.divide ? static_cast<double>(c.size) : 1.0;
  std::vector<at::Tensor> slices; // every rank's contribution to this rank's shard
  std::vector<at::Tensor> whole; // every rank's whole input
  for (int64_t r = 0; r < c.size; ++r) {
    whole.push_back(random(elements, c.type, 100 + r));
    slices.push_back(whole[r].narrow(0, rank * c.shard, c.shard).contiguous());
  }
  const auto addend = c.with_addend ? random(c.shard, c.type, 200 + rank) : at::Tensor();
  const auto expected = reduced(slices, divisor, addend);

  auto input = whole[rank].clone();
  const auto slice = [&](const at::Tensor& x) { return x.narrow(0, rank * c.shard, c.shard); };
  auto output = c.in_place ? slice(input) : at::empty({c.shard}, c.type);
  auto sum = c.with_addend && !c.in_place ? output.copy_(addend) : addend; // alias of the output
  comm.reduce_scatter(output, input, {divisor, sum}, {.what = "a"})->wait();
  TORCH_CHECK(same_bits(output, expected), "reduce_scatter, ", text_of(c));

  auto all = at::empty({elements}, c.type);
  auto own = c.in_place ? slice(all) : at::empty({c.shard}, c.type);
  own.copy_(expected);
  comm.all_gather(all, own, {.what = "b"})->wait();

  auto tensor = whole[rank].clone();
  comm.all_reduce(tensor, {divisor, addend}, {.what = "c"})->wait();
  TORCH_CHECK(same_bits(tensor, all), "all_reduce or all_gather, ", text_of(c));
  TORCH_CHECK(same_bits(slice(tensor), expected), "all_reduce, ", text_of(c));

  for (int64_t root = 0; root < c.size; ++root) {
    auto copy = whole[rank].clone();
    comm.broadcast(copy, root, {.what = "d"})->wait();
    TORCH_CHECK(same_bits(copy, whole[root]), "broadcast from ", root, ", ", text_of(c));
  }
}

} // namespace

TEST_CASE("collectives are right to the bit at every size, dtype and aliasing") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(1, 2, 3, 4);
  run_ranks(size, [&](int64_t, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t shard : {0, 1, 37, 1024}) {
        for (int flags = 0; flags < 8; ++flags) {
          check_collectives(
              *comm, {size, shard, type, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0});
        }
      }
    }
  });
}

TEST_CASE("shards of several chunks, with a last one that is short") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(2, 3);
  run_ranks(size, [&](int64_t, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    check_collectives(*comm, {size, 3 * (1 << 18) + 21, at::kFloat, true, true, false});
    check_collectives(*comm, {size, (1 << 20) + 4, at::kBFloat16, true, false, true});
  });
}

TEST_CASE("all_gather and broadcast move any dtype") {
  const std::string transport = EACH_TRANSPORT;
  run_ranks(2, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    for (const auto type : {at::kByte, at::kLong, at::kBool, at::kComplexFloat}) {
      const auto own = at::full({5}, rank, at::TensorOptions(type));
      auto all = at::empty({2, 5}, type);
      comm->all_gather(all, own, {})->wait();
      TORCH_CHECK(at::equal(all.select(0, 1), at::ones({5}, type)));
      TORCH_CHECK(at::equal(all.select(0, 0), at::zeros({5}, type)));
      auto copy = own.clone();
      comm->broadcast(copy, 1, {})->wait();
      TORCH_CHECK(at::equal(copy, at::ones({5}, type)));
    }
  });
}

TEST_CASE("a null group and a group of one rank need no peers") {
  const auto comm = make_communicator({}, 1.0);
  REQUIRE(comm->rank() == 0);
  REQUIRE(comm->size() == 1);
  const auto input = random(7, at::kFloat, 1);
  auto output = at::empty({7});
  const auto work = comm->reduce_scatter(output, input, {2.0, input}, {});
  REQUIRE(work->done());
  REQUIRE(same_bits(output, input + input / 2.0));
  REQUIRE(at::equal(comm->exchange(at::ones({3}, at::kByte), {}).at(0), at::ones({3}, at::kByte)));
  comm->barrier({});
  REQUIRE(comm->traffic().reduce_scatter.calls == 1);
  REQUIRE(comm->traffic().reduce_scatter.bytes == 0);
}

TEST_CASE("traffic is counted to the byte, and only that of training") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(1, 2, 3, 4);
  run_ranks(size, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    constexpr int64_t shard = 33;
    auto whole = at::zeros({size * shard}, at::kBFloat16);
    auto part = at::zeros({shard}, at::kBFloat16);
    for (const bool training : {true, false, true}) {
      const Tag tag{.what = "x", .training = training};
      comm->reduce_scatter(part, whole, {}, tag)->wait();
      comm->all_gather(whole, part, tag)->wait();
      comm->all_reduce(whole, {}, tag)->wait();
      comm->broadcast(whole, 0, tag)->wait();
      comm->exchange(at::zeros({1000}, at::kByte), tag);
      comm->barrier(tag);
    }
    const auto traffic = comm->traffic();
    const auto one = (size - 1) * shard * 2;
    TORCH_CHECK(traffic.reduce_scatter.calls == 2 && traffic.reduce_scatter.bytes == 2 * one);
    TORCH_CHECK(traffic.all_gather.calls == 2 && traffic.all_gather.bytes == 2 * one);
    TORCH_CHECK(traffic.all_reduce.calls == 2 && traffic.all_reduce.bytes == 4 * one);
    // The tree sends size - 1 copies in all; the root sends one for each bit of size - 1.
    auto sum = at::full({size}, traffic.broadcast.bytes, at::kLong);
    auto all = at::empty({size, size}, at::kLong);
    comm->all_gather(all, sum, {.what = "counts", .training = false})->wait();
    TORCH_CHECK(all.select(1, 0).sum().item<int64_t>() == 2 * (size - 1) * size * shard * 2);
    TORCH_CHECK(rank != 0 || traffic.broadcast.calls == 2);
  });
}

TEST_CASE("exchange brings every rank's bytes, of any length") {
  const std::string transport = EACH_TRANSPORT;
  const int64_t size = GENERATE(1, 2, 3, 4);
  run_ranks(size, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    const std::vector<int64_t> lengths{0, 1, 95, 96, 97, 256, 1 << 20};
    for (std::size_t round = 0; round < lengths.size(); ++round) {
      const auto length_of = [&](int64_t r) { return lengths[(round + r) % lengths.size()]; };
      const auto message_of = [&](int64_t r) {
        return (at::arange(length_of(r), at::kLong) * 7 + r).to(at::kByte);
      };
      const auto messages = comm->exchange(message_of(rank), {.what = "notes"});
      TORCH_CHECK(static_cast<int64_t>(messages.size()) == size);
      for (int64_t r = 0; r < size; ++r) {
        TORCH_CHECK(at::equal(messages[r], message_of(r)), "round ", round, ", rank ", r);
      }
    }
  });
}

TEST_CASE("operations run in the order of their calls and overlap their caller") {
  const std::string transport = EACH_TRANSPORT;
  run_ranks(3, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    std::vector<at::Tensor> wholes;
    std::vector<WorkPtr> works;
    for (int64_t i = 0; i < 40; ++i) {
      wholes.push_back(at::full({3 * 500}, static_cast<double>(rank + i)));
      works.push_back(comm->all_reduce(wholes.back(), {}, {.what = "bucket", .id = i}));
      // Each continues on the last one's result, unwaited for.
      works.push_back(comm->all_reduce(wholes.back(), {3.0, {}}, {.what = "again", .id = i}));
    }
    for (auto it = works.rbegin(); it != works.rend(); ++it) {
      (*it)->wait();
      TORCH_CHECK((*it)->done());
      (*it)->wait();
    }
    for (int64_t i = 0; i < 40; ++i) {
      TORCH_CHECK(at::equal(wholes[i], at::full({3 * 500}, 3.0 + 3.0 * static_cast<double>(i))));
    }
  });
}

TEST_CASE("buffers are released when wait() returns") {
  const std::string transport = EACH_TRANSPORT;
  run_ranks(2, [&](int64_t, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    auto whole = at::zeros({2 * 400000});
    auto part = at::zeros({400000});
    auto first = comm->reduce_scatter(part, whole, {}, {});
    auto second = comm->all_gather(whole, part, {});
    second->wait();
    first->wait();
    TORCH_CHECK(whole.storage().use_count() == 1 && part.storage().use_count() == 1);
    TORCH_CHECK(whole.use_count() == 1 && part.use_count() == 1);
  });
}

TEST_CASE("several communicators over one group don't mix, nor with the user's traffic") {
  const std::string transport = EACH_TRANSPORT;
  run_ranks(3, [&](int64_t rank, const Group& group) {
    auto first = make_communicator_over(transport, group, 60.0);
    auto second = make_communicator_over(transport, group, 60.0);
    auto a = at::full({3}, static_cast<double>(rank));
    auto b = at::full({3}, 10.0 * static_cast<double>(rank));
    std::vector<at::Tensor> mine{at::full({4}, static_cast<double>(rank))};
    const auto users = group->allreduce(mine);
    // In another order on each rank: each communicator has an order of its own.
    const auto run = [](Communicator& comm, at::Tensor& x) { return comm.all_reduce(x, {}, {}); };
    auto one = rank == 1 ? run(*second, b) : run(*first, a);
    auto two = rank == 1 ? run(*first, a) : run(*second, b);
    one->wait();
    two->wait();
    users->wait();
    TORCH_CHECK(at::equal(a, at::full({3}, 3.0)) && at::equal(b, at::full({3}, 30.0)));
    TORCH_CHECK(at::equal(mine[0], at::full({4}, 3.0)));
    first.reset();
    auto third = make_communicator_over(transport, group, 60.0);
    third->barrier({});
    second->barrier({});
  });
}

TEST_CASE("wrong arguments are refused before anything is sent") {
  const std::string transport = EACH_TRANSPORT;
  run_ranks(2, [&](int64_t rank, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    auto whole = at::zeros({8});
    auto part = at::zeros({4});
    const auto refuses = [](auto&& call, const std::string& part_of_text) {
      bool value = false;
      const auto text = error_of([&] {
        try {
          call();
        } catch (const c10::ValueError&) {
          value = true;
          throw;
        } catch (const c10::TypeError&) {
          value = true;
          throw;
        }
      });
      TORCH_CHECK(value, "expected ValueError or TypeError, got '", text, "'");
      check_contains(text, {"[zero.comm] expected", part_of_text});
    };
    if (rank == 0) { // alone: a collective would wait
      refuses([&] { comm->reduce_scatter(part, at::zeros({9}), {}, {}); }, "8 elements");
      const auto column = at::zeros({8, 2}).select(1, 0);
      refuses([&] { comm->reduce_scatter(part, column, {}, {}); }, "contiguous");
      refuses([&] { comm->reduce_scatter(part, whole.to(at::kBool), {}, {}); }, "float32");
      refuses(
          [&] { comm->reduce_scatter(part, whole.to(at::kDouble), {}, {}); }, "the input's dtype");
      refuses([&] { comm->reduce_scatter(whole.narrow(0, 1, 4), whole, {}, {}); }, "own slice");
      refuses([&] { comm->reduce_scatter(part, whole, {0.0, {}}, {}); }, "divisor");
      refuses([&] { comm->reduce_scatter(part, whole, {1.0, whole}, {}); }, "4 elements");
      refuses([&] { comm->reduce_scatter({}, whole, {}, {}); }, "got none");
      refuses([&] { comm->all_gather(whole, whole, {}); }, "16 elements");
      refuses([&] { comm->all_gather(whole, whole.narrow(0, 4, 4), {}); }, "own slice");
      refuses([&] { comm->all_reduce(at::zeros({3}), {}, {}); }, "multiple of 2");
      refuses([&] { comm->broadcast(whole, 2, {}); }, "root");
      refuses([&] { comm->exchange(whole, {}); }, "uint8");
      refuses([&] { comm->exchange(whole.to(at::kByte).view({2, 4}), {}); }, "one-dimensional");
    }
    comm->barrier({});
  });
  REQUIRE_THROWS_AS(make_communicator({}, 0.0), c10::ValueError);
}

TEST_CASE("a group without a store is refused with the remedy") {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const auto text = error_of([&] { make_communicator(group, 1.0); });
  REQUIRE(contains_all(text, {"process group with a c10d::Store", "zero::init()"}) == "");
}

TEST_CASE("hooks run around every wait that blocks") {
  const std::string transport = EACH_TRANSPORT;
  static std::atomic<int> released{0};
  static std::atomic<int> reacquired{0};
  set_blocking_hooks(
      []() -> void* {
        ++released;
        return &released;
      },
      [](void* state) { reacquired += state == &released ? 1 : 1000; });
  run_ranks(2, [&](int64_t, const Group& group) {
    auto comm = make_communicator_over(transport, group, 60.0);
    comm->barrier({});
  });
  set_blocking_hooks(nullptr, nullptr);
  REQUIRE(released > 4);
  REQUIRE(reacquired == released);
}
