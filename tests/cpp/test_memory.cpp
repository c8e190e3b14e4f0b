// Storages that lie in a slab, come and go, and answer for themselves.

#include "catch.h"

#include <thread>

#include <torch/torch.h>

#include <zero/autograd/use_guard.h>
#include <zero/memory/flat_buffer.h>
#include <zero/memory/heap.h>
#include <zero/memory/large_blocks.h>
#include <zero/memory/slab_pool.h>
#include <zero/memory/slab_view.h>

using namespace zero::memory;

namespace {

struct Opens final : OnUse {
  bool before_use(const char* operation) noexcept override {
    last = operation;
    view->open();
    return true;
  }
  SlabView* view = nullptr;
  std::string last;
};

template <typename Function>
std::string error_of(Function&& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

} // namespace

TEST_CASE("the account knows what is held and the peak since a mark", "[memory]") {
  const auto account = std::make_shared<Account>();
  {
    FlatBuffer a(16, at::kFloat, Purpose::gradients, account);
    FlatBuffer b(16, at::kDouble, Purpose::buffers, account);
    REQUIRE(account->held().gradients == 64);
    REQUIRE(account->held().buffers == 128);
    FlatBuffer moved = std::move(a);
    REQUIRE(account->held().gradients == 64);
    b = {};
    REQUIRE(account->held().buffers == 0);
    REQUIRE(account->peak().buffers == 128);
    account->mark();
    REQUIRE(account->peak().buffers == 0);
  }
  REQUIRE(account->held().gradients == 0);
}

TEST_CASE("adopted tensors keep identity, values, aliases and strides", "[memory]") {
  const auto account = std::make_shared<Account>();
  FlatBuffer slab(64, at::kFloat, Purpose::parameters, account);
  at::Tensor plain = torch::arange(6.0F).view({2, 3}).clone();
  const at::Tensor alias = plain.view({6});
  const auto* identity = plain.unsafeGetTensorImpl();
  const SlabView view = SlabView::adopt(plain, slab.tensor(), 16, true);
  REQUIRE(plain.unsafeGetTensorImpl() == identity);
  REQUIRE(view.holds(plain));
  REQUIRE(plain.data_ptr() == element(slab.tensor(), 16));
  plain.add_(1.0);
  REQUIRE(alias[5].item<float>() == 6.0F); // an older alias sees it
  at::Tensor transposed = torch::arange(6.0F).view({2, 3}).t();
  const SlabView other = SlabView::adopt(transposed, slab.tensor(), 32, false);
  REQUIRE(transposed.strides() == at::IntArrayRef({1, 3}));
  REQUIRE(transposed[2][1].item<float>() == 5.0F);
  REQUIRE(slab.tensor()[33].item<float>() == 1.0F); // in the order of its memory
}

TEST_CASE("the slab outlives its buffer while a view is open", "[memory]") {
  at::Tensor tensor = torch::ones({4});
  {
    const auto account = std::make_shared<Account>();
    FlatBuffer slab(16, at::kFloat, Purpose::parameters, account);
    SlabView view = SlabView::adopt(tensor, slab.tensor(), 0, true);
    view.close("away", nullptr);
  } // a closed view opens when it goes
  REQUIRE(tensor.sum().item<float>() == 4.0F);
}

TEST_CASE("a closed storage raises its message, keeps its shape, and opens again", "[memory]") {
  const auto account = std::make_shared<Account>();
  FlatBuffer slab(16, at::kFloat, Purpose::parameters, account);
  at::Tensor tensor = torch::ones({2, 2});
  SlabView view = SlabView::adopt(tensor, slab.tensor(), 0, true);
  const at::Tensor saved = tensor.view({4});
  view.close("parameter 'w' is away", nullptr);
  REQUIRE(tensor.sizes() == at::IntArrayRef({2, 2}));
  REQUIRE(error_of([&] { (void)tensor.sum(); }).find("'w' is away") != std::string::npos);
  REQUIRE(error_of([&] { (void)saved.data_ptr(); }).find("'w' is away") != std::string::npos);
  view.set_message("still away");
  REQUIRE(error_of([&] { (void)tensor.sum(); }).find("still away") != std::string::npos);
  view.open();
  REQUIRE(saved.sum().item<float>() == 4.0F);
}

TEST_CASE("the guard opens what an operation uses, lists and optionals too", "[memory]") {
  const auto account = std::make_shared<Account>();
  FlatBuffer slab(16, at::kFloat, Purpose::parameters, account);
  at::Tensor tensor = torch::ones({4});
  SlabView view = SlabView::adopt(tensor, slab.tensor(), 0, true);
  Opens opens;
  opens.view = &view;
  const auto closed = [&] {
    opens.last.clear();
    view.close("away", &opens);
  };
  zero::autograd::want_use_guard(true);
  closed();
  REQUIRE(tensor.sum().item<float>() == 4.0F);
  REQUIRE(opens.last == "aten::sum");
  closed();
  REQUIRE(torch::cat({torch::zeros({1}), tensor}).sum().item<float>() == 4.0F);
  closed();
  REQUIRE(
      torch::linear(torch::ones({1, 2}), torch::zeros({4, 2}), tensor).sum().item<float>() == 4.0F);
  closed();
  float elsewhere = 0;
  std::thread([&] { elsewhere = tensor.sum().item<float>(); }).join();
  REQUIRE(elsewhere == 4.0F);
  zero::autograd::want_use_guard(false);
  closed();
  REQUIRE(!error_of([&] { (void)tensor.sum(); }).empty());
  view.open();
}

TEST_CASE("a pool lets go of all free slabs but the largest", "[memory]") {
  const auto account = std::make_shared<Account>();
  SlabPool pool(account);
  const auto take = [&](int64_t numel) { return pool.take(numel, at::kFloat); };
  pool.keep_one();
  Slab small = take(16);
  Slab large = take(64);
  Slab middle = take(32);
  pool.give(std::move(small));
  pool.give(std::move(large));
  pool.give(std::move(middle));
  const Slab out = take(8); // of 16 elements
  REQUIRE(account->held().buffers == 4 * (16 + 64 + 32));
  pool.keep_one();
  REQUIRE(account->held().buffers == 4 * (16 + 64));
  REQUIRE(take(64));
  REQUIRE(account->held().buffers == 4 * 16);
}

#ifdef __GLIBC__
TEST_CASE("the last large block that torch freed serves the next of its size", "[memory]") {
  constexpr int64_t mib = int64_t{1} << 20;
  keep_heap(4 * mib);
  const auto make = [](int64_t bytes) { return at::empty({bytes}, at::kByte); };
  const auto freed = [&](int64_t bytes) { return make(bytes).const_data_ptr(); };
  const void* first = freed(8 * mib);
  REQUIRE(freed(8 * mib) == first);
  REQUIRE(freed(5 * mib) == first);
  REQUIRE(freed(8 * mib) == first); // whole again
  {
    const auto small = make(3 * mib);
    const auto larger = make(9 * mib);
    const auto taken = make(8 * mib);
    REQUIRE(taken.const_data_ptr() == first);
    const auto second = make(8 * mib);
    REQUIRE(second.const_data_ptr() != first);
  }
  // Not after a drop, nor for less than half: pages that hold zeros are new.
  make(16 * mib).fill_(1);
  REQUIRE(make(16 * mib)[12345].item<int>() == 1);
  drop_large_block();
  REQUIRE(make(16 * mib)[12345].item<int>() == 0);
  make(16 * mib).fill_(1);
  REQUIRE(make(7 * mib)[12345].item<int>() == 0);
  auto grown = at::ones({8 * mib}, at::kByte);
  grown.resize_({12 * mib});
  REQUIRE(grown.slice(0, 0, 8 * mib).eq(1).all().item<bool>());
  drop_large_block();
}
#endif

TEST_CASE("released data is gone, its slab too", "[memory]") {
  const auto account = std::make_shared<Account>();
  FlatBuffer slab(16, at::kFloat, Purpose::buffers, account);
  auto [tensor, view] = SlabView::make({2, 3}, {3, 1}, at::kFloat);
  view.point_to(slab.tensor(), 4);
  tensor.fill_(2.0);
  REQUIRE(slab.tensor()[9].item<float>() == 2.0F);
  const auto uses = slab.tensor().storage().use_count();
  view.release("gone");
  REQUIRE(slab.tensor().storage().use_count() == uses - 1);
  REQUIRE(error_of([&] { (void)tensor.sum(); }).find("gone") != std::string::npos);
  view.point_to(slab.tensor(), 0);
  REQUIRE(tensor.sizes() == at::IntArrayRef({2, 3}));
  REQUIRE(error_of([&] { (void)tensor.sum(); }).empty());
}
