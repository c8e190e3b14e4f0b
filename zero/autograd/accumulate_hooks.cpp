#include <zero/autograd/accumulate_hooks.h>

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace zero::autograd {
namespace {

namespace ta = torch::autograd;

class BeforeHook final : public ta::FunctionPreHook {
 public:
  BeforeHook(int64_t index, std::weak_ptr<AccumulateListener> listener)
      : index_(index), listener_(std::move(listener)) {}
  ta::variable_list operator()(const ta::variable_list& grads) override {
    if (const auto listener = listener_.lock(); listener && !grads.empty() && grads[0].defined()) {
      listener->before_accumulate(index_);
    }
    return grads;
  }

 private:
  int64_t index_;
  std::weak_ptr<AccumulateListener> listener_;
};

class AfterHook final : public ta::FunctionPostHook {
 public:
  AfterHook(int64_t index, std::weak_ptr<AccumulateListener> listener)
      : index_(index), listener_(std::move(listener)) {}
  ta::variable_list operator()(const ta::variable_list& outputs, const ta::variable_list& inputs)
      override {
    if (const auto listener = listener_.lock();
        listener && !inputs.empty() && inputs[0].defined()) {
      listener->after_accumulate(index_);
    }
    return outputs;
  }

 private:
  int64_t index_;
  std::weak_ptr<AccumulateListener> listener_;
};

template <typename Hooks, typename Hook>
void remove(Hooks& hooks, const Hook* hook) {
  std::erase_if(hooks, [hook](const auto& held) { return held.get() == hook; });
}

template <typename NodePointer>
class NodeHooks final : public AccumulateHooks {
 public:
  NodeHooks(NodePointer node, int64_t index, const std::weak_ptr<AccumulateListener>& listener)
      : node_(std::move(node)) {
    auto before = std::make_unique<BeforeHook>(index, listener);
    auto after = std::make_unique<AfterHook>(index, listener);
    before_ = before.get();
    after_ = after.get();
    node_->add_pre_hook(std::move(before));
    node_->add_post_hook(std::move(after));
  }
  ~NodeHooks() override {
    remove(node_->pre_hooks(), static_cast<const ta::FunctionPreHook*>(before_));
    remove(node_->post_hooks(), static_cast<const ta::FunctionPostHook*>(after_));
  }
  NodeHooks(const NodeHooks&) = delete;
  NodeHooks& operator=(const NodeHooks&) = delete;

 private:
  NodePointer node_; // autograd itself only holds it weakly
  BeforeHook* before_;
  AfterHook* after_;
};

} // namespace

std::unique_ptr<AccumulateHooks> hook_accumulation(
    const at::Tensor& parameter,
    int64_t index,
    const std::weak_ptr<AccumulateListener>& listener) {
  const bool frozen = !parameter.requires_grad();
  if (frozen && (!c10::isFloatingType(parameter.scalar_type()) || parameter.is_inference())) {
    return nullptr;
  }
  // Frozen tensors have no node until they need one.
  parameter.set_requires_grad(true);
  auto node = ta::impl::grad_accumulator(parameter);
  parameter.set_requires_grad(!frozen);
  return std::make_unique<NodeHooks<decltype(node)>>(std::move(node), index, listener);
}

} // namespace zero::autograd
