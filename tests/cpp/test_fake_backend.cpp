// Collectives over ranks that are threads with a fake device each.

#include <chrono>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "catch.h"
#include "fake_device/fake_backend.h"
#include "fake_device/fake_device.h"
#include "ranks.h"

namespace {

using namespace zero;
using zero::test::check_contains;
using zero::test::error_of;

using Backend = c10::intrusive_ptr<fake::FakeBackend>;

template <typename Body>
void run_fake_ranks(int64_t size, const Body& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  test::run_threads(size, [&](int64_t rank) {
    const c10::DeviceGuard guard(fake::device(static_cast<c10::DeviceIndex>(rank)));
    body(rank, fake::make_backend(store, rank, size));
  });
}

at::Tensor filled(int64_t count, double value, at::ScalarType dtype = at::kFloat) {
  return at::full({count}, value, at::TensorOptions(fake::current_stream().device()).dtype(dtype));
}

// Of three layers without an activation, on x = (rank + 1).
std::vector<at::Tensor> layers(const at::Device& device) {
  std::vector<at::Tensor> weights;
  for (int64_t layer = 0; layer < 3; ++layer) {
    const auto values = at::arange(64, at::kFloat).view({8, 8}) * 0.01 - 0.1 * double(layer + 1);
    weights.push_back(values.to(device).requires_grad_(true));
  }
  return weights;
}

at::Tensor loss_of(const std::vector<at::Tensor>& weights, int64_t rank) {
  auto x = at::full({8}, double(rank) + 1, weights[0].options().requires_grad(false));
  for (const auto& weight : weights) {
    x = at::mv(weight, x);
  }
  return x.square().sum();
}

// In rank order, on the CPU.
std::vector<at::Tensor> summed_gradients(int64_t size) {
  std::vector<at::Tensor> sums;
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto weights = layers(at::Device(at::kCPU));
    loss_of(weights, rank).backward();
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto& gradient = weights[i].grad();
      if (rank == 0) {
        sums.push_back(gradient.clone());
      } else {
        sums[i].add_(gradient);
      }
    }
  }
  return sums;
}

void require(bool holds, const char* what) {
  TORCH_CHECK(holds, what);
}

} // namespace

TEST_CASE("collectives give what they should") {
  const int64_t size = GENERATE(1, 2, 3, 4);
  fake::reset();
  run_fake_ranks(size, [&](int64_t rank, const Backend& backend) {
    auto mine = filled(5, static_cast<double>(rank) + 1);
    auto all = filled(5 * size, 0);
    backend->_allgather_base(all, mine, {})->wait();
    auto sums = filled(5, 0);
    auto average = filled(5, 0);
    backend->_reduce_scatter_base(sums, all, {})->wait();
    c10d::ReduceScatterOptions averages;
    averages.reduceOp = c10d::ReduceOp::AVG;
    backend->_reduce_scatter_base(average, all, averages)->wait();
    const double value = static_cast<double>(rank) + 1;
    require(at::equal(sums.cpu(), at::full({5}, value * static_cast<double>(size))), "sums");
    require(at::equal(average.cpu(), at::full({5}, value)), "average");

    std::vector<at::Tensor> tensors{filled(3, value)};
    backend->allreduce(tensors, {})->wait();
    require(tensors[0].cpu()[0].item<double>() == double(size * (size + 1)) / 2.0, "allreduce");
    std::vector<at::Tensor> sent{filled(3, value)};
    c10d::BroadcastOptions from_last;
    from_last.rootRank = size - 1;
    backend->broadcast(sent, from_last)->wait();
    require(sent[0].cpu()[2].item<double>() == double(size), "broadcast");

    auto out = filled(size, 0);
    auto in = filled(size, value);
    std::vector<int64_t> even;
    backend->alltoall_base(out, in, even, even, {})->wait();
    require(at::equal(out.cpu(), at::arange(1, size + 1, at::kFloat)), "alltoall");
    backend->barrier(c10d::BarrierOptions())->wait();
  });
  fake::check();
}

