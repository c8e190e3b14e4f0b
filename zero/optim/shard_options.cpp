#include <zero/optim/shard_options.h>

#include <sstream>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace zero::optim {

std::string pack_options(torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    torch::serialize::OutputArchive group(archive.compilation_unit());
    optimizer.param_groups()[g].options().serialize(group);
    archive.write(std::to_string(g), group);
  }
  std::ostringstream text;
  archive.save_to(text);
  return text.str();
}

OptionsScope::OptionsScope(torch::optim::Optimizer& optimizer, const std::string& packed)
    : optimizer_(optimizer) {
  std::istringstream text(packed);
  torch::serialize::InputArchive archive;
  archive.load_from(text);
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    torch::serialize::InputArchive group;
    archive.read(std::to_string(g), group);
    torch::optim::OptimizerOptions& options = optimizer.param_groups()[g].options();
    own_.push_back(options.clone());
    options.serialize(group);
  }
}

OptionsScope::~OptionsScope() {
  for (size_t g = 0; g < own_.size(); ++g) {
    optimizer_.param_groups()[g].set_options(std::move(own_[g]));
  }
}

} // namespace zero::optim
