#include <zero/checkpoint/shard_classes.h>

#include <tuple>
#include <type_traits>

#include <ATen/ops/full_like.h>
#include <nlohmann/json.hpp>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace zero::checkpoint {
namespace {

using Json = nlohmann::json;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// visit(name, field) for each hyper-parameter and each state tensor.
template <typename Visit>
void visit_options(torch::optim::SGDOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}

template <typename AdamLike, typename Visit>
void visit_adam_options(AdamLike& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("betas", options.betas());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}

template <typename Visit>
void visit_options(torch::optim::AdamOptions& options, const Visit& visit) {
  visit_adam_options(options, visit);
}

template <typename Visit>
void visit_options(torch::optim::AdamWOptions& options, const Visit& visit) {
  visit_adam_options(options, visit);
}

template <typename Visit>
void visit_options(torch::optim::RMSpropOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}

template <typename Visit>
void visit_options(torch::optim::AdagradOptions& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

template <typename Visit>
void visit_tensors(torch::optim::SGDParamState& state, const Visit& visit) {
  visit("momentum_buffer", state.momentum_buffer());
}

template <typename AdamLike, typename Visit>
void visit_adam_tensors(AdamLike& state, const Visit& visit) {
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}

template <typename Visit>
void visit_tensors(torch::optim::AdamParamState& state, const Visit& visit) {
  visit_adam_tensors(state, visit);
}

template <typename Visit>
void visit_tensors(torch::optim::AdamWParamState& state, const Visit& visit) {
  visit_adam_tensors(state, visit);
}

template <typename Visit>
void visit_tensors(torch::optim::RMSpropParamState& state, const Visit& visit) {
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}

template <typename Visit>
void visit_tensors(torch::optim::AdagradParamState& state, const Visit& visit) {
  visit("sum", state.sum());
}

int64_t* steps_of(torch::optim::SGDParamState& /*state*/) {
  return nullptr;
}

template <typename State>
int64_t* steps_of(State& state) {
  return &state.step();
}

template <typename Options, typename State>
class ClassOf final : public ShardClass {
 public:
  explicit ClassOf(std::string name) : name_(std::move(name)) {}

  std::string name() const override {
    return name_;
  }
  std::string write(OptimizerOptions& options) const override {
    Json json;
    visit_options(dynamic_cast<Options&>(options), [&](const char* name, const auto& value) {
      json[name] = value;
    });
    return json.dump();
  }
  void read(OptimizerOptions& options, const std::string& text) const override {
    const Json json = Json::parse(text);
    visit_options(dynamic_cast<Options&>(options), [&](const char* name, auto& value) {
      if (json.contains(name)) {
        json.at(name).get_to(value);
      }
    });
  }
  std::vector<std::pair<std::string, at::Tensor>> tensors(
      OptimizerParamState& state) const override {
    std::vector<std::pair<std::string, at::Tensor>> found;
    visit_tensors(dynamic_cast<State&>(state), [&](const char* name, const at::Tensor& tensor) {
      if (tensor.defined()) {
        found.emplace_back(name, tensor);
      }
    });
    return found;
  }
  std::vector<std::string> tensor_names() const override {
    std::vector<std::string> names;
    State state;
    visit_tensors(state, [&](const char* name, const at::Tensor&) { names.emplace_back(name); });
    return names;
  }
  const int64_t* steps(OptimizerParamState& state) const override {
    return steps_of(dynamic_cast<State&>(state));
  }
  std::unique_ptr<OptimizerParamState> make(
      const std::map<std::string, at::Tensor>& tensors,
      int64_t steps) const override {
    auto state = std::make_unique<State>();
    visit_tensors(*state, [&](const char* name, at::Tensor& tensor) {
      const auto found = tensors.find(name);
      if (found != tensors.end()) {
        tensor = found->second;
      }
    });
    if (int64_t* count = steps_of(*state)) {
      *count = steps;
    }
    return state;
  }
  std::unique_ptr<OptimizerParamState> fresh(const at::Tensor& shard, OptimizerOptions& options)
      const override {
    if constexpr (std::is_same_v<State, torch::optim::AdagradParamState>) {
      const double initial = dynamic_cast<Options&>(options).initial_accumulator_value();
      return make({{"sum", at::full_like(shard, initial)}}, 0);
    }
    return nullptr;
  }

 private:
  std::string name_;
};

} // namespace

std::unique_ptr<ShardClass> shard_class_of(torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim; // zero has classes of the same names
  if (dynamic_cast<optim::SGD*>(&optimizer) != nullptr) {
    return std::make_unique<ClassOf<optim::SGDOptions, optim::SGDParamState>>("SGD");
  }
  if (dynamic_cast<optim::Adam*>(&optimizer) != nullptr) {
    return std::make_unique<ClassOf<optim::AdamOptions, optim::AdamParamState>>("Adam");
  }
  if (dynamic_cast<optim::AdamW*>(&optimizer) != nullptr) {
    return std::make_unique<ClassOf<optim::AdamWOptions, optim::AdamWParamState>>("AdamW");
  }
  if (dynamic_cast<optim::RMSprop*>(&optimizer) != nullptr) {
    return std::make_unique<ClassOf<optim::RMSpropOptions, optim::RMSpropParamState>>("RMSprop");
  }
  if (dynamic_cast<optim::Adagrad*>(&optimizer) != nullptr) {
    return std::make_unique<ClassOf<optim::AdagradOptions, optim::AdagradParamState>>("Adagrad");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      dynamic_cast<optim::LBFGS*>(&optimizer) == nullptr,
      "[zero.checkpoint] state of torch::optim::LBFGS can't be saved or loaded: its history is of "
      "the whole gradient, and belongs to no parameter; use optimizer_state = false to load the "
      "module alone");
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "[zero.checkpoint] expected an optimizer of torch::optim::SGD, Adam, AdamW, RMSprop or "
      "Adagrad, got one of another class, whose state is not known; use optimizer_state = false to "
      "load the module alone");
}

} // namespace zero::checkpoint
