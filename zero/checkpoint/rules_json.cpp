#include <zero/checkpoint/rules_json.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

namespace zero::checkpoint {
namespace {

using Json = nlohmann::json;

const char* name_of(const AdamW& /*rule*/) {
  return "adamw";
}
const char* name_of(const Adam& /*rule*/) {
  return "adam";
}
const char* name_of(const SGD& /*rule*/) {
  return "sgd";
}
const char* name_of(const Lion& /*rule*/) {
  return "lion";
}

// Calls visit(name, field) for each hyper-parameter.
template <typename AdamLike, typename Visit>
void visit_adam(AdamLike& rule, const Visit& visit) {
  visit("lr", rule.lr);
  visit("betas", rule.betas);
  visit("eps", rule.eps);
  visit("weight_decay", rule.weight_decay);
  visit("amsgrad", rule.amsgrad);
  visit("maximize", rule.maximize);
}

template <typename Visit>
void visit_fields(AdamW& rule, const Visit& visit) {
  visit_adam(rule, visit);
}

template <typename Visit>
void visit_fields(Adam& rule, const Visit& visit) {
  visit_adam(rule, visit);
}

template <typename Visit>
void visit_fields(SGD& rule, const Visit& visit) {
  visit("lr", rule.lr);
  visit("momentum", rule.momentum);
  visit("dampening", rule.dampening);
  visit("weight_decay", rule.weight_decay);
  visit("nesterov", rule.nesterov);
  visit("maximize", rule.maximize);
}

template <typename Visit>
void visit_fields(Lion& rule, const Visit& visit) {
  visit("lr", rule.lr);
  visit("betas", rule.betas);
  visit("weight_decay", rule.weight_decay);
  visit("maximize", rule.maximize);
}

Json describe(OptimizerSection::Group group) {
  Json json;
  std::visit(
      [&](auto& rule) {
        visit_fields(rule, [&](const char* name, const auto& value) { json[name] = value; });
      },
      group.rule);
  json["params"] = group.parameters;
  return json;
}

void read_into(Rule& rule, const Json& json) {
  std::visit(
      [&](auto& concrete) {
        visit_fields(concrete, [&](const char* name, auto& value) {
          if (json.contains(name)) {
            json.at(name).get_to(value);
          }
        });
      },
      rule);
}

void require_same(
    const OptimizerSection::Group& expected,
    const std::vector<std::string>& found,
    size_t at,
    const std::string& where) {
  TORCH_CHECK_VALUE(
      expected.parameters == found,
      "[zero.checkpoint] expected group ",
      at,
      " of '",
      where,
      "' to hold the ",
      expected.parameters.size(),
      " parameters that it has in this optimizer, got ",
      found.size(),
      found.empty() ? "" : " that begin with '" + found.front() + "'");
}

} // namespace

std::string to_json(const OptimizerSection& section) {
  Json json;
  json["rule"] = section.groups.empty()
      ? "adamw"
      : std::visit([](const auto& rule) { return name_of(rule); }, section.groups.front().rule);
  json["groups"] = Json::array();
  for (const auto& group : section.groups) {
    json["groups"].push_back(describe(group));
  }
  json["scalars"] = Json::object();
  for (const auto& [name, steps] : section.steps) {
    json["scalars"][name]["step"] = steps;
  }
  return json.dump();
}

OptimizerSection optimizer_from_json(
    const std::string& text,
    const OptimizerSection& expected,
    const std::string& where) {
  OptimizerSection section = expected;
  section.steps.clear();
  try {
    const Json json = Json::parse(text);
    TORCH_CHECK_VALUE(
        json.is_object(),
        "[zero.checkpoint] expected an optimizer in '",
        where,
        "', got a checkpoint that was saved without one");
    const Json& groups = json.at("groups");
    TORCH_CHECK_VALUE(
        groups.size() == expected.groups.size(),
        "[zero.checkpoint] expected ",
        expected.groups.size(),
        " groups in '",
        where,
        "', got ",
        groups.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      require_same(
          expected.groups[g], groups[g].at("params").get<std::vector<std::string>>(), g, where);
      read_into(section.groups[g].rule, groups[g]);
    }
    for (const auto& [name, scalars] : json.at("scalars").items()) {
      if (scalars.contains("step")) {
        section.steps[name] = static_cast<int64_t>(scalars.at("step").get<double>());
      }
    }
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(
        false,
        "[zero.checkpoint] expected an optimizer section in the manifest of '",
        where,
        "', got one that can't be read: ",
        error.what());
  }
  return section;
}

std::string scalars_to_json(
    const std::vector<std::string>& states,
    const std::optional<EMASettings>& ema) {
  static constexpr const char* kDigits = "0123456789abcdef";
  Json json;
  json["rng"] = Json::array();
  for (const std::string& state : states) {
    std::string hex;
    for (const char byte : state) {
      const auto value = static_cast<unsigned char>(byte);
      hex += kDigits[value >> 4U];
      hex += kDigits[value & 15U];
    }
    json["rng"].push_back({{"torch", hex}});
  }
  if (ema) {
    json["ema"] = {{"decay", ema->decay}, {"updates", ema->updates}};
  }
  return json.dump();
}

std::string rng_from_json(const std::string& text, int64_t rank) {
  std::string state;
  try {
    const Json json = Json::parse(text);
    if (!json.is_object() || !json.contains("rng") ||
        rank >= static_cast<int64_t>(json.at("rng").size())) {
      return state;
    }
    const auto hex = json.at("rng").at(rank).at("torch").get<std::string>();
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
      state += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
  } catch (const std::exception&) {
    state.clear(); // nothing that was saved here
  }
  return state;
}

std::optional<EMASettings> ema_from_json(const std::string& text) {
  try {
    const Json ema = Json::parse(text).value("ema", Json());
    if (ema.is_object()) {
      return EMASettings{ema.at("decay").get<double>(), ema.at("updates").get<int64_t>()};
    }
  } catch (const nlohmann::json::exception&) { // nothing that was saved here
  }
  return std::nullopt;
}

} // namespace zero::checkpoint
