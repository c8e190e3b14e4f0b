// Engine's values that change outside of a step: what users write to parameters, buffers
// that follow one rank's, and parameters that stand aside for others.

#include <zero/optim/engine_join.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace zero {

void Engine::Impl::sync_buffers() {
  std::vector<NamedBuffer> current;
  if (buffers) {
    current = buffers();
  } else {
    for (const auto& [name, tensor] : own_buffers) {
      current.push_back({name, tensor});
    }
  }
  recover_if_failed();
  optim::sync_buffers(current, *communicator, join ? join->source() : 0, gradients.steps());
}

void Engine::Impl::reattach() {
  masters.note_moved();
  if (parameters) {
    parameters->settle_shards();
  }
  table.reattach();
}

// At stage 3 nobody can write to parameters but where masters follow at once, or by moving
// one to other storage, which only masters on the host look for.
void Engine::Impl::refresh_masters() {
  if (parameters && options.offload != "optimizer") {
    return;
  }
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    if (masters.has(b)) {
      masters.follow(b);
    }
  }
}

void Engine::Impl::require_own_values(const char* where) const {
  TORCH_CHECK(
      !swapped,
      "[zero.optim] expected the model's weights in ",
      where,
      ", got the averages that EMA has put in their place (rank ",
      communicator->rank(),
      " of ",
      communicator->size(),
      "); leave swapped() first");
}

void Engine::set_buffers(std::function<std::vector<NamedBuffer>()> source) {
  impl_->buffers = std::move(source);
}

void Engine::sync_buffers() {
  if (impl_->join) {
    impl_->join->announce({.action = optim::JoinAction::buffers});
  }
  impl_->sync_buffers();
}

// Values of a bucket that no step made: to autograd, and to the other ranks.
void Engine::Impl::publish_replaced(int64_t bucket) {
  if (!table.bucket(bucket).trainable) {
    return;
  }
  if (masters.has(bucket)) {
    masters.publish(bucket, masters.range(bucket));
  }
  for (const int64_t index : table.bucket(bucket).layout.parameters) {
    table.entry(index).parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  masters.saw(bucket);
  if (gather) {
    gather->start(bucket, gradients.steps(), false);
  }
}

void Engine::swap_values(std::vector<at::Tensor>& values, bool away) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  impl_->announce("EMA's swap");
  impl_->settle_values();
  if (impl_->parameters) {
    reshard_all();
    impl_->parameters->before_step();
  }
  impl_->refresh_masters();
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    at::Tensor own = shard_parameter(i);
    // One that was unfrozen since the last call had no part then.
    if (!values[i].defined() || values[i].numel() == 0 || own.numel() == 0) {
      continue;
    }
    const at::Tensor former = own.clone();
    own.copy_(values[i]);
    if (values[i].scalar_type() == former.scalar_type()) {
      values[i].copy_(former);
    } else {
      values[i] = former;
    }
  }
  for (int64_t b = impl_->table.bucket_count() - 1; b >= 0; --b) {
    impl_->publish_replaced(b);
  }
  impl_->swapped = away;
}

} // namespace zero
