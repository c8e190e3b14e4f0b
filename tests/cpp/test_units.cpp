// Units: expectations by hand, on small trees and on the example's model.

#include <algorithm>

#include "catch.h"

#include <c10/util/Exception.h>

#include "examples/gpt.h"

#include <zero/layout/units.h>
#include <zero/nn/module_tree.h>

using namespace zero::layout;

namespace {

using Indices = std::vector<int64_t>;
using Names = std::vector<std::string>;

// root: embed (0), blocks: 4 x Block {inner: Sequential of two Linear}, norm (9).
std::vector<ModuleSpec> transformer() {
  std::vector<ModuleSpec> modules = {
      {.name = "", .type = "Model"},
      {.name = "embed", .parent = 0, .type = "Embedding", .parameters = {0}},
      {.name = "blocks", .parent = 0, .type = "ModuleList", .list = true, .called = false},
  };
  for (int64_t i = 0; i < 4; ++i) {
    const std::string name = "blocks." + std::to_string(i);
    const auto block = static_cast<int64_t>(modules.size());
    modules.push_back({.name = name, .parent = 2, .type = "Block"});
    modules.push_back({.name = name + ".in", .parent = block, .type = "Sequential", .list = true});
    for (int64_t k = 0; k < 2; ++k) {
      modules.push_back(
          {.name = name + ".in." + std::to_string(k),
           .parent = block + 1,
           .type = "Linear",
           .parameters = {1 + 2 * i + k}});
    }
  }
  modules.push_back({.name = "norm", .parent = 0, .type = "LayerNorm", .parameters = {9}});
  return modules;
}

void choose(std::vector<ModuleSpec>& modules, const Names& names) {
  for (ModuleSpec& module : modules) {
    module.chosen = std::find(names.begin(), names.end(), module.name) != names.end();
  }
}

// (first module's name, unit) of the modules that are units.
std::vector<std::pair<std::string, int64_t>> unit_modules(
    const std::vector<ModuleSpec>& modules,
    const UnitLayout& layout) {
  std::vector<std::pair<std::string, int64_t>> result;
  for (size_t i = 0; i < modules.size(); ++i) {
    if (layout.unit_of_module[i] != -1) {
      result.emplace_back(modules[i].name, layout.unit_of_module[i]);
    }
  }
  return result;
}

using Placed = std::vector<std::pair<std::string, int64_t>>;

} // namespace

TEST_CASE("each block of a repeated list is a unit, whatever it holds", "[units]") {
  const auto modules = transformer();
  const UnitLayout layout = make_units(modules, Indices(10, 100), {});
  REQUIRE(layout.names == Names{"", "blocks.0", "blocks.1", "blocks.2", "blocks.3"});
  REQUIRE(layout.unit_of_parameter == Indices{0, 1, 1, 2, 2, 3, 3, 4, 4, 0});
  REQUIRE(
      unit_modules(modules, layout) ==
      Placed{{"", 0}, {"blocks.0", 1}, {"blocks.1", 2}, {"blocks.2", 3}, {"blocks.3", 4}});
}

TEST_CASE("in a list, only types that repeat and hold parameters are units", "[units]") {
  const std::vector<ModuleSpec> modules = {
      {.name = "", .type = "Sequential", .list = true},
      {.name = "0", .parent = 0, .type = "Linear", .parameters = {0}},
      {.name = "1", .parent = 0, .type = "ReLU"},
      {.name = "2", .parent = 0, .type = "Linear", .parameters = {1}},
      {.name = "3", .parent = 0, .type = "ReLU"},
      {.name = "4", .parent = 0, .type = "LayerNorm", .parameters = {2}},
  };
  const UnitLayout layout = make_units(modules, {7, 8, 9}, {});
  REQUIRE(layout.names == Names{"", "0", "2"});
  REQUIRE(layout.unit_of_parameter == Indices{1, 2, 0});
  REQUIRE(layout.unit_of_module == Indices{0, 1, -1, 2, -1, -1});
}

