#include <zero/layout/units.h>

#include <map>
#include <utility>

#include <c10/util/Exception.h>

namespace zero::layout {
namespace {

using Modules = std::vector<ModuleSpec>;

void check_module(const ModuleSpec& module, int64_t index, int64_t parameters) {
  TORCH_CHECK_VALUE(
      index == 0 ? module.parent == -1 : module.parent >= 0 && module.parent < index,
      "[zero.layout] expected the parent of module ",
      index,
      " ('",
      module.name,
      "') to be ",
      index == 0 ? "-1, for the root" : "an earlier module",
      ", got ",
      module.parent,
      "; list modules in preorder");
  for (const int64_t parameter : module.parameters) {
    TORCH_CHECK_VALUE(
        parameter >= 0 && parameter < parameters,
        "[zero.layout] expected the parameters of module '",
        module.name,
        "' to be indices below ",
        parameters,
        ", got ",
        parameter);
  }
}

void check(const Modules& modules, const std::vector<int64_t>& numels, const UnitOptions& options) {
  TORCH_CHECK_VALUE(
      !modules.empty(), "[zero.layout] expected modules to hold the root at least, got none");
  TORCH_CHECK_VALUE(
      options.min_unit_numel >= 0,
      "[zero.layout] expected min_unit_numel >= 0, got ",
      options.min_unit_numel);
  for (size_t i = 0; i < numels.size(); ++i) {
    TORCH_CHECK_VALUE(
        numels[i] >= 0, "[zero.layout] expected numel >= 0, got ", numels[i], " for parameter ", i);
  }
  for (size_t i = 0; i < modules.size(); ++i) {
    check_module(modules[i], static_cast<int64_t>(i), static_cast<int64_t>(numels.size()));
  }
}

// By module: whether another child of the same list has its type, and parameters
// lie below it. Where the list is such a child and has no forward, its children
// stand for it.
std::vector<bool> repeated(const Modules& modules) {
  std::map<std::pair<int64_t, std::string>, int64_t> alike; // by list and type
  std::vector<bool> filled(modules.size());
  for (size_t i = modules.size(); i-- > 0;) {
    const ModuleSpec& module = modules[i];
    filled[i] = filled[i] || !module.parameters.empty();
    if (i > 0) {
      filled[module.parent] = filled[module.parent] || filled[i];
      ++alike[{module.parent, module.type}];
    }
  }
  std::vector<bool> result(modules.size());
  for (size_t i = 1; i < modules.size(); ++i) {
    const ModuleSpec& module = modules[i];
    const ModuleSpec& parent = modules[module.parent];
    const bool alone = alike[{module.parent, module.type}] < 2;
    const bool stands_in = result[module.parent] && !parent.called;
    result[i] = filled[i] && parent.list && (!alone || stands_in);
  }
  return result;
}

std::vector<bool> default_units(const Modules& modules) {
  const std::vector<bool> repeats = repeated(modules);
  std::vector<bool> opened(modules.size()); // lists whose own children repeat
  for (size_t i = 1; i < modules.size(); ++i) {
    opened[modules[i].parent] = opened[modules[i].parent] || repeats[i];
  }
  std::vector<bool> units(modules.size());
  std::vector<bool> inside(modules.size()); // in a unit other than the root, or one itself
  for (size_t i = 1; i < modules.size(); ++i) {
    const bool outermost = !inside[modules[i].parent];
    units[i] = outermost && repeats[i] && !opened[i] && modules[i].called;
    inside[i] = !outermost || units[i];
  }
  return units;
}

std::vector<bool> chosen_units(const Modules& modules) {
  std::vector<bool> units(modules.size());
  for (size_t i = 0; i < modules.size(); ++i) {
    units[i] = modules[i].chosen;
  }
  return units;
}

// By module: the nearest unit above it, itself included if `self`.
std::vector<int64_t> nearest(const Modules& modules, const std::vector<bool>& units, bool self) {
  std::vector<int64_t> around(modules.size());
  std::vector<int64_t> above(modules.size(), -1);
  for (size_t i = 1; i < modules.size(); ++i) {
    above[i] = around[modules[i].parent];
    around[i] = units[i] ? static_cast<int64_t>(i) : above[i];
  }
  return self ? around : above;
}

// By parameter: the innermost unit around the first place that holds it.
std::vector<int64_t>
owners(const Modules& modules, const std::vector<bool>& units, size_t parameters) {
  const std::vector<int64_t> around = nearest(modules, units, /*self=*/true);
  std::vector<int64_t> owner(parameters, -1);
  for (size_t i = 0; i < modules.size(); ++i) {
    for (const int64_t parameter : modules[i].parameters) {
      if (owner[parameter] == -1) {
        owner[parameter] = around[i];
      }
    }
  }
  for (int64_t& module : owner) {
    module = module == -1 ? 0 : module;
  }
  return owner;
}

// Merges units, each named by the index of its first module. `into` says where a
// unit went: an earlier one always, or itself.
class Merger {
 public:
  explicit Merger(std::vector<int64_t> numels)
      : numel_(std::move(numels)),
        into_(numel_.size()),
        last_(numel_.size()),
        dissolved_(numel_.size()) {
    for (size_t i = 0; i < into_.size(); ++i) {
      into_[i] = last_[i] = static_cast<int64_t>(i);
    }
  }