TEST_CASE("16-bit sums are taken in fp32 in rank order and rounded once") {
  fake::reset();
  run_fake_ranks(3, [&](int64_t rank, const Backend& backend) {
    const double values[] = {256.0, 1.0, 1.0}; // in bf16 256 + 1 is 256
    auto input = filled(3, values[rank], at::kBFloat16);
    auto output = input.narrow(0, rank, 1); // in place
    backend->_reduce_scatter_base(output, input, {})->wait();
    require(output.cpu().item<double>() == 258.0, "258 is a bf16 number");
  });
  fake::check();
}

TEST_CASE("a collective is work of another stream until it was waited for") {
  fake::reset();
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    auto mine = filled(4, static_cast<double>(rank));
    auto all = filled(8, -1);
    const auto work = backend->_allgather_base(all, mine, {});
    check_contains(error_of([&] { all.add_(1); }), {"add_", "_allgather_base", "nothing orders"});
    check_contains(error_of([&] { mine.add_(1); }), {"add_", "_allgather_base", "reads"});
    work->wait();
    mine.add_(1);
    require(at::equal(all.cpu(), at::tensor({0., 0., 0., 0., 1., 1., 1., 1.}, at::kFloat)), "all");
  });
  REQUIRE(fake::take_errors().size() == 4);
  for (c10::DeviceIndex rank = 0; rank < 2; ++rank) {
    REQUIRE(fake::operations("_allgather_base", rank).at(0).stream != 0);
  }
}

TEST_CASE("without asyncOp a collective runs on the current stream") {
  fake::reset();
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    const auto side = fake::new_stream();
    const c10::StreamGuard guard(side);
    auto mine = filled(4, static_cast<double>(rank));
    auto all = filled(8, -1);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    require(backend->_allgather_base(all, mine, options) == nullptr, "no work");
    all.add_(1);
    require(all.cpu()[7].item<float>() == 2.f, "all");
    const auto calls = fake::operations("_allgather_base");
    require(calls.at(0).stream == side.id(), "on the current stream");
  });
  fake::check();
}

TEST_CASE("a call does not wait for peers; what depends on it does") {
  fake::reset();
  test::MeetingPoint queued(2);
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    auto first = filled(8, -1);
    auto second = filled(8, -1);
    auto mine = filled(4, static_cast<double>(rank) + 5);
    if (rank == 1) {
      queued.meet(); // only once rank 0 has queued both
    }
    const auto one = backend->_allgather_base(first, mine, {});
    const auto two = backend->_allgather_base(second, mine, {});
    if (rank == 0) {
      require(!one->isCompleted() && !two->isCompleted(), "rank 1 has not queued them");
      mine.record_stream(fake::current_stream());
      one->wait();
      two->wait(); // no wait of the host
      mine.reset(); // its memory is kept until the collectives have run
      queued.meet();
    } else {
      one->wait();
      two->wait();
    }
    require((first + second).cpu()[7].item<float>() == 12.f, "the sum waits for both");
  });
  fake::check();
}

TEST_CASE("calls can be coalesced") {
  fake::reset();
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    std::vector<at::Tensor> outputs{filled(2, 0), filled(3, 0)};
    std::vector<at::Tensor> inputs{filled(4, double(rank)), filled(6, 1)};
    backend->startCoalescing();
    require(backend->_reduce_scatter_base(outputs[0], inputs[0], {}) == nullptr, "none yet");
    require(backend->_reduce_scatter_base(outputs[1], inputs[1], {}) == nullptr, "none yet");
    backend->endCoalescing()->wait();
    require(outputs[0].cpu()[0].item<float>() == 1.f, "first");
    require(outputs[1].cpu()[2].item<float>() == 2.f, "second");
    backend->startCoalescing();
    require(backend->endCoalescing() == nullptr, "nothing was called");
  });
  fake::check();
}

