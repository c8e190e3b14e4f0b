#pragma once

// A small GPT over bytes: pre-norm blocks, learned positions, output weights
// tied to the embedding. gpt.py is the same model in Python: the same names in
// the same order, the same initial bits.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

constexpr int64_t vocabulary = 256;

// torch::nn::Linear adds its bias after a rounded product where Python's fuses
// the two: call the fused operator, for the bits of the Python program.
inline torch::Tensor affine(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

struct Block : torch::nn::Module {
  Block(int64_t dim, int64_t heads) : heads(heads) {
    using namespace torch::nn;
    attention_norm = register_module("attention_norm", LayerNorm(LayerNormOptions({dim})));
    attention_in = register_module("attention_in", Linear(dim, 3 * dim));
    attention_out = register_module("attention_out", Linear(dim, dim));
    mlp_norm = register_module("mlp_norm", LayerNorm(LayerNormOptions({dim})));
    mlp_in = register_module("mlp_in", Linear(dim, 4 * dim));
    mlp_out = register_module("mlp_out", Linear(4 * dim, dim));
  }

  torch::Tensor attend(const torch::Tensor& x) {
    auto parts = affine(attention_in, x).chunk(3, -1);
    for (auto& part : parts) {
      part = part.unflatten(-1, {heads, -1}).transpose(1, 2);
    }
    auto mixed = torch::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return affine(attention_out, mixed.transpose(1, 2).flatten(2));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + attend(attention_norm(x));
    return x + affine(mlp_out, torch::gelu(affine(mlp_in, mlp_norm(x))));
  }

  int64_t heads;
  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear attention_in{nullptr}, attention_out{nullptr};
  torch::nn::Linear mlp_in{nullptr}, mlp_out{nullptr};
};

struct GPT : torch::nn::Module {
  GPT(int64_t layers, int64_t dim, int64_t heads, int64_t context) : context(context) {
    using namespace torch::nn;
    tokens = register_module("tokens", Embedding(vocabulary, dim));
    positions = register_module("positions", Embedding(context, dim));
    blocks = register_module("blocks", ModuleList());
    for (int64_t layer = 0; layer < layers; ++layer) {
      blocks->push_back(std::make_shared<Block>(dim, heads));
    }
    norm = register_module("norm", LayerNorm(LayerNormOptions({dim})));
  }

  torch::Tensor forward(const torch::Tensor& input) {
    auto x = tokens(input) + positions(torch::arange(input.size(1), input.device()));
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return torch::linear(norm(x), tokens->weight);
  }

  int64_t context;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

inline at::Generator seeded(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

// Draws every weight from one generator, in the order of named_parameters().
inline void initialise(GPT& model, uint64_t seed) {
  torch::NoGradGuard no_grad;
  auto generator = seeded(seed);
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(model.blocks->size()));
  for (auto& item : model.named_parameters()) {
    const auto& name = item.key();
    if (name.ends_with("bias")) {
      item.value().zero_();
    } else if (name.find("norm") != std::string::npos) {
      item.value().fill_(1.0);
    } else {
      const bool into_residual = name.find("_out.") != std::string::npos;
      item.value().normal_(0.0, into_residual ? residual : 0.02, generator);
    }
  }
}

// `prompt` and `length` sampled bytes. Every rank must call it: a forward can
// communicate.
inline std::string generate(
    GPT& model,
    const std::string& prompt,
    int64_t length,
    uint64_t seed,
    double temperature = 0.8) {
  torch::NoGradGuard no_grad;
  auto generator = seeded(seed);
  std::string text = prompt;
  const auto device = model.tokens->weight.device();
  auto tokens = torch::tensor(std::vector<int64_t>(prompt.begin(), prompt.end())).unsqueeze(0);
  for (int64_t i = 0; i < length; ++i) {
    auto window = tokens.slice(1, std::max<int64_t>(0, tokens.size(1) - model.context));
    auto logits = model.forward(window.to(device))[0][-1].cpu();
    auto probabilities = torch::softmax(logits / temperature, -1);
    auto drawn = torch::multinomial(probabilities, 1, /*replacement=*/false, generator);
    text += static_cast<char>(drawn.item<int64_t>());
    tokens = torch::cat({tokens, drawn.unsqueeze(0)}, 1);
  }
  return text;
}
