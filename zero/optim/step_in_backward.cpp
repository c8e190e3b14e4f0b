// Engine's steps inside backward: each bucket by its rule, as soon as it is reduced.

#include <zero/optim/engine_impl.h>

#include <utility>

#include <zero/optim/native_step.h>

namespace zero {

class Engine::Impl::Stepper final : public sharding::BucketStepper {
 public:
  explicit Stepper(Engine::Impl& engine) : engine_(engine) {}

  void begin() override;
  void step(int64_t bucket, const sharding::BucketGradient& gradient) override;
  void publish(int64_t bucket) override {
    if (engine_.gather) {
      engine_.gather->start(bucket, engine_.gradients.steps());
    }
  }

 private:
  Engine::Impl& engine_;
  std::vector<Rule> rules_; // as they were when backward opened
};

void Engine::Impl::Stepper::begin() {
  engine_.require_own_values("a backward with step_in_backward");
  TORCH_CHECK(
      engine_.rule_source,
      "[zero.optim] expected an optimizer with step_in_backward, which says how parameters are "
      "stepped, got a backward without one (rank ",
      engine_.communicator->rank(),
      " of ",
      engine_.communicator->size(),
      "); make a ZeroOptimizer of the module first");
  std::vector<Rule> rules = engine_.rule_source();
  for (const Rule& rule : rules) {
    validate(rule);
  }
  if (engine_.gather) {
    engine_.gather->wait_all();
  }
  engine_.reattach();
  if (engine_.parameters) {
    engine_.parameters->refuse_writable();
  }
  for (int64_t b = 0; b < engine_.table.bucket_count(); ++b) {
    if (engine_.table.bucket(b).trainable) {
      engine_.state.require(b, sharding::state_names(engine_.rule_of(b, rules)));
    }
  }
  rules_ = std::move(rules);
}

void Engine::Impl::Stepper::step(int64_t bucket, const sharding::BucketGradient& gradient) {
  const Rule& rule = engine_.rule_of(bucket, rules_);
  engine_.state_tensors = static_cast<int64_t>(sharding::state_names(rule).size());
  if (engine_.parameters) {
    engine_.parameters->settle_shards();
  }
  const bool follows = !engine_.parameters || engine_.options.offload == "optimizer";
  if (follows && engine_.masters.has(bucket)) {
    engine_.masters.follow(bucket);
  }
  optim::native_step(engine_.table, gradient, engine_.state, engine_.masters, bucket, rule);
  for (const int64_t index : engine_.table.bucket(bucket).layout.parameters) {
    if (gradient.has(index)) { // what still wants the old values in this backward is told
      engine_.table.entry(index).parameter.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  engine_.masters.saw(bucket);
}

void Engine::Impl::step_in_backward() {
  gradients.step_in_backward(std::make_unique<Stepper>(*this));
}

void Engine::Impl::require_gradients(const char* what) const {
  TORCH_CHECK(
      !options.step_in_backward,
      "[zero.optim] ",
      what,
      " can't be used with step_in_backward: it needs all gradients after backward, and each was "
      "stepped and freed while backward ran (rank ",
      communicator->rank(),
      " of ",
      communicator->size(),
      "); leave step_in_backward out to use it");
}

void Engine::set_rule_source(std::function<std::vector<Rule>()> source) {
  impl_->rule_source = std::move(source);
}

} // namespace zero