TEST_CASE("a list in a list is opened where its children repeat", "[units]") {
  const std::vector<ModuleSpec> modules = {
      {.name = "", .type = "Net"},
      {.name = "stages", .parent = 0, .type = "Sequential", .list = true},
      {.name = "stages.0", .parent = 1, .type = "Sequential", .list = true},
      {.name = "stages.0.0", .parent = 2, .type = "Block", .parameters = {0}},
      {.name = "stages.0.1", .parent = 2, .type = "Block", .parameters = {1}},
      {.name = "stages.0.2", .parent = 2, .type = "Norm", .parameters = {2}},
      {.name = "stages.1", .parent = 1, .type = "Sequential", .list = true}, // does not repeat
      {.name = "stages.1.0", .parent = 6, .type = "Block", .parameters = {3}},
      {.name = "stages.1.1", .parent = 6, .type = "Norm", .parameters = {4}},
      {.name = "pairs", .parent = 0, .type = "ModuleList", .list = true, .called = false},
      {.name = "pairs.0", .parent = 9, .type = "ModuleList", .list = true, .called = false},
      {.name = "pairs.0.0", .parent = 10, .type = "Block", .parameters = {5}},
      {.name = "pairs.1", .parent = 9, .type = "ModuleList", .list = true, .called = false},
      {.name = "pairs.1.0", .parent = 12, .type = "Block", .parameters = {6}},
      {.name = "pairs.1.1", .parent = 12, .type = "Norm", .parameters = {7}},
  };
  const UnitLayout layout = make_units(modules, Indices(8, 1), {});
  REQUIRE(
      layout.names ==
      Names{"", "stages.0.0", "stages.0.1", "stages.1", "pairs.0.0", "pairs.1.0", "pairs.1.1"});
  REQUIRE(layout.unit_of_parameter == Indices{1, 2, 0, 3, 3, 4, 5, 6});
}

TEST_CASE("chosen units may lie inside each other", "[units]") {
  auto modules = transformer();
  choose(modules, {"", "blocks.1", "blocks.1.in.1", "norm"});
  UnitLayout layout = make_units(modules, Indices(10, 100), {.by_default = false});
  REQUIRE(layout.names == Names{"", "blocks.1", "blocks.1.in.1", "norm"});
  REQUIRE(layout.unit_of_parameter == Indices{0, 0, 0, 1, 2, 0, 0, 0, 0, 3});

  choose(modules, {"blocks.1", "blocks.1.in.0", "blocks.1.in.1"}); // nothing is left to blocks.1
  layout = make_units(modules, Indices(10, 100), {.by_default = false});
  REQUIRE(layout.names == Names{"", "blocks.1.in.0", "blocks.1.in.1"});
  REQUIRE(
      unit_modules(modules, layout) == Placed{{"", 0}, {"blocks.1.in.0", 1}, {"blocks.1.in.1", 2}});

  choose(modules, {});
  layout = make_units(modules, Indices(10, 100), {.by_default = false});
  REQUIRE(layout.names == Names{""});
  REQUIRE(layout.unit_of_parameter == Indices(10, 0));
}

TEST_CASE("a tied parameter is owned once, where it comes first", "[units]") {
  auto modules = transformer();
  modules.back().parameters = {0, 2}; // the embedding's, and one of blocks.0
  modules[5].parameters = {1}; // blocks.0.in.0
  modules[9].parameters = {1}; // blocks.1 shares both with blocks.0
  modules[10].parameters = {2};
  const UnitLayout layout = make_units(modules, Indices(10, 100), {});
  // Parameters 3, 4 and 9 are held nowhere now.
  REQUIRE(layout.names == Names{"", "blocks.0", "blocks.2", "blocks.3"});
  REQUIRE(layout.unit_of_parameter == Indices{0, 1, 1, 0, 0, 2, 2, 3, 3, 0});
}

