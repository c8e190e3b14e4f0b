#pragma once

// The engine's parts. Which managers exist is decided by the stage, once, in the
// constructor.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <zero/autograd/accumulate_hooks.h>
#include <zero/optim/engine.h>
#include <zero/optim/gradient_norm.h>
#include <zero/optim/join_message.h>
#include <zero/optim/nonfinite.h>
#include <zero/sharding/gradients.h>
#include <zero/sharding/master_weights.h>
#include <zero/sharding/optimizer_state.h>
#include <zero/sharding/parameter_gather.h>
#include <zero/sharding/parameters.h>

namespace zero {

struct Engine::Impl final : autograd::AccumulateListener,
                            std::enable_shared_from_this<Engine::Impl> {
  Impl(
      const Options& options,
      std::shared_ptr<comm::Communicator> communicator,
      const Units& units);
  ~Impl() override;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void before_accumulate(int64_t index) override;
  void after_accumulate(int64_t index) override;

  // [collective] Checks, broadcasts and manages new parameters.
  void append(
      std::vector<NamedParameter> parameters,
      const std::vector<std::pair<std::string, at::Tensor>>& buffers,
      const Units& units);
  // [collective] Flat buffers with rank 0's values for parameters that came.
  void take_in(const std::vector<int64_t>& indices);
  std::vector<int64_t> units_of(const std::vector<int64_t>& indices) const;
  void broadcast(const at::Tensor& tensor, int64_t root, const std::string& what);
  // After a failure that a caller was told of, on a transport that can start anew:
  // [collective] gives up what is in flight and starts anew. Not inside backward.
  void recover_if_failed();
  void recover();
  void meet_after_abandoned_forward();
  // Parameters in place and there; not inside backward.
  void settle_values();
  void reattach();
  // The same, and gradients reduced and taken in. `action`: what is about to be done, for
  // a join.
  void settle(const optim::JoinMessage& action);
  // Says so where nothing has to be settled.
  void announce(const char* action);
  void refuse_scaler() const; // inside a join
  void sync_buffers();
  // Hands the updated parameters of a bucket to autograd and to the other ranks.
  void publish(int64_t bucket);
  void publish_replaced(int64_t bucket);
  // The part of a parameter that this rank writes into checkpoints.
  layout::Range share(int64_t index) const;
  void add_state(int64_t index, layout::Range part, std::vector<StoredPart>& parts);
  // Throws where swap_values() has put others in the parameters.
  void require_own_values(const char* where) const;
  class Stepper;
  // Buckets are stepped as they are reduced, by the rules that rule_source gives.
  void step_in_backward();
  // Throws where gradients are gone after backward: `what` needs them.
  void require_gradients(const char* what) const;
  bool any_gradient(int64_t bucket) const;
  const Rule& rule_of(int64_t bucket, const std::vector<Rule>& rules) const;
  // [collective, unless on_nonfinite is "ignore"] Whether gradients are finite on all
  // ranks; throws on all where they are not and shall raise. On a device a native step
  // finds out itself: found_nonfinite says so there.
  bool may_step(bool native);
  void find_on_device();
  std::vector<GradNorm> norms(const optim::NormOptions& wanted); // [collective]
  Clipped unscale_on_device(double factor, double norm_type); // [collective]
  // What a native step on a device is left out by, and no longer waits for one.
  at::Tensor take_found();
  // Whether native rules run where the parameters are, and that is not the CPU.
  bool steps_on_device() const {
    return !device.is_cpu() && !options.offload;
  }
  // Throws where parameters are on several devices, or have nothing to offload, by name.
  void check_devices(const std::vector<NamedParameter>& parameters);
  void check_offload(const std::string& name) const;
  void count_nonfinite(int64_t parameter);
  std::string describe(const optim::Nonfinite& found) const;
  // The part of a parameter that this rank owns (at stage 0 and of what is not
  // sharded: all of it), as elements of it.
  layout::Range owned(int64_t index) const;
  // The part of a parameter that this rank updates, as elements of it.
  layout::Range updated(int64_t index) const;
  // The same part, as elements of the bucket's reduced gradient and of its state.
  layout::Range held(int64_t index) const;
  // Every rank's part of something of a parameter, in rank order.
  enum class Part : uint8_t { value, gradient, state, other };
  std::vector<at::Tensor> parts(int64_t index, const at::Tensor& own, Part part);
  at::Tensor unshard(int64_t index, const at::Tensor& own, Part part);
  // The values of a part that this rank holds, as a view; empty without one.
  at::Tensor values(int64_t index, layout::Range part) const;
  // The same, of the master weights where there are any.
  at::Tensor exact_values(int64_t index, layout::Range part) const;
  // What somebody wrote to parameters, or to one of them, goes to the masters.
  void refresh_masters();
  void refresh_master(int64_t index);
  void fill_theory(Engine::Report& report) const;
  std::vector<int64_t> all_indices() const;
  const sharding::ParameterEntry& checked(int64_t index) const;

  const Options options;
  const std::shared_ptr<comm::Communicator> communicator;
  const std::shared_ptr<comm::Communicator> gathers; // stage 3: another one
  const std::shared_ptr<memory::Account> account;
  const std::shared_ptr<memory::SlabPool> pool; // stage 3
  sharding::ParameterTable table;
  sharding::GradientManager gradients;
  sharding::OptimizerStateManager state;
  sharding::MasterWeights masters;
  // Stages 1 and 2 of several ranks: updated shards travel after the step.
  std::unique_ptr<sharding::ParameterGather> gather;
  std::unique_ptr<sharding::ParameterManager> parameters; // stage 3
  std::vector<std::string> unit_names;
  std::mutex recovery; // one thread at a time
  std::atomic<bool> forward_abandoned = false;
  std::unique_ptr<JoinState> join; // while one is open
  bool unsharded = false; // by unshard_all()
  bool released = false; // by release_parameters()
  std::vector<std::unique_ptr<autograd::AccumulateHooks>> hooks; // by parameter
  c10::Device device = at::kCPU; // of all that is sharded
  at::Tensor found_nonfinite; // on a device: fp32, not 0 leaves the next step out
  at::Tensor left_out; // on a device: int64, how many steps were
  bool swapped = false; // parameters hold other values: swap_values()
  std::vector<std::pair<std::string, at::Tensor>> own_buffers; // with sync_buffers
  std::function<std::vector<NamedBuffer>()> buffers;
  std::function<std::vector<Rule>()> rule_source;
  int64_t foreign_state = 0; // bytes that a rule outside the engine holds
  int64_t state_tensors = 2; // of the rule in use, for the theory
  int64_t nonfinite_steps = 0;
  int64_t nonfinite_parameter = -1; // of the last one
};

} // namespace zero
