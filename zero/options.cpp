#include <zero/options.h>

#include <cmath>

#include <c10/util/Exception.h>

namespace zero {
namespace {

template <typename T>
void at_least(const char* name, T value, T least) {
  TORCH_CHECK_VALUE(
      value >= least, "[zero.options] expected ", name, " >= ", least, ", got ", value);
}

void check_offload(const Options& options) {
  const auto& offload = options.offload;
  TORCH_CHECK_VALUE(
      !offload || *offload == "optimizer" || *offload == "parameters",
      "[zero.options] expected offload to be unset, optimizer or parameters, got ",
      offload.value_or(""));
  TORCH_CHECK_VALUE(
      offload != "parameters" || options.stage == 3,
      "[zero.options] expected stage 3 with offload=\"parameters\", which keeps shards of "
      "parameters on the host, got stage ",
      options.stage,
      "; choose offload=\"optimizer\", or stage 3");
}

void check_groups(const Options& options) {
  TORCH_CHECK_VALUE(
      options.shard_group.has_value() == options.replicate_group.has_value(),
      "[zero.options] expected shard_group and replicate_group together, got ",
      options.shard_group ? "no replicate_group" : "no shard_group");
}

void check_dtype(const char* name, const std::optional<std::string>& dtype, bool only_float32) {
  TORCH_CHECK_VALUE(
      !dtype || *dtype == "float32" ||
          (!only_float32 && (*dtype == "bfloat16" || *dtype == "float16")),
      "[zero.options] expected ",
      name,
      " to be unset",
      only_float32 ? " or float32" : ", float32, bfloat16 or float16",
      ", got ",
      dtype.value_or(""));
}

void check_dtypes(const Options& options) {
  check_dtype("param_dtype", options.param_dtype, false);
  check_dtype("reduce_dtype", options.reduce_dtype, false);
  check_dtype("output_dtype", options.output_dtype, false);
  check_dtype("master_dtype", options.master_dtype, true);
  const auto param = options.param_dtype.value_or("float32");
  const auto reduce = options.reduce_dtype.value_or(param);
  TORCH_CHECK_VALUE(
      param == "float32" || reduce == param || reduce == "float32",
      "[zero.options] expected reduce_dtype to be float32 or param_dtype=",
      param,
      ", got ",
      reduce);
  TORCH_CHECK_VALUE(
      !options.cast_forward_inputs || options.param_dtype,
      "[zero.options] expected param_dtype with cast_forward_inputs, got none; it says what to "
      "cast to");
}

void check_finite(const char* name, double value, double least, bool open = false) {
  TORCH_CHECK_VALUE(
      std::isfinite(value) && (open ? value > least : value >= least),
      "[zero.options] expected a finite ",
      name,
      open ? " > " : " >= ",
      least,
      ", got ",
      value);
}

void check_beta(const char* name, double value) {
  TORCH_CHECK_VALUE(
      value >= 0.0 && value < 1.0, "[zero.options] expected ", name, " in [0, 1), got ", value);
}

template <typename WithMoments>
void check_moments(const WithMoments& rule) {
  check_finite("lr", rule.lr, 0.0);
  check_beta("betas[0]", rule.betas[0]);
  check_beta("betas[1]", rule.betas[1]);
  check_finite("weight_decay", rule.weight_decay, 0.0);
}

template <typename AdamLike>
void check_adam(const AdamLike& rule) {
  check_moments(rule);
  check_finite("eps", rule.eps, 0.0);
}

void check(const AdamW& rule) {
  check_adam(rule);
}

void check(const Adam& rule) {
  check_adam(rule);
}

void check(const Lion& rule) {
  check_moments(rule);
}

void check(const SGD& rule) {
  check_finite("lr", rule.lr, 0.0);
  check_finite("momentum", rule.momentum, 0.0);
  check_finite("weight_decay", rule.weight_decay, 0.0);
  TORCH_CHECK_VALUE(
      !rule.nesterov || (rule.momentum > 0.0 && rule.dampening == 0.0),
      "[zero.options] expected momentum > 0 and dampening = 0 with nesterov, got momentum ",
      rule.momentum,
      " and dampening ",
      rule.dampening);
}

} // namespace

void Options::validate() const {
  TORCH_CHECK_VALUE(
      stage >= 0 && stage <= 3, "[zero.options] expected stage 0, 1, 2 or 3, got ", stage);
  at_least<int64_t>("bucket_bytes", bucket_bytes, 1);
  at_least<int64_t>("first_bucket_bytes", first_bucket_bytes, 1);
  at_least<int64_t>("prefetch", prefetch, 0);
  at_least<int64_t>("min_unit_numel", min_unit_numel, 0);
  at_least<int64_t>("max_live_numel", max_live_numel.value_or(1), 1);
  check_finite("timeout", timeout, 0.0, true);
  TORCH_CHECK_VALUE(
      reshard_after_forward == "true" || reshard_after_forward == "false" ||
          reshard_after_forward == "auto",
      "[zero.options] expected reshard_after_forward true, false or auto, got ",
      reshard_after_forward);
  TORCH_CHECK_VALUE(
      transport == "auto" || transport == "group" || transport == "host" || transport == "nccl",
      "[zero.options] expected transport auto, group, host or nccl, got ",
      transport);
  TORCH_CHECK_VALUE(
      on_nonfinite == "ignore" || on_nonfinite == "skip" || on_nonfinite == "raise",
      "[zero.options] expected on_nonfinite ignore, skip or raise, got ",
      on_nonfinite);
  TORCH_CHECK_VALUE(
      !step_in_backward || on_nonfinite == "ignore",
      "[zero.options] expected on_nonfinite ignore with step_in_backward, which steps parameters "
      "before all gradients are known, got ",
      on_nonfinite);
  check_dtypes(*this);
  check_groups(*this);
  check_offload(*this);
}

void validate(const Rule& rule) {
  std::visit([](const auto& concrete) { check(concrete); }, rule);
}

} // namespace zero
