// The fake device itself: numbers as on the CPU, and what its checker finds and leaves alone.

#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adamw.h>

#include "catch.h"
#include "fake_device/fake_device.h"
#include "ranks.h"

namespace {

using namespace zero;
using zero::test::check_contains;
using zero::test::error_of;

const c10::DeviceType type = c10::DeviceType::PrivateUse1;

at::Tensor on(const at::Tensor& tensor, c10::DeviceIndex index = 0) {
  return tensor.to(fake::device(index));
}

at::Tensor zeros(int64_t count) {
  return at::zeros({count}, at::TensorOptions(fake::device()));
}

// What the last error that was kept says; forgets it.
std::string taken() {
  const auto errors = fake::take_errors();
  return errors.empty() ? "" : errors.back();
}

// A block of a transformer over tokens, and its loss.
struct Model {
  at::Tensor table, gain, bias, qkv, out, classes;

  std::vector<at::Tensor> parameters() const {
    return {table, gain, bias, qkv, out, classes};
  }

  static Model make(const c10::Device& device) {
    const auto generator = at::detail::createCPUGenerator(7);
    const auto random = [&](at::IntArrayRef sizes) {
      return (at::randn(sizes, generator) * 0.3).to(device).requires_grad_(true);
    };
    return {
        random({32, 16}),
        random({16}),
        random({16}),
        random({48, 16}),
        random({16, 16}),
        random({32, 16})};
  }

  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) const {
    const auto x = at::layer_norm(at::embedding(table, tokens), {16}, gain, bias);
    const auto parts = at::linear(x, qkv).chunk(3, -1);
    const auto scores = at::matmul(parts[0], parts[1].transpose(-1, -2)) / 4.0;
    const auto mixed = at::matmul(at::softmax(scores, -1), parts[2]);
    const auto y = at::gelu(at::linear(mixed, out)) + x;
    return at::cross_entropy_loss(at::linear(y, classes).flatten(0, 1), targets.flatten());
  }
};

std::vector<at::Tensor> train(const c10::Device& device, int64_t steps) {
  const auto model = Model::make(device);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  const auto generator = at::detail::createCPUGenerator(11);
  std::vector<at::Tensor> values;
  for (int64_t step = 0; step < steps; ++step) {
    const auto tokens = at::randint(0, 32, {4, 9}, generator, at::kLong);
    const auto targets = at::randint(0, 32, {4, 9}, generator, at::kLong);
    const auto loss = model.loss(tokens.to(device), targets.to(device));
    loss.backward();
    values.push_back(loss.detach().cpu());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& parameter : model.parameters()) {
    values.push_back(parameter.detach().cpu());
  }
  return values;
}

} // namespace

TEST_CASE("a model trains on the fake device to the bits of the CPU") {
  fake::reset();
  const auto cpu = train(c10::Device(c10::kCPU), 3);
  const auto device = train(fake::device(1), 3);
  REQUIRE(cpu.size() == device.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    REQUIRE(at::equal(cpu[i], device[i]));
  }
  fake::check();
  REQUIRE(fake::operations("addmm", 1).size() + fake::operations("mm", 1).size() > 0);
}

TEST_CASE("views, in-place writes, out arguments and resizing reach the same memory") {
  fake::reset();
  const auto x = on(at::arange(12, at::kFloat));
  x.view({3, 4}).select(0, 1).mul_(10);
  REQUIRE(x.cpu()[5].item<float>() == 50.f);
  auto out = at::empty({0}, x.options());
  at::add_out(out, x, x);
  REQUIRE(at::equal(out.cpu(), x.cpu() + x.cpu()));
  out.resize_({20});
  REQUIRE(at::equal(out.cpu().narrow(0, 0, 12), x.cpu() + x.cpu()));
  auto other = at::empty({0}, x.options());
  other.set_(x.storage(), 4, {2, 2}, {4, 1});
  other.zero_();
  REQUIRE(x.cpu()[9].item<float>() == 0.f);
  REQUIRE(x.cpu()[10].item<float>() == 10.f);
  const auto attention = at::scaled_dot_product_attention(
      x.view({1, 1, 3, 4}), x.view({1, 1, 3, 4}), x.view({1, 1, 3, 4}));
  REQUIRE(attention.sizes() == at::IntArrayRef({1, 1, 3, 4}));
  REQUIRE(at::equal(x.to(at::kBFloat16).cpu(), x.cpu().to(at::kBFloat16)));
  fake::check();
}