TEST_CASE("small units are merged with the next, the last with the previous", "[units]") {
  const auto modules = transformer(); // blocks of 200
  const auto merged = [&](int64_t min_unit_numel) {
    return make_units(modules, Indices(10, 100), {.min_unit_numel = min_unit_numel});
  };
  REQUIRE(merged(200).names.size() == 5);
  UnitLayout layout = merged(201);
  REQUIRE(layout.names == Names{"", "blocks.0..blocks.1", "blocks.2..blocks.3"});
  REQUIRE(layout.unit_of_parameter == Indices{0, 1, 1, 1, 1, 2, 2, 2, 2, 0});
  REQUIRE(
      unit_modules(modules, layout) ==
      Placed{{"", 0}, {"blocks.0", 1}, {"blocks.1", 1}, {"blocks.2", 2}, {"blocks.3", 2}});
  // Three make 600; the fourth has no next one.
  REQUIRE(merged(401).names == Names{"", "blocks.0..blocks.3"});
  REQUIRE(merged(800).names == Names{"", "blocks.0..blocks.3"});
  // Too small even together: the root's.
  layout = merged(801);
  REQUIRE(layout.names == Names{""});
  REQUIRE(layout.unit_of_parameter == Indices(10, 0));
  REQUIRE(unit_modules(modules, layout) == Placed{{"", 0}});
}

TEST_CASE("small units do not take large ones before them", "[units]") {
  auto modules = transformer();
  const Indices numels = {1, 500, 0, 10, 0, 500, 0, 500, 0, 1};
  const UnitLayout layout = make_units(modules, numels, {.min_unit_numel = 100});
  REQUIRE(layout.names == Names{"", "blocks.0", "blocks.1..blocks.2", "blocks.3"});
}

TEST_CASE("units are merged within their enclosing unit, inner ones first", "[units]") {
  auto modules = transformer();
  choose(modules, {"blocks.0", "blocks.0.in.1", "blocks.1", "blocks.1.in.0", "blocks.2.in.0"});
  const Indices numels = {1, 60, 10, 100, 60, 10, 1, 1, 1, 1};
  const UnitLayout layout =
      make_units(modules, numels, {.by_default = false, .min_unit_numel = 65});
  // blocks.0.in.1 (10) goes to blocks.0, which is large enough then; blocks.1 (60) takes
  // blocks.2.in.0 (10), the next that lies in the root; blocks.1.in.0 (100) stays.
  REQUIRE(layout.names == Names{"", "blocks.0", "blocks.1..blocks.2.in.0", "blocks.1.in.0"});
  REQUIRE(layout.unit_of_parameter == Indices{0, 1, 1, 3, 2, 2, 0, 0, 0, 0});
  REQUIRE(
      unit_modules(modules, layout) ==
      Placed{
          {"", 0}, {"blocks.0", 1}, {"blocks.1", 2}, {"blocks.1.in.0", 3}, {"blocks.2.in.0", 2}});
}

TEST_CASE("trees that are none are refused", "[units]") {
  const ModuleSpec root{.name = "", .type = "M"};
  const auto refused = [](const std::vector<ModuleSpec>& modules, const UnitOptions& options) {
    REQUIRE_THROWS_AS(make_units(modules, {1}, options), c10::ValueError);
  };
  refused({}, {});
  refused({{.name = "", .parent = 0, .type = "M"}}, {});
  refused({root, {.name = "a", .parent = 1, .type = "M"}}, {});
  refused({root, {.name = "a", .parent = -1, .type = "M"}}, {});
  refused({{.name = "", .type = "M", .parameters = {1}}}, {});
  refused({{.name = "", .type = "M", .parameters = {-1}}}, {});
  refused({root}, {.min_unit_numel = -1});
  REQUIRE_THROWS_AS(make_units({root}, {-1}, {}), c10::ValueError);
  REQUIRE(make_units({root}, {1}, {}).unit_of_parameter == Indices{0}); // held nowhere
}

