// Engine's contents as checkpoints hold them: views of what this rank writes, and of
// what it reads into.

#include <zero/optim/engine_join.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace zero {
namespace {

layout::Range of_bucket(const layout::Slot& slot, layout::Range part) {
  return {slot.offset + part.begin, slot.offset + part.end};
}

} // namespace

// Of what ranks hold together each element belongs to one of them, at stage 0 too.
layout::Range Engine::Impl::share(int64_t index) const {
  const sharding::ParameterEntry& entry = table.entry(index);
  if (communicator->rank() >= communicator->shard_size()) {
    return {}; // another replica's
  }
  return layout::within(entry.slot, table.shard(entry.slot.bucket));
}

void Engine::Impl::add_state(int64_t index, layout::Range part, std::vector<StoredPart>& parts) {
  const layout::Slot& slot = table.entry(index).slot;
  const std::vector<std::string>& names = state.names(slot.bucket);
  const int64_t begin = part.size() == 0
      ? 0
      : of_bucket(slot, part).begin - gradients.reduced_range(slot.bucket).begin;
  for (size_t k = 0; k < names.size(); ++k) {
    parts.push_back(
        {index, names[k], part.begin, state.existing(slot.bucket)[k].view(begin, part.size())});
  }
}

bool Engine::is_flat(int64_t index) const {
  return impl_->checked(index).flat;
}

int64_t Engine::step_count(int64_t index) const {
  return impl_->checked(index).trainable ? impl_->state.steps().get(index) : 0;
}

int64_t Engine::held_begin(int64_t index) const {
  impl_->checked(index);
  return impl_->updated(index).begin;
}

std::vector<StoredPart> Engine::held_parts() {
  impl_->settle_values();
  impl_->refresh_masters();
  std::vector<StoredPart> parts;
  for (int64_t i = 0; i < impl_->table.size(); ++i) {
    if (!impl_->table.entry(i).flat) {
      continue;
    }
    const layout::Range part = impl_->owned(i);
    parts.push_back({i, "", part.begin, impl_->exact_values(i, part)});
    if (step_count(i) > 0) {
      impl_->add_state(i, impl_->updated(i), parts);
    }
  }
  return parts;
}

std::vector<StoredPart> Engine::own_parts() {
  impl_->announce("save");
  impl_->settle_values();
  impl_->refresh_masters();
  std::vector<StoredPart> parts;
  for (int64_t i = 0; i < impl_->table.size(); ++i) {
    const sharding::ParameterEntry& entry = impl_->table.entry(i);
    if (!entry.flat) {
      continue;
    }
    const layout::Range part = impl_->share(i);
    if (part.size() == 0) {
      continue;
    }
    parts.push_back({i, "", part.begin, impl_->exact_values(i, part)});
    if (step_count(i) > 0) {
      impl_->add_state(i, part, parts);
    }
  }
  return parts;
}

std::vector<StoredPart> Engine::begin_loading() {
  impl_->require_own_values("load");
  impl_->announce("load");
  impl_->settle_values();
  if (impl_->parameters) {
    reshard_all();
    impl_->parameters->before_step();
  }
  impl_->refresh_masters(); // what is not loaded stays
  std::vector<StoredPart> parts;
  for (int64_t i = 0; i < impl_->table.size(); ++i) {
    const layout::Range part = impl_->owned(i);
    if (impl_->table.entry(i).flat && part.size() > 0) {
      parts.push_back({i, "", part.begin, impl_->exact_values(i, part)});
    }
  }
  return parts;
}

std::vector<StoredPart>
Engine::load_state(int64_t index, const std::vector<std::string>& names, int64_t steps) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const bool clears = steps == 0 && names.empty();
  if (!clears) {
    make_trainable({index});
  }
  const sharding::ParameterEntry& entry = impl_->checked(index);
  std::vector<StoredPart> parts;
  if (!entry.trainable) {
    return parts;
  }
  impl_->gradients.mend();
  impl_->state.steps().set(index, steps);
  const layout::Range part = impl_->updated(index);
  if (clears) {
    impl_->state.clear_unused(entry.slot.bucket);
    const layout::Range held = impl_->held(index);
    for (const auto& tensor : impl_->state.existing(entry.slot.bucket)) {
      tensor.view(held.begin, held.size()).zero_();
    }
    return parts;
  }
  impl_->state.tensors(
      entry.slot.bucket,
      names,
      shard_parameter(index).options().requires_grad(false),
      impl_->gradients.reduced_range(entry.slot.bucket).size());
  if (part.size() > 0) {
    impl_->add_state(index, part, parts);
  }
  return parts;
}

void Engine::end_loading() {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  for (int64_t b = impl_->table.bucket_count() - 1; b >= 0; --b) {
    impl_->publish_replaced(b);
  }
}

} // namespace zero