TEST_CASE("random numbers are those of the CPU's generator") {
  fake::reset();
  at::manual_seed(5);
  const auto cpu = at::randn({10});
  at::manual_seed(5);
  const auto numbers = at::randn({10}, at::TensorOptions(fake::device()));
  REQUIRE(at::equal(numbers.cpu(), cpu));
  const auto kept = std::get<1>(at::native_dropout(numbers, 0.5, true));
  REQUIRE(kept.device() == fake::device());
  fake::check();
}

TEST_CASE("memory is counted, poisoned and reused by its own stream") {
  fake::reset();
  const auto before = fake::memory();
  const void* address = nullptr;
  {
    const auto x = zeros(1000);
    address = x.const_data_ptr();
    REQUIRE(fake::memory().bytes == before.bytes + 4000);
    REQUIRE(reinterpret_cast<uintptr_t>(address) % 64 == 0);
  }
  REQUIRE(fake::memory().bytes == before.bytes);
  REQUIRE(fake::memory().peak == before.bytes + 4000);
  const auto again = at::empty({1000}, at::TensorOptions(fake::device()));
  REQUIRE(again.const_data_ptr() == address);
  REQUIRE(again.isnan().all().item<bool>());
  {
    const c10::StreamGuard side(fake::new_stream());
    const auto elsewhere = zeros(1000);
    REQUIRE(elsewhere.const_data_ptr() != address);
  }
  fake::check();
}

TEST_CASE("a write after the free is noticed when the block is used again") {
  fake::reset();
  float* address = nullptr;
  {
    const auto x = zeros(3000);
    address = x.mutable_data_ptr<float>();
  }
  address[5] = 1.0f;
  const auto again = zeros(3000);
  check_contains(taken(), {"12000 bytes", "was written after it was freed"});
}

TEST_CASE("a stream that does not wait for another's write is an error that names both") {
  fake::reset();
  const auto x = zeros(64);
  fake::name_block(x, "weights");
  const auto side = fake::new_stream();
  c10::Event event(type);
  event.record(fake::current_stream());
  x.add_(1);
  const c10::StreamGuard guard(side);
  side.wait(event); // recorded before the write: not enough
  const auto error = error_of([&] {
    const fake::Label label("gather of bucket 3");
    x.mul_(2);
  });
  check_contains(
      error,
      {"mul [gather of bucket 3]",
       "stream " + std::to_string(side.id()) + " of device 0",
       "(weights) bytes 0 to 256",
       "add_",
       "stream 0 of device 0 writes",
       "nothing orders"});
  REQUIRE(taken() != "");
  event.record(c10::Stream(c10::Stream::DEFAULT, fake::device()));
  side.wait(event);
  x.mul_(2);
  side.synchronize();
  REQUIRE(fake::take_errors().empty());
}

TEST_CASE("a read that is not done before the next write is an error; two reads are none") {
  fake::reset();
  const auto x = zeros(64);
  const auto side = fake::new_stream();
  c10::Event ready(type);
  ready.record(fake::current_stream());
  side.wait(ready);
  {
    const c10::StreamGuard guard(side);
    const auto copy = x.clone();
    REQUIRE(at::sum(x).defined());
  }
  const auto sum = at::sum(x);
  // Other bytes of the same block don't conflict.
  x.narrow(0, 0, 0).zero_();
  check_contains(error_of([&] { x.zero_(); }), {"zero_", "writes", "sum", "reads"});
  REQUIRE(taken() != "");
  side.synchronize();
  x.zero_();
  fake::check();
}

TEST_CASE("halves of a block may be used by two streams at once") {
  fake::reset();
  const auto x = zeros(64);
  const auto side = fake::new_stream();
  c10::Event ready(type);
  ready.record(fake::current_stream());
  side.wait(ready);
  x.narrow(0, 0, 32).add_(1);
  const c10::StreamGuard guard(side);
  x.narrow(0, 32, 32).add_(2);
  REQUIRE(error_of([&] { x.narrow(0, 31, 2).add_(3); }) != "");
  REQUIRE(taken() != "");
  fake::current_stream().synchronize();
}

TEST_CASE("memory of one stream that another uses without waiting is an error") {
  fake::reset();
  zeros(8).add_(1);
  const auto x = at::empty({64}, at::TensorOptions(fake::device()));
  const c10::StreamGuard guard(fake::new_stream());
  check_contains(error_of([&] { x.zero_(); }), {"zero_", "the allocation"});
  REQUIRE(taken() != "");
}