TEST_CASE("a process group takes the backend for tensors on the device") {
  fake::reset();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  test::run_threads(2, [&](int64_t rank) {
    const c10::DeviceGuard guard(fake::device(static_cast<c10::DeviceIndex>(rank)));
    const auto group = fake::make_group(store, rank, 2);
    auto mine = filled(2, static_cast<double>(rank));
    auto all = filled(4, -1);
    group->all_gather_single(all, mine)->wait();
    require(all.cpu()[3].item<float>() == 1.f, "gathered");
    group->startCoalescing(c10::DeviceType::PrivateUse1);
    std::vector<at::Tensor> tensors{mine};
    group->allreduce(tensors);
    group->endCoalescing(c10::DeviceType::PrivateUse1)->wait();
    require(mine.cpu()[0].item<float>() == 1.f, "reduced");
  });
  fake::check();
}

TEST_CASE("ranks that call different things get an error that names both") {
  fake::reset();
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    auto small = filled(4, 1);
    auto large = filled(8, 1);
    const auto error = error_of([&] {
      if (rank == 0) {
        backend->_allgather_base(large, small, {})->wait();
      } else {
        backend->_reduce_scatter_base(small, large, {})->wait();
      }
      large.add_(1);
      small.add_(1);
    });
    check_contains(
        error,
        {"collective 0",
         "rank 0 queued",
         "_allgather_base of 4 Float",
         "rank 1 queued",
         "_reduce_scatter_base of 4 Float (sum)"});
  });
  fake::reset();
}

TEST_CASE("a peer that does not come is a timeout that names it") {
  fake::reset();
  fake::set_timeout(0.2);
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    auto all = filled(8, 1);
    if (rank == 0) {
      auto mine = filled(4, 1);
      backend->_allgather_base(all, mine, {})->wait();
      check_contains(
          error_of([&] { all.add_(1); }),
          {"waited 0.2 s for collective 0 (_allgather_base of 4 Float), which rank 0 has queued "
           "and rank 1 has not"});
    }
  });
  fake::set_timeout(30);
  REQUIRE(fake::take_errors().size() == 1);
  fake::reset();
}

TEST_CASE("no synchronization: a barrier is one, waiting for a collective is none") {
  fake::reset();
  run_fake_ranks(2, [&](int64_t, const Backend& backend) {
    std::vector<at::Tensor> tensors{filled(4, 1)};
    const fake::NoSynchronization none;
    backend->allreduce(tensors, {})->wait();
    tensors[0].add_(1);
    check_contains(
        error_of([&] { backend->barrier(c10d::BarrierOptions())->wait(); }), {"barrier", "wait"});
  });
  REQUIRE(fake::take_errors().size() == 2);
}

TEST_CASE("gradients are reduced while backward runs; a step that does not wait is found") {
  const bool waits = GENERATE(true, false);
  fake::reset();
  const auto expected = summed_gradients(2);
  run_fake_ranks(2, [&](int64_t rank, const Backend& backend) {
    const auto weights = layers(fake::current_stream().device());
    std::vector<std::vector<at::Tensor>> buckets;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (const auto& weight : weights) {
      buckets.push_back({at::empty_like(weight.detach())});
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].register_hook([&, i](const at::Tensor& gradient) {
        buckets[i][0].copy_(gradient);
        works.push_back(backend->allreduce(buckets[i], {}));
      });
    }
    {
      const fake::NoSynchronization none;
      loss_of(weights, rank).backward();
    }
    require(works.size() == 3, "one for each layer");
    if (!waits) {
      check_contains(
          error_of([&] { weights[1].detach().sub_(buckets[1][0]); }),
          {"sub_", "allreduce", "nothing orders"});
    }
    for (const auto& work : works) {
      work->wait();
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      require(at::equal(buckets[i][0].cpu(), expected[i]), "the sum over ranks");
    }
  });
  REQUIRE(fake::take_errors().size() == (waits ? 0 : 2));
}
