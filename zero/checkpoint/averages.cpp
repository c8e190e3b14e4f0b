#include <zero/checkpoint/averages.h>

#include <utility>

#include <ATen/core/grad_mode.h>

#include <zero/checkpoint/rules_json.h>
#include <zero/checkpoint/together.h>

namespace zero::checkpoint {
namespace {

void require_engine(EMA& ema, const Engine* engine, const char* operation) {
  TORCH_CHECK_VALUE(
      &ema.engine() == engine,
      "[zero.checkpoint] expected an EMA of the model's own optimizer in ",
      operation,
      ", got one of another");
  ema.require_weights(operation);
}

} // namespace

std::vector<ForeignState> averages_of(EMA& ema, const Engine* engine) {
  require_engine(ema, engine, "save");
  std::vector<ForeignState> averages;
  for (int64_t i = 0; i < engine->parameter_count(); ++i) {
    if (engine->is_trainable(i)) { // others are their own averages
      averages.push_back({i, kAverage, ema.part(i)});
    }
  }
  return averages;
}

void require_averages(const Checkpoint& checkpoint, EMA& ema, const Engine* engine) {
  require_engine(ema, engine, "load");
  TORCH_CHECK_VALUE(
      ema_from_json(checkpoint.manifest().scalars).has_value(),
      "[zero.checkpoint] expected the averages of an EMA in '",
      checkpoint.directory(),
      "', got a checkpoint that was saved without them; leave ema out, and make the EMA after "
      "loading to start it at the loaded weights");
}

void load_averages(Checkpoint& checkpoint, EMA& ema) {
  const at::NoGradGuard no_grad;
  Engine& engine = ema.engine();
  const Together ranks(&engine, "loading '" + checkpoint.directory() + "'");
  ranks.run([&] {
    for (int64_t i = 0; i < engine.parameter_count(); ++i) {
      at::Tensor part = ema.part(i);
      const std::string name = state_name(engine.parameter(i).name, kAverage);
      if (part.numel() > 0) {
        part.copy_(
            checkpoint.find(name) != nullptr ? checkpoint.read_state(engine, i, kAverage)
                                             : engine.shard_parameter(i).detach());
      }
    }
    return std::string();
  });
  const EMASettings settings = ema_from_json(checkpoint.manifest().scalars).value();
  ema.set_decay(settings.decay);
  ema.set_updates(settings.updates);
}

} // namespace zero::checkpoint
