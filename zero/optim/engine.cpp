#include <zero/optim/engine_join.h>

#include <utility>

#include <ATen/core/grad_mode.h>

#include <zero/autograd/backward_end.h>
#include <zero/autograd/use_guard.h>
#include <zero/memory/heap.h>
#include <zero/optim/native_step.h>
#include <zero/sharding/dtype_names.h>

namespace zero {
namespace {

sharding::GradientContext make_context(
    const Options& options,
    sharding::ParameterTable& table,
    const std::shared_ptr<comm::Communicator>& communicator,
    const std::shared_ptr<memory::Account>& account) {
  sharding::GradientContext context{table, communicator, account};
  context.reducer = std::make_shared<sharding::BucketReducer>(
      table,
      communicator,
      account,
      options.average ? static_cast<double>(communicator->size()) : 1.0);
  if (options.reduce_dtype) {
    context.reduce_dtype = sharding::dtype_named(*options.reduce_dtype);
  } else if (options.param_dtype == "float16") {
    context.reduce_dtype = at::kFloat;
  }
  return context;
}

// At stage 3 larger gradients would leave gaps in the heap of the size of units.
constexpr int64_t kSmallHeap = int64_t{4} << 20;
constexpr int64_t kLargeHeap = int64_t{32} << 20; // the most that glibc takes

sharding::GradientManager make_gradients(
    const Options& options,
    const sharding::GradientContext& context,
    const std::shared_ptr<memory::SlabPool>& pool) {
  return {context, sharding::make_gradient_storage(options, context, pool), options.stage == 0};
}

} // namespace

Engine::Impl::Impl(
    const Options& given,
    std::shared_ptr<comm::Communicator> with,
    const Units& units)
    : options(given),
      communicator(std::move(with)),
      gathers(units.gathers ? units.gathers : communicator),
      account(std::make_shared<memory::Account>()),
      pool(
          given.stage == 3 ? std::make_shared<memory::SlabPool>(account, communicator->buffers())
                           : nullptr),
      table(options, *communicator, account),
      gradients(make_gradients(options, make_context(options, table, communicator, account), pool)),
      state(table, account, /*on_host=*/options.offload.has_value()),
      masters(options, table, account) {
  if (options.step_in_backward) {
    step_in_backward();
  }
  gradients.on_unfrozen([this](int64_t bucket) {
    if (masters.wants(bucket)) {
      masters.widen(bucket);
    }
  });
  memory::keep_heap(options.stage == 3 ? kSmallHeap : kLargeHeap);
  if (options.stage == 3) {
    TORCH_CHECK_VALUE(
        gathers != communicator || communicator->size() == 1,
        "[zero.optim] expected a second communicator for the gathers of stage 3, got none");
    parameters = std::make_unique<sharding::ParameterManager>(
        options, table, gathers, pool, &autograd::inside_backward, [this] { recover_if_failed(); });
    autograd::want_use_guard(true);
  } else if (options.stage > 0 && communicator->shard_size() > 1) {
    gather = std::make_unique<sharding::ParameterGather>(
        table, communicator, &autograd::want_use_guard, [this] { recover_if_failed(); });
  }
}

Engine::Impl::~Impl() {
  gather.reset(); // waits, and leaves whole values in the parameters
  if (parameters) {
    parameters.reset();
    autograd::want_use_guard(false);
  }
  gradients.forget();
}

void Engine::Impl::before_accumulate(int64_t index) {
  if (!join && communicator->recoverable() && gradients.idle()) {
    recover();
  }
  const int64_t backward = gradients.before_accumulate(index);
  if (backward == 0) {
    return;
  }
  if (parameters && !gradients.order_known()) {
    gradients.expect_order(parameters->backward_order());
  }
  const std::weak_ptr<Impl> self = weak_from_this();
  autograd::at_end_of_backward(
      [self, backward] {
        if (const auto alive = self.lock()) {
          alive->gradients.end_backward(backward);
          if (alive->parameters) {
            alive->parameters->end_backward();
          }
        }
      },
      [self, backward] {
        if (const auto alive = self.lock()) {
          alive->gradients.abandon(backward);
          if (!alive->join || !alive->join->broken()) {
            alive->communicator->abort("its backward was left by an exception: see its own error");
          }
        }
      });
  if (join && gradients.reduces()) {
    join->announce({.action = optim::JoinAction::backward});
  }
}

void Engine::Impl::after_accumulate(int64_t index) {
  const int64_t complete = gradients.after_accumulate(index);
  if (parameters && complete >= 0) {
    parameters->gradients_complete(complete);
  }
}

void Engine::Impl::settle_values() {
  TORCH_CHECK(
      !autograd::inside_backward(),
      "[zero.optim] gradients and parameters can't be read or stepped inside backward (rank ",
      communicator->rank(),
      " of ",
      communicator->size(),
      "); call step, clip_grad_norm_ and full_grad after backward has returned");
  recover_if_failed();
  if (gather) {
    gather->wait_all();
  }
  TORCH_CHECK(
      !released,
      "[zero.optim] the parameters were given back by release(): this optimizer manages nothing");
  reattach();
}

void Engine::Impl::settle(const optim::JoinMessage& action) {
  settle_values();
  if (join) {
    join->announce(action);
  } else {
    gradients.flush();
  }
  gradients.import_assigned();
  if (join) {
    join->share();
  }
}

bool Engine::Impl::any_gradient(int64_t bucket) const {
  for (const int64_t index : table.bucket(bucket).layout.parameters) {
    if (gradients.has_gradient(index)) {
      return true;
    }
  }
  return false;
}

const Rule& Engine::Impl::rule_of(int64_t bucket, const std::vector<Rule>& rules) const {
  const int64_t group = table.group_of(bucket);
  TORCH_CHECK_VALUE(
      group < static_cast<int64_t>(rules.size()),
      "[zero.optim] expected a rule for each parameter group, got ",
      rules.size(),
      " for group ",
      group);
  return rules[group];
}

void Engine::Impl::publish(int64_t bucket) {
  for (const int64_t index : table.bucket(bucket).layout.parameters) {
    if (gradients.has_gradient(index)) {
      table.entry(index).parameter.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  masters.saw(bucket);
  if (gather) {
    gather->start(bucket, gradients.steps());
  }
}

layout::Range Engine::Impl::owned(int64_t index) const {
  const sharding::ParameterEntry& entry = table.entry(index);
  if (!entry.flat) {
    return {0, entry.parameter.tensor.numel()};
  }
  return entry.trainable ? updated(index)
                         : layout::within(entry.slot, table.shard(entry.slot.bucket));
}

layout::Range Engine::Impl::updated(int64_t index) const {
  const sharding::ParameterEntry& entry = table.entry(index);
  return entry.trainable ? layout::within(entry.slot, gradients.reduced_range(entry.slot.bucket))
                         : layout::Range{};
}

layout::Range Engine::Impl::held(int64_t index) const {
  const layout::Range part = updated(index);
  if (part.size() == 0) {
    return {};
  }
  const layout::Slot& slot = table.entry(index).slot;
  const int64_t shift = slot.offset - gradients.reduced_range(slot.bucket).begin;
  return {part.begin + shift, part.end + shift};
}

const sharding::ParameterEntry& Engine::Impl::checked(int64_t index) const {
  TORCH_CHECK_INDEX(
      index >= 0 && index < table.size(),
      "[zero.optim] expected a parameter index in [0, ",
      table.size(),
      "), got ",
      index);
  return table.entry(index);
}

Engine::Engine(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() = default;

const Options& Engine::options() const {
  return impl_->options;
}

int64_t Engine::rank() const {
  return impl_->communicator->rank();
}

int64_t Engine::world_size() const {
  return impl_->communicator->size();
}

int64_t Engine::parameter_count() const {
  return impl_->table.size();
}

const NamedParameter& Engine::parameter(int64_t index) const {
  return impl_->checked(index).parameter;
}

int64_t Engine::index_of(const at::Tensor& parameter) const {
  return impl_->table.index_of(parameter);
}

void Engine::set_gradient_stand_ins(std::vector<at::Tensor> stand_ins) {
  impl_->gradients.set_stand_ins(std::move(stand_ins));
}

void Engine::set_requires_gradient_sync(bool sync) {
  if (!sync) {
    impl_->require_gradients("no_sync (set_requires_gradient_sync(False))");
  }
  impl_->gradients.set_sync(sync);
}

bool Engine::requires_gradient_sync() const {
  return impl_->gradients.sync();
}

bool Engine::begin_step(const std::string& hyperparameters) {
  return open_step(/*native=*/false, hyperparameters);
}

bool Engine::open_step(bool native, const std::string& hyperparameters) {
  impl_->require_own_values("step()");
  impl_->account->mark();
  impl_->settle(
      {.action = native ? optim::JoinAction::step : optim::JoinAction::foreign_step,
       .text = hyperparameters});
  impl_->gradients.require_untorn();
  if (impl_->options.sync_buffers) {
    impl_->sync_buffers();
  }
  if (impl_->parameters) {
    if (impl_->unsharded) {
      reshard_all();
    }
    impl_->parameters->before_step();
  }
  impl_->refresh_masters();
  if (!impl_->may_step(native)) {
    return false;
  }
  impl_->gradients.prepare_step();
  return true;
}

bool Engine::step(const std::vector<Rule>& rules) {
  for (const Rule& rule : rules) {
    validate(rule);
  }
  if (!open_step(/*native=*/true, impl_->join ? optim::pack(rules) : std::string())) {
    return false;
  }
  for (int64_t b = 0; b < impl_->table.bucket_count(); ++b) {
    if (impl_->any_gradient(b)) {
      impl_->state.require(b, sharding::state_names(impl_->rule_of(b, rules)));
    }
  }
  const at::Tensor found = impl_->take_found();
  for (int64_t b = impl_->table.bucket_count() - 1; b >= 0; --b) {
    if (!impl_->any_gradient(b)) {
      continue;
    }
    const Rule& rule = impl_->rule_of(b, rules);
    impl_->state_tensors = static_cast<int64_t>(sharding::state_names(rule).size());
    const sharding::BucketGradient gradient{
        impl_->gradients.stepped_by(b),
        impl_->gradients.reduced_range(b),
        [this](int64_t parameter) { return impl_->gradients.has_gradient(parameter); }};
    optim::native_step(impl_->table, gradient, impl_->state, impl_->masters, b, rule, found);
    impl_->publish(b);
  }
  impl_->gradients.count_step();
  return true;
}

void Engine::end_step() {
  for (int64_t b = impl_->table.bucket_count() - 1; b >= 0; --b) {
    if (!impl_->any_gradient(b)) {
      continue;
    }
    if (impl_->masters.has(b)) {
      impl_->masters.publish(b, impl_->masters.range(b));
    }
    impl_->publish(b);
  }
  impl_->gradients.count_step();
}

std::vector<int64_t> Engine::stepping() {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < impl_->table.size(); ++i) {
    if (impl_->gradients.has_gradient(i) && impl_->updated(i).size() > 0) {
      indices.push_back(i);
    }
  }
  return indices;
}

at::Tensor Engine::shard_parameter(int64_t index) {
  impl_->checked(index);
  return impl_->exact_values(index, impl_->updated(index));
}

at::Tensor Engine::stepping_gradient(int64_t index) {
  const auto dtype = shard_parameter(index).scalar_type();
  if (!impl_->gradients.has_gradient(index)) {
    return {};
  }
  const at::NoGradGuard no_grad;
  const layout::Range held = impl_->held(index);
  const int64_t bucket = impl_->table.entry(index).slot.bucket;
  return memory::flat_view(impl_->gradients.stepped_by(bucket), held.begin, held.size()).to(dtype);
}

at::Tensor Engine::shard_gradient(int64_t index) {
  const sharding::ParameterEntry& entry = impl_->checked(index);
  if (!impl_->gradients.has_gradient(index)) {
    return {};
  }
  const layout::Range held = impl_->held(index);
  impl_->gradients.lent(entry.slot.bucket);
  return memory::flat_view(impl_->gradients.reduced(entry.slot.bucket), held.begin, held.size());
}

void Engine::wait_parameters() {
  impl_->recover_if_failed();
  if (impl_->gather) {
    impl_->gather->wait_all();
  }
}

void Engine::synchronize() {
  impl_->settle({.action = optim::JoinAction::synchronize});
}

void Engine::account_foreign_state(int64_t bytes) {
  impl_->account->add(
      memory::Purpose::optimizer_state, bytes - std::exchange(impl_->foreign_state, bytes));
}

} // namespace zero
