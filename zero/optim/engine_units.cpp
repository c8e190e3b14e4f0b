// Engine's stage 3: units used, held whole, loaded and given back.

#include <zero/optim/engine_impl.h>

#include <algorithm>
#include <numeric>

#include <zero/autograd/backward_end.h>

namespace zero {

// Sorted, each once; empty below stage 3.
std::vector<int64_t> Engine::Impl::units_of(const std::vector<int64_t>& indices) const {
  std::vector<int64_t> units;
  for (const int64_t index : indices) {
    if (parameters && checked(index).flat) {
      units.push_back(checked(index).parameter.unit);
    }
  }
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

std::vector<int64_t> Engine::Impl::all_indices() const {
  std::vector<int64_t> all(table.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void Engine::enter_unit(int64_t unit) {
  if (impl_->parameters && !impl_->released) {
    impl_->parameters->enter(unit);
  }
}

void Engine::leave_unit(int64_t unit) noexcept {
  if (impl_->parameters && !impl_->released) {
    impl_->parameters->leave(unit);
  }
}

void Engine::enter_forward() {
  if (impl_->parameters) {
    impl_->parameters->enter_forward();
  }
}

void Engine::leave_forward() noexcept {
  if (impl_->parameters) {
    impl_->parameters->leave_forward();
  }
}

void Engine::abandon_forward() noexcept {
  if (impl_->parameters && impl_->gathers->recovers() && !autograd::inside_backward()) {
    impl_->forward_abandoned = true;
  }
}

void Engine::set_gather_always(bool always) {
  if (impl_->parameters) {
    impl_->parameters->set_gather_always(always);
  }
}

void Engine::hold(const std::vector<int64_t>& indices, bool writable) {
  wait_parameters();
  const std::vector<int64_t> units = impl_->units_of(indices);
  if (!units.empty()) {
    impl_->parameters->hold(units, writable);
  }
}

void Engine::let_go(const std::vector<int64_t>& indices, bool writable) {
  const std::vector<int64_t> units = impl_->units_of(indices);
  try {
    if (writable) {
      broadcast_parameters(indices, 0);
    }
  } catch (...) {
    if (!units.empty()) {
      impl_->parameters->let_go(units, writable);
    }
    throw;
  }
  if (!units.empty()) {
    impl_->parameters->let_go(units, writable);
  }
}

void Engine::unshard_all() {
  wait_parameters();
  if (impl_->parameters && !impl_->unsharded) {
    impl_->parameters->hold(impl_->units_of(impl_->all_indices()), false);
    impl_->unsharded = true;
  }
}

void Engine::reshard_all() {
  if (impl_->parameters && impl_->unsharded) {
    impl_->parameters->let_go(impl_->units_of(impl_->all_indices()), false);
    impl_->unsharded = false;
  }
}

void Engine::begin_load(int64_t index) {
  if (impl_->parameters && impl_->checked(index).flat) {
    impl_->announce("load_state_dict");
    impl_->parameters->begin_load(index);
  }
}

void Engine::end_load(int64_t index) {
  if (impl_->parameters && impl_->checked(index).flat) {
    impl_->parameters->end_load(index);
    impl_->refresh_master(index);
  }
}

void Engine::release_parameters() {
  impl_->settle({.action = optim::JoinAction::other, .text = "release"});
  impl_->hooks.clear();
  if (impl_->parameters) {
    for (int64_t unit = 0; unit < impl_->parameters->unit_count(); ++unit) {
      impl_->parameters->restore(unit);
    }
    impl_->pool->clear();
  }
  impl_->gradients.forget();
  impl_->released = true;
}

const std::vector<std::string>& Engine::unit_names() const {
  return impl_->unit_names;
}

} // namespace zero