namespace {

struct Read {
  std::vector<ModuleSpec> modules;
  Indices numels;
  Names parameters;
};

Read read(const torch::nn::Module& module, const Names& chosen = {}) {
  Read result;
  std::unordered_map<const c10::TensorImpl*, int64_t> index;
  for (const auto& item : module.named_parameters()) {
    index.emplace(item.value().unsafeGetTensorImpl(), index.size());
    result.numels.push_back(item.value().numel());
    result.parameters.push_back(item.key());
  }
  result.modules = zero::nn::read_modules(module, index, chosen);
  return result;
}

std::string refusal(const torch::nn::Module& module, const std::string& chosen) {
  try {
    read(module, {chosen});
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

} // namespace

TEST_CASE("the example's blocks are units", "[units][nn]") {
  const GPT model(3, 16, 2, 8);
  const Read tree = read(model);
  REQUIRE(tree.modules[0].name.empty());
  REQUIRE(tree.modules[0].type == "GPT");
  REQUIRE(tree.modules[3].name == "blocks");
  REQUIRE(tree.modules[3].list);
  REQUIRE(tree.modules[4].name == "blocks.0");
  REQUIRE(tree.modules[4].parent == 3);
  REQUIRE(tree.modules[5].name == "blocks.0.attention_norm");
  REQUIRE(tree.modules[5].type == "torch::nn::LayerNormImpl");
  REQUIRE(tree.modules[5].parameters.size() == 2);
  REQUIRE(tree.modules.size() == 1 + 2 + 1 + 3 * 7 + 1);

  const UnitLayout layout = make_units(tree.modules, tree.numels, {});
  REQUIRE(layout.names == Names{"", "blocks.0", "blocks.1", "blocks.2"});
  for (size_t i = 0; i < tree.parameters.size(); ++i) {
    const std::string& name = tree.parameters[i];
    const int64_t expected = name.starts_with("blocks.") ? name[7] - '0' + 1 : 0;
    REQUIRE(layout.unit_of_parameter[i] == expected);
  }
  // A block holds 12 * 16 * 16 + 13 * 16 = 3280 elements.
  const UnitLayout merged = make_units(tree.modules, tree.numels, {.min_unit_numel = 8192});
  REQUIRE(merged.names == Names{"", "blocks.0..blocks.2"});
}

TEST_CASE("units are chosen by a module's name or its class", "[units][nn]") {
  const GPT model(2, 16, 2, 8);
  const auto names = [&](const Names& chosen) {
    const Read tree = read(model, chosen);
    return make_units(tree.modules, tree.numels, {.by_default = false}).names;
  };
  REQUIRE(names({"Block"}) == Names{"", "blocks.0", "blocks.1"});
  REQUIRE(names({"blocks.1", "tokens"}) == Names{"", "tokens", "blocks.1"});
  const Names embeddings = {"", "tokens", "positions"};
  REQUIRE(names({"Embedding"}) == embeddings);
  REQUIRE(names({"EmbeddingImpl"}) == embeddings);
  REQUIRE(names({"torch::nn::EmbeddingImpl"}) == embeddings);
  REQUIRE(names({"GPT"}) == Names{""});
  const std::string message = refusal(model, "blocks.7");
  REQUIRE(message.find("'blocks.7'") != std::string::npos);
  REQUIRE(message.find("'blocks.0'") != std::string::npos);
  REQUIRE_THROWS_AS(read(model, {"Bloc"}), c10::ValueError);
}

TEST_CASE("a shared module counts once", "[units][nn]") {
  const torch::nn::Linear shared(4, 4);
  torch::nn::Sequential model(shared, torch::nn::Linear(4, 4), torch::nn::Tanh());
  model->push_back(shared);
  const Read tree = read(*model);
  REQUIRE(tree.modules.size() == 4);
  const UnitLayout layout = make_units(tree.modules, tree.numels, {});
  REQUIRE(layout.names == Names{"", "0", "1"});
  REQUIRE(layout.unit_of_parameter[0] == 1);
}
