// Trains a small module for three steps and fails unless the loss falls. Given the
// directory of a checkpoint instead: loads it, saves what it loaded beside it, takes a
// step and saves that; by torch::optim's AdamW if a second argument is given.

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zero/optim/elementwise.h>
#include <zero/zero.h>

namespace {

struct Net : torch::nn::Module {
  Net() {
    up = register_module("up", torch::nn::Linear(7, 13));
    down = register_module("down", torch::nn::Linear(13, 1));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return down->forward(torch::tanh(up->forward(x)));
  }

  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};

zero::ZeroOptimizer optimizer_of(Net& model, bool of_torch) {
  if (of_torch) {
    const auto factory = zero::elementwise<torch::optim::AdamW>(torch::optim::AdamWOptions(0.5));
    return {model, {.stage = 3}, factory, zero::init()};
  }
  return {model, {.stage = 3}, zero::AdamW{}, zero::init()};
}

void go_on(const std::string& directory, bool of_torch) {
  auto model = std::make_shared<Net>();
  zero::ZeroOptimizer optimizer = optimizer_of(*model, of_torch);
  const std::string extra = zero::load(directory, *model, &optimizer);
  zero::save(directory + "-loaded", *model, &optimizer, {.extra = extra});
  model->forward(torch::ones({4, 7})).square().mean().backward();
  optimizer.step();
  zero::save(directory + "-stepped", *model, &optimizer);
}

} // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    go_on(argv[1], argc > 2);
    return 0;
  }
  torch::manual_seed(0);
  auto group = zero::init();
  auto model = std::make_shared<Net>();
  zero::ZeroOptimizer optimizer(*model, {.stage = 2}, zero::AdamW{.lr = 1e-2}, group);

  const torch::Tensor x = torch::randn({32, 7});
  const torch::Tensor y = x.sum(1, /*keepdim=*/true);
  std::vector<double> losses;
  for (int step = 0; step <= 3; ++step) {
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    losses.push_back(loss.item<double>());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::cout << "loss";
  bool falls = true;
  for (size_t i = 0; i < losses.size(); ++i) {
    std::cout << ' ' << losses[i];
    falls = falls && (i == 0 || losses[i] < losses[i - 1]);
  }
  std::cout << (falls ? "" : ": expected it to fall") << '\n';
  return falls ? 0 : 1;
}
