// What an engine should hold and send: section 3 of docs/design.md, by dtype.

#include <zero/optim/engine_impl.h>

namespace zero {
namespace {

int64_t size_of(c10::ScalarType type) {
  return static_cast<int64_t>(c10::elementSize(type));
}

} // namespace

void Engine::Impl::fill_theory(Engine::Report& report) const {
  const int64_t ranks = communicator->shard_size();
  const int64_t replicas = communicator->size() / ranks;
  const int64_t stage = options.stage;
  const int64_t gathers = stage < 3 ? 1 : options.reshard_after_forward == "false" ? 1 : 2;
  const auto shared = [&](int64_t bytes, int64_t from_stage) {
    return bytes / (stage >= from_stage ? ranks : 1);
  };
  const auto traffic = [&](int64_t bytes) { return bytes * (ranks - 1) / ranks; };
  // Reduced in the narrower of two dtypes, or what a comm hook makes of it.
  const auto wire_size = [&](int64_t bucket) {
    const auto own = table.bucket(bucket).options.dtype().toScalarType();
    const auto reduced = gradients.reduced_dtype(bucket);
    const auto narrow = size_of(reduced) < size_of(own) ? reduced : own;
    const auto& hook = gradients.reducer().hook();
    return size_of(hook ? hook->wire_dtype(narrow) : narrow);
  };
  memory::Usage held;
  int64_t sent = 0;
  int64_t on_host = 0; // copies of gradients that the CPU steps by
  int64_t sums = 0; // of gradients, which go from replica to replica unrounded
  for (int64_t i = 0; i < table.size(); ++i) {
    const sharding::ParameterEntry& entry = table.entry(i);
    const int64_t numel = entry.parameter.tensor.numel();
    const int64_t computed = numel * size_of(entry.dtype);
    held.parameters += computed;
    if (!entry.trainable) {
      sent += stage == 3 ? gathers * computed : 0;
      continue;
    }
    const int64_t bucket = entry.slot.bucket;
    const int64_t reduced = numel * size_of(gradients.reduced_dtype(bucket));
    const bool widened = table.bucket(bucket).masters;
    const int64_t master =
        masters.has(bucket) ? numel * size_of(widened ? at::kFloat : entry.dtype) : 0;
    const bool apart = reduced != computed; // from where backward accumulates
    held.gradients += stage >= 2 ? reduced : computed + (apart && stage == 1 ? reduced / ranks : 0);
    held.gradients += apart && stage == 0 && reduced > computed ? reduced : 0;
    held.optimizer_state += master + state_tensors * (master > 0 ? master : computed);
    on_host += options.offload ? reduced : 0;
    sums += numel * size_of(entry.dtype == at::kDouble ? at::kDouble : at::kFloat);
    sent += numel * wire_size(bucket); // reduce-scattered
    sent += stage == 0 ? reduced : gathers * computed;
  }
  if (options.step_in_backward) {
    held.gradients = 0; // but for the open buckets, while backward runs
  }
  report.theory_held.parameters = shared(held.parameters, 3);
  report.theory_held.gradients = shared(held.gradients, 2) + shared(on_host, 1);
  report.theory_held.optimizer_state = shared(held.optimizer_state, 1);
  report.theory_replicate_traffic = 2 * sums * (replicas - 1) / (ranks * replicas);
  report.theory_traffic = traffic(sent) + report.theory_replicate_traffic;
}

} // namespace zero