  // Merges the units that lie directly in one, given in preorder.
  void merge(const std::vector<int64_t>& siblings, int64_t enclosing, int64_t min_numel) {
    std::vector<int64_t> merged;
    for (const int64_t unit : siblings) {
      if (!merged.empty() && numel_[merged.back()] < min_numel) {
        join(unit, merged.back());
      } else {
        merged.push_back(unit);
      }
    }
    if (merged.empty() || numel_[merged.back()] >= min_numel) {
      return;
    }
    if (merged.size() > 1) {
      join(merged.back(), merged[merged.size() - 2]);
    } else {
      into_[merged.back()] = enclosing;
      numel_[enclosing] += numel_[merged.back()];
      dissolved_[merged.back()] = true;
    }
  }

  // Follows every unit to where it ended.
  void resolve() {
    for (size_t i = 0; i < into_.size(); ++i) {
      dissolved_[i] = dissolved_[i] || dissolved_[into_[i]];
      into_[i] = into_[into_[i]];
    }
  }

  int64_t into(int64_t unit) const {
    return into_[unit];
  }
  int64_t last(int64_t unit) const {
    return last_[unit];
  }
  // Whether the unit's parameters went to the enclosing unit.
  bool dissolved(int64_t unit) const {
    return dissolved_[unit];
  }

 private:
  void join(int64_t unit, int64_t earlier) {
    into_[unit] = earlier;
    numel_[earlier] += numel_[unit];
    last_[earlier] = last_[unit];
  }

  std::vector<int64_t> numel_;
  std::vector<int64_t> into_;
  std::vector<int64_t> last_; // the last module of a merged unit
  std::vector<bool> dissolved_;
};

Merger merge_units(
    const Modules& modules,
    const std::vector<bool>& units,
    std::vector<int64_t> numels,
    int64_t min_unit_numel) {
  const std::vector<int64_t> enclosing = nearest(modules, units, /*self=*/false);
  std::vector<std::vector<int64_t>> siblings(modules.size()); // by enclosing unit
  for (size_t i = 1; i < modules.size(); ++i) {
    if (units[i]) {
      siblings[enclosing[i]].push_back(static_cast<int64_t>(i));
    }
  }
  Merger merger(std::move(numels));
  for (size_t i = modules.size(); i-- > 0;) { // inner ones first
    merger.merge(siblings[i], static_cast<int64_t>(i), min_unit_numel);
  }
  merger.resolve();
  return merger;
}

} // namespace

UnitLayout make_units(
    const std::vector<ModuleSpec>& modules,
    const std::vector<int64_t>& numels,
    const UnitOptions& options) {
  check(modules, numels, options);
  std::vector<bool> units = options.by_default ? default_units(modules) : chosen_units(modules);
  const std::vector<int64_t> owner = owners(modules, units, numels.size());

  std::vector<int64_t> owned(modules.size()); // parameters, and their elements
  std::vector<int64_t> owned_numel(modules.size());
  for (size_t i = 0; i < owner.size(); ++i) {
    ++owned[owner[i]];
    owned_numel[owner[i]] += numels[i];
  }
  for (size_t i = 0; i < units.size(); ++i) {
    units[i] = i == 0 || (units[i] && owned[i] > 0);
  }

  const Merger merger = merge_units(modules, units, std::move(owned_numel), options.min_unit_numel);
  UnitLayout layout;
  std::vector<int64_t> number(modules.size(), -1); // of the units that are left
  layout.unit_of_module.assign(modules.size(), -1);
  for (size_t i = 0; i < modules.size(); ++i) {
    const int64_t unit = merger.into(static_cast<int64_t>(i));
    if (!units[i] || merger.dissolved(static_cast<int64_t>(i))) {
      continue;
    }
    if (number[unit] == -1) {
      number[unit] = static_cast<int64_t>(layout.names.size());
      const int64_t last = merger.last(unit);
      layout.names.push_back(
          last == unit ? modules[unit].name : modules[unit].name + ".." + modules[last].name);
    }
    layout.unit_of_module[i] = number[unit];
  }
  for (const int64_t module : owner) {
    layout.unit_of_parameter.push_back(number[merger.into(module)]);
  }
  return layout;
}

} // namespace zero::layout