TEST_CASE("a free while another stream uses the block is an error, unless that was recorded") {
  fake::reset();
  const auto side = fake::new_stream();
  const auto use_and_free = [&](bool records, bool waits) {
    auto x = zeros(64);
    c10::Event event(type);
    event.record(fake::current_stream());
    side.wait(event);
    {
      const c10::StreamGuard guard(side);
      x.add_(1);
      event.record(side);
    }
    if (records) {
      x.record_stream(side);
    }
    if (waits) {
      fake::current_stream().wait(event);
    }
  };
  use_and_free(true, false);
  use_and_free(false, true);
  REQUIRE(fake::take_errors().empty());
  use_and_free(false, false);
  check_contains(
      taken(), {"allocated on stream 0 of device 0, was freed while add_", "record the block"});
}

TEST_CASE("no synchronization: calls that wait throw with their name") {
  fake::reset();
  const auto x = zeros(64);
  const auto pinned = at::empty({64}, at::TensorOptions().pinned_memory(true));
  REQUIRE(pinned.is_pinned());
  const auto pageable = at::empty({64});
  c10::Event event(type);
  {
    const fake::NoSynchronization none;
    event.record(fake::current_stream());
    check_contains(error_of([&] { x[0].item<float>(); }), {"_local_scalar_dense", "host wait"});
    check_contains(error_of([&] { pageable.copy_(x); }), {"copy to host"});
    check_contains(error_of([&] { pageable.copy_(x, true); }), {"pageable"});
    check_contains(error_of([&] { x.copy_(pageable); }), {"copy to device"});
    check_contains(error_of([&] { event.synchronize(); }), {"synchronizeEvent"});
    check_contains(error_of([&] { fake::current_stream().synchronize(); }), {"synchronizeStream"});
    check_contains(error_of([&] { at::nonzero(x); }), {"nonzero"});
    REQUIRE(fake::take_errors().size() == 7);
    pinned.copy_(x, true);
    x.copy_(pinned, true);
    x.copy_(pageable, true);
    const fake::NoSynchronization others(1);
    REQUIRE(event.query());
  }
  REQUIRE(x[0].item<float>() == pageable[0].item<float>());
  fake::check();
}

TEST_CASE("pinned memory belongs to the copy until the host has waited") {
  fake::reset();
  const auto x = zeros(64);
  const auto pinned = at::empty({64}, at::TensorOptions().pinned_memory(true));
  pinned.copy_(x, /*non_blocking=*/true);
  check_contains(
      error_of([&] { fake::host_reads(pinned); }), {"host reads", "copy to host", "stream 0"});
  REQUIRE(taken() != "");
  fake::current_stream().synchronize();
  fake::host_reads(pinned);
  fake::host_writes(pinned);
  x.copy_(pinned, true);
  REQUIRE(error_of([&] { fake::host_writes(pinned); }) != "");
  REQUIRE(taken() != "");
}

TEST_CASE("the trace says what was queued where, and after what") {
  fake::reset();
  const auto x = zeros(64);
  const auto side = fake::new_stream(-1, /*high_priority=*/true);
  REQUIRE(fake::is_high_priority(side));
  c10::Event event(type);
  event.record(fake::current_stream());
  side.wait(event);
  const c10::StreamGuard guard(side);
  x.add_(1);
  const auto entries = fake::trace();
  const auto adds = fake::operations("add_");
  REQUIRE(adds.size() == 1);
  REQUIRE(adds[0].stream == side.id());
  REQUIRE(fake::touches(adds[0], x));
  REQUIRE_FALSE(fake::touches(adds[0], at::empty({4})));
  const auto& wait = entries.at(entries.size() - 2);
  REQUIRE(wait.kind == fake::Kind::wait);
  REQUIRE(wait.after == entries.at(entries.size() - 3).number);
  side.synchronize();
  check_contains(
      fake::text_of(entries), {"allocate block", "record event", ": wait event", "add_ reads"});
}

TEST_CASE("backward runs on the streams of forward, and gradients are ready after it") {
  fake::reset();
  const auto side = fake::new_stream();
  const auto x = on(at::arange(64, at::kFloat)).requires_grad_(true);
  c10::Event event(type);
  event.record(fake::current_stream());
  side.wait(event);
  at::Tensor loss;
  {
    const c10::StreamGuard guard(side);
    loss = (x * x).sum();
    event.record(side);
  }
  fake::current_stream().wait(event);
  loss.backward();
  const auto gradient = x.grad().clone();
  REQUIRE(at::equal(gradient.cpu(), at::arange(64, at::kFloat) * 2));
  bool on_side = false;
  for (const auto& entry : fake::operations("mul")) {
    on_side = on_side || entry.stream == side.id();
  }
  REQUIRE(on_side);
  x.grad().zero_();
  side.synchronize();
  fake::current_stream().synchronize(); // the gradient is memory of the side stream
  fake::check();
}
